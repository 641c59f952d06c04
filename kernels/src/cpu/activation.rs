//! SiLU(gate) · up on slices, in f32, in place: one pass where the library makes two over strided rows.

use super::isa::{Isa, Work};
use super::number::{Number, Target};
use crate::parallel;

/// Numbers a task, about: a row of a small model is too little.
const TASK_NUMBERS: usize = 32 << 10;
/// See [`crate::quantize`]: rounds, and leaves the whole number in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln(2)^k / k! for k = 6..=0: 2^x on ±1/2 to a unit in the last place.
const SERIES: [f32; 7] =
    [0.000_154_035_3, 0.001_333_355_8, 0.009_618_129, 0.055_504_11, 0.240_226_5, std::f32::consts::LN_2, 1.0];

/// Replaces the first half of each row, `width` gates, by silu(gate) · up, with the second half as `up`. `rows`:
/// `[rows, 2 · width]`.
pub(crate) fn silu_mul<T: Number>(isa: Isa, rows: &mut [T], width: usize) {
    let count = rows.len().checked_div(2 * width).unwrap_or(0);
    let step = (TASK_NUMBERS / width.max(1)).max(1);
    let target = Target::new(rows);
    parallel::for_each(count.div_ceil(step), |task| {
        let first = task * step;
        let rows = step.min(count - first);
        // SAFETY: rows first..first + rows of `count`, which belong to this task alone.
        let rows = unsafe { target.part(first * 2 * width, rows * 2 * width) };
        isa.run(SiluMul { rows, width });
    });
}

struct SiluMul<'a, T> {
    rows: &'a mut [T],
    width: usize,
}

impl<T: Number> Work for SiluMul<'_, T> {
    #[inline(always)]
    fn run(self) {
        for row in self.rows.chunks_exact_mut(2 * self.width) {
            let (gates, ups) = row.split_at_mut(self.width);
            for (gate, up) in gates.iter_mut().zip(ups) {
                *gate = T::from_f32(silu(gate.to_f32()) * up.to_f32());
            }
        }
    }
}

/// x / (1 + e^−x). NaN stays NaN.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    // Beyond ±126 the result is x or as good as 0.
    let power = (x * -std::f32::consts::LOG2_E).clamp(-126.0, 126.0);
    let shifted = power + ROUND;
    let rest = power - (shifted - ROUND);
    let mut sum = SERIES[0];
    for term in &SERIES[1..] {
        sum = sum * rest + term;
    }
    let exponential = f32::from_bits(sum.to_bits().wrapping_add(shifted.to_bits() << 23));
    x / (1.0 + exponential)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, numbers};

    fn plain(gate: f32, up: f32) -> f64 {
        let gate = f64::from(gate);
        gate / (1.0 + (-gate).exp()) * f64::from(up)
    }

    #[test]
    fn products_equal_the_definition_for_every_size_and_set() {
        for (seed, (rows, width)) in [(0, 3), (1, 1), (3, 97), (130, 257), (2, 40_000)].into_iter().enumerate() {
            println!("seed {seed}");
            let mut random = Random(seed as u64);
            let before: Vec<f32> = numbers(&mut random, rows * 2 * width).iter().map(|number| number * 9.0).collect();
            for isa in Isa::available() {
                let mut after = before.clone();
                silu_mul(isa, &mut after, width);
                let halves: Vec<half::bf16> = before.iter().map(|&number| half::bf16::from_f32(number)).collect();
                let mut half_after = halves.clone();
                silu_mul(isa, &mut half_after, width);
                for index in 0..rows * 2 * width {
                    if index % (2 * width) >= width {
                        assert!(after[index] == before[index] && half_after[index] == halves[index]);
                        continue;
                    }
                    let expected = plain(before[index], before[index + width]);
                    // The power of e is rounded relative to itself, and so is the result to that of a small sigmoid.
                    let bound = (4e-7 + 1.2e-7 * f64::from(before[index].abs())) * expected.abs() + 1e-30;
                    assert!((f64::from(after[index]) - expected).abs() <= bound, "{isa:?} {}", before[index]);
                    let expected = plain(halves[index].to_f32(), halves[index + width].to_f32());
                    let error = (f64::from(half_after[index].to_f32()) - expected).abs();
                    assert!(error <= expected.abs() / 255.0 + 1e-30, "{isa:?} bf16");
                }
            }
        }
    }

    #[test]
    fn extreme_gates_give_no_nonsense() {
        let gates = [f32::NAN, f32::MAX, -f32::MAX, f32::INFINITY, 100.0, -100.0, 0.0, -0.0];
        for isa in Isa::available() {
            let mut row: Vec<f32> = gates.iter().copied().chain([1.0; 8]).collect();
            silu_mul(isa, &mut row, 8);
            assert!(row[0].is_nan() && row[1] == f32::MAX && row[3] == f32::INFINITY && row[4] == 100.0, "{row:?}");
            assert!(row[2].abs() < 10.0 && row[5].abs() < 1e-30 && row[6] == 0.0 && row[7] == 0.0, "{row:?}");
        }
    }
}
