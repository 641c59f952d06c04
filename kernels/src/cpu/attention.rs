//! Ragged causal attention on slices: packs the query heads of a KV head into lanes and spreads tiles over the pool.

use super::isa::Isa;
pub(crate) use super::tile::HEAD_DIM_STEP;
use super::tile::{Scratch, Tile, portable};
#[cfg(target_arch = "x86_64")]
use super::tile::{avx2, avx2_narrow, avx512, avx512_narrow};
use crate::parallel;

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// A multiple of [`HEAD_DIM_STEP`].
    pub(crate) head_dim: usize,
}

impl Isa {
    /// Lanes of the tiles that fit `needed` lanes best: narrow ones when one of them holds everything.
    fn lanes(self, needed: usize) -> usize {
        let (wide, narrow) = match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (avx512::LANES, avx512_narrow::LANES),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (avx2::LANES, avx2_narrow::LANES),
            Isa::Portable => (portable::LANES, portable::LANES),
        };
        if needed <= narrow { narrow } else { wide }
    }

    fn attend(self, lanes: usize, tile: &Tile<'_>, scratch: &mut Scratch) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has found AVX-512F on this CPU.
            Isa::Avx512 if lanes == avx512::LANES => unsafe { avx512::attend(tile, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx512 => unsafe { avx512_narrow::attend(tile, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` has found AVX2 and FMA on this CPU.
            Isa::Avx2 if lanes == avx2::LANES => unsafe { avx2::attend(tile, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2_narrow::attend(tile, scratch) },
            Isa::Portable => portable::attend(tile, scratch),
        }
    }
}

/// Numbers that tiles write from several threads. No two tiles write the same one.
struct Output(*mut f32);

// SAFETY: tiles write disjoint numbers, and nobody reads until all are done.
unsafe impl Sync for Output {}

/// Attention of `shape.rows` rows; see [`crate::attention::ragged_causal`] for shapes. The caller has checked every
/// length: `query` and `output` hold rows · heads · head_dim numbers, `keys` and `values` every slot up to the last one.
/// `sums` `[rows, heads, ends]` receives natural log-sum-exps up to each of the ascending `ends`.
#[expect(clippy::too_many_arguments, reason = "one flat call; the tensors' wrapper groups them")]
pub(crate) fn ragged_causal(
    isa: Isa,
    shape: Shape,
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    slots: &[u32],
    ends: &[u32],
    output: &mut [f32],
    sums: &mut [f32],
) {
    let Shape { rows, heads, kv_heads, head_dim } = shape;
    assert!(query.len() == rows * heads * head_dim && output.len() == query.len() && slots.len() == rows);
    assert!(sums.len() == rows * heads * ends.len());
    let group = heads / kv_heads;
    let lanes = isa.lanes(rows * group);
    let tiles = (rows * group).div_ceil(lanes);
    let scale = std::f32::consts::LOG2_E / (head_dim as f32).sqrt();
    let target = Output(output.as_mut_ptr());
    let target = &target;
    let sum_target = Output(sums.as_mut_ptr());
    let sum_target = &sum_target;
    parallel::for_each(tiles * kv_heads, |index| {
        let (tile, kv_head) = (index / kv_heads, index % kv_heads);
        let first = tile * lanes;
        let used = lanes.min(rows * group - first);
        // Lane → (row, query head); lanes beyond the last one repeat it and are not written.
        let place = |lane: usize| {
            let lane = first + lane.min(used - 1);
            (lane / group, kv_head * group + lane % group)
        };
        let mut packed = vec![0f32; head_dim * lanes];
        let mut last_seen = vec![0i32; lanes];
        for lane in 0..lanes {
            let (row, head) = place(lane);
            last_seen[lane] = slots[row] as i32;
            let start = (row * heads + head) * head_dim;
            for (number, value) in query[start..start + head_dim].iter().enumerate() {
                packed[number * lanes + lane] = value * scale;
            }
        }
        let mut scratch = Scratch::new(lanes, head_dim, ends.len());
        let start = kv_head * head_dim;
        let tile = Tile {
            query: &packed,
            keys: &keys[start..],
            values: &values[start..],
            stride: kv_heads * head_dim,
            slots: &last_seen,
            ends,
            head_dim,
        };
        isa.attend(lanes, &tile, &mut scratch);
        for lane in 0..used {
            let (row, head) = place(lane);
            let start = (row * heads + head) * head_dim;
            for number in 0..head_dim {
                // SAFETY: start + number is below rows · heads · head_dim, the checked length of `output`; each
                // (row, head) belongs to one lane of one tile.
                unsafe { *target.0.add(start + number) = scratch.output[number * lanes + lane] };
            }
            let start = (row * heads + head) * ends.len();
            for end in 0..ends.len() {
                // SAFETY: start + end is below rows · heads · ends, the checked length of `sums`; as above.
                unsafe { *sum_target.0.add(start + end) = scratch.sums[end * lanes + lane] * std::f32::consts::LN_2 };
            }
        }
    });
}
