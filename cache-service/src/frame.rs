//! Cuts a layer into frames of whole rows, part by part, each at most 1 MiB with its checksum. Rows that are not wanted are left
//! out; what remains is gathered, so that the number of frames depends on bytes alone.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kvsplice_kv::{KvLayout, Part, RowRanges};
use kvsplice_proto::server::FRAME_BYTES;
use kvsplice_proto::v1::Frame;
use kvsplice_proto::{convert, v1};

use crate::fetch::Loaded;

/// Room for the fields of a frame beside its data, so that a message fits one HTTP/2 frame.
const FIELD_BYTES: usize = 256;
/// Ranges that one frame gathers at most, and the room that they take.
const MAX_GATHERED: usize = 256;
const GATHERED_BYTES: usize = MAX_GATHERED * 16;

/// The frames of one layer, made one at a time.
pub(crate) struct Frames {
    place: u32,
    layout: KvLayout,
    tokens: u32,
    loaded: Loaded,
    /// What is left to send, in order.
    pieces: VecDeque<Piece>,
    /// Nothing is to be sent but one frame that says so.
    empty: bool,
}

/// One part of the layer.
struct Piece {
    part: Part,
    /// Where its bytes begin in the layer, and its frames among those of a layer that is sent whole.
    start: usize,
    first_sum: usize,
    row_bytes: usize,
    /// The rows to send, ascending.
    ranges: Vec<Range<usize>>,
    /// The range that is being sent, and its next row.
    next: (usize, usize),
}

impl Frames {
    /// `place`: the chunk's place in Want. The layer is verified, hence as long as `layout` says for `tokens` tokens.
    /// `skip`: rows to leave out.
    pub(crate) fn new(place: u32, loaded: Loaded, layout: &KvLayout, tokens: u32, skip: &RowRanges) -> Self {
        let wanted = remaining(tokens as usize, skip);
        let mut sums = 0;
        let piece = |&part: &Part| {
            let first_sum = sums;
            sums += (part.rows(tokens) as usize).div_ceil(frame_rows(layout.row_bytes(part)));
            let ranges = if part.by_token() {
                wanted.clone()
            } else {
                remaining(part.rows(tokens) as usize, &RowRanges::default())
            };
            let next = (0, ranges.first().map_or(0, |range| range.start));
            let start = layout.part_range(part, tokens).start;
            Piece { part, start, first_sum, row_bytes: layout.row_bytes(part), ranges, next }
        };
        let empty = wanted.is_empty();
        let pieces = if empty { VecDeque::new() } else { layout.parts().iter().map(piece).collect() };
        Self { place, layout: *layout, tokens, loaded, pieces, empty }
    }
}

impl Piece {
    /// Takes the rows of the next frame.
    fn take(&mut self) -> Vec<Range<usize>> {
        let mut room = frame_rows(self.row_bytes);
        if self.ranges.len() > 1 {
            room = ((FRAME_BYTES - FIELD_BYTES - GATHERED_BYTES) / self.row_bytes.max(1)).max(1);
        }
        let mut taken = Vec::new();
        while let Some(range) = self.ranges.get(self.next.0) {
            if room == 0 || taken.len() == MAX_GATHERED {
                break;
            }
            let start = self.next.1;
            let end = range.end.min(start + room);
            taken.push(start..end);
            room -= end - start;
            self.next.1 = end;
            if end == range.end {
                self.next.0 += 1;
                self.next.1 = self.ranges.get(self.next.0).map_or(0, |range| range.start);
            }
        }
        taken
    }

    /// Which frame of a layer that is sent whole has just these rows.
    fn place(&self, layout: &KvLayout, tokens: u32, rows: &[Range<usize>]) -> Option<usize> {
        let [rows] = rows else { return None };
        let whole = frame_rows(layout.row_bytes(self.part));
        let end = (rows.start + whole).min(self.part.rows(tokens) as usize);
        (rows.start.is_multiple_of(whole) && rows.end == end).then(|| self.first_sum + rows.start / whole)
    }

    /// The bytes of these rows, out of the layer's.
    fn gather(&self, layer: &Bytes, rows: &[Range<usize>]) -> Bytes {
        let slice = |rows: &Range<usize>| {
            layer.slice(self.start + rows.start * self.row_bytes..self.start + rows.end * self.row_bytes)
        };
        if let [rows] = rows {
            return slice(rows);
        }
        let count: usize = rows.iter().map(Range::len).sum();
        let mut data = BytesMut::with_capacity(count * self.row_bytes);
        for rows in rows {
            data.extend_from_slice(&slice(rows));
        }
        data.freeze()
    }
}

impl Iterator for Frames {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        let mut frame = Frame {
            chunk: self.place,
            layer: self.loaded.layer,
            source: self.loaded.source.to_owned(),
            ..Frame::default()
        };
        if std::mem::take(&mut self.empty) {
            return Some(frame);
        }
        loop {
            let piece = self.pieces.front_mut()?;
            let taken = piece.take();
            if taken.is_empty() {
                self.pieces.pop_front();
                continue;
            }
            let wire = |rows: &Range<usize>| v1::Range { first: rows.start as u32, end: rows.end as u32 };
            frame.part = convert::wire_part(piece.part).into();
            frame.data = piece.gather(&self.loaded.bytes, &taken);
            let known = piece.place(&self.layout, self.tokens, &taken).and_then(|place| self.loaded.sums.get(place));
            frame.crc32c = known.copied().unwrap_or_else(|| crc32c::crc32c(&frame.data));
            frame.first_row = taken.first().map_or(0, |rows| rows.start as u32);
            frame.rows = taken.iter().map(|rows| rows.len() as u32).sum();
            frame.gathered = if taken.len() > 1 { taken.iter().map(wire).collect() } else { Vec::new() };
            return Some(frame);
        }
    }
}

/// Rows of a frame that leaves none out.
fn frame_rows(row_bytes: usize) -> usize {
    ((FRAME_BYTES - FIELD_BYTES) / row_bytes.max(1)).max(1)
}

/// CRC-32C of each frame that a layer makes when it is sent whole, and of the layer. The layer is as long as `layout` says.
pub(crate) fn sums(layout: &KvLayout, tokens: u32, layer: &[u8]) -> (Arc<[u32]>, u32) {
    let mut whole = 0;
    let mut sums = Vec::new();
    for &part in layout.parts() {
        let row_bytes = layout.row_bytes(part).max(1);
        let bytes = layer.get(layout.part_range(part, tokens)).unwrap_or(&[]);
        for piece in bytes.chunks(frame_rows(row_bytes) * row_bytes) {
            let sum = crc32c::crc32c(piece);
            whole = crc32c::crc32c_combine(whole, sum, piece.len());
            sums.push(sum);
        }
    }
    (sums.into(), whole)
}

/// Rows `0..rows` without `skip`.
fn remaining(rows: usize, skip: &RowRanges) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut next = 0;
    for skipped in skip.ranges() {
        let start = (skipped.start as usize).min(rows);
        if next < start {
            ranges.push(next..start);
        }
        next = next.max(skipped.end as usize);
    }
    if next < rows {
        ranges.push(next..rows);
    }
    ranges
}

/// The frame that ends a chunk.
pub(crate) fn error(place: u32, layer: u32, error: String) -> Frame {
    Frame { chunk: place, layer, error, ..Frame::default() }
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::Encoding;
    use prost::Message;

    use super::*;

    const LAYOUTS: [(u32, KvLayout); 7] = [
        (1, KvLayout { layers: 1, kv_heads: 1, head_dim: 2, encoding: Encoding::Bf16 }),
        (3000, KvLayout { layers: 1, kv_heads: 2, head_dim: 32, encoding: Encoding::F32 }),
        (1500, KvLayout { layers: 1, kv_heads: 8, head_dim: 128, encoding: Encoding::Bf16 }),
        (2, KvLayout { layers: 1, kv_heads: 1024, head_dim: 512, encoding: Encoding::Bf16 }),
        (4096, KvLayout { layers: 1, kv_heads: 3, head_dim: 40, encoding: Encoding::Int8 }),
        (1001, KvLayout { layers: 1, kv_heads: 8, head_dim: 128, encoding: Encoding::Int4 }),
        (64, KvLayout { layers: 1, kv_heads: 8, head_dim: 128, encoding: Encoding::Fp8 }),
    ];

    /// The rows that frames carry, by part, each once; checks every frame.
    fn join(frames: Frames, layout: &KvLayout, tokens: u32) -> [Vec<Option<Vec<u8>>>; 4] {
        let mut parts = Part::ALL.map(|part| vec![None; part.rows(tokens) as usize]);
        for frame in frames {
            let part = convert::part(&frame).unwrap();
            assert_eq!(frame.rows as usize * layout.row_bytes(part), frame.data.len());
            assert!(frame.encoded_len() <= FRAME_BYTES || frame.rows == 1);
            assert_eq!(frame.crc32c, crc32c::crc32c(&frame.data));
            let whole = [v1::Range { first: frame.first_row, end: frame.first_row + frame.rows }];
            let ranges = if frame.gathered.is_empty() { &whole[..] } else { &frame.gathered };
            let places: Vec<u32> = ranges.iter().flat_map(|range| range.first..range.end).collect();
            assert_eq!(places.len(), frame.rows as usize);
            for (row, data) in places.into_iter().zip(frame.data.chunks(layout.row_bytes(part))) {
                let there = parts[part.index()][row as usize].replace(data.to_vec());
                assert!(there.is_none(), "row {row} comes twice");
            }
        }
        parts
    }

    #[test]
    fn frames_are_whole_rows_that_fit_and_join_to_what_is_wanted() {
        let some = |every: u32, of: u32| RowRanges::from_slots((0..5000).filter(|row| row % of < every));
        let skips = [RowRanges::default(), some(1, 5), some(1, 2), some(97, 100), RowRanges::from_range(0..9000)];
        for (tokens, layout) in &LAYOUTS {
            let bytes: Bytes = (0..layout.layer_bytes(*tokens)).map(|i| (i % 251) as u8).collect();
            for skip in &skips {
                let loaded =
                    Loaded { layer: 3, bytes: bytes.clone(), source: "memory", sums: sums(layout, *tokens, &bytes).0 };
                let joined = join(Frames::new(7, loaded, layout, *tokens, skip), layout, *tokens);
                let nothing = (0..*tokens).all(|row| skip.contains(row));
                for &part in layout.parts() {
                    let rows = &joined[part.index()];
                    let expected = &bytes[layout.part_range(part, *tokens)];
                    for (row, expected) in expected.chunks(layout.row_bytes(part)).enumerate() {
                        let skipped = if part.by_token() { skip.contains(row as u32) } else { nothing };
                        let expected = (!skipped).then_some(expected);
                        assert_eq!(rows[row].as_deref(), expected, "{layout}: {part:?}, row {row} of {tokens}");
                    }
                }
            }
        }
    }

    #[test]
    fn known_sums_are_those_of_the_frames_and_make_that_of_the_layer() {
        for (tokens, layout) in &LAYOUTS {
            let bytes: Bytes = (0..layout.layer_bytes(*tokens)).map(|i| (i % 249) as u8).collect();
            let (sums, whole) = sums(layout, *tokens, &bytes);
            assert_eq!(whole, crc32c::crc32c(&bytes));
            let loaded = Loaded { layer: 0, bytes: bytes.clone(), source: "disk", sums: sums.clone() };
            let frames = |loaded| Frames::new(0, loaded, layout, *tokens, &RowRanges::default());
            let sent: Vec<u32> = frames(loaded.clone()).map(|frame| frame.crc32c).collect();
            assert_eq!(&sent[..], &sums[..]);
            // They are used: what is wrong here is sent.
            let wrong: Arc<[u32]> = sums.iter().map(|sum| !sum).collect();
            let sent = frames(Loaded { sums: wrong.clone(), ..loaded }).map(|frame| frame.crc32c);
            assert!(sent.eq(wrong.iter().copied()));
        }
    }

    #[test]
    fn a_layer_whose_rows_are_all_skipped_is_one_empty_frame() {
        for encoding in [Encoding::F32, Encoding::Int8] {
            let layout = KvLayout { layers: 4, kv_heads: 1, head_dim: 8, encoding };
            let bytes = vec![1; layout.layer_bytes(10)].into();
            let loaded = Loaded { layer: 3, bytes, source: "disk", sums: Arc::default() };
            let skip = RowRanges::from_range(0..10);
            let frames: Vec<Frame> = Frames::new(7, loaded, &layout, 10, &skip).collect();
            assert_eq!(frames.len(), 1);
            assert_eq!((frames[0].rows, frames[0].data.len(), frames[0].layer), (0, 0, 3));
            assert_eq!(frames[0].source, "disk");
        }
    }
}
