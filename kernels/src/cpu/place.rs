//! Stored rows → rotated rows at their slots, in one pass: each row is decoded into a buffer that stays in the
//! first-level cache, rotated, rounded once and written. Bound by memory.

use super::isa::{Isa, Work};
use super::number::{Number, Target};
use super::rope::{Angles, rotate_row};
use crate::parallel;
use crate::place::{Encoding, Stored};
use crate::quantize::{Format, GROUP, scale_each, scale_one};

/// Rows a task.
const TASK_ROWS: usize = 32;

/// Where rows go.
pub(crate) struct Destination<'a, T> {
    /// `[capacity, kv_heads, head_dim]`
    pub(crate) keys: &'a mut [T],
    /// As `keys`.
    pub(crate) values: &'a mut [T],
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// Places the rows of `pieces`, one after another, at `places`: one row index of the destination a row. The caller has
/// checked all lengths, and that places are distinct and below the capacity.
pub(crate) fn place<T: Number>(
    isa: Isa,
    destination: Destination<'_, T>,
    places: &[u32],
    pieces: &[Stored<'_>],
    angles: Angles<'_>,
) {
    let Destination { keys, values, kv_heads, head_dim } = destination;
    let width = kv_heads * head_dim;
    let capacity = keys.len().checked_div(width).unwrap_or(0);
    assert!(values.len() == keys.len() && places.iter().all(|&place| (place as usize) < capacity));
    let mut tasks = Vec::new();
    let mut before = 0;
    for piece in pieces {
        for first in (0..piece.rows.len()).step_by(TASK_ROWS) {
            tasks.push((piece, first, before + first, TASK_ROWS.min(piece.rows.len() - first)));
        }
        before += piece.rows.len();
    }
    let (keys, values) = (Target::new(keys), Target::new(values));
    parallel::for_each(tasks.len(), |task| {
        let (piece, first, row, count) = tasks[task];
        let places = &places[row..row + count];
        isa.run(Place { piece, first, row, places, angles, kv_heads, head_dim, keys: &keys, values: &values });
    });
}

struct Place<'a, T> {
    piece: &'a Stored<'a>,
    /// Within the piece.
    first: usize,
    /// Within all pieces.
    row: usize,
    places: &'a [u32],
    angles: Angles<'a>,
    kv_heads: usize,
    head_dim: usize,
    keys: &'a Target<T>,
    values: &'a Target<T>,
}

impl<T: Number> Work for Place<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { piece, first, row, places, angles, kv_heads, head_dim, keys, values } = self;
        let width = kv_heads * head_dim;
        let row_bytes = piece.encoding.bytes(width);
        let mut buffer = vec![0f32; width];
        for (index, &place) in places.iter().enumerate() {
            let stored = first + index;
            let bytes = stored * row_bytes..(stored + 1) * row_bytes;
            let token = piece.rows.start + stored;
            let (start, half) = (place as usize * width, head_dim / 2);
            // SAFETY: `place` has checked that the row lies inside; places are distinct, so it is this task's alone.
            let (key_row, value_row) = unsafe { (keys.part(start, width), values.part(start, width)) };
            let (cos, sin) = angles.row(row + index, half);
            let codes = &piece.keys[bytes.clone()];
            match piece.encoding {
                Encoding::F32 => read_f32(codes, &mut buffer),
                Encoding::Bf16 => read_bf16(codes, &mut buffer),
                Encoding::Quantized(format) => {
                    let group = token / GROUP;
                    scale_each(format, codes, &piece.key_scales[group * width..(group + 1) * width], &mut buffer);
                }
            }
            rotate_row(&buffer, cos, sin, key_row);
            let codes = &piece.values[bytes];
            match piece.encoding {
                Encoding::F32 => read_f32(codes, value_row),
                Encoding::Bf16 => read_bf16(codes, value_row),
                Encoding::Quantized(format) => {
                    let scales = &piece.value_scales[token * kv_heads..(token + 1) * kv_heads];
                    values_of(format, codes, scales, head_dim, &mut buffer);
                    for (to, number) in value_row.iter_mut().zip(&buffer) {
                        *to = T::from_f32(*number);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn values_of(format: Format, codes: &[u8], scales: &[f32], head_dim: usize, numbers: &mut [f32]) {
    let heads = codes.chunks_exact(format.bytes(head_dim)).zip(numbers.chunks_exact_mut(head_dim));
    for ((codes, numbers), scale) in heads.zip(scales) {
        scale_one(format, codes, *scale, numbers);
    }
}

#[inline(always)]
fn read_f32<T: Number>(bytes: &[u8], numbers: &mut [T]) {
    for (number, word) in numbers.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *number = T::from_f32(f32::from_le_bytes(*word));
    }
}

#[inline(always)]
fn read_bf16<T: Number>(bytes: &[u8], numbers: &mut [T]) {
    for (number, word) in numbers.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *number = T::from_f32(Number::to_f32(half::bf16::from_le_bytes(*word)));
    }
}
