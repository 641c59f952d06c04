//! Layers that arrive in frames: each frame is checked and copied to its place once.
//!
//! What comes is one chunk's; nothing here panics on what the network sends.

use std::collections::HashMap;

use bytes::Bytes;
use kvsplice_kv::{KvLayout, Part, RowRanges};

use crate::cache::intact;
use crate::{convert, v1};

/// A chunk of which something is still to come.
pub(super) struct Assembly {
    layout: KvLayout,
    tokens: u32,
    /// Rows without which a layer is not whole.
    needed: RowRanges,
    partial: HashMap<u32, Partial>,
    /// By layer, whether nothing of it is waited for.
    done: Vec<bool>,
    /// Bytes that have come since the last news.
    bytes: u64,
}

/// A layer that is still arriving.
struct Partial {
    /// The layer as it is stored, up to where something has come; zeros where nothing has.
    bytes: Vec<u8>,
    /// Rows that have come, by part.
    rows: [RowRanges; 4],
}

/// A layer of which everything needed has come.
pub(super) struct Assembled {
    pub(super) bytes: Bytes,
    /// Skipped rows that have not come.
    pub(super) lacks: RowRanges,
}

impl Assembly {
    /// Waits for `layers` of a chunk; for all of them if none is named.
    pub(super) fn new(layout: KvLayout, tokens: u32, layers: &[u32]) -> Self {
        let done = (0..layout.layers).map(|layer| !layers.is_empty() && !layers.contains(&layer)).collect();
        let needed = RowRanges::from_range(0..tokens);
        Self { layout, tokens, needed, partial: HashMap::new(), done, bytes: 0 }
    }

    /// Waits only for rows outside `skipped` from now on.
    pub(super) fn skip(&mut self, skipped: &RowRanges) {
        self.needed = RowRanges::from_range(0..self.tokens).without(skipped);
    }

    pub(super) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub(super) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Whether a layer is still waited for.
    pub(super) fn waits_for(&self, layer: u32) -> bool {
        self.done.get(layer as usize) == Some(&false)
    }

    /// Whether no layer is waited for.
    pub(super) fn is_done(&self) -> bool {
        self.done.iter().all(|&done| done)
    }

    /// Notes that a layer has come in another way. Whether it was waited for.
    pub(super) fn settle(&mut self, layer: u32) -> bool {
        self.partial.remove(&layer);
        self.done.get_mut(layer as usize).is_some_and(|done| !std::mem::replace(done, true))
    }

    /// Bytes that have come since this was last asked.
    pub(super) fn take_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.bytes)
    }

    /// Adds a frame to its layer; returns the layer once every row that is needed has come. Fails on a frame that does not
    /// fit or is not as it was sent.
    pub(super) fn accept(&mut self, frame: &v1::Frame) -> Result<Option<Assembled>, String> {
        let misfit = || format!("foreign: a frame of {} rows and {} bytes does not fit", frame.rows, frame.data.len());
        let part = convert::part(frame).map_err(|error| format!("foreign: {error}"))?;
        let row_bytes = self.layout.row_bytes(part);
        let place = self.layout.part_range(part, self.tokens);
        let end = frame.first_row.checked_add(frame.rows).ok_or_else(misfit)?;
        let rows = match frame.gathered.as_slice() {
            [] => RowRanges::from_range(frame.first_row..end),
            gathered => convert::rows(gathered).map_err(|error| format!("foreign: {error}"))?,
        };
        let inside = rows.ranges().last().is_none_or(|last| last.end as usize * row_bytes <= place.len());
        let counts = rows.len() == frame.rows as usize && frame.data.len() == rows.len() * row_bytes;
        if !inside || !counts || frame.layer as usize >= self.done.len() {
            return Err(misfit());
        }
        if !intact(frame) {
            return Err(format!("damaged: layer {} arrived with a wrong checksum", frame.layer));
        }
        self.bytes += frame.data.len() as u64;
        if !self.waits_for(frame.layer) {
            // Skipped rows of a layer that was on its way, or a layer that nobody asked for.
            return Ok(None);
        }
        let layer_bytes = self.layout.layer_bytes(self.tokens);
        let fresh = || Partial { bytes: Vec::with_capacity(layer_bytes), rows: Default::default() };
        let layer = self.partial.entry(frame.layer).or_insert_with(fresh);
        let mut data = frame.data.as_ref();
        for range in rows.ranges() {
            let (piece, rest) = data.split_at(range.len() * row_bytes);
            put(&mut layer.bytes, place.start + range.start as usize * row_bytes, piece);
            data = rest;
        }
        layer.rows[part.index()] = layer.rows[part.index()].union(&rows);
        let needed = self.needed.len();
        let enough = |part: &Part| {
            let rows = &layer.rows[part.index()];
            if part.by_token() {
                rows.intersection(&self.needed).len() == needed
            } else {
                rows.len() == part.rows(self.tokens) as usize
            }
        };
        if !self.layout.parts().iter().all(enough) {
            return Ok(None);
        }
        let all = RowRanges::from_range(0..self.tokens);
        let by_token = self.layout.parts().iter().filter(|part| part.by_token());
        let came = by_token.fold(all.clone(), |came, part| came.intersection(&layer.rows[part.index()]));
        let lacks = all.without(&came);
        let bytes = self.partial.remove(&frame.layer).map(|mut layer| {
            layer.bytes.resize(layer_bytes, 0);
            Bytes::from(layer.bytes)
        });
        self.settle(frame.layer);
        Ok(bytes.map(|bytes| Assembled { bytes, lacks }))
    }
}

/// Puts `piece` at `first`. Frames mostly come in order: then what they bring is written once, and nothing is cleared before.
fn put(bytes: &mut Vec<u8>, first: usize, piece: &[u8]) {
    if bytes.len() < first {
        bytes.resize(first, 0);
    }
    let there = bytes.len().min(first + piece.len()) - first;
    let (over, new) = piece.split_at(there);
    bytes[first..first + there].copy_from_slice(over);
    bytes.extend_from_slice(new);
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::Encoding;

    use super::*;
    use crate::v1::frame::Part;

    const LAYOUT: KvLayout = KvLayout { layers: 2, kv_heads: 1, head_dim: 2, encoding: Encoding::Bf16 };

    fn frame(part: Part, first_row: u32, data: &[u8]) -> v1::Frame {
        v1::Frame {
            part: part.into(),
            first_row,
            rows: data.len() as u32 / 4,
            crc32c: crc32c::crc32c(data),
            data: Bytes::copy_from_slice(data),
            source: "object".into(),
            ..v1::Frame::default()
        }
    }

    #[test]
    fn frames_in_any_order_make_the_layer() {
        let mut chunk = Assembly::new(LAYOUT, 2, &[]);
        assert!(chunk.accept(&frame(Part::Values, 0, &[5, 5, 5, 5, 6, 6, 6, 6])).unwrap().is_none());
        assert!(chunk.accept(&frame(Part::Keys, 1, &[2, 2, 2, 2])).unwrap().is_none());
        let layer = chunk.accept(&frame(Part::Keys, 0, &[1, 1, 1, 1])).unwrap().expect("every row has come");
        assert_eq!(layer.bytes, [1, 1, 1, 1, 2, 2, 2, 2, 5, 5, 5, 5, 6, 6, 6, 6].as_slice());
        assert!(layer.lacks.is_empty() && !chunk.is_done() && chunk.waits_for(1));
        assert_eq!((chunk.take_bytes(), chunk.take_bytes()), (16, 0));
        assert!(chunk.accept(&frame(Part::Keys, 0, &[9; 8])).unwrap().is_none(), "it has been handed on");
    }

    #[test]
    fn a_layer_without_skipped_rows_is_enough_but_not_whole() {
        let mut chunk = Assembly::new(LAYOUT, 2, &[]);
        chunk.skip(&RowRanges::from_range(0..1));
        assert!(chunk.accept(&frame(Part::Values, 1, &[6; 4])).unwrap().is_none());
        let layer = chunk.accept(&frame(Part::Keys, 1, &[2; 4])).unwrap().expect("what is needed has come");
        assert_eq!(layer.lacks, RowRanges::from_range(0..1));
        // The rows came all the same.
        let mut chunk = Assembly::new(LAYOUT, 2, &[]);
        chunk.skip(&RowRanges::from_range(0..1));
        chunk.accept(&frame(Part::Values, 0, &[6; 8])).unwrap();
        assert!(chunk.accept(&frame(Part::Keys, 0, &[2; 8])).unwrap().expect("all has come").lacks.is_empty());
    }

    #[test]
    fn only_the_layers_that_were_asked_for_are_waited_for() {
        let mut chunk = Assembly::new(LAYOUT, 1, &[1]);
        assert!(!chunk.waits_for(0) && chunk.waits_for(1) && !chunk.waits_for(2));
        assert!(chunk.settle(1) && !chunk.settle(1) && chunk.is_done());
    }

    #[test]
    fn a_frame_that_does_not_fit_is_refused() {
        let good = frame(Part::Keys, 0, &[1, 1, 1, 1]);
        let wrong = [
            v1::Frame { crc32c: 0, ..good.clone() },
            v1::Frame { first_row: u32::MAX, ..good.clone() },
            v1::Frame { first_row: 2, ..good.clone() },
            v1::Frame { layer: 7, ..good.clone() },
            v1::Frame { part: 9, ..good.clone() },
            v1::Frame { rows: 2, ..good.clone() },
            v1::Frame { gathered: vec![v1::Range { first: 0, end: 2 }], ..good.clone() },
        ];
        for frame in wrong {
            assert!(Assembly::new(LAYOUT, 2, &[]).accept(&frame).is_err(), "{frame:?}");
        }
    }
}
