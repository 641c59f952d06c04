use super::*;
use crate::testing::{Random, numbers};

const FORMATS: [Format; 3] = [Format::Int8, Format::Int4, Format::Fp8];
const SHAPES: [Shape; 6] = [
    Shape { tokens: 0, kv_heads: 2, head_dim: 64 },
    Shape { tokens: 1, kv_heads: 1, head_dim: 2 },
    Shape { tokens: 63, kv_heads: 3, head_dim: 16 },
    Shape { tokens: 64, kv_heads: 2, head_dim: 64 },
    Shape { tokens: 97, kv_heads: 2, head_dim: 66 },
    Shape { tokens: 257, kv_heads: 1, head_dim: 128 },
];

struct Encoded {
    keys: Vec<u8>,
    key_scales: Vec<f32>,
    values: Vec<u8>,
    value_scales: Vec<f32>,
}

fn encode(format: Format, shape: Shape, keys: &[f32], values: &[f32]) -> Result<Encoded, Error> {
    let bytes = data_length(format, shape.tokens, shape);
    let mut encoded = Encoded {
        keys: vec![0; bytes],
        key_scales: vec![0.0; key_scales(shape)],
        values: vec![0; bytes],
        value_scales: vec![0.0; value_scales(shape)],
    };
    encode_keys(format, keys, shape, &mut encoded.keys, &mut encoded.key_scales)?;
    encode_values(format, values, shape, &mut encoded.values, &mut encoded.value_scales)?;
    Ok(encoded)
}

/// Decodes in pieces of `step` rows, as frames come.
fn decode(format: Format, shape: Shape, encoded: &Encoded, step: usize) -> (Vec<f32>, Vec<f32>) {
    let (width, row) = (shape.width(), format.bytes(shape.width()));
    let (mut keys, mut values) = (vec![0.0; shape.tokens * width], vec![0.0; shape.tokens * width]);
    for first in (0..shape.tokens).step_by(step) {
        let rows = first..shape.tokens.min(first + step);
        let (data, numbers) = (rows.start * row..rows.end * row, rows.start * width..rows.end * width);
        let Encoded { keys: k, key_scales, values: v, value_scales } = encoded;
        decode_keys(format, &k[data.clone()], key_scales, shape, rows.clone(), &mut keys[numbers.clone()]).unwrap();
        decode_values(format, &v[data], value_scales, shape, rows, &mut values[numbers]).unwrap();
    }
    (keys, values)
}

/// What a number may be off by: half a step of its group's scale; fp8 also has steps of 1/8 of the number.
fn bound(format: Format, number: f32, scale: f32) -> f32 {
    let half = match format {
        Format::Int8 | Format::Int4 => 0.5 * scale,
        Format::Fp8 => (number.abs() / 16.0).max(scale / 1024.0),
    };
    half * 1.000_01
}

#[test]
fn numbers_survive_within_half_a_step_of_their_group() {
    for seed in 1..=3 {
        println!("seed {seed}");
        for shape in SHAPES {
            let mut random = Random(seed);
            // Channels of very different size, as un-rotated keys have.
            let count = shape.tokens * shape.width();
            let mut keys = numbers(&mut random, count);
            for (index, key) in keys.iter_mut().enumerate() {
                *key *= 10f32.powi((index % shape.width() % 5) as i32 - 2);
            }
            let values = numbers(&mut random, count);
            for format in FORMATS {
                let encoded = encode(format, shape, &keys, &values).unwrap();
                let (got_keys, got_values) = decode(format, shape, &encoded, 1 + (seed as usize * 37) % 80);
                for index in 0..count {
                    let (token, channel) = (index / shape.width(), index % shape.width());
                    let key_scale = encoded.key_scales[token / GROUP * shape.width() + channel];
                    let value_scale = encoded.value_scales[index / shape.head_dim];
                    for (number, got, scale) in
                        [(keys[index], got_keys[index], key_scale), (values[index], got_values[index], value_scale)]
                    {
                        let bound = bound(format, number, scale);
                        assert!((number - got).abs() <= bound, "{format:?} {shape:?}: {number} became {got}");
                    }
                }
            }
        }
    }
}

#[test]
fn representable_numbers_survive_exactly() {
    let shape = Shape { tokens: 130, kv_heads: 2, head_dim: 32 };
    for format in FORMATS {
        let greatest = format.greatest();
        let mut random = Random(9);
        let mut exact = || {
            let mut numbers: Vec<f32> = (0..shape.tokens * shape.width())
                .map(|_| match format {
                    Format::Int8 | Format::Int4 => random.below(2 * greatest as usize + 1) as f32 - greatest,
                    Format::Fp8 => {
                        codes::fp8_value([random.below(0x7f) as u8, 0x80 | random.below(0x7f) as u8][random.below(2)])
                    }
                })
                .collect();
            // Every group reaches the greatest code, so that its scale is 1/4 exactly.
            for token in (0..shape.tokens).filter(|token| token % GROUP == 0) {
                numbers[token * shape.width()..(token + 1) * shape.width()].fill(-greatest);
            }
            for head in numbers.chunks_exact_mut(shape.head_dim) {
                head[7] = greatest;
            }
            numbers.iter().map(|number| number * 0.25).collect::<Vec<f32>>()
        };
        let (keys, values) = (exact(), exact());
        let encoded = encode(format, shape, &keys, &values).unwrap();
        assert_eq!(decode(format, shape, &encoded, 48), (keys, values), "{format:?}");
    }
}

#[test]
fn zeros_have_scale_zero_and_tiny_groups_become_zeros() {
    let shape = Shape { tokens: 3, kv_heads: 1, head_dim: 4 };
    for tiny in [0.0, -0.0, 1e-44, 1e-40] {
        let numbers = [tiny; 12];
        for format in FORMATS {
            let encoded = encode(format, shape, &numbers, &numbers).unwrap();
            assert!(encoded.key_scales.iter().chain(&encoded.value_scales).all(|&scale| scale == 0.0), "{tiny}");
            let (keys, values) = decode(format, shape, &encoded, 2);
            assert!(keys.iter().chain(&values).all(|&number| number == 0.0), "{tiny} {format:?}");
        }
    }
    // The greatest numbers do not overflow.
    for format in FORMATS {
        let numbers = [f32::MAX, f32::MIN, 1.0, 0.0].repeat(3);
        let encoded = encode(format, shape, &numbers, &numbers).unwrap();
        let (keys, values) = decode(format, shape, &encoded, 3);
        assert!(keys.iter().chain(&values).all(|number| number.is_finite()), "{format:?}: {keys:?} {values:?}");
    }
}

#[test]
fn the_first_of_two_int4_numbers_is_in_the_low_half() {
    let shape = Shape { tokens: 1, kv_heads: 1, head_dim: 2 };
    let (mut data, mut scales) = ([0], [0.0]);
    encode_values(Format::Int4, &[7.0, -2.0], shape, &mut data, &mut scales).unwrap();
    assert_eq!((data, scales), ([0xe7], [1.0]));
}

#[test]
fn a_number_that_is_not_finite_is_refused_with_its_place() {
    let shape = Shape { tokens: 70, kv_heads: 2, head_dim: 8 };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
        let good = vec![1.0; 70 * 16];
        let mut numbers = good.clone();
        numbers[1111] = bad;
        for format in FORMATS {
            for result in [encode(format, shape, &numbers, &good), encode(format, shape, &good, &numbers)] {
                assert!(matches!(result.err(), Some(Error::NonFinite { index: 1111, .. })), "{bad} {format:?}");
            }
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let shape = Shape { tokens: 70, kv_heads: 2, head_dim: 8 };
    let numbers = vec![1.0; 70 * 16];
    for format in FORMATS {
        let Encoded { keys, key_scales, values, value_scales } = encode(format, shape, &numbers, &numbers).unwrap();
        let mut out = vec![0.0; 70 * 16];
        let good = decode_keys(format, &keys, &key_scales, shape, 0..70, &mut out);
        good.unwrap();
        assert!(decode_keys(format, &keys[1..], &key_scales, shape, 0..70, &mut out).is_err());
        assert!(decode_keys(format, &keys, &key_scales[1..], shape, 0..70, &mut out).is_err());
        assert!(decode_keys(format, &keys, &key_scales, shape, 1..70, &mut out).is_err());
        assert!(decode_keys(format, &keys, &key_scales, shape, 1..71, &mut out).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "a wrong range must be refused")]
        let reversed = 3..2;
        assert!(decode_values(format, &[], &value_scales, shape, reversed, &mut []).is_err());
        assert!(decode_values(format, &values, &value_scales, shape, 0..70, &mut out[1..]).is_err());
        let wide = Shape { kv_heads: usize::MAX, ..shape };
        assert!(decode_values(format, &values, &value_scales, wide, 0..70, &mut out).is_err());
        assert!(encode_keys(format, &numbers[1..], shape, &mut vec![0; keys.len()], &mut out).is_err());
    }
    let odd = Shape { head_dim: 7, ..shape };
    let refused = encode_values(Format::Int4, &vec![1.0; 70 * 14], odd, &mut [0; 70 * 7], &mut [0.0; 140]);
    assert!(refused.unwrap_err().to_string().contains("head size 7 is odd"));
}

#[test]
fn any_bytes_decode_without_a_panic() {
    let shape = Shape { tokens: 66, kv_heads: 2, head_dim: 6 };
    for seed in 1..=20 {
        println!("seed {seed}");
        let mut random = Random(seed);
        for format in FORMATS {
            let data: Vec<u8> = (0..data_length(format, 66, shape)).map(|_| random.below(256) as u8).collect();
            let mut any = |count| (0..count).map(|_| f32::from_bits(random.next() as u32)).collect::<Vec<f32>>();
            let (keys, values) = (any(key_scales(shape)), any(value_scales(shape)));
            let mut out = vec![0.0; 66 * 12];
            decode_keys(format, &data, &keys, shape, 0..66, &mut out).unwrap();
            decode_values(format, &data, &values, shape, 0..66, &mut out).unwrap();
        }
    }
}

#[test]
fn scales_survive_as_bytes_and_strange_ones_are_refused() {
    let scales = [0.0, 1.5, f32::MAX, f32::MIN_POSITIVE];
    assert_eq!(read_scales(&write_scales(&scales)).unwrap(), scales);
    assert!(read_scales(&[0; 5]).is_err());
    for strange in [-1.0, f32::NAN, f32::INFINITY] {
        assert!(read_scales(&write_scales(&[1.0, strange])).unwrap_err().to_string().contains("scale 1"));
    }
}
