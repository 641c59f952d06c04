//! Attention of one tile: some query heads of some rows (the lanes) over some keys of one KV head.
//!
//! Lanes are vector lanes: scores are computed transposed, `[key][lane]`, so that keys and values are read as they lie
//! in the cache (one scalar, broadcast) and the softmax over keys is a vertical operation without any shuffle. The
//! softmax is online over blocks of keys, in f32, in base 2 (queries carry the factor log2 e). Keys and values that are
//! not f32 are converted block by block, on their way into the first-level cache.
//!
//! One body, three instruction sets: a module of operations each, and the macro puts the body on top of it.

mod job;

pub(super) use job::{Masses, Part, Scratch, Tile, padded};

use super::number::{Number, Typed};
use super::{by_lane, vectors};

/// Keys a block: those of one block of a sequence's KV.
pub(super) const BLOCK_KEYS: usize = crate::BLOCK as usize;
/// The greatest score of a lane that has seen no key: far below every score, and so far above that of a hidden key, the least
/// number, that a hidden key weighs nothing. All are finite: so are their differences.
const UNSEEN: f32 = -1e30;
/// What memory comes in.
const LINE_BYTES: usize = 64;
/// Numbers of a head are padded to a multiple of this: the inner loops handle as many at once.
const HEAD_DIM_STEP: usize = 16;

macro_rules! tile_kernel {
    ($module:ident, $($feature:literal)?, $width:literal, $vectors:literal, $keys:literal, $numbers:literal, $operations:ident) => {
        pub(super) mod $module {
            use super::{BLOCK_KEYS, HEAD_DIM_STEP, Masses, Number, Part, Scratch, Tile, Typed, UNSEEN, by_lane};

            /// Lanes a tile, and a vector.
            pub(crate) const LANES: usize = $width * $vectors;
            pub(crate) const WIDTH: usize = $width;
            const VECTORS: usize = $vectors;
            /// Keys at once: with the vectors, as many sums as hide the latency of a product.
            const KEYS: usize = $keys;
            /// Numbers of a head at once, as well.
            const NUMBERS: usize = $numbers;
            /// Whether values are summed in vectors of a head's numbers, not of lanes.
            const BY_LANE: bool = VECTORS == 1;
            type Group = [V; VECTORS];

            use super::vectors::$operations::{
                V, add, exp2, fma, load, max, mul, splat, splat_at, store, sub, transpose, widen, zero,
            };

            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn load_group(from: &[f32]) -> Group {
                let from = &from[..LANES];
                let mut group = [zero(); VECTORS];
                for vector in 0..VECTORS {
                    group[vector] = load(&from[vector * $width..]);
                }
                group
            }

            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn store_group(to: &mut [f32], group: Group) {
                let to = &mut to[..LANES];
                for (vector, value) in group.into_iter().enumerate() {
                    store(&mut to[vector * $width..], value);
                }
            }

            /// Lays heads of the query out by lane, times `scale`: `[padded head][lanes]`, whose padding is not written. `starts`:
            /// where each lane's head begins.
            $(#[target_feature(enable = $feature)])?
            pub(crate) fn pack<Q: Number>(query: &[Q], dim: usize, starts: &[usize], scale: f32, to: &mut [f32]) {
                let whole = dim - dim % WIDTH;
                for (block, starts) in starts.chunks_exact(WIDTH).enumerate() {
                    for first in (0..whole).step_by(WIDTH) {
                        let mut square = [zero(); WIDTH];
                        for (row, start) in square.iter_mut().zip(starts) {
                            let numbers = match Q::typed(&query[start + first..]) {
                                Typed::F32(numbers) => load(numbers),
                                Typed::Bf16(numbers) => widen(numbers),
                            };
                            *row = mul(numbers, splat(scale));
                        }
                        for (number, lanes) in transpose(square).into_iter().enumerate() {
                            store(&mut to[(first + number) * LANES + block * WIDTH..], lanes);
                        }
                    }
                    for number in whole..dim {
                        for (lane, start) in starts.iter().enumerate() {
                            to[number * LANES + block * WIDTH + lane] = query[start + number].to_f32() * scale;
                        }
                    }
                }
            }

            /// `[padded head][lanes]` as `[lanes][padded head]`.
            $(#[target_feature(enable = $feature)])?
            fn turn(from: &[f32], to: &mut [f32]) {
                let size = from.len() / LANES;
                for lane in (0..LANES).step_by(WIDTH) {
                    for number in (0..size).step_by(WIDTH) {
                        let mut square = [zero(); WIDTH];
                        for (at, row) in square.iter_mut().enumerate() {
                            *row = load(&from[(number + at) * LANES + lane..]);
                        }
                        for (at, numbers) in transpose(square).into_iter().enumerate() {
                            store(&mut to[(lane + at) * size + number..], numbers);
                        }
                    }
                }
            }

            /// Scores of `N` keys: `scores[key][lane] = query · key`.
            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn dot<const N: usize>(
                query: &[f32],
                keys: &[f32],
                stride: usize,
                scores: &mut [f32],
                between: impl Fn(usize),
            ) {
                let dim = query.len() / LANES;
                let mut rows: [&[[f32; HEAD_DIM_STEP]]; N] = [&[]; N];
                for (key, row) in rows.iter_mut().enumerate() {
                    *row = keys[key * stride..key * stride + dim].as_chunks().0;
                }
                let mut sums: [Group; N] = [[zero(); VECTORS]; N];
                for (step, query) in query.chunks_exact(HEAD_DIM_STEP * LANES).enumerate() {
                    let rows = rows.map(|row| &row[step]);
                    between(step);
                    for number in 0..HEAD_DIM_STEP {
                        let query = load_group(&query[number * LANES..]);
                        for key in 0..N {
                            let value = splat_at(&rows[key][number]);
                            for vector in 0..VECTORS {
                                sums[key][vector] = fma(query[vector], value, sums[key][vector]);
                            }
                        }
                    }
                }
                for (key, sum) in sums.into_iter().enumerate() {
                    store_group(&mut scores[key * LANES..], sum);
                }
            }

            /// Attention of one tile; the result is in `scratch`.
            $(#[target_feature(enable = $feature)])?
            pub(crate) fn attend<T: Number>(tile: &Tile<'_, T>, scratch: &mut Scratch) {
                let Scratch { found, by_number, scores, packed, sums } = scratch;
                let Part { output: by_lane, greatest: greatest_out, total: total_out } = found;
                let output = if BY_LANE { &mut *by_lane } else { &mut *by_number };
                let mut sums = sums.chunks_exact_mut(LANES);
                let mut ends = tile.ends.iter().map(|&end| end as usize).peekable();
                let unmasked = tile.last[0] as usize;
                let mut greatest: Group = [splat(UNSEEN); VECTORS];
                let mut total: Group = [zero(); VECTORS];
                output.fill(0.0);
                let mut first = tile.slots.start;
                while first < tile.slots.end {
                    let mut count = (BLOCK_KEYS - first % BLOCK_KEYS).min(tile.slots.end - first);
                    while let Some(&end) = ends.peek() {
                        if end > first {
                            count = count.min(end - first);
                            break;
                        }
                        ends.next();
                        record(sums.next(), greatest, total);
                    }
                    let scores = &mut scores[..count * LANES];
                    let row = tile.row(first);
                    // Keys and values come from beyond the second-level cache: each half of a block asks for what the next one
                    // reads. Few rows wait longest: there, keys ask for the next block's keys, and values for its values.
                    let behind = first + count;
                    let ahead = (behind < tile.slots.end).then(|| tile.row(behind));
                    let (keys, stride) = tile.numbers(tile.keys, row, count, packed);
                    let steps = tile.query.len() / (HEAD_DIM_STEP * LANES);
                    let mut key = 0;
                    while key + KEYS <= count {
                        dot::<KEYS>(tile.query, &keys[key * stride..], stride, &mut scores[key * LANES..], |step| {
                            let rows = (step * KEYS / steps)..((step + 1) * KEYS / steps);
                            if !BY_LANE {
                                tile.fetch(tile.values, row + key, rows);
                            } else if let Some(ahead) = ahead {
                                tile.fetch(tile.keys, ahead + key, rows);
                            }
                        });
                        key += KEYS;
                    }
                    while key < count {
                        dot::<1>(tile.query, &keys[key * stride..], stride, &mut scores[key * LANES..], |_| ());
                        key += 1;
                    }
                    if first + count - 1 > unmasked {
                        hide(tile.last, first, scores);
                    }
                    let mut next = greatest;
                    for row in scores.chunks_exact(LANES) {
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
                    for row in scores.chunks_exact_mut(LANES) {
                        let mut weights = load_group(row);
                        for vector in 0..VECTORS {
                            weights[vector] = exp2(sub(weights[vector], greatest[vector]));
                            total[vector] = add(total[vector], weights[vector]);
                        }
                        store_group(row, weights);
                    }
                    let (values, stride) = tile.numbers(tile.values, row, count, packed);
                    if BY_LANE {
                        let mut corrections = [0f32; LANES];
                        store_group(&mut corrections, correction);
                        let part = by_lane::Part { weights: scores, values, stride, corrections: &corrections };
                        by_lane::$operations::accumulate(&part, output, tile.used, |row| {
                            if let Some(ahead) = ahead {
                                tile.fetch(tile.values, ahead, row..row + 1);
                            }
                        });
                    } else {
                        let lines = tile.lines();
                        accumulate(scores, values, stride, &correction, output, |step, key| {
                            if let Some(ahead) = ahead
                                && step < lines
                            {
                                tile.fetch_line(tile.keys, ahead + key, step);
                            }
                        });
                    }
                    first += count;
                }
                for _ in ends {
                    record(sums.next(), greatest, total);
                }
                if !BY_LANE {
                    turn(by_number, by_lane);
                }
                store_group(greatest_out, greatest);
                store_group(total_out, total);
            }

            /// Weights of one tile by key, from log-sum-exps that are known: `found[key][lane of a vector]` takes in the
            /// tile's lanes of each vector, as their sum or, if `greatest`, as the greatest one.
            $(#[target_feature(enable = $feature)])?
            pub(crate) fn masses<T: Number>(masses: &Masses<'_, T>, scratch: &mut Scratch, found: &mut [f32]) {
                let Masses { tile, sums, greatest } = masses;
                let Scratch { scores, packed, .. } = scratch;
                let sums = load_group(sums);
                let (mut first, mut found) = (tile.slots.start, found.chunks_exact_mut(WIDTH));
                while first < tile.slots.end {
                    let count = (BLOCK_KEYS - first % BLOCK_KEYS).min(tile.slots.end - first);
                    let (keys, stride) = tile.numbers(tile.keys, tile.row(first), count, packed);
                    // As in `attend`; one function for both loops made that slower by a thirtieth.
                    let mut key = 0;
                    while key + KEYS <= count {
                        dot::<KEYS>(tile.query, &keys[key * stride..], stride, &mut scores[key * LANES..], |_| ());
                        key += KEYS;
                    }
                    while key < count {
                        dot::<1>(tile.query, &keys[key * stride..], stride, &mut scores[key * LANES..], |_| ());
                        key += 1;
                    }
                    for (row, found) in scores[..count * LANES].chunks_exact(LANES).zip(&mut found) {
                        let row = load_group(row);
                        let mut all = load(found);
                        for vector in 0..VECTORS {
                            let weight = exp2(sub(row[vector], sums[vector]));
                            all = if *greatest { max(all, weight) } else { add(all, weight) };
                        }
                        store(found, all);
                    }
                    first += count;
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

            /// output = output · correction + weights · values.
            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn accumulate(
                weights: &[f32],
                values: &[f32],
                stride: usize,
                correction: &Group,
                output: &mut [f32],
                between: impl Fn(usize, usize),
            ) {
                for (step, rows) in output.chunks_exact_mut(NUMBERS * LANES).enumerate() {
                    let mut sums: [Group; NUMBERS] = [[zero(); VECTORS]; NUMBERS];
                    for number in 0..NUMBERS {
                        let old = load_group(&rows[number * LANES..]);
                        for vector in 0..VECTORS {
                            sums[number][vector] = mul(old[vector], correction[vector]);
                        }
                    }
                    // Without a product a key: it would be checked for overflow.
                    let values = values[step * NUMBERS..].chunks(stride);
                    for ((key, weights), values) in weights.chunks_exact(LANES).enumerate().zip(values) {
                        between(step, key);
                        let values = &values[..NUMBERS];
                        let weights = load_group(weights);
                        for number in 0..NUMBERS {
                            let value = splat_at(&values[number]);
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

            /// Scores of keys beyond a lane's last slot become the least number.
            #[inline(never)]
            $(#[target_feature(enable = $feature)])?
            fn hide(last: &[i32], first: usize, scores: &mut [f32]) {
                for (key, row) in scores.chunks_exact_mut(LANES).enumerate() {
                    let slot = (first + key) as i32;
                    for (score, &last) in row.iter_mut().zip(last) {
                        *score = if slot > last { f32::MIN } else { *score };
                    }
                }
            }
        }
    };
}

// Wide tiles for prefill; narrow ones, whose lanes a single row's query heads fill better, for decode.
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx512, "avx512f", 16, 3, 8, 8, avx512);
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx512_narrow, "avx512f", 16, 1, 8, 8, avx512);
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx2, "avx2,fma", 8, 3, 4, 4, avx2);
#[cfg(target_arch = "x86_64")]
tile_kernel!(avx2_narrow, "avx2,fma", 8, 1, 8, 8, avx2);
tile_kernel!(portable, , 4, 4, 4, 4, portable);
