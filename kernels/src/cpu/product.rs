//! Products of few rows with a matrix: every number of the matrix is read once, in the order in which it lies in memory.
//!
//! A sum depends neither on the other rows nor on the number of threads: a row of a batch gets the bits that it gets alone.
//! One body, three instruction sets, as in [`super::tile`].

use super::isa::Isa;
use super::number::{Number, Target, Typed};
use crate::parallel;

/// Outputs at once: as many streams of memory. Measured beyond all caches: twice as fast as one, and as sixteen.
const OUTPUTS: usize = 4;
/// Bytes that are fetched ahead: what the hardware fetches by itself comes late.
const AHEAD_BYTES: usize = 512;
/// Bytes of the matrix a task, about: more rows than registers hold read them again, from a near cache.
const TASK_BYTES: usize = 128 << 10;

/// rows · weightᵀ. `rows`: `[count, inner]`, `weight`: `[outputs, inner]`, `to`: `[count, outputs]`; `inner` is not 0.
pub(crate) fn few_rows<T: Number>(isa: Isa, rows: &[f32], weight: &[T], inner: usize, to: &mut [T]) {
    let outputs = weight.len() / inner;
    let step = (TASK_BYTES / (inner * size_of::<T>())).next_multiple_of(OUTPUTS).max(OUTPUTS);
    let target = Target::new(to);
    let isa = isa.or_best();
    parallel::for_each(outputs.div_ceil(step), |task| {
        let first = task * step;
        let weight = &weight[first * inner..outputs.min(first + step) * inner];
        let task = Task { rows, weight, inner, first, outputs, to: &target };
        match isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `or_best` gives what this CPU has.
            Isa::Avx512 => unsafe { avx512::run(&task) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2::run(&task) },
            Isa::Portable => portable::run(&task),
        }
    });
}

/// Outputs `first..` of all rows.
struct Task<'a, T> {
    rows: &'a [f32],
    weight: &'a [T],
    inner: usize,
    first: usize,
    outputs: usize,
    to: &'a Target<T>,
}

impl<T: Number> Task<'_, T> {
    /// Row `row` of the rows.
    #[inline(always)]
    fn row(&self, row: usize) -> &[f32] {
        &self.rows[row * self.inner..(row + 1) * self.inner]
    }

    #[inline(always)]
    fn write(&self, row: usize, output: usize, sum: f32) {
        // SAFETY: row < count and first + output < outputs, in `[count, outputs]`; these outputs are this task's alone.
        unsafe { self.to.part(row * self.outputs + self.first + output, 1)[0] = T::from_f32(sum) };
    }
}

macro_rules! product_kernel {
    ($module:ident, $($feature:literal)?, $width:literal) => {
        mod $module {
            use super::super::vectors::$module::{V, fma, load, sum, widen, zero};
            use super::super::vectors::fetch;
            use super::{AHEAD_BYTES, Number, OUTPUTS, Task, Typed};

            /// Every product of a task.
            $(#[target_feature(enable = $feature)])?
            pub(super) fn run<T: Number>(task: &Task<'_, T>) {
                let count = task.rows.len() / task.inner;
                let mut row = 0;
                while row < count {
                    row += match count - row {
                        1 => of_rows::<T, 1>(task, row),
                        2 | 3 => of_rows::<T, 2>(task, row),
                        _ => of_rows::<T, 4>(task, row),
                    };
                }
            }

            /// All outputs of `ROWS` rows; returns how many rows.
            $(#[target_feature(enable = $feature)])?
            fn of_rows<T: Number, const ROWS: usize>(task: &Task<'_, T>, row: usize) -> usize {
                let outputs = task.weight.len() / task.inner;
                let whole = outputs - outputs % OUTPUTS;
                for output in (0..whole).step_by(OUTPUTS) {
                    products::<T, ROWS, OUTPUTS>(task, row, output);
                }
                for output in whole..outputs {
                    products::<T, ROWS, 1>(task, row, output);
                }
                ROWS
            }

            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn products<T: Number, const ROWS: usize, const N: usize>(task: &Task<'_, T>, row: usize, output: usize) {
                let inner = task.inner;
                let whole = inner - inner % $width;
                let rows: [&[f32]; ROWS] = std::array::from_fn(|at| task.row(row + at));
                let weights: [&[T]; N] =
                    std::array::from_fn(|at| &task.weight[(output + at) * inner..(output + at + 1) * inner]);
                let mut sums: [[V; ROWS]; N] = [[zero(); ROWS]; N];
                for at in (0..whole).step_by($width) {
                    let numbers: [V; ROWS] = std::array::from_fn(|row| load(&rows[row][at..]));
                    for output in 0..N {
                        fetch(weights[output], at + AHEAD_BYTES / size_of::<T>());
                        let weight = match T::typed(&weights[output][at..]) {
                            Typed::F32(weights) => load(weights),
                            Typed::Bf16(weights) => widen(weights),
                        };
                        for row in 0..ROWS {
                            sums[output][row] = fma(weight, numbers[row], sums[output][row]);
                        }
                    }
                }
                for output_at in 0..N {
                    for row_at in 0..ROWS {
                        let rest = weights[output_at][whole..].iter().zip(&rows[row_at][whole..]);
                        let rest: f32 = rest.map(|(weight, number)| weight.to_f32() * number).sum();
                        task.write(row + row_at, output + output_at, sum(sums[output_at][row_at]) + rest);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
product_kernel!(avx512, "avx512f", 16);
#[cfg(target_arch = "x86_64")]
product_kernel!(avx2, "avx2,fma", 8);
product_kernel!(portable, , 4);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, numbers};

    #[test]
    fn products_equal_the_definition_for_every_size_and_set() {
        for (seed, (count, inner, outputs)) in
            [(0, 5, 3), (1, 1, 1), (1, 97, 5), (2, 16, 4), (3, 48, 130), (5, 100, 64), (8, 4097, 9), (13, 33, 21)]
                .into_iter()
                .enumerate()
        {
            println!("seed {seed}");
            let mut random = Random(seed as u64);
            let (rows, weight) = (numbers(&mut random, count * inner), numbers(&mut random, outputs * inner));
            let halves: Vec<half::bf16> = weight.iter().map(|&number| half::bf16::from_f32(number)).collect();
            for isa in Isa::available() {
                let mut to = vec![f32::NAN; count * outputs];
                few_rows(isa, &rows, &weight, inner, &mut to);
                let mut half_to = vec![half::bf16::NAN; count * outputs];
                few_rows(isa, &rows, &halves, inner, &mut half_to);
                for (index, (found, half_found)) in to.iter().zip(&half_to).enumerate() {
                    let row = &rows[index / outputs * inner..][..inner];
                    let check = |found: f32, precision: f64, weight: &dyn Fn(usize) -> f32| {
                        let terms =
                            (0..inner).map(|at| f64::from(row[at]) * f64::from(weight(index % outputs * inner + at)));
                        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                        let bound = 1e-5 * size + precision * sum.abs() + 1e-30;
                        assert!((f64::from(found) - sum).abs() <= bound, "{isa:?} {index}: {found} for {sum}");
                    };
                    check(*found, 0.0, &|at| weight[at]);
                    check(half_found.to_f32(), 1.0 / 255.0, &|at| halves[at].to_f32());
                }
            }
        }
    }

    #[test]
    fn a_row_of_a_batch_gets_the_bits_that_it_gets_alone() {
        let (count, inner, outputs) = (7, 203, 50);
        let mut random = Random(3);
        let (rows, weight) = (numbers(&mut random, count * inner), numbers(&mut random, outputs * inner));
        for isa in Isa::available() {
            let mut together = vec![0f32; count * outputs];
            few_rows(isa, &rows, &weight, inner, &mut together);
            for (row, together) in rows.chunks_exact(inner).zip(together.chunks_exact(outputs)) {
                let mut alone = vec![0f32; outputs];
                few_rows(isa, row, &weight, inner, &mut alone);
                assert_eq!(alone, together, "{isa:?}");
            }
        }
    }
}
