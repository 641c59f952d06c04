//! Codes and scales → numbers.

use std::ops::Range;

use super::codes::fp8_value;
use super::{Format, GROUP, Shape, check, data_length, key_scales, value_scales};
use crate::cpu::isa::{Isa, Work};
use crate::{Error, argument};

/// Decodes rows `rows` of a chunk's keys.
///
/// - `data`: the codes of these rows alone; `scales`: all of the chunk's, as [`super::encode_keys`] gave them.
/// - `keys`: receives `[rows, kv_heads, head_dim]`.
///
/// Fails on lengths that do not fit.
pub fn decode_keys(
    format: Format,
    data: &[u8],
    scales: &[f32],
    shape: Shape,
    rows: Range<usize>,
    keys: &mut [f32],
) -> Result<(), Error> {
    check_rows("decode_keys", format, data, (scales, key_scales(shape)), shape, &rows, keys)?;
    Isa::best().run(Keys { format, data, scales, shape, first: rows.start, keys });
    Ok(())
}

/// Decodes rows `rows` of a chunk's values. As [`decode_keys`].
pub fn decode_values(
    format: Format,
    data: &[u8],
    scales: &[f32],
    shape: Shape,
    rows: Range<usize>,
    values: &mut [f32],
) -> Result<(), Error> {
    check_rows("decode_values", format, data, (scales, value_scales(shape)), shape, &rows, values)?;
    let scales = &scales[rows.start * shape.kv_heads..rows.end * shape.kv_heads];
    Isa::best().run(Values { format, data, scales, shape, values });
    Ok(())
}

fn check_rows(
    op: &'static str,
    format: Format,
    data: &[u8],
    (scales, expected_scales): (&[f32], usize),
    shape: Shape,
    rows: &Range<usize>,
    numbers: &[f32],
) -> Result<(), Error> {
    if rows.start > rows.end || rows.end > shape.tokens {
        return Err(argument(op, format!("rows {rows:?} of a chunk of {} tokens", shape.tokens)));
    }
    let lengths = [
        ("bytes", data.len(), data_length(format, rows.len(), shape)),
        ("scales", scales.len(), expected_scales),
        ("numbers", numbers.len(), rows.len().saturating_mul(shape.width())),
    ];
    check(op, format, shape, rows.len(), lengths)
}

struct Keys<'a> {
    format: Format,
    data: &'a [u8],
    scales: &'a [f32],
    shape: Shape,
    first: usize,
    keys: &'a mut [f32],
}

impl Work for Keys<'_> {
    #[inline(always)]
    fn run(self) {
        let width = self.shape.width();
        if self.keys.is_empty() || self.data.is_empty() {
            return;
        }
        let rows = self.data.chunks_exact(self.format.bytes(width)).zip(self.keys.chunks_exact_mut(width));
        for (row, (codes, numbers)) in rows.enumerate() {
            let group = (self.first + row) / GROUP;
            scale_each(self.format, codes, &self.scales[group * width..(group + 1) * width], numbers);
        }
    }
}

struct Values<'a> {
    format: Format,
    data: &'a [u8],
    /// Of these rows.
    scales: &'a [f32],
    shape: Shape,
    values: &'a mut [f32],
}

impl Work for Values<'_> {
    #[inline(always)]
    fn run(self) {
        let dim = self.shape.head_dim;
        if self.values.is_empty() || self.data.is_empty() {
            return;
        }
        let heads = self.data.chunks_exact(self.format.bytes(dim)).zip(self.values.chunks_exact_mut(dim));
        for ((codes, numbers), scale) in heads.zip(self.scales) {
            scale_one(self.format, codes, *scale, numbers);
        }
    }
}

#[inline(always)]
fn low(code: u8) -> f32 {
    f32::from(((code << 4) as i8) >> 4)
}

#[inline(always)]
fn high(code: u8) -> f32 {
    f32::from((code as i8) >> 4)
}

/// Codes, each with the scale of its number.
#[inline(always)]
pub(crate) fn scale_each(format: Format, codes: &[u8], scales: &[f32], numbers: &mut [f32]) {
    match format {
        Format::Int8 => {
            for ((number, code), scale) in numbers.iter_mut().zip(codes).zip(scales) {
                *number = f32::from(*code as i8) * scale;
            }
        }
        Format::Fp8 => {
            for ((number, code), scale) in numbers.iter_mut().zip(codes).zip(scales) {
                *number = fp8_value(*code) * scale;
            }
        }
        Format::Int4 => {
            let pairs = numbers.chunks_exact_mut(2).zip(scales.chunks_exact(2));
            for (code, (numbers, scales)) in codes.iter().zip(pairs) {
                numbers[0] = low(*code) * scales[0];
                numbers[1] = high(*code) * scales[1];
            }
        }
    }
}

/// Codes with one scale.
#[inline(always)]
pub(crate) fn scale_one(format: Format, codes: &[u8], scale: f32, numbers: &mut [f32]) {
    match format {
        Format::Int8 => {
            for (number, code) in numbers.iter_mut().zip(codes) {
                *number = f32::from(*code as i8) * scale;
            }
        }
        Format::Fp8 => {
            for (number, code) in numbers.iter_mut().zip(codes) {
                *number = fp8_value(*code) * scale;
            }
        }
        Format::Int4 => {
            for (numbers, code) in numbers.chunks_exact_mut(2).zip(codes) {
                numbers[0] = low(*code) * scale;
                numbers[1] = high(*code) * scale;
            }
        }
    }
}
