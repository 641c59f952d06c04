//! How much rows look at each key, on slices: query heads in lanes as for attention, keys in runs that are spread over the
//! pool. Every run goes through all lanes, so nothing is merged and results are repeatable.

use std::ops::Range;

use super::isa::Isa;
use super::number::{Number, Target};
use super::tile::{Masses, Scratch, Tile, portable};
#[cfg(target_arch = "x86_64")]
use super::tile::{avx2, avx2_narrow, avx512, avx512_narrow};
use crate::parallel;

/// Keys a run: enough that laying out the lanes costs little.
const RUN_KEYS: usize = 256;

/// Rows of one sequence, and the keys that they all see.
pub(crate) struct Rows<'a, T> {
    /// `[capacity, kv_heads, head_dim]`
    pub(crate) keys: &'a [T],
    /// The block of each 64 slots; without, slot s is row s.
    pub(crate) table: Option<&'a [u32]>,
    pub(crate) rows: usize,
    /// The keys that are asked about.
    pub(crate) slots: Range<usize>,
}

/// A call. The caller has checked all lengths, and that the slots are in the cache.
pub(crate) struct Call<'a, Q, T> {
    /// The rows of all sequences, one after another, `[rows, heads, head_dim]`; they start `stride` numbers apart.
    pub(crate) query: &'a [Q],
    pub(crate) stride: usize,
    pub(crate) sequences: &'a [Rows<'a, T>],
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// `[rows, heads]`: the natural log-sum-exps that weights are relative to.
    pub(crate) sums: &'a [f32],
    /// The greatest weight over rows and heads, not their mean.
    pub(crate) greatest: bool,
}

/// Some keys of one sequence.
struct Run {
    sequence: usize,
    /// The sequence's first row among all.
    row: usize,
    slots: Range<usize>,
    /// Where they go.
    to: usize,
}

/// What a thread keeps from one run to the next.
#[derive(Default)]
struct Own {
    /// By lane, where its head of the query begins.
    starts: Vec<usize>,
    query: Vec<f32>,
    sums: Vec<f32>,
    scratch: Scratch,
    /// `[keys][lanes of a vector]`
    found: Vec<f32>,
}

impl Isa {
    /// Lanes of a vector.
    fn vector(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::WIDTH,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::WIDTH,
            Isa::Portable => portable::WIDTH,
        }
    }

    fn masses<T: Number>(self, lanes: usize, masses: &Masses<'_, T>, scratch: &mut Scratch, found: &mut [f32]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `masses` has found AVX-512F on this CPU.
            Isa::Avx512 if lanes == avx512::LANES => unsafe { avx512::masses(masses, scratch, found) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512_narrow::masses(masses, scratch, found) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `masses` has found AVX2 and FMA on this CPU.
            Isa::Avx2 if lanes == avx2::LANES => unsafe { avx2::masses(masses, scratch, found) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2_narrow::masses(masses, scratch, found) },
            Isa::Portable => portable::masses(masses, scratch, found),
        }
    }
}

/// One number a slot of every sequence; see [`crate::attention::key_masses`].
pub(crate) fn masses<Q: Number, T: Number>(isa: Isa, call: &Call<'_, Q, T>, to: &mut [f32]) {
    let isa = isa.or_best();
    let (mut runs, mut row, mut end) = (Vec::new(), 0, 0);
    for (sequence, rows) in call.sequences.iter().enumerate() {
        for start in rows.slots.clone().step_by(RUN_KEYS) {
            let slots = start..rows.slots.end.min(start + RUN_KEYS);
            let to = end;
            end += slots.len();
            runs.push(Run { sequence, row, slots, to });
        }
        row += rows.rows;
    }
    assert!(to.len() == end && call.sums.len() == row * call.heads);
    let to = Target::new(to);
    parallel::for_each_with(runs.len(), Own::default, |own, index| {
        let run = &runs[index];
        // SAFETY: the runs' places do not overlap and end within `to`, which is checked above.
        run.masses(isa, call, own, unsafe { to.part(run.to, run.slots.len()) });
    });
}

impl Run {
    fn masses<Q: Number, T: Number>(&self, isa: Isa, call: &Call<'_, Q, T>, own: &mut Own, to: &mut [f32]) {
        let (sequence, dim) = (&call.sequences[self.sequence], call.head_dim);
        let group = call.heads / call.kv_heads;
        let needed = sequence.rows * group;
        let (width, vector) = (isa.lanes(needed), isa.vector());
        let Own { starts, query, sums, scratch, found } = own;
        scratch.fit(width, dim, 0);
        found.clear();
        found.resize(to.len() * vector, 0.0);
        for kv_head in 0..call.kv_heads {
            for first in (0..needed).step_by(width) {
                // Lanes beyond the last one repeat it, and weigh nothing.
                let head = |at: usize| (self.row + at / group, kv_head * group + at % group);
                let heads = (first..first + width).map(|lane| head(lane.min(needed - 1)));
                starts.clear();
                starts.extend(heads.clone().map(|(row, head)| row * call.stride + head * dim));
                isa.pack(call.query, dim, starts, call.scale * std::f32::consts::LOG2_E, query);
                sums.clear();
                sums.extend(heads.map(|(row, head)| call.sums[row * call.heads + head] * std::f32::consts::LOG2_E));
                sums[needed.min(first + width) - first..].fill(f32::MAX);
                let keys = &sequence.keys[kv_head * dim..];
                let tile = Tile {
                    query,
                    keys,
                    values: &[],
                    stride: call.kv_heads * dim,
                    table: sequence.table,
                    slots: self.slots.clone(),
                    last: &[],
                    ends: &[],
                    head_dim: dim,
                    used: needed.min(first + width) - first,
                };
                isa.masses(width, &Masses { tile, sums, greatest: call.greatest }, scratch, found);
            }
        }
        let share = 1.0 / (sequence.rows * call.heads) as f32;
        for (to, found) in to.iter_mut().zip(found.chunks_exact(vector)) {
            *to = match call.greatest {
                true => found.iter().fold(0.0, |greatest, &weight| weight.max(greatest)),
                false => found.iter().sum::<f32>() * share,
            };
        }
    }
}

#[cfg(test)]
mod tests;
