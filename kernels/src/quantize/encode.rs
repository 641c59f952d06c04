//! Numbers → codes and scales.

use super::codes::{fp8, integer};
use super::{Format, GROUP, Shape, check, data_length, key_scales, value_scales};
use crate::Error;
use crate::cpu::isa::{Isa, Work};

/// Encodes a chunk's keys, before rotation.
///
/// - `keys`: `[tokens, kv_heads, head_dim]`.
/// - `data`: receives [`data_length`] bytes for all tokens; `scales`: [`key_scales`] numbers.
///
/// Fails on lengths that do not fit, on int4 with an odd head size, and on a number that is not finite.
pub fn encode_keys(
    format: Format,
    keys: &[f32],
    shape: Shape,
    data: &mut [u8],
    scales: &mut [f32],
) -> Result<(), Error> {
    const OP: &str = "encode_keys";
    let lengths = [
        ("keys", keys.len(), shape.tokens.saturating_mul(shape.width())),
        ("bytes", data.len(), data_length(format, shape.tokens, shape)),
        ("scales", scales.len(), key_scales(shape)),
    ];
    check(OP, format, shape, shape.tokens, lengths)?;
    let mut greatest = 0;
    Isa::best().run(Encode { format, per: Per::Channel, numbers: keys, shape, data, scales, greatest: &mut greatest });
    finite(OP, greatest, keys)
}

/// Encodes a chunk's values. As [`encode_keys`], with [`value_scales`] scales.
pub fn encode_values(
    format: Format,
    values: &[f32],
    shape: Shape,
    data: &mut [u8],
    scales: &mut [f32],
) -> Result<(), Error> {
    const OP: &str = "encode_values";
    let lengths = [
        ("values", values.len(), shape.tokens.saturating_mul(shape.width())),
        ("bytes", data.len(), data_length(format, shape.tokens, shape)),
        ("scales", scales.len(), value_scales(shape)),
    ];
    check(OP, format, shape, shape.tokens, lengths)?;
    let mut greatest = 0;
    Isa::best().run(Encode { format, per: Per::Token, numbers: values, shape, data, scales, greatest: &mut greatest });
    finite(OP, greatest, values)
}

/// Magnitudes compare like their bits, and those of infinity and NaN are the greatest.
fn finite(op: &'static str, greatest: u32, numbers: &[f32]) -> Result<(), Error> {
    if greatest < f32::INFINITY.to_bits() {
        return Ok(());
    }
    let index = numbers.iter().position(|number| !number.is_finite()).unwrap_or(0);
    Err(Error::NonFinite { op, index, value: numbers[index] })
}

/// What shares a scale.
enum Per {
    Channel,
    Token,
}

struct Encode<'a> {
    format: Format,
    per: Per,
    numbers: &'a [f32],
    shape: Shape,
    data: &'a mut [u8],
    scales: &'a mut [f32],
    /// Receives the bits of the greatest magnitude.
    greatest: &'a mut u32,
}

impl Work for Encode<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { format, per, numbers, shape, data, scales, greatest } = self;
        if numbers.is_empty() || data.is_empty() {
            return;
        }
        match per {
            Per::Channel => {
                let (rows, row_bytes) = (GROUP * shape.width(), GROUP * format.bytes(shape.width()));
                let groups = numbers.chunks(rows).zip(data.chunks_mut(row_bytes));
                for ((numbers, data), scales) in groups.zip(scales.chunks_exact_mut(shape.width())) {
                    channel_scales(format, numbers, scales, greatest);
                    let rows = numbers.chunks_exact(scales.len());
                    for (row, data) in rows.zip(data.chunks_exact_mut(format.bytes(scales.len()))) {
                        encode_each(format, row, scales, data);
                    }
                }
            }
            Per::Token => {
                let heads = numbers.chunks_exact(shape.head_dim);
                let heads = heads.zip(data.chunks_exact_mut(format.bytes(shape.head_dim)));
                for ((head, data), scale) in heads.zip(scales) {
                    let mut most = 0;
                    for number in head {
                        most = most.max(number.to_bits() & 0x7fff_ffff);
                    }
                    *greatest = (*greatest).max(most);
                    *scale = scale_of(format, most);
                    encode_one(format, head, *scale, data);
                }
            }
        }
    }
}

/// Scales of each channel over the rows of `numbers`.
#[inline(always)]
fn channel_scales(format: Format, numbers: &[f32], scales: &mut [f32], greatest: &mut u32) {
    // Until the last line, `scales` holds magnitudes; the bits' order makes NaN win, where a float maximum would drop it.
    scales.fill(0.0);
    for row in numbers.chunks_exact(scales.len()) {
        for (most, number) in scales.iter_mut().zip(row) {
            *most = f32::from_bits(most.to_bits().max(number.to_bits() & 0x7fff_ffff));
        }
    }
    for scale in scales {
        *greatest = (*greatest).max(scale.to_bits());
        *scale = scale_of(format, scale.to_bits());
    }
}

/// The scale for numbers of at most this magnitude. Below the least normal number it is 0: dividing by it would be
/// inexact, and slow. Rounded up, the greatest numbers' scale would decode to infinity.
#[inline(always)]
fn scale_of(format: Format, most: u32) -> f32 {
    let scale = f32::from_bits(most) / format.greatest();
    let scale = if scale * format.greatest() == f32::INFINITY { scale.next_down() } else { scale };
    if scale < f32::MIN_POSITIVE { 0.0 } else { scale }
}

/// 0 for scale 0, else the quotient, which a hair of rounding may have put beyond the greatest code.
#[inline(always)]
fn quotient(number: f32, scale: f32) -> f32 {
    let quotient = number / if scale == 0.0 { f32::INFINITY } else { scale };
    // Not finite only where the whole call fails; then the code does not matter.
    quotient.clamp(-1e3, 1e3)
}

#[inline(always)]
fn nibbles(low: f32, high: f32) -> u8 {
    (integer(low) & 15) | (integer(high) << 4)
}

#[inline(always)]
fn encode_each(format: Format, numbers: &[f32], scales: &[f32], data: &mut [u8]) {
    match format {
        Format::Int8 => {
            for ((code, number), scale) in data.iter_mut().zip(numbers).zip(scales) {
                *code = integer(quotient(*number, *scale));
            }
        }
        Format::Fp8 => {
            for ((code, number), scale) in data.iter_mut().zip(numbers).zip(scales) {
                *code = fp8(quotient(*number, *scale));
            }
        }
        Format::Int4 => {
            let pairs = numbers.chunks_exact(2).zip(scales.chunks_exact(2));
            for (code, (numbers, scales)) in data.iter_mut().zip(pairs) {
                *code = nibbles(quotient(numbers[0], scales[0]), quotient(numbers[1], scales[1]));
            }
        }
    }
}

#[inline(always)]
fn encode_one(format: Format, numbers: &[f32], scale: f32, data: &mut [u8]) {
    match format {
        Format::Int8 => {
            for (code, number) in data.iter_mut().zip(numbers) {
                *code = integer(quotient(*number, scale));
            }
        }
        Format::Fp8 => {
            for (code, number) in data.iter_mut().zip(numbers) {
                *code = fp8(quotient(*number, scale));
            }
        }
        Format::Int4 => {
            for (code, numbers) in data.iter_mut().zip(numbers.chunks_exact(2)) {
                *code = nibbles(quotient(numbers[0], scale), quotient(numbers[1], scale));
            }
        }
    }
}
