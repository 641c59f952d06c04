//! How sure a mean is: a percentile bootstrap (Efron 1979), seeded, so that the same pairs give the same bounds.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// Resamples; the bounds of 2,000 are steady to about two digits.
const RESAMPLES: usize = 2000;
/// Half of what lies outside a 95 % interval.
const TAIL: f64 = 0.025;

/// A mean with the bounds of its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Interval {
    pub(crate) mean: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Interval {
    /// The same in another unit.
    pub(super) fn scaled(self, factor: f64) -> Self {
        Self { mean: self.mean * factor, low: self.low * factor, high: self.high * factor }
    }
}

/// The mean over groups of the mean over their values, each group resampled by itself; none without values.
pub(super) fn of_mean(groups: &[Vec<f64>], seed: u64) -> Option<Interval> {
    let groups: Vec<&[f64]> = groups.iter().map(Vec::as_slice).filter(|group| !group.is_empty()).collect();
    if groups.is_empty() {
        return None;
    }
    let total: f64 = groups.iter().map(|group| group.iter().sum::<f64>() / group.len() as f64).sum();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut means: Vec<f64> = (0..RESAMPLES).map(|_| resample(&groups, &mut rng)).collect();
    means.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let place = (share * (RESAMPLES - 1) as f64).round() as usize;
        means.get(place).copied().unwrap_or_default()
    };
    Some(Interval { mean: total / groups.len() as f64, low: at(TAIL), high: at(1.0 - TAIL) })
}

fn resample(groups: &[&[f64]], rng: &mut ChaCha8Rng) -> f64 {
    let mut total = 0.0;
    for group in groups {
        let drawn = (0..group.len()).filter_map(|_| group.get(rng.random_range(0..group.len())));
        total += drawn.sum::<f64>() / group.len() as f64;
    }
    total / groups.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_surround_the_mean_and_do_not_change_with_the_run() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        let interval = of_mean(std::slice::from_ref(&values), 1).unwrap();
        assert_eq!(interval.mean, 49.5);
        // The standard error of the mean is 2.89: ±1.96 of them.
        assert!((interval.low - 43.8).abs() < 0.7 && (interval.high - 55.2).abs() < 0.7, "{interval:?}");
        assert_eq!(of_mean(&[values], 1), Some(interval));
        assert_eq!(of_mean(&[vec![], vec![]], 1), None);
        assert_eq!(of_mean(&[vec![2.0]], 1), Some(Interval { mean: 2.0, low: 2.0, high: 2.0 }));
    }

    #[test]
    fn groups_count_alike_whatever_their_size() {
        let interval = of_mean(&[vec![1.0; 9], vec![0.0], vec![]], 3).unwrap();
        assert_eq!(interval, Interval { mean: 0.5, low: 0.5, high: 0.5 });
    }
}
