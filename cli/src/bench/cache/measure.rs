//! Clocks and counters of this process, and the spread of a few measurements.

use std::time::Duration;

use serde::Serialize;

use crate::stats::median;

/// Median, lowest and highest of the measured rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Spread {
    pub(super) fn of(values: &[f64]) -> Self {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Self { median: median(values.iter().copied()), low, high }
    }

    /// Of a figure that was taken once.
    pub(super) const fn once(value: f64) -> Self {
        Self { median: value, low: value, high: value }
    }
}

/// Processor time of all threads of this process.
pub(super) fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// Bytes that this process has had read from a disk; 0 where the system does not tell.
pub(super) fn disk_bytes() -> f64 {
    field("/proc/self/io", "read_bytes:")
}

fn field(file: &str, name: &str) -> f64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}

/// The value below which `share` of the values lie. `values` must be sorted.
pub(super) fn quantile(values: &[f64], share: f64) -> f64 {
    let place = (values.len() as f64 * share).ceil() as usize;
    values.get(place.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_value_and_clocks_run() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!((quantile(&values, 0.99), quantile(&values, 0.5), quantile(&[], 0.5)), (99.0, 50.0, 0.0));
        assert!(processor_time() > Duration::ZERO);
    }
}
