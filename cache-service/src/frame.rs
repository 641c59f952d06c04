//! Cuts a layer into frames of whole rows, K first, each at most 1 MiB with its checksum. Rows that are not wanted are left
//! out; what remains is gathered, so that the number of frames depends on bytes alone.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use kvsplice_kv::RowRanges;
use kvsplice_proto::server::FRAME_BYTES;
use kvsplice_proto::v1;
use kvsplice_proto::v1::Frame;
use kvsplice_proto::v1::frame::Part;

use crate::fetch::Loaded;

/// Room for the fields of a frame beside its data, so that a message fits one HTTP/2 frame.
const FIELD_BYTES: usize = 256;
/// Ranges that one frame gathers at most, and the room that they take.
const MAX_GATHERED: usize = 256;
const GATHERED_BYTES: usize = MAX_GATHERED * 16;

/// The frames of one layer, made one at a time.
pub(crate) struct Frames {
    place: u32,
    loaded: Loaded,
    row_bytes: usize,
    /// Rows of K; V has as many.
    rows: usize,
    part: Part,
    /// The rows to send, ascending.
    ranges: Vec<Range<usize>>,
    /// The range that is being sent, and its next row.
    next: (usize, usize),
    /// Nothing is left to send but one frame that says so.
    empty: bool,
}

impl Frames {
    /// `place`: the chunk's place in Want. The layer is verified, hence K and V of whole rows. `skip`: rows to leave out.
    pub(crate) fn new(place: u32, loaded: Loaded, row_bytes: usize, skip: &RowRanges) -> Self {
        let rows = loaded.bytes.len() / row_bytes / 2;
        let ranges = remaining(rows, skip);
        let next = (0, ranges.first().map_or(0, |range| range.start));
        Self { place, loaded, row_bytes, rows, part: Part::Keys, empty: ranges.is_empty(), ranges, next }
    }

    /// Takes the rows of the next frame.
    fn take(&mut self) -> Vec<Range<usize>> {
        let room = FRAME_BYTES - FIELD_BYTES - if self.ranges.len() > 1 { GATHERED_BYTES } else { 0 };
        let mut room = (room / self.row_bytes).max(1);
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

    /// The bytes of these rows of the current part.
    fn gather(&self, rows: &[Range<usize>]) -> Bytes {
        let base = if self.part == Part::Keys { 0 } else { self.rows };
        let slice = |rows: &Range<usize>| {
            self.loaded.bytes.slice((base + rows.start) * self.row_bytes..(base + rows.end) * self.row_bytes)
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
        let mut taken = self.take();
        if taken.is_empty() && self.part == Part::Keys && !self.empty {
            self.part = Part::Values;
            self.next = (0, self.ranges.first().map_or(0, |range| range.start));
            taken = self.take();
        }
        if taken.is_empty() && !std::mem::take(&mut self.empty) {
            return None;
        }
        let data = self.gather(&taken);
        let wire = |rows: &Range<usize>| v1::Range { first: rows.start as u32, end: rows.end as u32 };
        Some(Frame {
            chunk: self.place,
            layer: self.loaded.layer,
            part: self.part.into(),
            first_row: taken.first().map_or(0, |rows| rows.start as u32),
            rows: taken.iter().map(|rows| rows.len() as u32).sum(),
            crc32c: crc32c::crc32c(&data),
            data,
            source: self.loaded.source.to_owned(),
            error: String::new(),
            gathered: if taken.len() > 1 { taken.iter().map(wire).collect() } else { Vec::new() },
        })
    }
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
    use prost::Message;

    use super::*;

    /// K and V of a layer as its frames carry them, each row once; checks every frame.
    fn join(frames: Frames, rows: usize, row_bytes: usize) -> [Vec<Option<Vec<u8>>>; 2] {
        let mut parts = [vec![None; rows], vec![None; rows]];
        for frame in frames {
            assert_eq!(frame.rows as usize * row_bytes, frame.data.len());
            assert!(frame.encoded_len() <= FRAME_BYTES || frame.rows == 1);
            assert_eq!(frame.crc32c, crc32c::crc32c(&frame.data));
            let whole = [v1::Range { first: frame.first_row, end: frame.first_row + frame.rows }];
            let ranges = if frame.gathered.is_empty() { &whole[..] } else { &frame.gathered };
            let places: Vec<u32> = ranges.iter().flat_map(|range| range.first..range.end).collect();
            assert_eq!(places.len(), frame.rows as usize);
            for (row, data) in places.into_iter().zip(frame.data.chunks(row_bytes)) {
                let there = parts[frame.part as usize][row as usize].replace(data.to_vec());
                assert!(there.is_none(), "row {row} comes twice");
            }
        }
        parts
    }

    #[test]
    fn frames_are_whole_rows_that_fit_and_join_to_what_is_wanted() {
        let some = |every: u32, of: u32| RowRanges::from_slots((0..5000).filter(|row| row % of < every));
        let skips = [RowRanges::default(), some(1, 5), some(1, 2), some(97, 100), RowRanges::from_range(0..9000)];
        for (rows, row_bytes) in [(1, 4), (3000, 256), (1500, 2048), (2, 1 << 20), (4096, 257)] {
            let bytes: Vec<u8> = (0..2 * rows * row_bytes).map(|i| (i % 251) as u8).collect();
            for skip in &skips {
                let loaded = Loaded { layer: 3, bytes: bytes.clone().into(), source: "memory" };
                let parts = join(Frames::new(7, loaded, row_bytes, skip), rows, row_bytes);
                for (found, expected) in parts.iter().flatten().zip(bytes.chunks(row_bytes)) {
                    assert!(found.as_ref().is_none_or(|found| found == expected));
                }
                for part in parts {
                    let missing = |row: usize| part[row].is_none() == skip.contains(row as u32);
                    assert!((0..rows).all(missing), "{rows} rows of {row_bytes} bytes");
                }
            }
        }
    }

    #[test]
    fn a_layer_whose_rows_are_all_skipped_is_one_empty_frame() {
        let loaded = Loaded { layer: 3, bytes: vec![1; 80].into(), source: "disk" };
        let frames: Vec<Frame> = Frames::new(7, loaded, 4, &RowRanges::from_range(0..10)).collect();
        assert_eq!(frames.len(), 1);
        assert_eq!((frames[0].rows, frames[0].data.len(), frames[0].layer), (0, 0, 3));
        assert_eq!(frames[0].source, "disk");
    }
}
