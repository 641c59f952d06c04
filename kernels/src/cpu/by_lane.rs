//! The second half of a narrow tile: weights · values, with vectors of a head's numbers.
//!
//! A tile whose vectors are of lanes reads a block's values once for every few numbers of the head. That pays where many lanes
//! share what is read, not for a single row's query heads, which wait for memory: here every value is read once.

/// A block's weights and values.
pub(super) struct Part<'a> {
    /// `[keys][lanes]`
    pub(super) weights: &'a [f32],
    /// Key k's numbers start at k · stride.
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
    /// By lane, what the output so far is multiplied with.
    pub(super) corrections: &'a [f32],
}

macro_rules! by_lane_kernel {
    ($module:ident, $($feature:literal)?, $width:literal, $values:literal, [$($few:literal),*]) => {
        pub(super) mod $module {
            use super::Part;
            use super::super::vectors::$module::{fma, load, mul, splat, store, zero};

            /// Lanes of a tile.
            const LANES: usize = $width;
            /// Vectors of a value at once.
            const VALUES: usize = $values;
            /// Lanes at once: their sums fill the registers.
            const MOST: usize = [$($few),*][[$($few),*].len() - 1];

            /// output = output · corrections + weights · values of the first `used` lanes. `output`: `[lanes][padded head]`.
            /// Calls `between` with every key of the block.
            #[inline]
            $(#[target_feature(enable = $feature)])?
            pub(crate) fn accumulate(part: &Part<'_>, output: &mut [f32], used: usize, between: impl Fn(usize)) {
                let padded = output.len() / LANES;
                let passes = used.div_ceil(MOST);
                for pass in 0..passes {
                    let lanes = used * pass / passes..used * (pass + 1) / passes;
                    let output = &mut output[lanes.start * padded..lanes.end * padded];
                    let (weights, corrections) = (&part.weights[lanes.start..], &part.corrections[lanes.clone()]);
                    let mut number = 0;
                    while number < padded {
                        let between = |key| {
                            if pass == 0 && number == 0 {
                                between(key);
                            }
                        };
                        let wide = number + VALUES * $width <= padded;
                        let part = Part { weights, values: &part.values[number..], corrections, ..*part };
                        let output = &mut output[number..];
                        match (lanes.len(), wide) {
                            $(($few, true) => sum::<$few, VALUES>(&part, output, padded, between),
                            ($few, false) => sum::<$few, 1>(&part, output, padded, between),)*
                            _ => {}
                        }
                        number += if wide { VALUES * $width } else { $width };
                    }
                }
            }

            /// [`accumulate`] for `N` lanes and `M` vectors of numbers; a lane's numbers are `padded` apart.
            #[inline]
            $(#[target_feature(enable = $feature)])?
            fn sum<const N: usize, const M: usize>(
                part: &Part<'_>,
                output: &mut [f32],
                padded: usize,
                between: impl Fn(usize),
            ) {
                let mut sums = [[zero(); M]; N];
                for lane in 0..N {
                    for vector in 0..M {
                        let old = load(&output[lane * padded + vector * $width..]);
                        sums[lane][vector] = mul(old, splat(part.corrections[lane]));
                    }
                }
                for (key, weights) in part.weights.chunks(LANES).enumerate() {
                    between(key);
                    let values = &part.values[key * part.stride..key * part.stride + M * $width];
                    let mut numbers = [zero(); M];
                    for vector in 0..M {
                        numbers[vector] = load(&values[vector * $width..]);
                    }
                    let weights = &weights[..N];
                    for lane in 0..N {
                        let weight = splat(weights[lane]);
                        for vector in 0..M {
                            sums[lane][vector] = fma(weight, numbers[vector], sums[lane][vector]);
                        }
                    }
                }
                for lane in 0..N {
                    for vector in 0..M {
                        store(&mut output[lane * padded + vector * $width..], sums[lane][vector]);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
by_lane_kernel!(avx512, "avx512f", 16, 4, [1, 2, 3, 4, 5, 6, 7]);
#[cfg(target_arch = "x86_64")]
by_lane_kernel!(avx2, "avx2,fma", 8, 2, [1, 2, 3, 4, 5, 6]);
by_lane_kernel!(portable, , 4, 2, [1, 2]);
