//! Collects GetChunks frames into whole chunks. A frame that does not fit its chunk, or does not match its checksum,
//! makes that chunk a miss; nothing here panics on what the network sends.

use std::ops::Range;

use kvsplice_kv::{KvLayout, Part, RowRanges, Variant};
use kvsplice_model::auxiliary::ChunkKv;
use kvsplice_proto::cache::{CacheClient, intact};
use kvsplice_proto::{convert, v1};
use tonic::Status;
use tracing::warn;

use crate::auxiliary::Wanted;

/// Reads the KV of `wanted` (no repeats) from the cache service; none where it is missing or damaged.
pub(crate) async fn fetch(
    cache: &CacheClient,
    wanted: &[Wanted],
    layout: KvLayout,
    variant: Variant,
) -> Result<Vec<Option<ChunkKv>>, Status> {
    let want = v1::Want {
        chunks: wanted.iter().map(|chunk| chunk.id.to_string()).collect(),
        variant: variant.to_string(),
        ..v1::Want::default()
    };
    let (_control, mut frames) = cache.get_chunks(want).await?;
    let mut chunks: Vec<Assembly> =
        wanted.iter().map(|chunk| Assembly::new(layout, u32::try_from(chunk.ids.len()).unwrap_or(0))).collect();
    while let Some(frame) = frames.message().await? {
        let (place, layer) = (frame.chunk, frame.layer);
        let Some(chunk) = usize::try_from(place).ok().and_then(|place| chunks.get_mut(place)) else {
            return Err(Status::internal(format!("the cache service sent chunk {place} of {}", wanted.len())));
        };
        if let Err(reason) = chunk.add(frame) {
            if !reason.starts_with("missing") {
                warn!(chunk = place, layer, reason, "stored auxiliary KV cannot be used");
            }
            chunk.failed = true;
        }
    }
    Ok(chunks.into_iter().map(Assembly::finish).collect())
}

/// One chunk's layers while they arrive.
struct Assembly {
    layout: KvLayout,
    tokens: u32,
    /// As they are stored.
    layers: Vec<Vec<u8>>,
    /// Rows that came of each layer, by part.
    rows: Vec<[Vec<Range<u32>>; 4]>,
    failed: bool,
}

impl Assembly {
    fn new(layout: KvLayout, tokens: u32) -> Self {
        let layers = layout.layers as usize;
        Self { layout, tokens, layers: vec![Vec::new(); layers], rows: vec![Default::default(); layers], failed: false }
    }

    fn add(&mut self, frame: v1::Frame) -> Result<(), String> {
        if self.failed {
            return Ok(());
        }
        if !frame.error.is_empty() {
            return Err(frame.error);
        }
        let part = convert::part(&frame).map_err(|error| error.to_string())?;
        let row_bytes = self.layout.row_bytes(part);
        let place = self.layout.part_range(part, self.tokens);
        let fits = |end: &u32| *end as usize * row_bytes <= place.len();
        let end = frame.first_row.checked_add(frame.rows).filter(fits);
        let Some(end) = end.filter(|_| frame.data.len() == frame.rows as usize * row_bytes) else {
            return Err(format!("{} rows from {} in {} bytes", frame.rows, frame.first_row, frame.data.len()));
        };
        if !intact(&frame) {
            return Err("checksum of a frame differs".into());
        }
        let layer_bytes = self.layout.layer_bytes(self.tokens);
        let layer = self.layers.get_mut(frame.layer as usize).ok_or_else(|| format!("layer {}", frame.layer))?;
        if layer.is_empty() {
            layer.resize(layer_bytes, 0);
        }
        let first = place.start + frame.first_row as usize * row_bytes;
        let bytes = layer.get_mut(first..first + frame.data.len()).ok_or("rows outside the chunk")?;
        bytes.copy_from_slice(&frame.data);
        let rows = self.rows.get_mut(frame.layer as usize).ok_or("layer")?;
        rows[part.index()].push(frame.first_row..end);
        Ok(())
    }

    fn finish(self) -> Option<ChunkKv> {
        let whole = |part: &Part, rows: &Vec<Range<u32>>| {
            RowRanges::from_ranges(rows.iter().cloned()).len() == part.rows(self.tokens) as usize
        };
        let came =
            |rows: &[Vec<Range<u32>>; 4]| self.layout.parts().iter().all(|part| whole(part, &rows[part.index()]));
        if self.failed || !self.rows.iter().all(came) {
            return None;
        }
        let layers = self.layers.into_iter().map(bytes::Bytes::from).collect();
        Some(ChunkKv { layout: self.layout, tokens: self.tokens, layers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvsplice_kv::Encoding;
    use kvsplice_proto::v1::frame::Part;

    const LAYOUT: KvLayout = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, encoding: Encoding::Bf16 };

    fn frame(part: Part, first_row: u32, data: &[u8]) -> v1::Frame {
        v1::Frame {
            chunk: 0,
            layer: 0,
            part: part.into(),
            first_row,
            rows: data.len() as u32 / 4,
            crc32c: crc32c::crc32c(data),
            data: bytes::Bytes::copy_from_slice(data),
            source: "object".into(),
            ..v1::Frame::default()
        }
    }

    #[test]
    fn frames_in_any_order_make_the_layer_and_a_missing_row_makes_a_miss() {
        let mut chunk = Assembly::new(LAYOUT, 2);
        chunk.add(frame(Part::Values, 0, &[5, 5, 5, 5, 6, 6, 6, 6])).unwrap();
        chunk.add(frame(Part::Keys, 1, &[2, 2, 2, 2])).unwrap();
        chunk.add(frame(Part::Keys, 0, &[1, 1, 1, 1])).unwrap();
        let kv = chunk.finish().unwrap();
        assert_eq!(kv.layers[0], [1, 1, 1, 1, 2, 2, 2, 2, 5, 5, 5, 5, 6, 6, 6, 6].as_slice());

        let mut chunk = Assembly::new(LAYOUT, 2);
        chunk.add(frame(Part::Keys, 0, &[1; 8])).unwrap();
        assert!(chunk.finish().is_none());
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
            v1::Frame { error: "damaged: layer 0".into(), ..good.clone() },
        ];
        for frame in wrong {
            assert!(Assembly::new(LAYOUT, 2).add(frame.clone()).is_err(), "{frame:?}");
        }
    }
}
