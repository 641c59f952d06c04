//! How fast this worker computes and loads, as measured on its own requests.
//!
//! Operations are counted as algorithms count them: two for each weight and row, and four for each number of a head and
//! visible key (roofline of arXiv 2510.10129's setting; attention over slots 0..=s for the row at s).

use std::time::Duration;

use kvsplice_kv::RowRanges;
use kvsplice_model::{Config, Decoder, Error, decoder};

/// How much an earlier measurement still counts when a new one comes.
const MEMORY: f64 = 0.5;

/// The same for the link: it changes faster than the processors.
const LINK_MEMORY: f64 = 0.25;
/// Bytes that a load is taken to have brought at least.
const LEAST_BYTES: f64 = (64 << 10) as f64;

/// Operations of a model's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// A row, all layers, attention aside.
    row: f64,
    /// A row's look at one key, all layers.
    pair: f64,
}

impl Cost {
    pub(crate) fn of(config: &Config) -> Self {
        let (hidden, dim) = (f64::from(config.hidden), f64::from(config.head_dim));
        let (heads, kv_heads) = (f64::from(config.heads), f64::from(config.kv_heads));
        let weights =
            2.0 * hidden * heads * dim + 2.0 * hidden * kv_heads * dim + 3.0 * hidden * f64::from(config.intermediate);
        let layers = f64::from(config.layers);
        Self { row: 2.0 * weights * layers, pair: 4.0 * heads * dim * layers }
    }

    /// Operations of computing these slots, each over all keys up to its own.
    pub(crate) fn rows(&self, rows: &RowRanges) -> f64 {
        let sum = |range: &std::ops::Range<u32>| {
            let (rows, keys) = (range.len() as f64, f64::from(range.start) + f64::from(range.end) + 1.0);
            rows * self.row + rows * keys / 2.0 * self.pair
        };
        rows.ranges().iter().map(sum).sum()
    }
}

/// Speeds of one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) cost: Cost,
    /// Operations a second.
    compute: f64,
    /// Bytes a second.
    link: Option<f64>,
    /// Seconds from a request's arrival until its rows were known.
    rows: Option<f64>,
}

impl Pace {
    /// `compute`: operations a second, as [`measure`] gives them.
    pub(crate) fn new(cost: Cost, compute: f64) -> Self {
        Self { cost, compute, link: None, rows: None }
    }

    /// Operations a second.
    pub(crate) fn compute(&self) -> f64 {
        self.compute
    }

    /// Bytes a second of recent loads, if there were any.
    pub(crate) fn link(&self) -> Option<f64> {
        self.link
    }

    /// Seconds until rows are known, from a request's arrival, if that has been seen.
    pub(crate) fn rows(&self) -> Option<f64> {
        self.rows
    }

    /// Takes in how long a request's rows took to be known.
    pub(crate) fn rows_known(&mut self, seconds: f64) {
        let seconds = seconds.max(0.0);
        self.rows = Some(self.rows.map_or(seconds, |before| MEMORY * before + (1.0 - MEMORY) * seconds));
    }

    /// Takes in a prompt's computation.
    pub(crate) fn computed(&mut self, operations: f64, time: Duration) {
        let seconds = time.as_secs_f64();
        if operations > 0.0 && seconds > 0.0 {
            self.compute = MEMORY * self.compute + (1.0 - MEMORY) * operations / seconds;
        }
    }

    /// Takes in a load, or as much of it as came in a time. The mean is one of orders of magnitude: that is how links differ from
    /// one time to the next.
    pub(crate) fn loaded(&mut self, bytes: f64, seconds: f64) {
        if seconds > 0.0 {
            // Where nothing has come, a little may have been about to.
            let new = bytes.max(LEAST_BYTES) / seconds;
            self.link = Some(self.link.map_or(new, |old| old.powf(LINK_MEMORY) * new.powf(1.0 - LINK_MEMORY)));
        }
    }
}

/// Operations a second of one slice of one layer, the second time it runs.
pub(crate) fn measure(decoder: &Decoder) -> Result<f64, Error> {
    let config = decoder.config();
    let rows = (decoder::SLICE_ROWS as u32).min(config.context);
    let slots: Vec<u32> = (0..rows).collect();
    let ids: Vec<u32> = slots.iter().map(|slot| slot % config.vocabulary).collect();
    let (hidden, rotation) = (decoder.embed(&ids)?, decoder.rotation(&slots)?);
    let mut cache = decoder.cache(rows)?;
    let mut time = Duration::ZERO;
    for _ in 0..2 {
        let started = std::time::Instant::now();
        let mut segments = [decoder::Segment { cache: &mut cache, slots: &slots, two_part: None }];
        drop(decoder.layer(0, &hidden, &rotation, &mut segments, decoder::Keep::All, None)?);
        decoder.synchronize();
        time = started.elapsed();
    }
    let operations = Cost::of(config).rows(&RowRanges::from_range(0..rows)) / f64::from(config.layers.max(1));
    Ok(operations / time.as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_roofline_table() {
        // Qwen2.5-14B at 16,384 tokens: 432.9 T in products, 131.9 T in attention.
        let weights = 275.25e6;
        let cost = Cost { row: 2.0 * weights * 48.0, pair: 4.0 * 40.0 * 128.0 * 48.0 };
        let all = cost.rows(&RowRanges::from_range(0..16_384));
        assert!((all / 1e12 - 564.9).abs() < 1.0, "{all}");
        let halves = cost.rows(&RowRanges::from_range(0..8_192)) + cost.rows(&RowRanges::from_range(8_192..16_384));
        assert!((halves / all - 1.0).abs() < 1e-9);
    }

    #[test]
    fn newer_measurements_count_more() {
        let mut pace = Pace::new(Cost { row: 1.0, pair: 1.0 }, 100.0);
        pace.computed(200.0, Duration::from_secs(1));
        assert!((pace.compute() - 150.0).abs() < 1e-9);
        assert_eq!(pace.link(), None);
        pace.loaded(1e9, 1.0);
        pace.loaded(1e6, 0.1);
        assert!((pace.link().unwrap() / 1e7 - 100.0f64.powf(0.25)).abs() < 1e-9);
        pace.loaded(0.0, 1.0);
        assert!((1e5..1e6).contains(&pace.link().unwrap()));
    }
}
