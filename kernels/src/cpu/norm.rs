//! RMSNorm on slices, in f32 with one rounding: one pass where the library makes several.

use super::isa::{Isa, Work};
use super::number::{Number, Target};
use crate::parallel;

/// Numbers a task, about.
const TASK_NUMBERS: usize = 32 << 10;
/// Sums of squares at once, so that the compiler can keep them in vectors.
const LANES: usize = 32;

/// number / √(mean(row²) + epsilon) · weight. `rows`: `[rows, width]`, as many numbers as `to`; `weight`: `[width]`, not
/// empty.
pub(crate) fn rms_norm<T: Number>(isa: Isa, rows: &[T], weight: &[T], epsilon: f32, to: &mut [T]) {
    let width = weight.len();
    let count = rows.len() / width;
    let step = (TASK_NUMBERS / width).max(1);
    let target = Target::new(to);
    parallel::for_each(count.div_ceil(step), |task| {
        let first = task * step;
        let here = step.min(count - first);
        // SAFETY: rows first..first + here of `count`, which belong to this task alone.
        let to = unsafe { target.part(first * width, here * width) };
        isa.run(RmsNorm { rows: &rows[first * width..(first + here) * width], weight, epsilon, to });
    });
}

struct RmsNorm<'a, T> {
    rows: &'a [T],
    weight: &'a [T],
    epsilon: f32,
    to: &'a mut [T],
}

impl<T: Number> Work for RmsNorm<'_, T> {
    #[inline(always)]
    fn run(self) {
        let width = self.weight.len();
        let mut wide = vec![0f32; width];
        for (row, to) in self.rows.chunks_exact(width).zip(self.to.chunks_exact_mut(width)) {
            for (wide, number) in wide.iter_mut().zip(row) {
                *wide = number.to_f32();
            }
            let mut sums = [0f32; LANES];
            let (blocks, rest) = wide.as_chunks::<LANES>();
            for block in blocks {
                for (sum, number) in sums.iter_mut().zip(block) {
                    *sum += number * number;
                }
            }
            for (sum, number) in sums.iter_mut().zip(rest) {
                *sum += number * number;
            }
            let mean = sums.iter().sum::<f32>() / width as f32;
            let scale = 1.0 / (mean + self.epsilon).sqrt();
            for ((to, number), weight) in to.iter_mut().zip(&wide).zip(self.weight) {
                *to = T::from_f32(number * scale * weight.to_f32());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, numbers};

    #[test]
    fn rows_equal_the_definition_for_every_size_and_set() {
        for (seed, (count, width)) in [(0, 3), (1, 1), (3, 97), (130, 257), (2, 40_000)].into_iter().enumerate() {
            println!("seed {seed}");
            let mut random = Random(seed as u64);
            let (rows, weight) = (numbers(&mut random, count * width), numbers(&mut random, width));
            let halves = |numbers: &[f32]| numbers.iter().map(|&n| half::bf16::from_f32(n)).collect::<Vec<_>>();
            let (half_rows, half_weight) = (halves(&rows), halves(&weight));
            for isa in Isa::available() {
                let mut to = vec![f32::NAN; rows.len()];
                rms_norm(isa, &rows, &weight, 1e-6, &mut to);
                let mut half_to = vec![half::bf16::NAN; rows.len()];
                rms_norm(isa, &half_rows, &half_weight, 1e-6, &mut half_to);
                for index in 0..rows.len() {
                    let check = |found: f32, bound: f64, row: &dyn Fn(usize) -> f64, weight: f64| {
                        let first = index / width * width;
                        let mean = (first..first + width).map(|at| row(at).powi(2)).sum::<f64>() / width as f64;
                        let expected = row(index) / (mean + 1e-6).sqrt() * weight;
                        let error = (f64::from(found) - expected).abs();
                        assert!(error <= bound * expected.abs() + 1e-30, "{isa:?} {index}: {found} for {expected}");
                    };
                    if width > 1000 && index % 997 != 0 {
                        continue;
                    }
                    check(to[index], 2e-6, &|at| f64::from(rows[at]), f64::from(weight[index % width]));
                    let half_at = |at: usize| f64::from(half_rows[at].to_f32());
                    check(half_to[index].to_f32(), 1.0 / 250.0, &half_at, half_weight[index % width].to_f32().into());
                }
            }
        }
    }
}
