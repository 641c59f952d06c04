//! What a tile works on and gives.

use std::ops::Range;

use super::{BLOCK_KEYS, HEAD_DIM_STEP, LINE_BYTES, vectors};
use crate::cpu::number::{Number, Typed};

/// One tile's work.
pub(in crate::cpu) struct Tile<'a, T> {
    /// `[padded head][lanes]`, scaled by log2(e) / √head_dim.
    pub(in crate::cpu) query: &'a [f32],
    /// From the first number of the KV head; row r of the cache starts at r · stride.
    pub(in crate::cpu) keys: &'a [T],
    /// As `keys`.
    pub(in crate::cpu) values: &'a [T],
    /// Numbers from one row to the next.
    pub(in crate::cpu) stride: usize,
    /// The block of each [`BLOCK_KEYS`] slots; without, slot s is row s.
    pub(in crate::cpu) table: Option<&'a [u32]>,
    /// The slots whose keys are looked at.
    pub(in crate::cpu) slots: Range<usize>,
    /// By lane, the last key that it sees; ascending.
    pub(in crate::cpu) last: &'a [i32],
    /// Ascending slots; at each, the log-sum-exp over the visible keys before it is recorded.
    pub(in crate::cpu) ends: &'a [u32],
    pub(in crate::cpu) head_dim: usize,
    /// Lanes that are wanted; those behind repeat the last one.
    pub(in crate::cpu) used: usize,
}

/// A tile whose weights are wanted by key; it needs no values.
pub(in crate::cpu) struct Masses<'a, T> {
    pub(in crate::cpu) tile: Tile<'a, T>,
    /// By lane, the base-2 log-sum-exp that its weights are relative to; the greatest number for a lane that does not count.
    pub(in crate::cpu) sums: &'a [f32],
    /// Of the lanes, the greatest weight, not their sum.
    pub(in crate::cpu) greatest: bool,
}

/// Numbers of a head with its padding.
pub(in crate::cpu) fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(HEAD_DIM_STEP)
}

/// What a tile, or a part of it, has found.
#[derive(Clone, Default)]
pub(in crate::cpu) struct Part {
    /// `[lanes][padded head]`: the sum of weights · values, relative to 2^greatest.
    pub(in crate::cpu) output: Vec<f32>,
    /// By lane, the greatest score.
    pub(in crate::cpu) greatest: Vec<f32>,
    /// By lane, the sum of weights, relative to 2^greatest.
    pub(in crate::cpu) total: Vec<f32>,
}

/// What a tile gives, and what it needs besides.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    pub(in crate::cpu) found: Part,
    /// `[ends][lanes]`: base-2 log-sum-exp up to each end; −∞ where no key is visible.
    pub(in crate::cpu) sums: Vec<f32>,
    /// `[padded head][lanes]`: the output on its way.
    pub(super) by_number: Vec<f32>,
    /// `[BLOCK_KEYS][lanes]`
    pub(super) scores: Vec<f32>,
    /// `[BLOCK_KEYS][padded head]`: converted keys, then values, of a block.
    pub(super) packed: Vec<f32>,
}

impl Scratch {
    /// Makes it as large as tiles of a call need it. All calls of one scratch have one head size: the padding of `packed`
    /// stays 0.
    pub(in crate::cpu) fn fit(&mut self, lanes: usize, head_dim: usize, ends: usize) {
        let Self { found: Part { output, greatest, total }, sums, by_number, scores, packed } = self;
        output.resize(padded(head_dim) * lanes, 0.0);
        by_number.resize(padded(head_dim) * lanes, 0.0);
        greatest.resize(lanes, 0.0);
        total.resize(lanes, 0.0);
        sums.resize(ends * lanes, 0.0);
        scores.resize(BLOCK_KEYS * lanes, 0.0);
        packed.resize(BLOCK_KEYS * padded(head_dim), 0.0);
    }
}

impl<T: Number> Tile<'_, T> {
    /// The cache's row of a slot.
    #[inline(always)]
    pub(super) fn row(&self, slot: usize) -> usize {
        match self.table {
            None => slot,
            Some(table) => table[slot / BLOCK_KEYS] as usize * BLOCK_KEYS + slot % BLOCK_KEYS,
        }
    }

    /// Asks for the memory of `rows`, counted from row `first` on.
    #[inline(always)]
    pub(super) fn fetch(&self, all: &[T], first: usize, rows: Range<usize>) {
        for row in first + rows.start..first + rows.end {
            for line in 0..self.lines() {
                self.fetch_line(all, row, line);
            }
        }
    }

    /// Lines of a row's numbers.
    #[inline(always)]
    pub(super) fn lines(&self) -> usize {
        self.head_dim.div_ceil(LINE_BYTES / size_of::<T>())
    }

    /// Asks for line `line` of a row's memory.
    #[inline(always)]
    pub(super) fn fetch_line(&self, all: &[T], row: usize, line: usize) {
        // A hint: no place is wrong, and none is checked.
        let line = line.wrapping_mul(LINE_BYTES / size_of::<T>());
        vectors::fetch(all, row.wrapping_mul(self.stride).wrapping_add(line));
    }

    /// `count` rows from row `first` on, as f32 with padding, and how far apart they are.
    #[inline(always)]
    pub(super) fn numbers<'b>(
        &self,
        all: &'b [T],
        first: usize,
        count: usize,
        packed: &'b mut [f32],
    ) -> (&'b [f32], usize) {
        let (dim, padded) = (self.head_dim, padded(self.head_dim));
        let from = &all[first * self.stride..];
        if let (Typed::F32(numbers), true) = (T::typed(from), dim == padded) {
            return (numbers, self.stride);
        }
        // The padding is zero from the start and is never written.
        for (row, to) in packed.chunks_exact_mut(padded).take(count).enumerate() {
            for (to, number) in to.iter_mut().zip(&from[row * self.stride..row * self.stride + dim]) {
                *to = number.to_f32();
            }
        }
        (packed, padded)
    }
}
