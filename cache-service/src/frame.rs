//! Cuts a layer into frames of whole rows, K first, each at most 1 MiB with its checksum.

use std::ops::Range;

use kvsplice_proto::server::FRAME_BYTES;
use kvsplice_proto::v1::Frame;
use kvsplice_proto::v1::frame::Part;

use crate::fetch::Loaded;

/// Room for the fields of a frame beside its data, so that a message fits one HTTP/2 frame.
const FIELD_BYTES: usize = 256;

/// The frames of one layer, made one at a time.
pub(crate) struct Frames {
    place: u32,
    loaded: Loaded,
    row_bytes: usize,
    /// Rows of K; V has as many.
    rows: usize,
    /// The next row; rows of V follow those of K.
    next: usize,
}

impl Frames {
    /// `place`: the chunk's place in Want. The layer is verified, hence K and V of whole rows.
    pub(crate) fn new(place: u32, loaded: Loaded, row_bytes: usize) -> Self {
        let rows = loaded.bytes.len() / row_bytes / 2;
        Self { place, loaded, row_bytes, rows, next: 0 }
    }

    fn piece(&self) -> (Part, Range<usize>) {
        let (part, base) = if self.next < self.rows { (Part::Keys, 0) } else { (Part::Values, self.rows) };
        let most = ((FRAME_BYTES - FIELD_BYTES) / self.row_bytes).max(1);
        let end = (self.next + most).min(base + self.rows);
        (part, self.next..end)
    }
}

impl Iterator for Frames {
    type Item = Frame;

    fn next(&mut self) -> Option<Frame> {
        if self.next >= 2 * self.rows {
            return None;
        }
        let (part, rows) = self.piece();
        let data = self.loaded.bytes.slice(rows.start * self.row_bytes..rows.end * self.row_bytes);
        let first_row = if part == Part::Keys { rows.start } else { rows.start - self.rows };
        self.next = rows.end;
        Some(Frame {
            chunk: self.place,
            layer: self.loaded.layer,
            part: part.into(),
            first_row: first_row as u32,
            rows: rows.len() as u32,
            crc32c: crc32c::crc32c(&data),
            data,
            source: self.loaded.source.to_owned(),
            error: String::new(),
        })
    }
}

/// The frame that ends a chunk.
pub(crate) fn error(place: u32, layer: u32, error: String) -> Frame {
    Frame { chunk: place, layer, error, ..Frame::default() }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn frames_are_whole_rows_that_fit_and_join_to_the_layer() {
        for (rows, row_bytes) in [(1, 4), (3000, 256), (1500, 2048), (2, 1 << 20), (4096, 257)] {
            let bytes: Vec<u8> = (0..2 * rows * row_bytes).map(|i| (i % 251) as u8).collect();
            let loaded = Loaded { layer: 3, bytes: bytes.clone().into(), source: "memory" };
            let mut parts = [Vec::new(), Vec::new()];
            for frame in Frames::new(7, loaded, row_bytes) {
                let part = &mut parts[frame.part as usize];
                assert_eq!(frame.first_row as usize * row_bytes, part.len());
                assert_eq!(frame.rows as usize * row_bytes, frame.data.len());
                assert!(frame.encoded_len() <= FRAME_BYTES || frame.rows == 1);
                assert_eq!(frame.crc32c, crc32c::crc32c(&frame.data));
                part.extend_from_slice(&frame.data);
            }
            assert_eq!(parts.concat(), bytes);
        }
    }
}
