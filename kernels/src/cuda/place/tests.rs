//! The kernels of place.cu, emulated on the CPU, against the plain twin.

use tch::{Device, Kind, Tensor};

use super::super::emulated::Emulated;
use super::*;

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

fn bytes_of(tensor: &Tensor) -> Tensor {
    tensor.contiguous().view_dtype(Kind::Uint8).flatten(0, -1)
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
        Encoding::Int8 => {
            let codes: Vec<u8> = draw.iter().map(|&code| code as u8).collect();
            let numbers = codes.iter().map(|&code| f32::from(code as i8)).collect();
            (codes, numbers)
        }
        Encoding::Fp8 => {
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
    keys: Tensor,
    values: Tensor,
    scales: Option<(Tensor, Tensor)>,
    /// What is stored, in f32.
    meant: (Tensor, Tensor),
}

fn chunk(encoding: Encoding, rows: i64, kv_heads: i64, dim: i64, first_token: i64) -> Chunk {
    let shape = [rows, kv_heads, dim];
    if !encoding.scaled() {
        let kind = if encoding == Encoding::F32 { Kind::Float } else { Kind::BFloat16 };
        let [keys, values] = [1, 2].map(|seed| random(&shape, seed).to_kind(kind));
        let meant = (keys.to_kind(Kind::Float), values.to_kind(Kind::Float));
        return Chunk { keys: bytes_of(&keys), values: bytes_of(&values), scales: None, meant };
    }
    let count = (rows * kv_heads * dim) as usize;
    let [(keys, key_numbers), (values, value_numbers)] = [1, 2].map(|seed| codes(encoding, count, seed));
    let groups = (first_token + rows).div_euclid(64) + 1;
    let key_scales = random(&[groups, kv_heads, dim], 3).abs() / 100;
    let value_scales = random(&[rows, kv_heads], 4).abs() / 100;
    let group_of_row = (Tensor::arange(rows, (Kind::Int64, Device::Cpu)) + first_token).divide_scalar_mode(64, "floor");
    let meant_keys = Tensor::from_slice(&key_numbers).view(shape) * key_scales.index_select(0, &group_of_row);
    let meant_values = Tensor::from_slice(&value_numbers).view(shape) * value_scales.unsqueeze(2);
    Chunk {
        keys: Tensor::from_slice(&keys),
        values: Tensor::from_slice(&values),
        scales: Some((key_scales, value_scales)),
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
    for encoding in [Encoding::F32, Encoding::Bf16, Encoding::Int8, Encoding::Fp8, Encoding::Int4] {
        for (turn, (rows, kv_heads, dim)) in
            [(1, 1, 64), (97, 2, 64), (130, 3, 128), (33, 2, 16)].into_iter().enumerate()
        {
            let kind = [Kind::BFloat16, Kind::Half][turn % 2];
            let first_token = 7 * turn;
            let stored = chunk(encoding, rows, kv_heads, dim, first_token as i64);
            let angles = random(&[rows, dim / 2], 5) * 100;
            let (cosines, sines) = (angles.cos(), angles.sin());
            let slots: Vec<u32> = (0..rows as u32).map(|row| row + row / 50 + 3).collect();
            for table in [None, Some(&table[..])] {
                for launch in Emulated::all(1) {
                    let blocks = || Tensor::full([5, 64, kv_heads, dim], -3.0, FLOAT).to_kind(kind);
                    let (keys, values) = (blocks(), blocks());
                    let target = Target {
                        keys: &keys,
                        values: &values,
                        rows: Rows { last: &slots, table },
                        cosines: &cosines,
                        sines: &sines,
                    };
                    let source = Stored {
                        encoding,
                        keys: &stored.keys,
                        values: &stored.values,
                        scales: stored.scales.as_ref().map(|(keys, values)| (keys, values)),
                        first_token,
                    };
                    place(&launch, &source, &target).unwrap();
                    let what = format!("{encoding:?} {rows} x {kv_heads} x {dim} {kind:?} {launch:?}");
                    check_blocks(&keys, &rotated(&stored.meant.0, &cosines, &sines), &slots, table, &what);
                    check_blocks(&values, &stored.meant.1, &slots, table, &what);
                }
            }
        }
    }
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
    let stored = chunk(Encoding::Int8, 4, 2, 64, 0);
    let table = random(&[4, 32], 1);
    let blocks = Tensor::zeros([2, 64, 2, 64], (Kind::Half, Device::Cpu));
    let try_with = |keys: &Tensor, cosines: &Tensor, slots: &[u32], scales: bool, encoding: Encoding| {
        let rows = Rows { last: slots, table: None };
        let target = Target { keys, values: &blocks, rows, cosines, sines: &table };
        let scales = stored.scales.as_ref().filter(|_| scales).map(|(keys, values)| (keys, values));
        let source = Stored { encoding, keys: &stored.keys, values: &stored.values, scales, first_token: 0 };
        place(&launch, &source, &target).map_err(|error| error.to_string())
    };
    let slots = [0, 1, 2, 127];
    assert_eq!(try_with(&blocks, &table, &slots, true, Encoding::Int8), Ok(()));
    let cases = [
        (try_with(&blocks, &table, &[0, 1, 2, 128], true, Encoding::Int8), "slot 128 is beyond"),
        (try_with(&blocks, &table, &[0, 1, 3, 2], true, Encoding::Int8), "descend"),
        (try_with(&blocks, &table, &slots, false, Encoding::Int8), "needs scales"),
        (try_with(&blocks, &table, &slots, true, Encoding::Int4), "stored bytes"),
        (try_with(&blocks, &table.narrow(0, 0, 3), &slots, true, Encoding::Int8), "rotation"),
        (try_with(&blocks.narrow(0, 0, 1), &table, &slots, true, Encoding::Int8), "[1, 64, 2, 64]"),
        (try_with(&blocks.to_kind(Kind::BFloat16), &table, &slots, true, Encoding::Int8), "do not go together"),
    ];
    for (result, why) in cases {
        let text = result.unwrap_err();
        assert!(text.contains(why), "{text:?} does not say {why:?}");
    }
}
