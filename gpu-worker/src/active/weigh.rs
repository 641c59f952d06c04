//! What the planner is told of a request, and what becomes of its plan.

use kvsplice_kv::RowRanges;
use kvsplice_kv::options::Strategy;
use kvsplice_kv::receipt::Source;

use super::{Active, Stage};
use crate::pace::{Cost, Pace};
use crate::planner::{Candidate, Plan, Situation, plan};

/// A load of fewer bytes, and of less time, says more about latency than about speed.
const TELLING_BYTES: f64 = (1 << 20) as f64;
const TELLING_SECONDS: f64 = 0.25;

impl Active {
    /// Whether it may still be decided to compute chunks. Never once the first layer has begun; nor where a chunk's tokens
    /// stand elsewhere than at their slots: beside such chunks there is no place for a computed one.
    pub(crate) fn undecided(&self) -> bool {
        let request = &self.request;
        matches!(self.stage, Stage::Waiting)
            && self.admitted
            && request.options.strategy != Strategy::Ape
            && request.parts.iter().all(|part| part.first_position == part.slots.start)
            && self.parts.iter().any(|part| part.cached && part.failed.is_none())
    }

    /// Compares loading with computing, and takes the faster for each chunk.
    pub(crate) fn weigh(&mut self, pace: &Pace) {
        let places: Vec<usize> = (0..self.users.len()).filter(|&place| self.is_open(place)).collect();
        let elapsed = self.started.elapsed().as_secs_f64();
        let situation = Situation {
            elapsed,
            came: self.came,
            rows_in: if self.rows_complete { 0.0 } else { (pace.rows().unwrap_or(0.0) - elapsed).max(0.0) },
            chunks: places.iter().map(|&place| self.candidate(place, &pace.cost)).collect(),
            rest: pace.cost.rows(&self.unloaded()),
            compute: pace.compute(),
            link: pace.link(),
            layers: self.layers,
        };
        let plan = plan(&situation);
        self.preload = plan.preload;
        self.compute_instead(&plan, &places);
    }

    /// Tells how fast this prompt was computed and loaded.
    pub(crate) fn tell_pace(&self, pace: &mut Pace) {
        let options = &self.request.options;
        // Rows that go on from layer to layer take what is counted; those that a selector of the worker drops do not.
        let stays = !matches!(options.strategy, Strategy::Blend | Strategy::Guided) && options.early_stop.window == 0;
        if stays && !self.request.capture {
            pace.computed(pace.cost.rows(&self.computed.rows), self.compute);
        }
        if let (Strategy::Clip, Some(known)) = (options.strategy, self.timeline.rows_known) {
            pace.rows_known((known - self.timeline.received) / 1e3);
        }
        if let Some((bytes, seconds)) = self.probed.or_else(|| self.link()) {
            pace.loaded(bytes, seconds);
        }
    }

    /// Ends a load that only tells how fast the link is, once it has told: others may need the link, and this request the
    /// processors.
    pub(crate) fn end_probe(&mut self) {
        if self.probing && self.started.elapsed().as_secs_f64() >= TELLING_SECONDS {
            self.probing = false;
            self.probed = self.link();
            self.skips.clear();
            self.loaders.drain(..).for_each(|loader| loader.abort());
        }
    }

    /// What came over the link, and in how many seconds, if that says something about its speed.
    fn link(&self) -> Option<(f64, f64)> {
        if self.loaders.is_empty() {
            return None;
        }
        let elapsed = self.started.elapsed().as_secs_f64();
        let until_last = self.arrived.map_or(elapsed, |last| last.duration_since(self.started).as_secs_f64());
        // Between two layers nothing comes for a while; after long enough that says something too.
        let stalled = !self.nothing_is_loaded() && elapsed > 2.0 * until_last;
        let seconds = if stalled { elapsed } else { until_last };
        (self.came >= TELLING_BYTES || elapsed >= TELLING_SECONDS).then_some((self.came, seconds))
    }

    /// Whether of every chunk all has come, or nothing is waited for.
    fn nothing_is_loaded(&self) -> bool {
        let over = |place: usize| {
            let users = self.users[place].iter();
            let failed = users.clone().any(|&part| self.parts[part].failed.is_some());
            let tokens = users.map(|&part| self.request.parts[part].ids.len()).max().unwrap_or(0);
            let dropped = self.skipped.get(&place).is_some_and(|rows| rows.len() >= tokens);
            failed || dropped || self.arrived_share(place) >= 1.0
        };
        (0..self.users.len()).all(over)
    }

    /// Whether the chunk at this place of the load is to be loaded.
    fn is_open(&self, place: usize) -> bool {
        self.users[place].iter().all(|&part| self.parts[part].cached && self.parts[part].failed.is_none())
    }

    fn candidate(&self, place: usize, cost: &Cost) -> Candidate {
        let bytes = self.bytes(place);
        let (mut selected, mut whole) = (0.0, 0.0);
        let options = &self.request.options;
        // Selectors of the worker, and a head that has not answered yet, will name this share.
        let expected = match options.strategy {
            Strategy::Blend | Strategy::Guided => Some(options.ratio),
            Strategy::Clip if !self.rows_complete => Some(options.ratio),
            _ => None,
        };
        for &part in &self.users[place] {
            let slots = self.request.parts[part].slots.clone();
            let all = cost.rows(&RowRanges::from_range(slots.clone()));
            whole += all;
            selected += match expected {
                Some(ratio) => f64::from(ratio) * all,
                None => cost.rows(&self.rows.intersection(&RowRanges::from_range(slots))),
            };
        }
        let first = self.users[place].iter().all(|&part| self.parts[part].layers.first().is_some_and(Option::is_some));
        Candidate { bytes, arrived: bytes * self.arrived_share(place), begun: first, selected, whole }
    }

    /// Bytes that the chunk at this place takes, skipped rows and what the pool has left out.
    fn bytes(&self, place: usize) -> f64 {
        let Some(&part) = self.users[place].first() else { return 0.0 };
        let part = &self.request.parts[part];
        let tokens = part.ids.len() as u32;
        let nothing = RowRanges::default();
        let [skipped, have] = [&self.skipped, &self.have].map(|rows| rows.get(&place).unwrap_or(&nothing));
        let skipped = skipped.union(have).len() as f64 / f64::from(tokens.max(1));
        let layout = kvsplice_kv::KvLayout { encoding: part.variant.encoding, ..self.layout };
        layout.layer_bytes(tokens) as f64 * f64::from(self.layers) * (1.0 - skipped) * (1.0 - self.pooled_share(place))
    }

    /// How much of what the pool does not have of the chunk has come.
    fn arrived_share(&self, place: usize) -> f64 {
        let layers = |part: &usize| {
            let part = &self.parts[*part];
            let loaded = self.layers.saturating_sub(part.pooled);
            if loaded == 0 { 1.0 } else { f64::from(part.arrived.saturating_sub(part.pooled)) / f64::from(loaded) }
        };
        self.users[place].iter().map(layers).reduce(f64::min).unwrap_or(0.0)
    }

    /// How much of the chunk the pool had.
    fn pooled_share(&self, place: usize) -> f64 {
        let pooled = self.users[place].first().map_or(0, |&part| self.parts[part].pooled);
        f64::from(pooled) / f64::from(self.layers.max(1))
    }

    /// Slots that are computed whatever is decided.
    fn unloaded(&self) -> RowRanges {
        let parts = self.request.parts.iter().zip(&self.parts).filter(|(_, kv)| !kv.cached || kv.failed.is_some());
        let slots = RowRanges::from_ranges(parts.map(|(part, _)| part.slots.clone()));
        slots.intersection(&RowRanges::from_range(self.beginning.tokens()..self.request.tokens()))
    }

    /// The plan's chunks are rows now. They leave the link to the others; where there are no others, loading goes on for a
    /// moment, for what comes tells how fast the link is now.
    fn compute_instead(&mut self, plan: &Plan, places: &[usize]) {
        if plan.fresh.is_empty() {
            return;
        }
        let (load, fresh) = plan.seconds;
        let needed_rows = !self.rows_complete && self.loads_chunks();
        let computed: Vec<usize> = plan.fresh.iter().filter_map(|&index| places.get(index).copied()).collect();
        if computed.len() < places.len() {
            let tokens =
                |place: usize| self.users[place].first().map_or(0, |&part| self.request.parts[part].slots.len());
            let skips = computed.iter().map(|&place| (place, RowRanges::from_range(0..tokens(place) as u32))).collect();
            self.skip(skips);
        } else {
            self.probing = true;
        }
        for place in computed {
            for &part in &self.users[place] {
                let part = &mut self.parts[part];
                part.cached = false;
                part.layers.fill(None);
                part.outcome.source = Source::Fresh;
                part.outcome.reason =
                    format!("slow: the prompt takes {load:.2} s with every chunk loaded, {fresh:.2} s as planned");
            }
        }
        if needed_rows && !self.loads_chunks() {
            self.tell(Ok(super::Event::RowsUnneeded));
        }
        tracing::info!(request = self.id, chunks = plan.fresh.len(), load, fresh, "chunks are computed, not loaded");
    }
}
