//! Chunk KV in fewer bytes: int8, int4 and fp8-e4m3 with f32 scales, on plain slices, on the caller's thread.
//!
//! Symmetric: a number is its code times a scale. Keys before rotation have outlying channels, so each channel
//! (KV head, dim) has a scale of its own for every [`GROUP`] tokens; values have one for every token and KV head (KIVI,
//! arXiv 2402.02750, §3). A scale is the group's greatest magnitude over the code's greatest; a group of zeros has
//! scale 0. Decoding takes any bytes: what nobody encoded gives wrong numbers, never a panic.

mod codes;
mod decode;
mod encode;

use crate::{Error, argument};

pub use decode::{decode_keys, decode_values};
pub(crate) use decode::{scale_each, scale_one};
pub use encode::{encode_keys, encode_values};

/// Tokens that share a key channel's scale; the last group of a chunk may be shorter.
pub const GROUP: usize = 64;

/// How a number is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// A signed byte, −127..=127.
    Int8,
    /// Four bits, −7..=7, two numbers a byte along head_dim, the first in the low half.
    Int4,
    /// A byte with four exponent and three mantissa bits, at most ±448 (OCP FP8 E4M3: no infinity, one NaN a sign).
    Fp8,
}

impl Format {
    /// The greatest code.
    const fn greatest(self) -> f32 {
        match self {
            Format::Int8 => 127.0,
            Format::Int4 => 7.0,
            Format::Fp8 => 448.0,
        }
    }

    /// Bytes of `numbers` codes, an even number for int4.
    pub(crate) const fn bytes(self, numbers: usize) -> usize {
        match self {
            Format::Int8 | Format::Fp8 => numbers,
            Format::Int4 => numbers / 2,
        }
    }
}

/// The shape of a chunk's keys, and of its values, in one layer: `[tokens, kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of the whole chunk.
    pub tokens: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Numbers a head; even for int4.
    pub head_dim: usize,
}

impl Shape {
    /// Numbers of one token.
    pub(crate) const fn width(&self) -> usize {
        self.kv_heads.saturating_mul(self.head_dim)
    }
}

/// Bytes of the codes of `rows` tokens. Saturates where no buffer could hold them.
pub const fn data_length(format: Format, rows: usize, shape: Shape) -> usize {
    rows.saturating_mul(format.bytes(shape.width()))
}

/// How many scales a chunk's keys have: `[ceil(tokens / GROUP), kv_heads, head_dim]`.
pub const fn key_scales(shape: Shape) -> usize {
    shape.tokens.div_ceil(GROUP).saturating_mul(shape.width())
}

/// How many scales a chunk's values have: `[tokens, kv_heads]`.
pub const fn value_scales(shape: Shape) -> usize {
    shape.tokens.saturating_mul(shape.kv_heads)
}

/// Scales from their stored bytes: little-endian f32. Fails on a length that is no multiple of 4, and on a scale that is
/// negative or not finite, which no encoder writes.
pub fn read_scales(bytes: &[u8]) -> Result<Vec<f32>, Error> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(argument("read_scales", format!("{} bytes are no whole number of f32", bytes.len())));
    }
    let scales: Vec<f32> = words.iter().map(|&word| f32::from_le_bytes(word)).collect();
    match scales.iter().position(|scale| !scale.is_finite() || *scale < 0.0) {
        Some(index) => Err(argument("read_scales", format!("scale {index} is {}", scales[index]))),
        None => Ok(scales),
    }
}

/// As [`read_scales`], the other way.
pub fn write_scales(scales: &[f32]) -> Vec<u8> {
    scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()
}

/// Lengths of a call that fit each other.
fn check(
    op: &'static str,
    format: Format,
    shape: Shape,
    rows: usize,
    lengths: [(&'static str, usize, usize); 3],
) -> Result<(), Error> {
    if rows > shape.tokens {
        return Err(argument(op, format!("{rows} rows of a chunk of {} tokens", shape.tokens)));
    }
    if format == Format::Int4 && !shape.head_dim.is_multiple_of(2) {
        return Err(argument(op, format!("int4 packs two numbers of a head; head size {} is odd", shape.head_dim)));
    }
    for (what, found, expected) in lengths {
        if found != expected {
            let Shape { tokens, kv_heads, head_dim } = shape;
            let what = format!(
                "{found} {what} for {rows} rows of [{tokens}, {kv_heads}, {head_dim}] as {format:?}, expected {expected}"
            );
            return Err(argument(op, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
