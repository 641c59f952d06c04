//! Reading memory, as fast as it comes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::isa::{Isa, Work};
use crate::parallel;

/// Places that a thread reads from in turns: one alone does not keep the memory busy.
const STREAMS: usize = 4;
/// Numbers that are added at once, so that the compiler keeps them in vectors.
const LANES: usize = 64;
/// Numbers a task.
const TASK_NUMBERS: usize = 1 << 20;

/// The sum of `numbers`, in no particular order.
pub(crate) fn sum(isa: Isa, numbers: &[f32]) -> f64 {
    let total = AtomicU64::new(0f64.to_bits());
    let tasks: Vec<&[f32]> = numbers.chunks(TASK_NUMBERS).collect();
    parallel::for_each(tasks.len(), |task| {
        let mut sum = 0.0;
        isa.run(Sum { numbers: tasks[task], to: &mut sum });
        let added = |total| Some((f64::from_bits(total) + f64::from(sum)).to_bits());
        // It never gives nothing.
        let _ = total.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added);
    });
    f64::from_bits(total.into_inner())
}

struct Sum<'a> {
    numbers: &'a [f32],
    to: &'a mut f32,
}

impl Work for Sum<'_> {
    #[inline(always)]
    fn run(self) {
        let stream = self.numbers.len() / STREAMS / LANES * LANES;
        let (streams, rest) = self.numbers.split_at(stream * STREAMS);
        let mut sums = [0f32; LANES];
        for first in (0..stream).step_by(LANES) {
            for place in 0..STREAMS {
                let numbers = &streams[place * stream + first..][..LANES];
                for (sum, number) in sums.iter_mut().zip(numbers) {
                    *sum += number;
                }
            }
        }
        *self.to = sums.iter().chain(rest).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_once() {
        for count in [0, 1, 63, 257, 1000, TASK_NUMBERS + 77] {
            let numbers: Vec<f32> = (0..count).map(|index| (index % 7) as f32).collect();
            let expected: f64 = numbers.iter().map(|&number| f64::from(number)).sum();
            for isa in Isa::available() {
                assert_eq!(sum(isa, &numbers), expected, "{isa:?}, {count} numbers");
            }
        }
    }
}
