//! The engine: one task that owns every request and feeds the compute thread one unit of work at a time.
//!
//! Others talk to it through a `Handle`. A unit is at most one slice of one layer, so that news (rows, layers, callers
//! that left) is seen within a unit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvsplice_kv::Variant;
use kvsplice_model::decoder::SLICE_ROWS;
use kvsplice_model::encode::layout;
use kvsplice_model::resident::LayerKv;
use kvsplice_model::{Compute, Model};
use kvsplice_proto::cache::{CacheClient, us_per_token};
use kvsplice_proto::load::{Loaded, Loader, Wanted};
use tokio::sync::{Semaphore, mpsc};
use tonic::Status;
use tracing::{Instrument, Span, debug, info, warn};

use crate::active::{Active, Arrived, Event, Events, Stage};
use crate::beginning::Beginnings;
use crate::decode::step;
use crate::encode::{Call, store, tokens};
use crate::handle::{Command, Handle, Load};
use crate::keep::keep;
use crate::pace::{Cost, Pace, measure};
use crate::pass::{Encoded, Pass, Prefixes};
use crate::placing::Placing;
use crate::pool::Pool;
use crate::prefill::{Prefill, Step};
use crate::request::Request;
use crate::schedule::{Schedule, State, Unit};
use crate::text::Text;
use crate::through::{Through, finish};
use crate::{Config, Error};

/// Rows of a prefill slice while other requests generate: their tokens wait for one slice at most.
const SHARED_SLICE_ROWS: usize = 160;
/// Times that a loader may be told what need not come before it has listened: once by the head, else by plans.
const SKIPS: usize = 16;
/// While a plan may change with time, it is made anew this often.
const DECIDE_EVERY: Duration = Duration::from_millis(10);
/// Encoded batches that may wait for the cache service.
const STORING_BATCHES: usize = 2;

/// The state of every request in hand.
pub(crate) struct Engine {
    queue_limit: usize,
    kv_budget: u64,
    /// In order of arrival.
    active: Vec<Active>,
    encodes: VecDeque<Call>,
    beginnings: Beginnings,
    pool: Pool,
    prefixes: Prefixes,
    schedule: Schedule,
    storing: Arc<Semaphore>,
    commands: mpsc::WeakSender<Command>,
    load: Arc<Load>,
    next_id: u64,
    plan_loads: bool,
    /// None where loads are not planned.
    pace: Option<Pace>,
    model: Model,
    compute: Compute,
    cache: CacheClient,
    loader: Loader,
}

impl Engine {
    /// An engine that `handle` leads to.
    pub(crate) fn new(handle: &Handle, config: &Config, model: Model, compute: Compute, loader: Loader) -> Self {
        Self {
            queue_limit: config.queue_limit as usize,
            kv_budget: config.kv_bytes,
            active: Vec::new(),
            encodes: VecDeque::new(),
            beginnings: handle.beginnings.clone(),
            pool: handle.pool.clone(),
            prefixes: Prefixes::default(),
            schedule: Schedule::new(Instant::now()),
            storing: Arc::new(Semaphore::new(STORING_BATCHES)),
            commands: handle.downgrade(),
            load: Arc::clone(&handle.load),
            next_id: 0,
            plan_loads: config.plan_loads,
            pace: None,
            model,
            compute,
            cache: loader.client(),
            loader,
        }
    }

    /// Runs until the last handle is gone.
    pub(crate) async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        if self.plan_loads {
            self.measure().await;
        }
        loop {
            while let Ok(command) = inbox.try_recv() {
                self.apply(command);
            }
            self.active.retain(|request| !request.gone());
            self.encodes.retain(|call| !call.events.is_closed());
            self.admit();
            let undecided = self.weigh();
            self.active.iter_mut().for_each(Active::end_probe);
            let states: Vec<State> = self.active.iter().map(Active::state).collect();
            let encode_ready =
                self.storing.available_permits() > 0 && self.encodes.front_mut().is_some_and(Call::prepare);
            match self.schedule.next(&states, encode_ready, Instant::now()) {
                Some(Unit::Decode) => self.decode().await,
                Some(Unit::Prefill(index)) => self.prefill(index).await,
                Some(Unit::Repair(index)) => self.repair(index).await,
                Some(Unit::Encode) => self.encode().await,
                None if undecided => match tokio::time::timeout(DECIDE_EVERY, inbox.recv()).await {
                    Ok(Some(command)) => self.apply(command),
                    Ok(None) => return,
                    Err(_) => {}
                },
                None => match inbox.recv().await {
                    Some(command) => self.apply(command),
                    None => return,
                },
            }
        }
    }

    /// Measures the speed of computing, which every plan needs.
    async fn measure(&mut self) {
        let model = self.model.clone();
        let measured = self.compute.run(move || model.with_decoder(measure)).await;
        match measured {
            Ok(Ok(compute)) => self.pace = Some(Pace::new(Cost::of(&self.model.config), compute)),
            Ok(Err(error)) | Err(error) => warn!(%error, "loads are not planned: computing cannot be measured"),
        }
    }

    /// Decides for the request that is next to compute whether its chunks are loaded. Whether that may change with time.
    fn weigh(&mut self) -> bool {
        let Some(pace) = &self.pace else { return false };
        let next = self.active.iter_mut().find(|request| !matches!(request.stage, Stage::Decode(_)));
        let Some(next) = next.filter(|request| request.undecided()) else { return false };
        next.weigh(pace);
        true
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Start { request, events, accepted, span } => {
                let started = self.start(*request, events, span);
                // A caller that is gone already is dropped at the next turn.
                drop(accepted.send(started));
            }
            Command::Rows { id, rows, complete_below } => {
                let Some(index) = self.active.iter().position(|request| request.id == id) else { return };
                if let Err(error) = self.active[index].add_rows(&rows, complete_below) {
                    self.fail(index, error.into());
                }
            }
            Command::Loaded { id, news } => {
                if let Some(request) = self.active.iter_mut().find(|request| request.id == id) {
                    if let Loaded::Failed { reason, .. } = &news {
                        warn!(request = id, reason, "a chunk is not usable; it is computed anew");
                    }
                    request.loaded(news);
                }
            }
            Command::Cancel { id, status } => {
                let Some(index) = self.active.iter().position(|request| request.id == id) else { return };
                match status {
                    Some(status) => self.fail(index, status),
                    None => {
                        debug!(request = id, "canceled");
                        self.active.remove(index);
                    }
                }
            }
            Command::Encode(call) => self.encodes.push_back(*call),
            Command::Wake => {}
        }
    }

    fn start(&mut self, request: Request, events: Events, span: Span) -> Result<u64, Error> {
        if self.active.len() >= self.queue_limit {
            return Err(Error::Busy(format!("{} requests in hand, the limit", self.active.len())));
        }
        let config = &self.model.config;
        let token_bytes = token_bytes(&self.model);
        let text = Text::new(&self.model.tokenizer, request.sampling.stop.clone());
        let id = self.next_id;
        let beginning = self.beginnings.find(&request);
        let chunks = layout(config, request.variant.encoding);
        let mut active = Active::new(id, request, events, text, beginning, chunks, token_bytes);
        if active.kv_bytes > self.kv_budget {
            return Err(Error::Busy(format!(
                "the request needs {} bytes of KV, the limit is {}",
                active.kv_bytes, self.kv_budget
            )));
        }
        self.next_id += 1;
        for (variant, chunks) in active.wanted(&self.pool, &Cost::of(config)) {
            let Some(commands) = self.commands.upgrade() else { break };
            let wanted = Wanted {
                chunks,
                layout: layout(config, variant.encoding),
                variant,
                lease: active.request.lease.clone(),
                // The head holds a lease for as long as the request lasts.
                protect: Duration::ZERO,
            };
            let keeper = active.keeper();
            let sink = async move |news| {
                let news = match &keeper {
                    Some(keeper) => keeper.take_in(news),
                    None => news,
                };
                commands.send(Command::Loaded { id, news }).await.is_ok()
            };
            let (skips, said) = mpsc::channel(SKIPS);
            let loader = self.loader.clone();
            let loading = async move { loader.load(wanted, said, sink).await };
            let loading = tokio::spawn(loading.instrument(span.clone()));
            active.loads(loading.abort_handle(), skips);
        }
        self.active.push(active);
        Ok(id)
    }

    /// Lets requests in while their KV fits the budget, in order of arrival.
    fn admit(&mut self) {
        let mut used: u64 = self.active.iter().filter(|request| request.admitted).map(|request| request.kv_bytes).sum();
        for request in self.active.iter_mut().filter(|request| !request.admitted) {
            if used + request.kv_bytes > self.kv_budget {
                break;
            }
            used += request.kv_bytes;
            request.admitted = true;
        }
        let running = self.active.iter().filter(|request| !matches!(request.stage, Stage::Waiting)).count() as u32;
        self.load.running.store(running, Ordering::Relaxed);
        self.load.queued.store(self.active.len() as u32 - running, Ordering::Relaxed);
        self.load.kv_bytes.store(used, Ordering::Relaxed);
    }

    fn fail(&mut self, index: usize, status: Status) {
        let request = self.active.remove(index);
        warn!(request = request.id, code = ?status.code(), error = status.message(), "request failed");
        request.tell(Err(status));
    }

    fn finish(&mut self, index: usize, finish: &str) {
        let mut request = self.active.remove(index);
        info!(request = request.id, finish, output = request.output, elapsed = ?request.age(), "request done");
        let mut done = request.done(finish);
        let Some(keeping) = request.keeping.take() else { return request.tell(Ok(Event::Done(done))) };
        // The last event says what was kept, so it waits for that.
        let events = request.events.clone();
        tokio::spawn(async move {
            done.captured = keeping.await.unwrap_or(0);
            // A caller that has left needs no answer.
            drop(events.send(Ok(Event::Done(done))).await);
        });
    }

    async fn prefill(&mut self, index: usize) {
        let shared = self.active.iter().any(|request| matches!(request.stage, Stage::Decode(_)));
        let rows = if shared { SHARED_SLICE_ROWS } else { SLICE_ROWS };
        let active = &mut self.active[index];
        let begin = matches!(active.stage, Stage::Waiting).then(|| active.begin());
        let wants = match &active.stage {
            Stage::Prefill(prefill) => prefill.wants(),
            // A prefill is set up first; then it says what it wants.
            _ => None,
        };
        let arrived = wants.map_or_else(Vec::new, |layer| active.take_layer(layer));
        let stage = std::mem::replace(&mut active.stage, Stage::Busy);
        let request = Arc::clone(&active.request);
        let beginning = Arc::clone(&active.beginning);
        let spent = active.compute;
        let model = self.model.clone();
        let outcome = self.compute.run(move || {
            let started = Instant::now();
            let computed = model.with_decoder(|decoder| -> Result<Computed, kvsplice_model::Error> {
                if let Some((prompt, rows, placed)) = begin {
                    let mut cache = decoder.cache(request.slots_needed())?;
                    beginning.copy_to(&mut cache)?;
                    let placing = Placing::new(decoder, &prompt, &placed, beginning.tokens())?;
                    return Ok(Computed::More(Box::new(Prefill::new(decoder, prompt, rows, cache, placing)?)));
                }
                let Stage::Prefill(mut prefill) = stage else {
                    return Err(kvsplice_model::Error::Argument("a prefill without a beginning".to_owned()));
                };
                let ready = |layer: Option<Arrived>| Some(layer?.ready(decoder.device()));
                let stored: Vec<Option<LayerKv>> = arrived.into_iter().map(ready).collect();
                match prefill.advance(decoder, &stored, rows)? {
                    Step::More => Ok(Computed::More(prefill)),
                    Step::Done(finished) => {
                        let through = finish(decoder, &request, &beginning, *finished, spent + started.elapsed())?;
                        Ok(Computed::Done(Box::new(through)))
                    }
                }
            });
            (computed, started.elapsed())
        });
        match outcome.await {
            Ok((Ok(Computed::More(prefill)), elapsed)) => {
                let active = &mut self.active[index];
                active.compute += elapsed;
                active.stage = Stage::Prefill(prefill);
            }
            Ok((Ok(Computed::Done(result)), elapsed)) => {
                self.active[index].compute += elapsed;
                self.through(index, *result);
            }
            Ok((Err(error), _)) | Err(error) => self.fail(index, Error::Model(error).into()),
        }
    }

    /// A prompt's rows are computed: scores, or the first token, go to the caller.
    fn through(&mut self, index: usize, result: Through) {
        let Through { computed, scores, logits, sequence, captured } = result;
        let active = &mut self.active[index];
        active.computed(computed);
        if let Some(pace) = &mut self.pace {
            active.tell_pace(pace);
        }
        if !captured.is_empty() {
            let request = Arc::clone(&active.request);
            // All its rows were computed for the capture.
            let us_per_token = us_per_token(active.compute, request.tokens().into());
            let storing = keep(self.cache.clone(), &self.model, request, self.dtype(), captured, us_per_token);
            let active = &mut self.active[index];
            active.keeping = Some(tokio::spawn(storing));
        }
        let active = &mut self.active[index];
        if let Some(scores) = scores {
            active.tell(Ok(Event::Scores(scores)));
            self.finish(index, "length");
            return;
        }
        if active.request.want_logits {
            active.tell(Ok(Event::Logits(logits)));
        }
        match sequence {
            None => self.finish(index, "length"),
            Some(sequence) => {
                let token = sequence.token;
                active.stage = Stage::Decode(sequence);
                self.accept(index, token);
            }
        }
    }

    /// One token for every generating request.
    async fn decode(&mut self) {
        let (mut ids, mut sequences) = (Vec::new(), Vec::new());
        for request in &mut self.active {
            match std::mem::replace(&mut request.stage, Stage::Busy) {
                Stage::Decode(sequence) => {
                    ids.push(request.id);
                    sequences.push(*sequence);
                }
                other => request.stage = other,
            }
        }
        let model = self.model.clone();
        let outcome = self.compute.run(move || {
            let drawn = model.with_decoder(|decoder| step(decoder, &mut sequences));
            drawn.map(|drawn| (drawn, sequences))
        });
        match outcome.await {
            Ok(Ok((drawn, sequences))) => {
                for ((id, drawn), sequence) in ids.into_iter().zip(drawn).zip(sequences) {
                    let Some(index) = self.active.iter().position(|request| request.id == id) else { continue };
                    match drawn {
                        Ok(token) => {
                            self.active[index].stage = Stage::Decode(Box::new(sequence));
                            self.accept(index, token);
                        }
                        Err(error) => self.fail(index, Error::Model(error).into()),
                    }
                }
            }
            Ok(Err(error)) | Err(error) => {
                let status = Status::from(Error::Model(error));
                for id in ids {
                    if let Some(index) = self.active.iter().position(|request| request.id == id) {
                        self.fail(index, status.clone());
                    }
                }
            }
        }
    }

    /// Takes in a drawn token: text for the caller, or the end.
    fn accept(&mut self, index: usize, token: u32) {
        let active = &mut self.active[index];
        let now = active.request.now_ms();
        active.timeline.first_token.get_or_insert(now);
        if self.model.config.eos.contains(&token) && !active.request.sampling.ignore_eos {
            self.end(index, "eos");
            return;
        }
        let added = match active.text.push(token) {
            Ok(added) => added,
            Err(error) => return self.fail(index, Error::Model(error).into()),
        };
        active.output += 1;
        active.tell(Ok(Event::Token(kvsplice_proto::v1::Token { id: token, text: added.text, at_ms: now })));
        if added.stopped {
            self.finish(index, "stop");
        } else if active.output >= active.request.sampling.max_tokens {
            self.end(index, "length");
        }
    }

    /// Ends output for another reason than a stop string: text that was held back comes out.
    fn end(&mut self, index: usize, finish: &str) {
        let active = &mut self.active[index];
        let rest = active.text.finish();
        if !rest.is_empty() {
            let at_ms = active.request.now_ms();
            // No new token: the id repeats the one whose text was held back.
            let id = match &active.stage {
                Stage::Decode(sequence) => sequence.token,
                _ => 0,
            };
            active.tell(Ok(Event::Token(kvsplice_proto::v1::Token { id, text: rest, at_ms })));
        }
        self.finish(index, finish);
    }

    async fn repair(&mut self, index: usize) {
        let Some((part, pass, spent)) = self.active[index].take_repair() else { return };
        let (outcome, took) = self.advance(pass).await;
        let spent = spent + took;
        match outcome {
            Ok(Encoded::More(pass)) => self.active[index].repair = Some((part, Some(pass), spent)),
            Ok(Encoded::Done(mut encoded)) => {
                let us_per_token = us_per_token(spent, tokens(&encoded));
                let active = &mut self.active[index];
                let (Some(kv), Some(key)) = (encoded.pop(), active.request.parts[part].key.clone()) else { return };
                active.repaired(part, &kv);
                let variant = Variant::clean(kv.layout.encoding);
                let (cache, dtype) = (self.cache.clone(), self.dtype());
                tokio::spawn(async move {
                    if let Err(status) = store(&cache, &key, variant, dtype, kv, us_per_token).await {
                        warn!(chunk = %key.id().short(), error = status.message(), "a repaired chunk is not stored");
                    }
                });
            }
            Err(error) => self.fail(index, Error::Model(error).into()),
        }
    }

    /// Computes a layer of a batch, and says what that took.
    fn advance(&self, pass: Pass) -> impl Future<Output = Advanced> + use<> {
        let (model, prefixes, compute) = (self.model.clone(), self.prefixes.clone(), self.compute.clone());
        let job = move || {
            let started = Instant::now();
            let encoded = model.with_decoder(|decoder| pass.advance(decoder, &prefixes));
            (encoded, started.elapsed())
        };
        async move {
            match compute.run(job).await {
                Ok(advanced) => advanced,
                Err(error) => (Err(error), Duration::ZERO),
            }
        }
    }

    async fn encode(&mut self) {
        let Some(mut call) = self.encodes.pop_front() else { return };
        let Some((chunks, pass)) = call.running.take() else { return };
        let (outcome, took) = self.advance(pass).await;
        call.spent += took;
        match outcome {
            Ok(Encoded::More(pass)) => {
                call.running = Some((chunks, pass));
                self.encodes.push_front(call);
            }
            Ok(Encoded::Done(encoded)) => {
                let us_per_token = us_per_token(call.spent, tokens(&encoded));
                let permit = Arc::clone(&self.storing).try_acquire_owned();
                let (cache, variant, dtype) = (self.cache.clone(), call.variant, self.dtype());
                let (events, commands) = (call.events.clone(), self.commands.clone());
                tokio::spawn(async move {
                    for (chunk, kv) in chunks.into_iter().zip(encoded) {
                        let stored = store(&cache, &chunk.key, variant, dtype, kv, us_per_token).await;
                        let failed = stored.is_err();
                        if events.send(stored).await.is_err() || failed {
                            break;
                        }
                    }
                    drop(permit);
                    if let Some(commands) = commands.upgrade() {
                        drop(commands.send(Command::Wake).await);
                    }
                });
                if !call.waiting.is_empty() {
                    // Calls take turns, batch by batch.
                    self.encodes.push_back(call);
                }
            }
            Err(error) => drop(call.events.try_send(Err(Error::Model(error).into()))),
        }
    }

    fn dtype(&self) -> kvsplice_model::Dtype {
        self.model.with_decoder(|decoder| decoder.dtype())
    }
}

/// What a layer of a batch led to, and the time that it took.
type Advanced = (Result<Encoded, kvsplice_model::Error>, Duration);

/// What a prefill unit led to.
enum Computed {
    More(Box<Prefill>),
    Done(Box<Through>),
}

/// Bytes of K and V of one token in a sequence's cache.
pub(crate) fn token_bytes(model: &Model) -> u64 {
    let numbers = layout(&model.config, kvsplice_kv::Encoding::F32).token_bytes() / 4;
    (numbers * model.with_decoder(|decoder| decoder.dtype().bytes())) as u64
}
