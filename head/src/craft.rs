//! Cache-Craft (arXiv 2502.15734) on the head: for each chunk of a prompt, the stored variant that costs least behind the
//! chunks before it, and the tokens of it to compute anew.
//!
//! Captures are read from the cache service and trusted for 30 s. Weighs and counts only: the worker computes, captures and
//! stores. Invariant: a decision that is not fresh names a variant whose KV was there when its captures were read.

mod keep;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use kvsplice_kv::craft::choose;
use kvsplice_kv::layout::KV_SEMANTICS;
use kvsplice_kv::{Capture, ChunkId, Encoding, Variant};
use kvsplice_proto::cache::CacheClient;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use tracing::{debug, warn};

use crate::corpus::blocking;
use crate::{Config, Error};

pub use keep::forget;

/// How long captures are used without a look at the store.
const TRUSTED: Duration = Duration::from_secs(30);
/// Captures held in memory, in bytes.
const MEMORY_BYTES: u64 = 64 << 20;
/// A chunk's captures are about this large, in bytes: for the map's estimate of how many to expect.
const TYPICAL_BYTES: u64 = 16 << 10;
/// Chunks whose uses are counted.
const COUNTED: usize = 1 << 16;
/// Chunks looked up at once, and variants of each.
const CHUNKS: usize = 8;
const VARIANTS: usize = 4;
/// Requests whose uses wait to be written; those of more are not counted.
const UPDATES: usize = 64;
/// A use that costs less than this counts like one that costs this.
const LEAST_COST: f64 = 0.05;

/// A chunk of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The chunk.
    pub id: ChunkId,
    /// Its tokens.
    pub tokens: u32,
}

/// What to do with one chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What was measured of the variant to load; the clean-room chunk where no captured one is cheaper.
    pub stale: Capture,
    /// Share of the chunk to compute anew, in 0..=1.
    pub cfo: f64,
    /// Tokens to compute anew, ascending, counted from the chunk's first; all of them when it is fresh.
    pub rows: Vec<u32>,
    /// Nothing is to be loaded: no variant is stored, or none is worth it.
    pub fresh: bool,
    /// By policy, this use is to be captured.
    pub capture: bool,
}

impl Decision {
    /// The variant to load.
    pub fn variant(&self) -> Variant {
        self.stale.variant
    }
}

/// What was stored of a chunk in one encoding when it was read.
#[derive(Clone)]
struct Held {
    read: Instant,
    /// The clean-room chunk first, if there is one, then captures by key.
    variants: Arc<Vec<Capture>>,
}

#[derive(Clone)]
struct Bytes;

impl Weighter<(ChunkId, Encoding), Held> for Bytes {
    fn weight(&self, _: &(ChunkId, Encoding), held: &Held) -> u64 {
        let capture = |capture: &Capture| 256 + 40 * capture.prefix.len() as u64 + 4 * capture.external.len() as u64;
        held.variants.iter().map(capture).sum::<u64>() + 128
    }
}

/// The captures of all chunks: a handle to the store with a bounded memory. Heads share nothing else.
pub struct Captures {
    cache: CacheClient,
    held: Cache<(ChunkId, Encoding), Held, Bytes>,
    counts: Cache<ChunkId, Arc<AtomicU32>>,
    /// Held while records change, so that this head's changes do not undo each other. Another head may still win: then a
    /// use is not counted.
    changing: Mutex<()>,
    updates: Semaphore,
    most_variants: usize,
    most_chunks: usize,
    capture_after: u32,
}

impl std::fmt::Debug for Captures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captures").field("held", &self.held.len()).finish_non_exhaustive()
    }
}

impl Captures {
    /// Reads through `cache`, whose deadline holds for each call.
    pub fn new(cache: CacheClient, config: &Config) -> Self {
        Self {
            cache,
            held: Cache::with_weighter((MEMORY_BYTES / TYPICAL_BYTES) as usize, MEMORY_BYTES, Bytes),
            counts: Cache::new(COUNTED),
            changing: Mutex::default(),
            updates: Semaphore::new(UPDATES),
            most_variants: config.craft_variants,
            most_chunks: config.craft_chunks,
            capture_after: config.craft_capture_after,
        }
    }

    /// Decides for each chunk of a prompt, in order. What cannot be read within `deadline` counts as not stored, so a cache
    /// service that is down makes every chunk fresh.
    ///
    /// # Errors
    /// [`Error::Task`] when the computation ends early.
    pub async fn decide(
        &self,
        chunks: &[Chunk],
        encoding: Encoding,
        alpha: f64,
        deadline: Duration,
    ) -> Result<Vec<Decision>, Error> {
        let deadline = Instant::now() + deadline;
        let mut seen = HashSet::new();
        let distinct: Vec<Chunk> = chunks.iter().filter(|chunk| seen.insert(chunk.id)).copied().collect();
        let mut reads = Vec::with_capacity(distinct.len());
        for chunk in distinct {
            reads.push(self.get_until(chunk, encoding, deadline).boxed());
        }
        let read: Vec<_> = stream::iter(reads).buffer_unordered(CHUNKS).collect().await;
        let mut stored: HashMap<ChunkId, Arc<Vec<Capture>>> = HashMap::with_capacity(read.len());
        let mut failed: Option<(usize, String)> = None;
        for (id, variants) in read {
            match variants {
                Ok(variants) => drop(stored.insert(id, variants)),
                Err(detail) => failed = Some((failed.map_or(1, |(count, _)| count + 1), detail)),
            }
        }
        if let Some((chunks, error)) = failed {
            warn!(chunks, error, "captures cannot be read: these chunks are computed whole");
        }
        let planned = chunks.to_vec();
        let mut decisions = blocking("weigh captures", move || weigh(&planned, &stored, encoding, alpha)).await?;
        seen.clear();
        for (index, (chunk, decision)) in chunks.iter().zip(&mut decisions).enumerate() {
            // The first chunk of a prompt is a clean-room chunk there.
            let counts = seen.insert(chunk.id) && index > 0;
            decision.capture = counts && decision.capture && self.count(chunk.id);
        }
        Ok(decisions)
    }

    async fn get_until(
        &self,
        chunk: Chunk,
        encoding: Encoding,
        deadline: Instant,
    ) -> (ChunkId, Result<Arc<Vec<Capture>>, String>) {
        let read = match tokio::time::timeout_at(deadline, self.get(chunk, encoding)).await {
            Ok(read) => read.map_err(|error| error.to_string()),
            Err(_elapsed) => Err("the deadline passed".to_owned()),
        };
        (chunk.id, read)
    }

    /// Counts a use of a chunk without captures. Returns whether it is to be captured.
    fn count(&self, chunk: ChunkId) -> bool {
        if self.capture_after == 0 {
            return false;
        }
        let uses = match self.counts.get_or_insert_with(&chunk, || Ok::<_, Infallible>(Arc::default())) {
            Ok(uses) => uses,
            Err(never) => match never {},
        };
        uses.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= self.capture_after
    }

    /// What is stored of a chunk, from memory if it was read lately. One task reads a chunk, others wait for it.
    async fn get(&self, chunk: Chunk, encoding: Encoding) -> Result<Arc<Vec<Capture>>, Error> {
        let key = (chunk.id, encoding);
        self.held.remove_if(&key, |held| held.read.elapsed() >= TRUSTED);
        Ok(self.held.get_or_insert_async(&key, self.read(chunk, encoding)).await?.variants)
    }

    async fn read(&self, chunk: Chunk, encoding: Encoding) -> Result<Held, Error> {
        let read = Instant::now();
        let (folder, clean) = (Capture::folder(chunk.id), Variant::clean(encoding));
        let (keys, clean_there) =
            tokio::try_join!(self.cache.list_records(&folder), self.is_stored(chunk.id, clean)).map_err(failed)?;
        let usable = |variant: &Variant| {
            variant.encoding == encoding && variant.kv_semantics == KV_SEMANTICS && *variant != clean
        };
        let wanted: Vec<Variant> =
            keys.iter().filter_map(|key| keep::parse(key)).map(|(_, variant)| variant).filter(usable).collect();
        let mut reads = Vec::with_capacity(wanted.len());
        for variant in wanted {
            reads.push(self.read_capture(chunk, variant).boxed());
        }
        let captures: Vec<Option<Capture>> = stream::iter(reads).buffered(VARIANTS).try_collect().await?;
        let clean = clean_there.then(|| Capture::clean(chunk.id, clean, chunk.tokens));
        Ok(Held { read, variants: Arc::new(clean.into_iter().chain(captures.into_iter().flatten()).collect()) })
    }

    /// One capture; none if its record or its KV is gone, or the record cannot be used.
    async fn read_capture(&self, chunk: Chunk, variant: Variant) -> Result<Option<Capture>, Error> {
        let key = format!("{}/{variant}", Capture::folder(chunk.id));
        let (json, there) =
            tokio::try_join!(self.cache.get_record(&key), self.is_stored(chunk.id, variant)).map_err(failed)?;
        let Some(json) = json.filter(|_| there) else { return Ok(None) };
        match Capture::from_json(&json) {
            Ok(capture) if capture.key() == key && capture.tokens == chunk.tokens => Ok(Some(capture)),
            Ok(capture) => {
                warn!(key, found = capture.key(), tokens = capture.tokens, "a record is of another capture");
                Ok(None)
            }
            Err(error) => {
                warn!(key, %error, "a record cannot be used");
                Ok(None)
            }
        }
    }

    async fn is_stored(&self, chunk: ChunkId, variant: Variant) -> Result<bool, tonic::Status> {
        Ok(self.cache.contains(&[chunk], variant, Duration::ZERO).await?.found == [true])
    }

    /// Adds the uses that `decisions` made of captures to their records, each weighted by the inverse of its cost. For a
    /// task of its own, after the answer. A use that cannot be written is not counted.
    pub async fn used(&self, decisions: &[Decision]) {
        let mut weights: BTreeMap<String, f64> = BTreeMap::new();
        for decision in decisions.iter().filter(|decision| !decision.fresh && !decision.stale.prefix.is_empty()) {
            *weights.entry(decision.stale.key()).or_default() += 1.0 / decision.cfo.max(LEAST_COST);
        }
        if weights.is_empty() {
            return;
        }
        let Ok(_permit) = self.updates.try_acquire() else {
            debug!(captures = weights.len(), "uses are not counted: too many wait");
            return;
        };
        let _alone = self.changing.lock().await;
        let updates = stream::iter(&weights).for_each_concurrent(VARIANTS, |(key, &weight)| async move {
            if let Err(error) = self.add_use(key, weight).await {
                warn!(key, %error, "a use is not counted");
            }
        });
        updates.await;
    }

    async fn add_use(&self, key: &str, weight: f64) -> Result<(), Error> {
        // One that is gone must not come back.
        let Some(json) = self.cache.get_record(key).await.map_err(failed)? else { return Ok(()) };
        let mut capture = Capture::from_json(&json)?;
        capture.uses += weight;
        self.cache.put_record(key, capture.to_json()?).await.map_err(Error::cache("write a capture"))
    }
}

fn failed(status: tonic::Status) -> Error {
    Error::cache("read captures")(status)
}

/// Decisions from what is stored. `capture` is set where that was read and holds no captured variant.
fn weigh(
    chunks: &[Chunk],
    stored: &HashMap<ChunkId, Arc<Vec<Capture>>>,
    encoding: Encoding,
    alpha: f64,
) -> Vec<Decision> {
    let ids: Vec<ChunkId> = chunks.iter().map(|chunk| chunk.id).collect();
    let mut decisions = Vec::with_capacity(chunks.len());
    for (index, chunk) in chunks.iter().enumerate() {
        let read = stored.get(&chunk.id);
        let variants = read.map_or(&[][..], |variants| variants.as_slice());
        let choice = choose(variants, alpha, &ids[..index]);
        let chosen = choice.and_then(|(place, cfo)| Some((variants.get(place)?.clone(), cfo)));
        let (stale, cfo) =
            chosen.unwrap_or_else(|| (Capture::clean(chunk.id, Variant::clean(encoding), chunk.tokens), 1.0));
        decisions.push(Decision {
            rows: stale.rows(cfo),
            fresh: cfo >= 1.0,
            capture: read.is_some() && variants.iter().all(|variant| variant.prefix.is_empty()),
            stale,
            cfo,
        });
    }
    decisions
}
