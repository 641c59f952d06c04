use super::*;
use crate::cpu::number::Number;
use crate::cpu::place::{Destination, place};
use crate::cpu::rope::Angles;
use crate::quantize::{data_length, decode_keys, decode_values, encode_keys, encode_values};
use crate::testing::{Random, numbers};
use crate::{BLOCK, Isa};

pub(super) const ENCODINGS: [Encoding; 5] = [
    Encoding::F32,
    Encoding::Bf16,
    Encoding::Quantized(Format::Int8),
    Encoding::Quantized(Format::Int4),
    Encoding::Quantized(Format::Fp8),
];

/// A chunk as it is stored, and the numbers that its bytes mean.
pub(super) struct Chunk {
    encoding: Encoding,
    shape: Shape,
    /// One byte before the data: nothing may rely on alignment.
    keys: Vec<u8>,
    values: Vec<u8>,
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    plain_keys: Vec<f32>,
    plain_values: Vec<f32>,
}

impl Chunk {
    pub(super) fn new(random: &mut Random, encoding: Encoding, shape: Shape) -> Self {
        let count = shape.tokens * shape.width();
        let (mut plain_keys, mut plain_values) = (numbers(random, count), numbers(random, count));
        let (mut keys, mut values) = (vec![0], vec![0]);
        let (mut ks, mut vs) = (Vec::new(), Vec::new());
        match encoding {
            Encoding::F32 => {
                keys.extend(plain_keys.iter().flat_map(|number| number.to_le_bytes()));
                values.extend(plain_values.iter().flat_map(|number| number.to_le_bytes()));
            }
            Encoding::Bf16 => {
                for (plain, bytes) in [(&mut plain_keys, &mut keys), (&mut plain_values, &mut values)] {
                    for number in plain.iter_mut() {
                        let rounded = half::bf16::from_f32(*number);
                        *number = rounded.to_f32();
                        bytes.extend(rounded.to_le_bytes());
                    }
                }
            }
            Encoding::Quantized(format) => {
                keys.resize(1 + data_length(format, shape.tokens, shape), 0);
                values.resize(keys.len(), 0);
                ks.resize(key_scales(shape), 0.0);
                vs.resize(value_scales(shape), 0.0);
                encode_keys(format, &plain_keys, shape, &mut keys[1..], &mut ks).unwrap();
                encode_values(format, &plain_values, shape, &mut values[1..], &mut vs).unwrap();
                decode_keys(format, &keys[1..], &ks, shape, 0..shape.tokens, &mut plain_keys).unwrap();
                decode_values(format, &values[1..], &vs, shape, 0..shape.tokens, &mut plain_values).unwrap();
            }
        }
        Self { encoding, shape, keys, values, key_scales: ks, value_scales: vs, plain_keys, plain_values }
    }

    pub(super) fn rows(&self, rows: Range<usize>) -> Stored<'_> {
        let row = self.encoding.bytes(self.shape.width());
        let bytes = 1 + rows.start * row..1 + rows.end * row;
        Stored {
            encoding: self.encoding,
            tokens: self.shape.tokens,
            rows,
            keys: &self.keys[bytes.clone()],
            values: &self.values[bytes],
            key_scales: &self.key_scales,
            value_scales: &self.value_scales,
        }
    }
}

/// The obvious twin in double precision, with one rounding: rotated keys of one row.
fn rotated(row: &[f32], head_dim: usize, position: f64) -> Vec<f64> {
    let half = head_dim / 2;
    let mut rotated = vec![0.0; row.len()];
    for (head, to) in row.chunks(head_dim).zip(rotated.chunks_mut(head_dim)) {
        for pair in 0..half {
            let angle = position * 1e4f64.powf(-(pair as f64) / half as f64);
            let (a, b) = (f64::from(head[pair]), f64::from(head[pair + half]));
            to[pair] = a * angle.cos() - b * angle.sin();
            to[pair + half] = b * angle.cos() + a * angle.sin();
        }
    }
    rotated
}

fn angles(positions: &[u32], head_dim: usize) -> (Vec<f32>, Vec<f32>) {
    let half = head_dim / 2;
    let angle = |index: usize| f64::from(positions[index / half]) * 1e4f64.powf(-((index % half) as f64) / half as f64);
    let count = positions.len() * half;
    (
        (0..count).map(|index| angle(index).cos() as f32).collect(),
        (0..count).map(|index| angle(index).sin() as f32).collect(),
    )
}

/// Places two chunks, the first without its first rows, and compares every number of the destination.
fn placed_rows_equal_the_twin<T: Number>(isa: Isa, encoding: Encoding, shape: Shape, seed: u64, rounding: f64) {
    let mut random = Random(seed);
    let chunks = [Chunk::new(&mut random, encoding, shape), Chunk::new(&mut random, encoding, shape)];
    let skipped = shape.tokens / 3;
    let pieces = [chunks[0].rows(skipped..shape.tokens), chunks[1].rows(0..shape.tokens)];
    let count = 2 * shape.tokens - skipped;
    // Scattered slots through a table that is out of order.
    let slots: Vec<u32> = (0..count as u32).map(|row| 2 * row + u32::from(row % 3 == 0)).collect();
    let blocks = (2 * count).div_ceil(BLOCK as usize) + 1;
    let table: Vec<u32> = (0..blocks as u32).rev().collect();
    let capacity = blocks * BLOCK as usize;
    let places = places(&slots, Some(&table), capacity).unwrap();
    let (cos, sin) = angles(&slots, shape.head_dim);
    let width = shape.width();
    let untouched = T::from_f32(-77.0);
    let (mut keys, mut values) = (vec![untouched; capacity * width], vec![untouched; capacity * width]);
    let destination =
        Destination { keys: &mut keys, values: &mut values, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    place(isa, destination, &places, &pieces, Angles { cos: &cos, sin: &sin });
    let mut free = vec![true; capacity];
    for (row, (&slot, &at)) in slots.iter().zip(&places).enumerate() {
        assert_eq!(at, table[(slot / BLOCK) as usize] * BLOCK + slot % BLOCK);
        free[at as usize] = false;
        let row = row + skipped;
        let (chunk, token) = (&chunks[row / shape.tokens], row % shape.tokens);
        let plain = token * width..(token + 1) * width;
        let expected = rotated(&chunk.plain_keys[plain.clone()], shape.head_dim, f64::from(slot));
        let got = at as usize * width..(at as usize + 1) * width;
        for (key, expected) in keys[got.clone()].iter().zip(expected) {
            let bound = rounding * expected.abs().max(0.5) * 1.001 + 1e-6;
            assert!((f64::from(key.to_f32()) - expected).abs() < bound, "{isa:?} {encoding:?} slot {slot}");
        }
        for (value, expected) in values[got].iter().zip(&chunk.plain_values[plain]) {
            assert_eq!(value.to_f32(), T::from_f32(*expected).to_f32(), "{isa:?} {encoding:?} slot {slot}");
        }
    }
    for (at, free) in free.into_iter().enumerate() {
        let row = at * width..(at + 1) * width;
        assert!(!free || keys[row.clone()].iter().chain(&values[row]).all(|number| number.to_f32() == -77.0));
    }
}

#[test]
fn every_encoding_lands_rotated_at_its_slots() {
    for (seed, (tokens, kv_heads, head_dim)) in [(1, 1, 2), (97, 2, 64), (130, 3, 18)].into_iter().enumerate() {
        let shape = Shape { tokens, kv_heads, head_dim };
        for encoding in ENCODINGS {
            for isa in Isa::available() {
                println!("seed {seed} {isa:?} {encoding:?} {shape:?}");
                placed_rows_equal_the_twin::<f32>(isa, encoding, shape, seed as u64, 0.0);
                placed_rows_equal_the_twin::<half::bf16>(isa, encoding, shape, seed as u64, 1.0 / 256.0);
            }
        }
    }
}

#[test]
fn slots_and_tables_that_do_not_fit_are_refused() {
    assert_eq!(places(&[1, 64, 130], Some(&[4, 1, 0]), 320).unwrap(), [257, 64, 2]);
    assert!(places(&[], None, 0).unwrap().is_empty());
    for (slots, table, what) in [
        (&[1, 1][..], None, "ascend"),
        (&[5, 4], None, "ascend"),
        (&[319, 320], None, "slot 320 is beyond the capacity 320"),
        (&[64], Some(&[0][..]), "beyond a table of 1 blocks"),
        (&[64], Some(&[0, 5]), "slot 64 is beyond the capacity 320"),
        (&[64], Some(&[0, u32::MAX]), "beyond the capacity"),
        (&[0, 64], Some(&[3, 3]), "block 3 is twice"),
    ] {
        let error = places(slots, table, 320).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let shape = Shape { tokens: 70, kv_heads: 2, head_dim: 4 };
    for encoding in ENCODINGS {
        let chunk = Chunk::new(&mut Random(1), encoding, shape);
        let good = chunk.rows(3..70);
        good.check(2, 4).unwrap();
        assert!(good.check(2, 6).is_err() && good.check(usize::MAX, 4).is_err());
        assert!(Stored { rows: 4..70, ..good.clone() }.check(2, 4).is_err());
        assert!(Stored { rows: 4..71, ..good.clone() }.check(2, 4).is_err());
        assert!(Stored { values: &good.values[1..], ..good.clone() }.check(2, 4).is_err());
        assert!(Stored { key_scales: &[1.0], ..good.clone() }.check(2, 4).is_err());
        assert!(Stored { value_scales: &[1.0], ..good.clone() }.check(2, 4).is_err());
    }
}

#[cfg(feature = "libtorch")]
#[test]
fn tensors_of_rows_and_of_blocks_are_written_and_others_refused() {
    use crate::rope::RopeTable;
    use tch::{Device, Kind, Tensor};
    let shape = Shape { tokens: 65, kv_heads: 2, head_dim: 8 };
    let chunk = Chunk::new(&mut Random(3), Encoding::Quantized(Format::Int8), shape);
    let pieces = [Piece::Host(chunk.rows(0..65))];
    let slots: Vec<u32> = (10..75).collect();
    let rotation = RopeTable::new(&[1.0, 0.1, 0.01, 0.001], 100).unwrap().at(&slots).unwrap();
    for kind in [Kind::Float, Kind::BFloat16] {
        let zeros = |size: &[i64]| Tensor::zeros(size, (kind, Device::Cpu));
        let (mut keys, mut values) = (zeros(&[128, 2, 8]), zeros(&[128, 2, 8]));
        super::place(&mut keys, &mut values, &slots, None, &pieces, &rotation).unwrap();
        let (mut block_keys, mut block_values) = (zeros(&[3, 64, 2, 8]), zeros(&[3, 64, 2, 8]));
        super::place(&mut block_keys, &mut block_values, &slots, Some(&[2, 0]), &pieces, &rotation).unwrap();
        for (rows, blocks) in [(&keys, &block_keys), (&values, &block_values)] {
            let ordered = Tensor::cat(&[blocks.select(0, 2), blocks.select(0, 0)], 0);
            assert!(rows.equal(&ordered) && rows.abs().sum(Kind::Float).double_value(&[]) > 1.0);
        }
        let refuse = |keys: &mut Tensor, values: &mut Tensor, slots: &[u32], what: &str| {
            let error = super::place(keys, values, slots, None, &pieces, &rotation).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        refuse(&mut zeros(&[128, 2, 8]), &mut zeros(&[128, 2, 4]), &slots, "do not fit");
        refuse(&mut zeros(&[128, 2]), &mut zeros(&[128, 2]), &slots, "neither rows");
        refuse(&mut zeros(&[128, 2, 8]), &mut zeros(&[128, 2, 8]), &slots[1..], "64 slots");
        refuse(&mut zeros(&[64, 2, 8]), &mut zeros(&[64, 2, 8]), &slots, "slot 64");
        let mut apart = zeros(&[128, 4, 8]).narrow(1, 0, 2);
        refuse(&mut apart, &mut zeros(&[128, 2, 8]), &slots, "contiguous");
        let shared = zeros(&[256, 2, 8]);
        refuse(&mut shared.narrow(0, 0, 128), &mut shared.narrow(0, 127, 128), &slots, "share");
        let mut double = Tensor::zeros([128, 2, 8], (Kind::Double, Device::Cpu));
        refuse(&mut double.copy(), &mut double, &slots, "Double");
    }
}
