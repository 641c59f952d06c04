//! The kernels of place.cu, emulated on the CPU, against the plain twin.

use tch::{Device, Kind, Tensor};

use super::super::emulated::Emulated;
use super::*;
use crate::place::Resident;
use crate::quantize::Shape;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn random(shape: &[i64], seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, FLOAT)
}

/// The plain twin of rotation, halves convention.
fn rotated(heads: &Tensor, cosines: &Tensor, sines: &Tensor) -> Tensor {
    let half = heads.size()[2] / 2;
    let (first, second) = (heads.narrow(2, 0, half), heads.narrow(2, half, half));
    let (cosines, sines) = (cosines.unsqueeze(1), sines.unsqueeze(1));
    Tensor::cat(&[&first * &cosines - &second * &sines, &second * &cosines + &first * &sines], 2)
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let bytes = tensor.contiguous().view_dtype(Kind::Uint8).flatten(0, -1);
    let mut all = vec![0; bytes.numel()];
    bytes.copy_data(&mut all, bytes.numel());
    all
}

/// An e4m3 number by the definition of the format.
fn fp8(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size =
        if exponent == 0 { fraction / 8.0 * 2f32.powi(-6) } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) };
    if code < 128 { size } else { -size }
}

/// Random codes: their bytes, and what they mean before scaling.
fn codes(encoding: Encoding, count: usize, seed: i64) -> (Vec<u8>, Vec<f32>) {
    tch::manual_seed(seed);
    let draw = Vec::<i64>::try_from(Tensor::randint(256, [count as i64], (Kind::Int64, Device::Cpu))).unwrap();
    match encoding {
        Encoding::Quantized(Format::Int8) => {
            let codes: Vec<u8> = draw.iter().map(|&code| code as u8).collect();
            let numbers = codes.iter().map(|&code| f32::from(code as i8)).collect();
            (codes, numbers)
        }
        Encoding::Quantized(Format::Fp8) => {
            // 0x7f and 0xff are NaN; a writer never makes them.
            let codes: Vec<u8> = draw.iter().map(|&code| if code & 127 == 127 { 0 } else { code as u8 }).collect();
            let numbers = codes.iter().map(|&code| fp8(code)).collect();
            (codes, numbers)
        }
        _ => {
            let numbers: Vec<i64> = draw.iter().map(|code| code % 15 - 7).collect();
            let bytes = numbers.chunks(2).map(|pair| (pair[0] & 15) as u8 | ((pair[1] & 15) << 4) as u8).collect();
            (bytes, numbers.iter().map(|&number| number as f32).collect())
        }
    }
}

struct Chunk {
    tokens: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
    key_scales: Vec<f32>,
    value_scales: Vec<f32>,
    /// What is stored, in f32, `[tokens, kv_heads, head_dim]`.
    meant: (Tensor, Tensor),
}

impl Chunk {
    /// The rows from `first` on.
    fn from(&self, encoding: Encoding, first: usize) -> Stored<'_> {
        let skipped = first * (self.keys.len() / self.tokens);
        Stored {
            encoding,
            tokens: self.tokens,
            rows: first..self.tokens,
            keys: &self.keys[skipped..],
            values: &self.values[skipped..],
            key_scales: &self.key_scales,
            value_scales: &self.value_scales,
        }
    }
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

fn chunk(encoding: Encoding, tokens: i64, kv_heads: i64, dim: i64) -> Chunk {
    let shape = [tokens, kv_heads, dim];
    let Encoding::Quantized(_) = encoding else {
        let kind = if encoding == Encoding::F32 { Kind::Float } else { Kind::BFloat16 };
        let [keys, values] = [1, 2].map(|seed| random(&shape, seed).to_kind(kind));
        let meant = (keys.to_kind(Kind::Float), values.to_kind(Kind::Float));
        let (keys, values) = (bytes_of(&keys), bytes_of(&values));
        return Chunk { tokens: tokens as usize, keys, values, key_scales: vec![], value_scales: vec![], meant };
    };
    let count = (tokens * kv_heads * dim) as usize;
    let [(keys, key_numbers), (values, value_numbers)] = [1, 2].map(|seed| codes(encoding, count, seed));
    let groups = (tokens + 63).div_euclid(64);
    let key_scales = random(&[groups, kv_heads, dim], 3).abs() / 100;
    let value_scales = random(&[tokens, kv_heads], 4).abs() / 100;
    let group_of_row = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)).divide_scalar_mode(64, "floor");
    let meant_keys = Tensor::from_slice(&key_numbers).view(shape) * key_scales.index_select(0, &group_of_row);
    let meant_values = Tensor::from_slice(&value_numbers).view(shape) * value_scales.unsqueeze(2);
    Chunk {
        tokens: tokens as usize,
        keys,
        values,
        key_scales: floats(&key_scales),
        value_scales: floats(&value_scales),
        meant: (meant_keys, meant_values),
    }
}

/// Equal but for the rounding of `kind`, at the slots given; untouched (−3) elsewhere.
fn check_blocks(blocks: &Tensor, exact: &Tensor, slots: &[u32], table: Option<&[u32]>, what: &str) {
    let &[.., kv_heads, dim] = &blocks.size()[..] else { panic!("{what}") };
    let flat = blocks.reshape([-1, kv_heads, dim]);
    let place = |slot: u32| match table {
        None => i64::from(slot),
        Some(table) => i64::from(table[slot as usize / 64] * 64 + slot % 64),
    };
    let mut expected = Tensor::full(flat.size(), -3.0, FLOAT);
    let places: Vec<i64> = slots.iter().map(|&slot| place(slot)).collect();
    let _ = expected.index_copy_(0, &Tensor::from_slice(&places), exact);
    let difference = (flat.to_kind(Kind::Float) - &expected).abs();
    let unit = if blocks.kind() == Kind::BFloat16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
    // Half a unit in the last place for the rounding; the same again and a little for f32 in another order.
    let allowed = expected.abs() * unit + 1e-5;
    assert!(difference.less_equal_tensor(&allowed).all().int64_value(&[]) == 1, "{what}: {}", difference.max());
}

#[test]
fn placed_rows_equal_the_plain_twin_in_every_encoding() {
    let table = [4, 1, 3];
    let formats = [Format::Int8, Format::Fp8, Format::Int4].map(Encoding::Quantized);
    for encoding in [Encoding::F32, Encoding::Bf16].into_iter().chain(formats) {
        for (turn, (tokens, kv_heads, dim)) in
            [(1, 1, 64), (97, 2, 64), (130, 3, 128), (33, 2, 16)].into_iter().enumerate()
        {
            let kind = [Kind::BFloat16, Kind::Half][turn % 2];
            let first = [0, 13, 70, 1][turn];
            let (whole, other) = (chunk(encoding, tokens, kv_heads, dim), chunk(Encoding::Bf16, 5, kv_heads, dim));
            let rows = tokens - first + 5;
            let exact = |pick: fn(&Chunk) -> &Tensor| {
                Tensor::cat(&[pick(&whole).narrow(0, first, tokens - first), pick(&other).shallow_clone()], 0)
            };
            let angles = random(&[rows, dim / 2], 5) * 100;
            let (cosines, sines) = (angles.cos(), angles.sin());
            let slots: Vec<u32> = (0..rows as u32).map(|row| row + row / 50 + 3).collect();
            for table in [None, Some(&table[..])] {
                for launch in Emulated::all(1) {
                    let blocks = || Tensor::full([5, 64, kv_heads, dim], -3.0, FLOAT).to_kind(kind);
                    let (keys, values) = (blocks(), blocks());
                    let rows = Rows { last: &slots, table };
                    let target = Target { keys: &keys, values: &values, rows, cosines: &cosines, sines: &sines };
                    let pieces = [whole.from(encoding, first as usize).into(), other.from(Encoding::Bf16, 0).into()];
                    place(&launch, &pieces, &target).unwrap();
                    let what = format!("{encoding:?} {tokens} x {kv_heads} x {dim} from {first} {kind:?} {launch:?}");
                    let exact_keys = rotated(&exact(|chunk| &chunk.meant.0), &cosines, &sines);
                    check_blocks(&keys, &exact_keys, &slots, table, &what);
                    check_blocks(&values, &exact(|chunk| &chunk.meant.1), &slots, table, &what);
                }
            }
        }
    }
}

#[test]
fn resident_rows_are_placed_bit_by_bit_as_those_of_the_host() {
    let formats = [Format::Int8, Format::Fp8, Format::Int4].map(Encoding::Quantized);
    for encoding in [Encoding::F32, Encoding::Bf16].into_iter().chain(formats) {
        for (tokens, kv_heads, dim) in [(1, 1, 64), (97, 2, 64), (70, 3, 16)] {
            let (kept, sent) = (chunk(encoding, tokens, kv_heads, dim), chunk(Encoding::Bf16, 5, kv_heads, dim));
            let (heads, size) = (kv_heads as usize, dim as usize);
            let shape = Shape { tokens: tokens as usize, kv_heads: heads, head_dim: size };
            for launch in Emulated::all(1) {
                let what = format!("{encoding:?} {tokens} x {kv_heads} x {dim} {launch:?}");
                let plain = Resident::new(&kept.from(encoding, 0), heads, size, Device::Cpu).unwrap();
                let memory = Tensor::zeros([Resident::bytes(encoding, shape) as i64], (Kind::Uint8, Device::Cpu));
                keep(&launch, &kept.from(encoding, 0), heads, &memory, plain.parts()).unwrap();
                assert!(memory.equal(plain.memory()), "{what}");
                let layer = Resident::of(encoding, shape, memory).unwrap();
                // From the first row on, from a middle one, the last alone, and none.
                for first in [0, tokens as usize / 2, tokens as usize - 1, tokens as usize] {
                    let rows = tokens - first as i64 + 10;
                    let angles = random(&[rows, dim / 2], 5) * 100;
                    let (cosines, sines) = (angles.cos(), angles.sin());
                    let slots: Vec<u32> = (0..rows as u32).map(|row| row * 2 + 1).collect();
                    let mixed = |middle: Piece<'_>| {
                        let ends = [0, 1].map(|_| Piece::from(sent.from(Encoding::Bf16, 0)));
                        let [before, after] = ends;
                        let blocks = [0, 1].map(|_| Tensor::full([4, 64, kv_heads, dim], -3.0, FLOAT));
                        let [keys, values] = blocks.map(|block| block.to_kind(Kind::BFloat16));
                        let rows = Rows { last: &slots, table: Some(&[2, 0, 1, 3]) };
                        let target = Target { keys: &keys, values: &values, rows, cosines: &cosines, sines: &sines };
                        place(&launch, &[before, middle, after], &target).unwrap();
                        (keys, values)
                    };
                    let expected = mixed(kept.from(encoding, first).into());
                    let found = mixed(Piece::Resident { layer: &layer, rows: first..tokens as usize });
                    assert!(expected.0.equal(&found.0) && expected.1.equal(&found.1), "{what} from {first}");
                }
            }
        }
    }
}

#[test]
fn memory_that_does_not_fit_a_layer_is_not_written() {
    let launch = Emulated { mode: 0, multiprocessors: 1 };
    let stored = chunk(Encoding::Bf16, 4, 2, 64);
    let layer = Resident::new(&stored.from(Encoding::Bf16, 0), 2, 64, Device::Cpu).unwrap();
    let try_with = |memory: &Tensor, first: usize| {
        let kept = keep(&launch, &stored.from(Encoding::Bf16, first), 2, memory, layer.parts());
        kept.map_err(|error| error.to_string())
    };
    let memory = Tensor::zeros([4096], (Kind::Uint8, Device::Cpu));
    assert_eq!(try_with(&memory, 0), Ok(()));
    let wrong = Tensor::zeros([4096], (Kind::Int8, Device::Cpu));
    for (result, why) in [
        (try_with(&memory.narrow(0, 0, 2047), 0), "do not fit"),
        (try_with(&memory, 1), "do not fit"),
        (try_with(&wrong, 0), "needs Uint8"),
        (try_with(&memory.narrow(0, 8, 4088), 0), "multiple of 16"),
    ] {
        let text = result.unwrap_err();
        assert!(text.contains(why), "{text:?} does not say {why:?}");
    }
    assert!(wrong.eq(0).all().int64_value(&[]) == 1);
}

#[test]
fn scattered_rows_equal_the_plain_twin() {
    for (kind, rows, heads, kv_heads, dim) in [(Kind::BFloat16, 37, 14, 2, 64), (Kind::Half, 5, 5, 1, 128)] {
        let all = heads + 2 * kv_heads;
        let projected = random(&[rows, all, dim], 1).to_kind(kind);
        let bias = random(&[all * dim], 2).to_kind(kind);
        let angles = random(&[rows, dim / 2], 3) * 100;
        let (cosines, sines) = (angles.cos(), angles.sin());
        let slots: Vec<u32> = (0..rows as u32).map(|row| row * 3 + 60).collect();
        let table = [2, 0, 1];
        for bias in [None, Some(&bias)] {
            let mut sum = projected.to_kind(Kind::Float);
            if let Some(bias) = bias {
                sum += bias.to_kind(Kind::Float).view([1, all, dim]);
            }
            for launch in Emulated::all(1) {
                let blocks = || Tensor::full([3, 64, kv_heads, dim], -3.0, FLOAT).to_kind(kind);
                let (keys, values) = (blocks(), blocks());
                let rows_and_table = Rows { last: &slots, table: Some(&table) };
                let target =
                    Target { keys: &keys, values: &values, rows: rows_and_table, cosines: &cosines, sines: &sines };
                let query = scatter(&launch, &projected, bias, &target).unwrap();
                let what = format!("{kind:?} {launch:?}");
                let exact = rotated(&sum.narrow(1, 0, heads), &cosines, &sines);
                let rounding = (&exact - exact.to_kind(kind).to_kind(Kind::Float)).abs().max().double_value(&[]);
                assert!((query.to_kind(Kind::Float) - exact).abs().max().double_value(&[]) <= 2.0 * rounding, "{what}");
                let exact_keys = rotated(&sum.narrow(1, heads, kv_heads), &cosines, &sines);
                check_blocks(&keys, &exact_keys, &slots, Some(&table), &what);
                check_blocks(&values, &sum.narrow(1, heads + kv_heads, kv_heads), &slots, Some(&table), &what);
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_values() {
    let launch = Emulated { mode: 0, multiprocessors: 1 };
    let int8 = Encoding::Quantized(Format::Int8);
    let stored = chunk(int8, 4, 2, 64);
    let table = random(&[4, 32], 1);
    let blocks = Tensor::zeros([2, 64, 2, 64], (Kind::Half, Device::Cpu));
    let try_with = |keys: &Tensor, cosines: &Tensor, slots: &[u32], encoding: Encoding| {
        let rows = Rows { last: slots, table: None };
        let target = Target { keys, values: &blocks, rows, cosines, sines: &table };
        place(&launch, &[stored.from(encoding, 0).into()], &target).map_err(|error| error.to_string())
    };
    let slots = [0, 1, 2, 127];
    assert_eq!(try_with(&blocks, &table, &slots, int8), Ok(()));
    let cases = [
        (try_with(&blocks, &table, &[0, 1, 2, 128], int8), "slot 128 is beyond"),
        (try_with(&blocks, &table, &[0, 1, 3, 2], int8), "descend"),
        (try_with(&blocks, &table, &slots, Encoding::Bf16), "bytes of keys"),
        (try_with(&blocks, &table.narrow(0, 0, 3), &slots, int8), "rotation"),
        (try_with(&blocks.narrow(0, 0, 1), &table, &slots, int8), "[1, 64, 2, 64]"),
        (try_with(&blocks.to_kind(Kind::BFloat16), &table, &slots, int8), "do not go together"),
        (try_with(&blocks, &table.narrow(0, 0, 3), &slots[..3], int8), "rotation"),
    ];
    for (result, why) in cases {
        let text = result.unwrap_err();
        assert!(text.contains(why), "{text:?} does not say {why:?}");
    }
}
