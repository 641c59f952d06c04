//! Rotation of heads by their rows' positions, in f32 with one rounding. Halves convention, see [`crate::rope`].

use super::isa::{Isa, Work};
use super::number::{Number, Target};
use crate::parallel;

/// Rows a task.
const TASK_ROWS: usize = 16;

/// Cosines and sines of some rows, `[rows, head_dim / 2]` each.
#[derive(Clone, Copy)]
pub(crate) struct Angles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
}

impl<'a> Angles<'a> {
    /// Those of one row.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize, half: usize) -> (&'a [f32], &'a [f32]) {
        (&self.cos[row * half..(row + 1) * half], &self.sin[row * half..(row + 1) * half])
    }
}

/// Numbers that are rotated at once: half a head is too short for the loops that the compiler makes of its own accord.
const LANES: usize = 16;

/// Rotates the heads of one row. `cos`, `sin`: half a head each.
#[inline(always)]
pub(crate) fn rotate_row<S: Number, T: Number>(heads: &[S], cos: &[f32], sin: &[f32], to: &mut [T]) {
    let half = cos.len();
    let whole = half - half % LANES;
    for (from, to) in heads.chunks_exact(2 * half).zip(to.chunks_exact_mut(2 * half)) {
        let (first, second) = from.split_at(half);
        let (to_first, to_second) = to.split_at_mut(half);
        for at in (0..whole).step_by(LANES) {
            let part = at..at + LANES;
            let (to_first, to_second) = (&mut to_first[part.clone()], &mut to_second[part.clone()]);
            let (first, second) = (&first[part.clone()], &second[part.clone()]);
            let (cos, sin) = (&cos[part.clone()], &sin[part]);
            for index in 0..LANES {
                [to_first[index], to_second[index]] = rotated(first[index], second[index], cos[index], sin[index]);
            }
        }
        for index in whole..half {
            [to_first[index], to_second[index]] = rotated(first[index], second[index], cos[index], sin[index]);
        }
    }
}

#[inline(always)]
fn rotated<S: Number, T: Number>(first: S, second: S, cos: f32, sin: f32) -> [T; 2] {
    let (a, b) = (first.to_f32(), second.to_f32());
    [T::from_f32(a * cos - b * sin), T::from_f32(b * cos + a * sin)]
}

/// Rotates `rows` rows of `width` numbers, which start `stride` numbers apart, into `to`, `[rows, width]`. The caller
/// has checked that `width` is a multiple of twice the angles' half head, and all lengths.
pub(crate) fn rotate<T: Number>(
    from: &[T],
    stride: usize,
    width: usize,
    angles: Angles<'_>,
    half: usize,
    to: &mut [T],
) {
    let rows = to.len().checked_div(width).unwrap_or(0);
    let target = Target::new(to);
    let isa = Isa::best();
    parallel::for_each(rows.div_ceil(TASK_ROWS), |task| {
        let first = task * TASK_ROWS;
        let count = TASK_ROWS.min(rows - first);
        // SAFETY: rows first..first + count of the `rows` rows of `to`, which belong to this task alone.
        let to = unsafe { target.part(first * width, count * width) };
        isa.run(Rotate { from: &from[first * stride..], stride, width, angles, half, first, to });
    });
}

struct Rotate<'a, T> {
    from: &'a [T],
    stride: usize,
    width: usize,
    angles: Angles<'a>,
    half: usize,
    first: usize,
    to: &'a mut [T],
}

impl<T: Number> Work for Rotate<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (row, to) in self.to.chunks_exact_mut(self.width).enumerate() {
            let (cos, sin) = self.angles.row(self.first + row, self.half);
            rotate_row(&self.from[row * self.stride..row * self.stride + self.width], cos, sin, to);
        }
    }
}
