//! Attention of one tile: some query heads of some rows (the lanes) over the keys of one KV head.
//!
//! Lanes are vector lanes: scores are computed transposed, `[key][lane]`, so that keys and values are read as they lie
//! in the cache (one scalar, broadcast) and the softmax over keys is a vertical operation without any shuffle. The
//! softmax is online over blocks of keys, in f32, in base 2 (queries carry the factor log2 e).
//!
//! One body, three instruction sets: a module of operations each, and the macro puts the body on top of it.

/// Keys a block: its scores, queries and values fit the first-level cache together.
const BLOCK_KEYS: usize = 64;
/// `head_dim` is a multiple of this: the inner loops handle as many numbers of a head at once.
pub(crate) const HEAD_DIM_STEP: usize = 8;

/// One tile's work. `keys` and `values` are whole caches `[capacity, kv_heads, head_dim]` from the KV head's first
/// number on.
pub(super) struct Tile<'a> {
    /// `[head_dim][lanes]`, scaled by log2(e) / √head_dim.
    pub(super) query: &'a [f32],
    /// From the first number of the KV head; token t starts at t · stride.
    pub(super) keys: &'a [f32],
    /// As `keys`.
    pub(super) values: &'a [f32],
    /// Numbers from one token to the next.
    pub(super) stride: usize,
    /// By lane, the last key that it sees; ascending.
    pub(super) slots: &'a [i32],
    /// Ascending slots; at each, the log-sum-exp over the visible keys before it is recorded.
    pub(super) ends: &'a [u32],
    /// A multiple of [`HEAD_DIM_STEP`].
    pub(super) head_dim: usize,
}

/// What a thread needs besides.
pub(super) struct Scratch {
    /// `[BLOCK_KEYS][lanes]`
    scores: Vec<f32>,
    /// `[head_dim][lanes]`: the result, before it goes to its rows.
    pub(super) output: Vec<f32>,
    /// `[ends][lanes]`: base-2 log-sum-exp up to each end; −∞ where no key is visible.
    pub(super) sums: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(lanes: usize, head_dim: usize, ends: usize) -> Self {
        Self {
            scores: vec![0.0; BLOCK_KEYS * lanes],
            output: vec![0.0; head_dim * lanes],
            sums: vec![0.0; ends * lanes],
        }
    }
}

macro_rules! tile_kernel {
    ($module:ident, $($feature:literal)?, $width:literal, $vectors:literal, $unroll:literal, $operations:ident) => {
        pub(super) mod $module {
            use super::{BLOCK_KEYS, Scratch, Tile};

            /// Lanes a tile.
            pub(crate) const LANES: usize = $width * $vectors;
            const VECTORS: usize = $vectors;
            /// Keys, or numbers of a head, at once: with the vectors, as many sums as hide the latency of a product.
            const UNROLL: usize = $unroll;
            type Group = [V; VECTORS];

            use super::$operations::{V, add, div, exp2, fma, load, max, mul, splat, store, sub, zero};

            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn load_group(from: &[f32]) -> Group {
                let from = &from[..LANES];
                std::array::from_fn(|vector| load(&from[vector * $width..]))
            }

            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn store_group(to: &mut [f32], group: Group) {
                let to = &mut to[..LANES];
                for (vector, value) in group.into_iter().enumerate() {
                    store(&mut to[vector * $width..], value);
                }
            }

            /// Scores of `N` keys: `scores[key][lane] = query · key`.
            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn dot<const N: usize>(tile: &Tile<'_>, first: usize, scores: &mut [f32]) {
                let rows: [&[f32]; N] = std::array::from_fn(|key| {
                    let start = (first + key) * tile.stride;
                    &tile.keys[start..start + tile.head_dim]
                });
                let mut sums: [Group; N] = [[zero(); VECTORS]; N];
                for (number, query) in tile.query.chunks_exact(LANES).enumerate() {
                    let query = load_group(query);
                    for key in 0..N {
                        let value = splat(rows[key][number]);
                        for vector in 0..VECTORS {
                            sums[key][vector] = fma(query[vector], value, sums[key][vector]);
                        }
                    }
                }
                for (key, sum) in sums.into_iter().enumerate() {
                    store_group(&mut scores[key * LANES..], sum);
                }
            }

            /// Attention of one tile; the result is in `scratch.output`.
            $(#[target_feature(enable = $feature)])?
            pub(crate) fn attend(tile: &Tile<'_>, scratch: &mut Scratch) {
                let Scratch { scores, output, sums } = scratch;
                let mut sums = sums.chunks_exact_mut(LANES);
                let mut ends = tile.ends.iter().map(|&end| end as usize).peekable();
                let last = tile.slots[LANES - 1] as usize;
                let unmasked = tile.slots[0] as usize;
                let mut greatest: Group = [splat(f32::NEG_INFINITY); VECTORS];
                let mut total: Group = [zero(); VECTORS];
                output.fill(0.0);
                let mut first = 0;
                while first <= last {
                    let mut count = BLOCK_KEYS.min(last + 1 - first);
                    while let Some(&end) = ends.peek() {
                        if end > first {
                            count = count.min(end - first);
                            break;
                        }
                        ends.next();
                        record(sums.next(), greatest, total);
                    }
                    let mut key = 0;
                    while key + UNROLL <= count {
                        dot::<UNROLL>(tile, first + key, &mut scores[key * LANES..]);
                        key += UNROLL;
                    }
                    while key < count {
                        dot::<1>(tile, first + key, &mut scores[key * LANES..]);
                        key += 1;
                    }
                    if first + count - 1 > unmasked {
                        hide(tile, first, &mut scores[..count * LANES]);
                    }
                    let mut next = greatest;
                    for row in scores[..count * LANES].chunks_exact(LANES) {
                        let row = load_group(row);
                        for vector in 0..VECTORS {
                            next[vector] = max(next[vector], row[vector]);
                        }
                    }
                    let mut correction = [zero(); VECTORS];
                    for vector in 0..VECTORS {
                        correction[vector] = exp2(sub(greatest[vector], next[vector]));
                        total[vector] = mul(total[vector], correction[vector]);
                    }
                    greatest = next;
                    for row in scores[..count * LANES].chunks_exact_mut(LANES) {
                        let mut weights = load_group(row);
                        for vector in 0..VECTORS {
                            weights[vector] = exp2(sub(weights[vector], greatest[vector]));
                            total[vector] = add(total[vector], weights[vector]);
                        }
                        store_group(row, weights);
                    }
                    accumulate(tile, first, &scores[..count * LANES], &correction, output);
                    first += count;
                }
                for _ in ends {
                    record(sums.next(), greatest, total);
                }
                for row in output.chunks_exact_mut(LANES) {
                    let mut numbers = load_group(row);
                    for vector in 0..VECTORS {
                        numbers[vector] = div(numbers[vector], total[vector]);
                    }
                    store_group(row, numbers);
                }
            }

            /// Log-sum-exp so far, in base 2.
            #[inline(never)]
            $(#[target_feature(enable = $feature)])?
            fn record(to: Option<&mut [f32]>, greatest: Group, total: Group) {
                let Some(to) = to else { return };
                let mut totals = [0f32; LANES];
                store_group(to, greatest);
                store_group(&mut totals, total);
                for (sum, total) in to.iter_mut().zip(totals) {
                    *sum += total.log2();
                }
            }

            /// output = output · correction + weights · values
            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn accumulate(tile: &Tile<'_>, first: usize, weights: &[f32], correction: &Group, output: &mut [f32]) {
                for (step, rows) in output.chunks_exact_mut(UNROLL * LANES).enumerate() {
                    let mut sums: [Group; UNROLL] = [[zero(); VECTORS]; UNROLL];
                    for number in 0..UNROLL {
                        let old = load_group(&rows[number * LANES..]);
                        for vector in 0..VECTORS {
                            sums[number][vector] = mul(old[vector], correction[vector]);
                        }
                    }
                    for (key, weights) in weights.chunks_exact(LANES).enumerate() {
                        let start = (first + key) * tile.stride + step * UNROLL;
                        let values = &tile.values[start..start + UNROLL];
                        let weights = load_group(weights);
                        for number in 0..UNROLL {
                            let value = splat(values[number]);
                            for vector in 0..VECTORS {
                                sums[number][vector] = fma(weights[vector], value, sums[number][vector]);
                            }
                        }
                    }
                    for (number, sum) in sums.into_iter().enumerate() {
                        store_group(&mut rows[number * LANES..], sum);
                    }
                }
            }

            /// Scores of keys beyond a lane's slot become −∞.
            #[inline(never)]
            $(#[target_feature(enable = $feature)])?
            fn hide(tile: &Tile<'_>, first: usize, scores: &mut [f32]) {
                for (key, row) in scores.chunks_exact_mut(LANES).enumerate() {
                    let slot = (first + key) as i32;
                    for (score, &last) in row.iter_mut().zip(tile.slots) {
                        *score = if slot > last { f32::NEG_INFINITY } else { *score };
                    }
                }
            }
        }
    };
}

/// ln(2)^k / k!, the series of 2^x: on ±1/2 six terms are exact to a unit in the last place.
const SERIES: [f32; 6] =
    [std::f32::consts::LN_2, 0.240_226_5, 0.055_504_11, 0.009_618_129, 0.001_333_355_8, 0.000_154_035_3];

#[cfg(target_arch = "x86_64")]
mod avx512_operations {
    use super::SERIES;
    use std::arch::x86_64::*;
    pub(super) type V = __m512;
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn load(from: &[f32]) -> V {
        let from = &from[..16];
        // SAFETY: the slice has 16 numbers; the load needs no alignment.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn store(to: &mut [f32], value: V) {
        let to = &mut to[..16];
        // SAFETY: the slice has 16 numbers; the store needs no alignment.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn zero() -> V {
        _mm512_setzero_ps()
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn splat(value: f32) -> V {
        _mm512_set1_ps(value)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn fma(a: V, b: V, c: V) -> V {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn add(a: V, b: V) -> V {
        _mm512_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn sub(a: V, b: V) -> V {
        _mm512_sub_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn mul(a: V, b: V) -> V {
        _mm512_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn div(a: V, b: V) -> V {
        _mm512_div_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn max(a: V, b: V) -> V {
        _mm512_max_ps(a, b)
    }
    /// 2^x for x ≤ 0, −∞ included.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn exp2(x: V) -> V {
        // Below −150 every result is 0; a finite bound keeps −∞ out of the subtraction.
        let x = _mm512_max_ps(x, _mm512_set1_ps(-200.0));
        let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        let rest = _mm512_sub_ps(x, whole);
        let mut sum = _mm512_set1_ps(SERIES[5]);
        for term in [SERIES[4], SERIES[3], SERIES[2], SERIES[1], SERIES[0], 1.0] {
            sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
        }
        _mm512_scalef_ps(sum, whole)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2_operations {
    use super::SERIES;
    use std::arch::x86_64::*;
    pub(super) type V = __m256;
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn load(from: &[f32]) -> V {
        let from = &from[..8];
        // SAFETY: the slice has 8 numbers; the load needs no alignment.
        unsafe { _mm256_loadu_ps(from.as_ptr()) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn store(to: &mut [f32], value: V) {
        let to = &mut to[..8];
        // SAFETY: the slice has 8 numbers; the store needs no alignment.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn zero() -> V {
        _mm256_setzero_ps()
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn splat(value: f32) -> V {
        _mm256_set1_ps(value)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn fma(a: V, b: V, c: V) -> V {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add(a: V, b: V) -> V {
        _mm256_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn sub(a: V, b: V) -> V {
        _mm256_sub_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn mul(a: V, b: V) -> V {
        _mm256_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn div(a: V, b: V) -> V {
        _mm256_div_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn max(a: V, b: V) -> V {
        _mm256_max_ps(a, b)
    }
    /// 2^x for x ≤ 0, −∞ included; 0 below −125.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn exp2(x: V) -> V {
        let bound = _mm256_set1_ps(-125.0);
        let visible = _mm256_cmp_ps::<_CMP_GE_OQ>(x, bound);
        let x = _mm256_max_ps(x, bound);
        let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        let rest = _mm256_sub_ps(x, whole);
        let mut sum = _mm256_set1_ps(SERIES[5]);
        for term in [SERIES[4], SERIES[3], SERIES[2], SERIES[1], SERIES[0], 1.0] {
            sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(term));
        }
        let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(whole));
        let scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sum), exponent));
        _mm256_and_ps(scaled, visible)
    }
}

mod portable_operations {
    pub(super) type V = [f32; 4];
    #[inline]
    pub(super) fn load(from: &[f32]) -> V {
        [from[0], from[1], from[2], from[3]]
    }
    #[inline]
    pub(super) fn store(to: &mut [f32], value: V) {
        to[..4].copy_from_slice(&value)
    }
    #[inline]
    pub(super) fn zero() -> V {
        [0.0; 4]
    }
    #[inline]
    pub(super) fn splat(value: f32) -> V {
        [value; 4]
    }
    #[inline]
    pub(super) fn map(a: V, b: V, with: impl Fn(f32, f32) -> f32) -> V {
        std::array::from_fn(|lane| with(a[lane], b[lane]))
    }
    #[inline]
    pub(super) fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }
    #[inline]
    pub(super) fn add(a: V, b: V) -> V {
        map(a, b, |a, b| a + b)
    }
    #[inline]
    pub(super) fn sub(a: V, b: V) -> V {
        map(a, b, |a, b| a - b)
    }
    #[inline]
    pub(super) fn mul(a: V, b: V) -> V {
        map(a, b, |a, b| a * b)
    }
    #[inline]
    pub(super) fn div(a: V, b: V) -> V {
        map(a, b, |a, b| a / b)
    }
    #[inline]
    pub(super) fn max(a: V, b: V) -> V {
        map(a, b, f32::max)
    }
    #[inline]
    pub(super) fn exp2(x: V) -> V {
        x.map(f32::exp2)
    }
}

// Wide tiles for prefill; narrow ones, whose lanes a single row's query heads fill better, for decode.
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx512, "avx512f", 16, 4, 4, avx512_operations);
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx512_narrow, "avx512f", 16, 1, 8, avx512_operations);
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx2, "avx2,fma", 8, 3, 4, avx2_operations);
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx2_narrow, "avx2,fma", 8, 1, 8, avx2_operations);
tile_kernel!(portable, , 4, 4, 4, portable_operations);
