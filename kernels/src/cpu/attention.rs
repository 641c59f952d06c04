//! Ragged causal attention on slices: packs the query heads of a KV head into lanes and spreads tiles over the pool.
//!
//! Where there are few tiles and many keys, as in decode, tiles are split along the keys and merged by their
//! log-sum-exps (Flash-Decoding). How, follows from the sizes and the number of threads alone: results are repeatable.

use std::ops::Range;

use super::isa::Isa;
use super::number::{Number, Target};
use super::tile::{BLOCK_KEYS, Part, Scratch, Tile, padded, portable};
#[cfg(target_arch = "x86_64")]
use super::tile::{avx2, avx2_narrow, avx512, avx512_narrow};
use crate::parallel;

/// Keys of a split at least: below, starting a thread's work costs more than it saves.
const SPLIT_KEYS: usize = 512;
/// Parts that are merged sooner than another thread wakes.
const FEW_PARTS: usize = 32;
/// Tasks a thread, so that all end at about the same time.
const THREAD_TASKS: usize = 4;

/// Rows of one sequence.
pub(crate) struct Rows<'a, T> {
    /// `[capacity, kv_heads, head_dim]`
    pub(crate) keys: &'a [T],
    /// As `keys`.
    pub(crate) values: &'a [T],
    /// The block of each 64 slots; without, slot s is row s.
    pub(crate) table: Option<&'a [u32]>,
    /// By row, the last slot that it sees; not descending.
    pub(crate) last: &'a [u32],
}

/// A call. The caller has checked all lengths, that every slot up to each row's last one is in the cache, and that every
/// row sees a key.
pub(crate) struct Call<'a, Q, T> {
    /// The rows of all sequences, one after another, `[rows, heads, head_dim]`; they start `stride` numbers apart.
    pub(crate) query: &'a [Q],
    pub(crate) stride: usize,
    pub(crate) sequences: &'a [Rows<'a, T>],
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// No row sees the slots before this one.
    pub(crate) from: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// Ascending slots; for each, the log-sum-exp over the keys before it.
    pub(crate) ends: &'a [u32],
}

/// Some lanes of one KV head.
struct Lanes {
    sequence: usize,
    kv_head: usize,
    /// The sequence's first row among all.
    row: usize,
    /// Of the sequence's rows times the KV head's query heads.
    lanes: Range<usize>,
    /// Lanes of the kernel.
    width: usize,
    /// The slots that any of them sees.
    slots: Range<usize>,
}

/// What a thread keeps from one tile of a call to the next.
#[derive(Default)]
struct Own {
    /// By lane, where its head of the query begins.
    starts: Vec<usize>,
    /// `[padded head][lanes]`
    query: Vec<f32>,
    /// By lane, the last slot that it sees.
    last: Vec<i32>,
    scratch: Scratch,
}

impl Isa {
    /// Lanes of the tiles that fit `needed` lanes best: narrow ones when one of them holds everything.
    pub(super) fn lanes(self, needed: usize) -> usize {
        let (wide, narrow) = match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (avx512::LANES, avx512_narrow::LANES),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (avx2::LANES, avx2_narrow::LANES),
            Isa::Portable => (portable::LANES, portable::LANES),
        };
        if needed <= narrow { narrow } else { wide }
    }

    /// Lays heads of the query out by lane, times `scale`: `[padded head][lanes]`. `starts`: where each lane's head begins.
    pub(super) fn pack<Q: Number>(self, query: &[Q], dim: usize, starts: &[usize], scale: f32, to: &mut Vec<f32>) {
        // The padding of a head stays 0: all calls of one buffer have one head size.
        to.resize(padded(dim) * starts.len(), 0.0);
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: callers have found AVX-512F on this CPU.
            Isa::Avx512 if starts.len() == avx512::LANES => unsafe { avx512::pack(query, dim, starts, scale, to) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512_narrow::pack(query, dim, starts, scale, to) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: callers have found AVX2 and FMA on this CPU.
            Isa::Avx2 if starts.len() == avx2::LANES => unsafe { avx2::pack(query, dim, starts, scale, to) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2_narrow::pack(query, dim, starts, scale, to) },
            Isa::Portable => portable::pack(query, dim, starts, scale, to),
        }
    }

    fn attend<T: Number>(self, lanes: usize, tile: &Tile<'_, T>, scratch: &mut Scratch) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `attend` has found AVX-512F on this CPU.
            Isa::Avx512 if lanes == avx512::LANES => unsafe { avx512::attend(tile, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512_narrow::attend(tile, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `attend` has found AVX2 and FMA on this CPU.
            Isa::Avx2 if lanes == avx2::LANES => unsafe { avx2::attend(tile, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2_narrow::attend(tile, scratch) },
            Isa::Portable => portable::attend(tile, scratch),
        }
    }
}

/// Attention of all rows; see [`crate::attention`]. `output`: `[rows, heads, head_dim]`; `sums`: `[rows, heads, ends]`,
/// natural log-sum-exps.
pub(crate) fn attend<Q: Number, T: Number>(isa: Isa, call: &Call<'_, Q, T>, output: &mut [Q], sums: &mut [f32]) {
    let isa = isa.or_best();
    let width = call.heads * call.head_dim;
    let rows: usize = call.sequences.iter().map(|rows| rows.last.len()).sum();
    assert!(output.len() == rows * width && sums.len() == rows * call.heads * call.ends.len());
    let lanes = lanes(isa, call);
    let wanted = (parallel::threads() * THREAD_TASKS).div_ceil(lanes.len().max(1));
    // Sums up to an end run over all splits before it: such calls have many rows, and stay whole.
    let splits = if call.ends.is_empty() { wanted } else { 1 };
    let mut parts: Vec<(usize, Range<usize>)> = Vec::new();
    for (index, lanes) in lanes.iter().enumerate() {
        let keys = lanes.slots.len();
        let splits = splits.min(keys / SPLIT_KEYS).max(1);
        // Whole blocks a split.
        let step = keys.div_ceil(splits).next_multiple_of(BLOCK_KEYS).max(BLOCK_KEYS);
        parts.extend((0..keys).step_by(step).map(|first| {
            let start = lanes.slots.start + first;
            (index, start..lanes.slots.end.min(start + step))
        }));
    }
    let output = Output { numbers: Target::new(output), sums: Target::new(sums) };
    if parts.len() == lanes.len() {
        parallel::for_each_with(lanes.len(), Own::default, |own, index| {
            let lanes = &lanes[index];
            let scratch = part(isa, call, lanes, lanes.slots.clone(), own);
            output.write(call, lanes, &[&scratch.found], &scratch.sums);
        });
        return;
    }
    // KV heads of the same slots one after another: their numbers lie side by side in memory.
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&part| (lanes[parts[part].0].sequence, parts[part].1.start));
    let found: Vec<std::sync::OnceLock<Part>> = parts.iter().map(|_| std::sync::OnceLock::new()).collect();
    parallel::for_each_with(parts.len(), Own::default, |own, task| {
        let task = order[task];
        let (index, slots) = &parts[task];
        let scratch = part(isa, call, &lanes[*index], slots.clone(), own);
        found[task].get_or_init(|| scratch.found.clone());
    });
    let merge = |index: usize| {
        let first = parts.partition_point(|(lanes, _)| *lanes < index);
        let end = parts.partition_point(|(lanes, _)| *lanes <= index);
        let mine: Vec<&Part> = found[first..end].iter().filter_map(|part| part.get()).collect();
        output.write(call, &lanes[index], &mine, &[]);
    };
    if parts.len() <= FEW_PARTS {
        return (0..lanes.len()).for_each(merge);
    }
    parallel::for_each(lanes.len(), merge);
}

/// All tiles of a call, those with the most keys last.
fn lanes<Q, T>(isa: Isa, call: &Call<'_, Q, T>) -> Vec<Lanes> {
    let group = call.heads / call.kv_heads;
    let mut all = Vec::new();
    let mut row = 0;
    for (sequence, rows) in call.sequences.iter().enumerate() {
        let needed = rows.last.len() * group;
        let width = isa.lanes(needed);
        for first in (0..needed).step_by(width) {
            let lanes = first..needed.min(first + width);
            let last = rows.last[(lanes.end - 1) / group] as usize;
            for kv_head in 0..call.kv_heads {
                let (lanes, slots) = (lanes.clone(), call.from..last + 1);
                all.push(Lanes { sequence, kv_head, row, lanes, width, slots });
            }
        }
        row += rows.last.len();
    }
    // Stable: the same order every time.
    all.sort_by_key(|lanes| lanes.slots.len());
    all
}

/// Attention of some lanes over some slots.
fn part<'a, Q: Number, T: Number>(
    isa: Isa,
    call: &Call<'_, Q, T>,
    lanes: &Lanes,
    slots: Range<usize>,
    own: &'a mut Own,
) -> &'a Scratch {
    let (rows, dim, width) = (&call.sequences[lanes.sequence], call.head_dim, lanes.width);
    let group = call.heads / call.kv_heads;
    let scale = call.scale * std::f32::consts::LOG2_E;
    let Own { starts, query, last, scratch } = own;
    scratch.fit(width, dim, call.ends.len());
    last.resize(width, 0);
    // Lanes beyond the last one repeat it and are not written.
    let at = |lane: usize| (lanes.lanes.start + lane).min(lanes.lanes.end - 1);
    for (lane, last) in last.iter_mut().enumerate() {
        *last = rows.last[at(lane) / group] as i32;
    }
    let start = |at: usize| (lanes.row + at / group) * call.stride + (lanes.kv_head * group + at % group) * dim;
    starts.clear();
    starts.extend((0..width).map(|lane| start(at(lane))));
    isa.pack(call.query, dim, starts, scale, query);
    let tile = Tile {
        query,
        keys: &rows.keys[lanes.kv_head * dim..],
        values: &rows.values[lanes.kv_head * dim..],
        stride: call.kv_heads * dim,
        table: rows.table,
        slots,
        last,
        ends: call.ends,
        head_dim: dim,
        used: lanes.lanes.len(),
    };
    isa.attend(width, &tile, scratch);
    scratch
}

struct Output<Q> {
    numbers: Target<Q>,
    sums: Target<f32>,
}

impl<Q: Number> Output<Q> {
    /// Merges the parts of some lanes and writes their rows.
    fn write<T>(&self, call: &Call<'_, Q, T>, lanes: &Lanes, parts: &[&Part], sums: &[f32]) {
        let (dim, width, ends) = (call.head_dim, lanes.width, call.ends.len());
        let (group, padded) = (call.heads / call.kv_heads, padded(dim));
        let (mut weights, mut merged) = (vec![0f32; parts.len()], vec![0f32; dim]);
        for (lane, at) in lanes.lanes.clone().enumerate() {
            let greatest = parts.iter().fold(f32::MIN, |greatest, part| greatest.max(part.greatest[lane]));
            let mut total = 0.0;
            for (weight, part) in weights.iter_mut().zip(parts) {
                *weight = (part.greatest[lane] - greatest).exp2();
                total += *weight * part.total[lane];
            }
            for weight in &mut weights {
                *weight /= total;
            }
            let head = (lanes.row + at / group) * call.heads + lanes.kv_head * group + at % group;
            // SAFETY: `head` is below rows · heads, and `attend` has checked the lengths; each row's head belongs to one
            // lane of one tile.
            let (to, to_sums) = unsafe { (self.numbers.part(head * dim, dim), self.sums.part(head * ends, ends)) };
            merged.fill(0.0);
            for (weight, part) in weights.iter().zip(parts) {
                for (sum, number) in merged.iter_mut().zip(&part.output[lane * padded..]) {
                    *sum += weight * number;
                }
            }
            for (to, sum) in to.iter_mut().zip(&merged) {
                *to = Q::from_f32(*sum);
            }
            for (end, to) in to_sums.iter_mut().enumerate() {
                *to = sums[end * width + lane] * std::f32::consts::LN_2;
            }
        }
    }
}

#[cfg(test)]
mod tests;
