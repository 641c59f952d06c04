//! One request in hand: what has been loaded, which rows are known, how far computation is.

mod arrival;
mod wanted;
mod weigh;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvsplice_kv::options::Strategy;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{KvLayout, RowRanges};
use kvsplice_proto::load::Skips;
use kvsplice_proto::v1;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle};
use tonic::Status;

pub(crate) use arrival::Arrived;

use crate::beginning::Beginning;
use crate::decode::{Scores, Sequence};
use crate::pass::{Batch, Pass};
use crate::pool::Hold;
use crate::prefill::Prefill;
use crate::prompt::Prompt;
use crate::receipt::{self, Computed, PartOutcome, Timeline};
use crate::request::{Kind, Request};
use crate::schedule::State;
use crate::skip::skippable;
use crate::text::Text;

/// What a request's caller hears.
#[derive(Debug)]
pub(crate) enum Event {
    Token(v1::Token),
    Logits(Vec<f32>),
    Scores(Scores),
    /// Every chunk is computed, whatever rows are still named.
    RowsUnneeded,
    Done(v1::PrefillDone),
}

/// Where a caller listens. Dropping the other end cancels the request.
pub(crate) type Events = mpsc::Sender<Result<Event, Status>>;

/// The KV of one part as it comes in.
#[derive(Debug)]
struct PartKv {
    /// By layer, until it is placed.
    layers: Vec<Option<Arrived>>,
    /// Layers that have come, those that are placed already included.
    arrived: u32,
    /// How many of them this worker's pool had.
    pooled: u32,
    outcome: PartOutcome,
    /// Why loading ended early; the part is repaired from prefix and tokens.
    failed: Option<String>,
    /// Loaded and placed KV is used (else every token is a row).
    cached: bool,
}

/// How far computation is.
pub(crate) enum Stage {
    /// Rows or the first layer are still to come, or the memory for its KV.
    Waiting,
    /// Rows are computed.
    Prefill(Box<Prefill>),
    /// Tokens are generated.
    Decode(Box<Sequence>),
    /// The state is with the compute thread.
    Busy,
}

/// One request in hand.
pub(crate) struct Active {
    pub(crate) id: u64,
    pub(crate) request: Arc<Request>,
    pub(crate) events: Events,
    pub(crate) stage: Stage,
    pub(crate) timeline: Timeline,
    pub(crate) text: Text,
    /// Bytes of KV that it needs; counted against the budget once admitted.
    pub(crate) kv_bytes: u64,
    pub(crate) admitted: bool,
    pub(crate) output: u32,
    /// The part that is encoded anew, and the time that this has taken so far.
    pub(crate) repair: Option<(usize, Option<Pass>, Duration)>,
    /// The time that computing its rows took.
    pub(crate) compute: Duration,
    pub(crate) computed: Computed,
    /// Stores captured chunks; gives their number.
    pub(crate) keeping: Option<JoinHandle<u32>>,
    pub(crate) beginning: Arc<Beginning>,
    parts: Vec<PartKv>,
    /// By place in the load: the parts that use the chunk.
    users: Vec<Vec<usize>>,
    /// Its chunks in this worker's pool: they stay there for as long as this request lasts.
    hold: Option<Hold>,
    /// Rows that the head has named.
    rows: RowRanges,
    rows_complete: bool,
    loaders: Vec<AbortHandle>,
    /// Where each loader hears which rows need not come.
    skips: Vec<mpsc::Sender<Skips>>,
    /// Rows that need not come, by place in the load.
    skipped: Skips,
    /// Rows that this worker's pool has of the layers that are loaded, by place in the load.
    have: Skips,
    /// When loading began.
    started: Instant,
    /// When the last layer so far came, and the bytes that have come.
    arrived: Option<Instant>,
    came: f64,
    /// Nothing that is loaded is needed: it only tells how fast the link is. And what it has told.
    probing: bool,
    probed: Option<(f64, f64)>,
    /// Layers that should have come before the first is computed while others have work.
    preload: u32,
    /// Of the model's chunks; each is stored in its own encoding.
    layout: KvLayout,
    layers: u32,
}

impl Drop for Active {
    fn drop(&mut self) {
        for loader in &self.loaders {
            loader.abort();
        }
    }
}

impl Active {
    pub(crate) fn new(
        id: u64,
        request: Request,
        events: Events,
        text: Text,
        beginning: Beginning,
        layout: KvLayout,
        token_bytes: u64,
    ) -> Self {
        let layers = layout.layers;
        let parts = request.parts.iter().map(|part| {
            let held = beginning.tokens() >= part.slots.end;
            let (source, reason) =
                if held { (Source::Device, String::new()) } else { (Source::Fresh, part.fresh_reason.clone()) };
            PartKv {
                layers: vec![None; layers as usize],
                arrived: 0,
                pooled: 0,
                outcome: PartOutcome { source, reason, bytes: 0 },
                failed: None,
                cached: part.key.is_some() && !held,
            }
        });
        Self {
            id,
            parts: parts.collect(),
            kv_bytes: u64::from(request.slots_needed()) * token_bytes,
            timeline: Timeline { received: request.now_ms(), ..Timeline::default() },
            stage: Stage::Waiting,
            admitted: false,
            output: 0,
            compute: Duration::ZERO,
            computed: Computed::default(),
            keeping: None,
            beginning: Arc::new(beginning),
            repair: None,
            users: Vec::new(),
            hold: None,
            rows: RowRanges::default(),
            rows_complete: false,
            loaders: Vec::new(),
            skips: Vec::new(),
            request: Arc::new(request),
            events,
            text,
            skipped: Skips::new(),
            started: Instant::now(),
            have: Skips::new(),
            arrived: None,
            came: 0.0,
            probing: false,
            probed: None,
            preload: 1,
            layout,
            layers,
        }
    }

    /// Tells the loaders, besides what they have heard, which rows need not come.
    fn skip(&mut self, skips: Skips) {
        if skips.is_empty() {
            return;
        }
        self.skipped.extend(skips);
        for loader in &self.skips {
            // One that has everything already does not listen.
            drop(loader.try_send(self.skipped.clone()));
        }
    }

    /// Takes in rows. Fails on rows outside chunks, and after the last message.
    pub(crate) fn add_rows(&mut self, rows: &RowRanges, complete_below: u32) -> Result<(), crate::Error> {
        self.request.check_rows(rows)?;
        if self.rows_complete {
            return Err(crate::Error::Request("rows after the last Rows message".to_owned()));
        }
        if !matches!(self.stage, Stage::Waiting) {
            // It went ahead without any chunk to load: every token is a row.
            return Ok(());
        }
        self.rows = self.rows.union(rows);
        if complete_below >= self.request.tokens() - self.request.targets.len() as u32 {
            self.rows_complete = true;
            self.timeline.rows_known = Some(self.request.now_ms());
            let skips = skippable(&self.request, &self.rows, self.beginning.tokens(), &self.users);
            self.skip(skips);
        }
        Ok(())
    }

    /// Whether a part's KV must be placed: it is cached, and not every token is computed in every layer anyway.
    fn needs(&self, part: usize) -> bool {
        let slots = &self.request.parts[part].slots;
        let options = &self.request.options;
        let picks_here = matches!(options.strategy, Strategy::Blend | Strategy::Guided) && options.ratio < 1.0;
        let all = self.rows.count_in(slots.clone()) == slots.len() && options.early_stop.window == 0;
        let all_selected = options.ratio >= 1.0
            && matches!(options.strategy, Strategy::Blend | Strategy::Guided)
            && options.early_stop.window == 0
            && self.request.parts[part].kind == Kind::Chunk
            && !self.request.parts[part].exact;
        self.parts[part].cached && (picks_here || !(all || all_selected))
    }

    /// What is computed, and how: the prompt, the slots that are computed from the start, and by part, whether its KV will
    /// be placed. Call once, when prefill begins.
    pub(crate) fn begin(&mut self) -> (Prompt, Vec<u32>, Vec<bool>) {
        let cached: Vec<bool> = self.parts.iter().map(|part| part.cached).collect();
        let placed: Vec<bool> = (0..self.parts.len()).map(|part| self.needs(part)).collect();
        let prompt = Prompt::new(&self.request, &cached);
        let uncached = self.request.parts.iter().zip(&self.parts).filter(|(_, kv)| !kv.cached);
        let mut rows = RowRanges::from_ranges(uncached.map(|(part, _)| part.slots.clone())).union(&self.rows);
        let options = &self.request.options;
        let from_all = options.strategy == Strategy::Blend && options.ratio > 0.0;
        if from_all || (options.strategy == Strategy::Guided && options.ratio >= 1.0) {
            rows = rows.union(&prompt.all_selectable());
        }
        // What the beginning holds is exact: nothing there is computed.
        let rows = rows.intersection(&RowRanges::from_range(self.beginning.tokens()..self.request.tokens()));
        self.timeline.rows_start = Some(self.request.now_ms());
        (prompt, rows.slots().collect(), placed)
    }

    /// What the worker computed, once it is through.
    pub(crate) fn computed(&mut self, computed: Computed) {
        self.timeline.rows_end = Some(self.request.now_ms());
        self.computed = computed;
    }

    /// What the schedule may do with this request.
    pub(crate) fn state(&self) -> State {
        let layer = match &self.stage {
            Stage::Decode(_) => return State::Decode,
            Stage::Busy => return State::Waiting,
            Stage::Prefill(prefill) => match prefill.wants() {
                Some(layer) => layer,
                None => return State::Prefill,
            },
            // Without a chunk to load, every token is a row.
            Stage::Waiting if self.admitted && (self.rows_complete || !self.loads_chunks()) => 0,
            Stage::Waiting => return State::Waiting,
        };
        if self.repair.is_some() {
            return State::Repair;
        }
        let mut state = State::Prefill;
        for (index, part) in self.parts.iter().enumerate() {
            if !self.needs(index) || part.layers[layer as usize].is_some() {
                continue;
            }
            if part.failed.is_some() {
                return State::Repair;
            }
            state = State::Waiting;
        }
        let early = matches!(self.stage, Stage::Waiting) && self.resident() < self.preload;
        if early && state == State::Prefill { State::Early } else { state }
    }

    /// Whether any chunk is placed rather than computed.
    fn loads_chunks(&self) -> bool {
        let mut parts = self.request.parts.iter().zip(&self.parts);
        parts.any(|(part, kv)| part.kind == Kind::Chunk && (kv.cached || kv.outcome.source == Source::Device))
    }

    /// Layers of which everything has come that is placed.
    fn resident(&self) -> u32 {
        let placed = (0..self.parts.len()).filter(|&part| self.needs(part));
        placed.map(|part| self.parts[part].arrived).min().unwrap_or(self.layers)
    }

    /// Takes the next repair in hand: the part and how far its encoding is.
    pub(crate) fn take_repair(&mut self) -> Option<(usize, Pass, Duration)> {
        if let Some((part, pass, spent)) = self.repair.as_mut() {
            let (part, spent) = (*part, *spent);
            return pass.take().map(|pass| (part, pass, spent));
        }
        let failed = self.parts.iter().enumerate().find(|(index, part)| self.needs(*index) && part.failed.is_some());
        let part = failed.map(|(index, _)| index)?;
        let prompt_part = &self.request.parts[part];
        let prefix = if prompt_part.behind_prefix { self.request.prefix_ids().to_vec() } else { Vec::new() };
        let batch =
            Batch { prefix_ids: prefix, chunks: vec![prompt_part.ids.clone()], encoding: prompt_part.variant.encoding };
        self.repair = Some((part, None, Duration::ZERO));
        Some((part, Pass::Waiting(batch), Duration::ZERO))
    }

    /// Whether nobody listens any more.
    pub(crate) fn gone(&self) -> bool {
        self.events.is_closed()
    }

    /// Tells the caller something. The channel has room for every token; one that is full is a caller that is gone.
    pub(crate) fn tell(&self, event: Result<Event, Status>) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.events.try_send(event) {
            tracing::warn!(request = self.id, "a caller's channel is full; an event is lost");
        }
    }

    /// The last event.
    pub(crate) fn done(&self, finish: &str) -> v1::PrefillDone {
        let outcomes: Vec<PartOutcome> = self.parts.iter().map(|part| part.outcome.clone()).collect();
        let beginning = self.beginning.tokens();
        let (request, timeline) = (&self.request, &self.timeline);
        receipt::done(request, &outcomes, &self.computed, beginning, timeline, finish, self.output)
    }

    /// How long ago the request came in.
    pub(crate) fn age(&self) -> Duration {
        self.request.clock.elapsed()
    }
}

/// Room in an [`Events`] channel: every token, and the few other events.
pub(crate) fn event_room(request: &Request) -> usize {
    request.sampling.max_tokens as usize + 8
}

/// Whether a request has any chunk: for logs.
pub(crate) fn chunks(request: &Request) -> usize {
    request.parts.iter().filter(|part| part.kind == Kind::Chunk).count()
}
