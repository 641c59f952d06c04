//! Layers that arrive in frames: each frame is checked and copied to its place once.

use std::collections::HashMap;

use bytes::Bytes;
use kvsplice_kv::{KvLayout, Part, RowRanges};
use kvsplice_proto::cache::intact;
use kvsplice_proto::{convert, v1};

/// A chunk of which something is still to come.
pub(super) struct Open {
    /// Rows without which a layer is not whole.
    pub(super) needed: RowRanges,
    partial: HashMap<u32, Partial>,
    /// By layer, whether it has been handed on.
    pub(super) done: Vec<bool>,
    /// Bytes that have come since the last news.
    pub(super) bytes: u64,
    /// Its file cannot be used: it is to be sent.
    pub(super) sent: bool,
}

/// A layer that is still arriving.
struct Partial {
    /// As the layer is stored; zeros where nothing has come.
    bytes: Vec<u8>,
    /// Rows that have come, by part.
    rows: [RowRanges; 4],
}

impl Open {
    pub(super) fn new(tokens: u32, layout: &KvLayout) -> Self {
        let needed = RowRanges::from_range(0..tokens);
        Self { needed, partial: HashMap::new(), done: vec![false; layout.layers as usize], bytes: 0, sent: false }
    }
}

/// Adds a frame to its layer; returns the layer's bytes once every row that is needed has come.
pub(super) fn accept(
    chunk: &mut Open,
    tokens: u32,
    layout: &KvLayout,
    frame: &v1::Frame,
) -> Result<Option<Bytes>, String> {
    let misfit = || format!("foreign: a frame of {} rows and {} bytes does not fit", frame.rows, frame.data.len());
    let part = convert::part(frame).map_err(|error| format!("foreign: {error}"))?;
    let row_bytes = layout.row_bytes(part);
    let place = layout.part_range(part, tokens);
    let end = frame.first_row.checked_add(frame.rows).ok_or_else(misfit)?;
    let rows = match frame.gathered.as_slice() {
        [] => RowRanges::from_range(frame.first_row..end),
        gathered => convert::rows(gathered).map_err(|error| format!("foreign: {error}"))?,
    };
    let inside = rows.ranges().last().is_none_or(|last| last.end as usize * row_bytes <= place.len());
    let counts = rows.len() == frame.rows as usize && frame.data.len() == rows.len() * row_bytes;
    let Some(done) = chunk.done.get_mut(frame.layer as usize).filter(|_| inside && counts) else {
        return Err(misfit());
    };
    if !intact(frame) {
        return Err(format!("damaged: layer {} arrived with a wrong checksum", frame.layer));
    }
    chunk.bytes += frame.data.len() as u64;
    if *done {
        // Skipped rows of a layer that was on its way.
        return Ok(None);
    }
    let layer = chunk
        .partial
        .entry(frame.layer)
        .or_insert_with(|| Partial { bytes: vec![0; layout.layer_bytes(tokens)], rows: Default::default() });
    let mut data = frame.data.as_ref();
    for range in rows.ranges() {
        let (piece, rest) = data.split_at(range.len() * row_bytes);
        let first = place.start + range.start as usize * row_bytes;
        layer.bytes[first..first + piece.len()].copy_from_slice(piece);
        data = rest;
    }
    layer.rows[part.index()] = layer.rows[part.index()].union(&rows);
    let needed = chunk.needed.len();
    let whole = |part: &Part| {
        let rows = &layer.rows[part.index()];
        if part.by_token() {
            rows.intersection(&chunk.needed).len() == needed
        } else {
            rows.len() == part.rows(tokens) as usize
        }
    };
    if layout.parts().iter().all(whole) {
        *done = true;
        return Ok(chunk.partial.remove(&frame.layer).map(|layer| Bytes::from(layer.bytes)));
    }
    Ok(None)
}
