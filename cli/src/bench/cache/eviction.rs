//! Eviction by value beside lru on the shipped Zipf trace: no data moves, only the order of what goes.

use kvsplice_cache_service::trace::{self, Outcome, Settings};
use kvsplice_cache_service::{Admission, Eviction};
use serde_json::json;

use super::measure::Spread;
use super::report::{Ceiling, Figure, Goal};
use crate::output;

const SEED: u64 = 7;
const CHUNKS: u32 = 10_000;
const REQUESTS: usize = 200_000;
const EXPONENT: f64 = 0.9;

pub(super) async fn measure() -> anyhow::Result<Vec<Figure>> {
    output::note("eviction: replaying the trace");
    tokio::task::spawn_blocking(replay).await.map_err(anyhow::Error::from)
}

fn replay() -> Vec<Figure> {
    let requests = trace::zipf(SEED, CHUNKS, REQUESTS, EXPONENT);
    let mut sizes: Vec<(u32, u64)> = requests.iter().map(|request| (request.chunk, request.bytes)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let all: u64 = sizes.iter().map(|(_, bytes)| bytes).sum();
    let mut figures = Vec::new();
    for part in [50, 20, 10, 5] {
        let run = |eviction| {
            let settings = Settings { eviction, admission: Admission::Always, limit_bytes: all / part };
            trace::replay(settings, &requests)
        };
        let (value, lru) = (run(Eviction::Value), run(Eviction::Lru));
        let hit = |outcome: &Outcome| 100.0 * outcome.hit_bytes as f64 / outcome.bytes as f64;
        let saved = |outcome: &Outcome| 100.0 * outcome.saved_us / outcome.cost_us;
        let measured = Spread::once(hit(&value));
        figures.push(Figure {
            name: "eviction",
            what: format!("hit bytes of value, tier of 1/{part} of all bytes"),
            unit: "%",
            value: measured,
            ceiling: Some(Ceiling::over("lru", &[hit(&lru)], measured)),
            goal: Some(Goal::AtLeast(1.0)),
            notes: vec![("% of the recompute cost saved by value, by lru", json!([saved(&value), saved(&lru)]))],
        });
    }
    figures
}
