//! Chunk layers that came over the wire, kept in this worker's memory for the next prompt that has them.
//!
//! Mapped layers are not kept: the system's page cache is their pool. One byte limit, always held; what goes first is decided
//! by the clock of the cache tiers (`kvsplice_kv::eviction`). A chunk that a request holds (its lease here, which ends with the
//! request, however that ends) is never evicted. What no request has asked for during the longest lease is dropped: then
//! the cache service may have been told to erase it. Whoever takes a layer has the cache service's word, of this request,
//! that the chunk is stored; the pool does not ask.
//!
//! Rows that a request computes anew are not loaded, so a layer may be kept with gaps. What it has need not come again: the
//! next request loads only the missing rows, and puts both together here before anything looks at them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kvsplice_kv::eviction::{Book, Eviction};
use kvsplice_kv::{ChunkId, KvLayout, RowRanges, Variant};
use kvsplice_proto::load::{Form, Loaded};
use kvsplice_proto::v1;

/// Layers of a chunk that no request has asked for during this time are dropped. The longest lease of the cache service.
const UNASKED: Duration = Duration::from_secs(600);
/// How often that is looked after.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Bookkeeping of one layer, in bytes.
const ENTRY_BYTES: u64 = 256;

/// One stored form of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    pub(crate) chunk: ChunkId,
    pub(crate) variant: Variant,
}

/// A chunk that a request wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    /// Its place in the load.
    pub(crate) place: usize,
    pub(crate) key: PoolKey,
    /// What computing the whole chunk takes, in one unit for all.
    pub(crate) cost: f64,
    /// The cache service has it, as of this request: layers may be taken and kept.
    pub(crate) confirmed: bool,
    /// The shape of its layers.
    pub(crate) layout: KvLayout,
    pub(crate) tokens: u32,
}

/// A layer that is kept, as it is stored; zeros stand for the rows that it lacks.
#[derive(Clone, Debug)]
struct Entry {
    data: Bytes,
    lacks: RowRanges,
}

/// What the pool has of a chunk.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Whole layers, ascending.
    pub(crate) whole: Vec<(u32, Bytes)>,
    /// Rows that it has of every other layer.
    pub(crate) have: RowRanges,
}

/// The pool; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// None when it is off.
    state: Option<Arc<Mutex<State>>>,
    /// Of each chunk.
    layers: u32,
}

#[derive(Debug)]
struct State {
    book: Book<(PoolKey, u32), Entry>,
    chunks: HashMap<PoolKey, Kept>,
    hits: u64,
    misses: u64,
    evicted: u64,
}

/// A chunk that is held, or of which layers are here.
#[derive(Debug)]
struct Kept {
    /// Layers in the book.
    layers: u32,
    /// Requests that hold it.
    holders: u32,
    asked: Instant,
}

/// The chunks of one request. They stay until this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    pool: Pool,
    wishes: Vec<Wish>,
    /// By place and layer, those with gaps that were taken.
    gapped: HashMap<(usize, u32), Entry>,
}

impl Pool {
    /// A pool of at most `limit_bytes`, of chunks with so many layers; off when the limit is 0.
    pub(crate) fn new(limit_bytes: u64, layers: u32) -> Self {
        let state = || State {
            book: Book::new(Eviction::Value, limit_bytes),
            chunks: HashMap::new(),
            hits: 0,
            misses: 0,
            evicted: 0,
        };
        Self { state: (limit_bytes > 0).then(|| Arc::new(Mutex::new(state()))), layers }
    }

    /// Drops what nobody asks for, from now on, until the pool is gone. Must be called within a tokio runtime.
    pub(crate) fn watch(&self) {
        let Some(state) = &self.state else { return };
        let (state, layers) = (Arc::downgrade(state), self.layers);
        tokio::spawn(async move {
            let mut clock = tokio::time::interval(LOOK_EVERY);
            loop {
                clock.tick().await;
                let Some(state) = state.upgrade() else { return };
                Self { state: Some(state), layers }.drop_unasked(Instant::now());
            }
        });
    }

    // A panic while the lock was held cannot leave a layer that is wrong, only counts.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        Some(self.state.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Holds the chunks of a request, from before it loads them until it is over. Those that the cache service has not
    /// confirmed are forgotten instead.
    pub(crate) fn hold(&self, mut wishes: Vec<Wish>) -> Hold {
        match self.state() {
            Some(mut state) => {
                for wish in wishes.iter().filter(|wish| !wish.confirmed) {
                    state.forget(&wish.key, self.layers);
                }
                wishes.retain(|wish| wish.confirmed);
                for wish in &wishes {
                    let fresh = Kept { layers: 0, holders: 0, asked: Instant::now() };
                    let kept = state.chunks.entry(wish.key).or_insert(fresh);
                    kept.holders += 1;
                    kept.asked = Instant::now();
                }
            }
            None => wishes.clear(),
        }
        Hold { pool: self.clone(), wishes, gapped: HashMap::new() }
    }

    /// What Status says of it.
    pub(crate) fn status(&self) -> v1::ChunkPool {
        let Some(state) = self.state() else { return v1::ChunkPool::default() };
        v1::ChunkPool {
            bytes: state.book.bytes(),
            limit_bytes: state.book.limit_bytes(),
            layers: state.book.len() as u64,
            held: state.chunks.values().filter(|kept| kept.holders > 0).count() as u64,
            hits: state.hits,
            misses: state.misses,
            evicted: state.evicted,
        }
    }

    fn drop_unasked(&self, now: Instant) {
        let Some(mut state) = self.state() else { return };
        let unasked = |kept: &Kept| kept.holders == 0 && now.saturating_duration_since(kept.asked) >= UNASKED;
        let keys: Vec<PoolKey> = state.chunks.iter().filter(|(_, kept)| unasked(kept)).map(|(key, _)| *key).collect();
        for key in keys {
            state.forget(&key, self.layers);
        }
    }
}

impl State {
    /// Drops the layers of a chunk; whoever holds it goes on holding it.
    fn forget(&mut self, key: &PoolKey, layers: u32) {
        for layer in 0..layers {
            self.book.remove(&(*key, layer));
        }
        if let Some(kept) = self.chunks.get_mut(key) {
            kept.layers = 0;
        }
        self.drop_if_empty(key);
    }

    fn drop_if_empty(&mut self, key: &PoolKey) {
        if self.chunks.get(key).is_some_and(|kept| kept.layers == 0 && kept.holders == 0) {
            self.chunks.remove(key);
        }
    }

    /// Keeps a layer if there is room beside what is held, in the place of one that lacks more. Returns what must be freed:
    /// better without the lock.
    fn keep(&mut self, key: PoolKey, layer: u32, entry: Entry, cost: f64) -> Vec<Entry> {
        // A request that is over does not fill the pool any more.
        let held = self.chunks.get(&key).is_some_and(|kept| kept.holders > 0);
        let known = self.book.get(&(key, layer));
        if !held || known.is_some_and(|known| known.lacks.len() <= entry.lacks.len()) {
            return Vec::new();
        }
        let bytes = entry.data.len() as u64 + ENTRY_BYTES;
        let replaced = self.book.remove(&(key, layer));
        if let (Some(_), Some(kept)) = (&replaced, self.chunks.get_mut(&key)) {
            kept.layers = kept.layers.saturating_sub(1);
        }
        let chunks = &self.chunks;
        let is_held = |(key, _): &(PoolKey, u32)| chunks.get(key).is_some_and(|kept| kept.holders > 0);
        let (evicted, room) = self.book.make_room(bytes, is_held);
        let mut freed = Vec::from_iter(replaced);
        for ((key, _), entry) in evicted {
            self.evicted += 1;
            freed.push(entry);
            if let Some(kept) = self.chunks.get_mut(&key) {
                kept.layers = kept.layers.saturating_sub(1);
            }
            self.drop_if_empty(&key);
        }
        if room {
            self.book.insert((key, layer), entry, bytes, cost);
            if let Some(kept) = self.chunks.get_mut(&key) {
                kept.layers += 1;
            }
        }
        freed
    }
}

impl Hold {
    /// What is here of the chunk at `place`. Counts a request of each layer; one with gaps counts as missing.
    pub(crate) fn take(&mut self, place: usize) -> Taken {
        let wish = self.wishes.iter().find(|wish| wish.place == place);
        let (Some(wish), Some(mut guard)) = (wish, self.pool.state()) else { return Taken::default() };
        let state = &mut *guard;
        let mut taken = Taken { whole: Vec::new(), have: RowRanges::from_range(0..wish.tokens) };
        for layer in 0..self.pool.layers {
            let key = (wish.key, layer);
            let Some(entry) = state.book.get(&key) else {
                taken.have = RowRanges::default();
                continue;
            };
            if entry.lacks.is_empty() {
                taken.whole.push((layer, entry.data.clone()));
            } else {
                taken.have = taken.have.without(&entry.lacks);
                self.gapped.insert((place, layer), entry.clone());
            }
            state.book.touch(&key);
        }
        state.hits += taken.whole.len() as u64;
        state.misses += u64::from(self.pool.layers) - taken.whole.len() as u64;
        taken
    }

    /// What keeps news of the load, for as long as the request lasts. Call it once everything is taken.
    pub(crate) fn keeper(&self) -> Keeper {
        Keeper { pool: self.pool.clone(), wishes: self.wishes.clone(), gapped: self.gapped.clone() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(mut guard) = self.pool.state() else { return };
        let state = &mut *guard;
        for wish in &self.wishes {
            let Some(kept) = state.chunks.get_mut(&wish.key) else { continue };
            kept.holders = kept.holders.saturating_sub(1);
            state.drop_if_empty(&wish.key);
        }
        state.book.look_again();
    }
}

/// Puts what a request loads into the pool. Does not hold chunks: what comes after the request is over is not kept.
#[derive(Debug)]
pub(crate) struct Keeper {
    pool: Pool,
    wishes: Vec<Wish>,
    gapped: HashMap<(usize, u32), Entry>,
}

impl Keeper {
    /// Puts what has come over the wire together with what was here, keeps it, and forgets a chunk that the cache service
    /// cannot give.
    pub(crate) fn take_in(&self, news: Loaded) -> Loaded {
        let place = match &news {
            Loaded::Layer { chunk, .. } | Loaded::Failed { chunk, .. } => *chunk,
        };
        let Some(wish) = self.wishes.iter().find(|wish| wish.place == place) else { return news };
        let (layer, data, form, source, bytes) = match news {
            Loaded::Layer { layer, data, form, source, bytes, .. } => (layer, data, form, source, bytes),
            Loaded::Failed { ref reason, .. } => {
                // A store that cannot be reached says nothing of the chunk.
                if let (false, Some(mut state)) = (reason.starts_with("store"), self.pool.state()) {
                    state.forget(&wish.key, self.pool.layers);
                }
                return news;
            }
        };
        let came = match form {
            // The page cache keeps it.
            Form::Mapped => return Loaded::Layer { chunk: place, layer, data, form, source, bytes },
            Form::Whole => Entry { data, lacks: RowRanges::default() },
            Form::Gapped(lacks) => Entry { data, lacks },
        };
        let entry = match self.gapped.get(&(place, layer)) {
            Some(known) if !came.lacks.is_empty() => match joined(came, known, wish) {
                Ok(entry) => entry,
                Err(reason) => return Loaded::Failed { chunk: place, reason, service_down: false },
            },
            _ => came,
        };
        let cost = wish.cost / f64::from(self.pool.layers.max(1));
        let freed = self.pool.state().map(|mut state| state.keep(wish.key, layer, entry.clone(), cost));
        drop(freed);
        let form = if entry.lacks.is_empty() { Form::Whole } else { Form::Gapped(entry.lacks) };
        Loaded::Layer { chunk: place, layer, data: entry.data, form, source, bytes }
    }
}

/// A layer with the rows of another one in its gaps.
fn joined(came: Entry, known: &Entry, wish: &Wish) -> Result<Entry, String> {
    let (bytes, known_bytes) = (came.data.len(), known.data.len());
    let mut data = BytesMut::from(came.data);
    let missing = came.lacks.without(&known.lacks);
    for &part in wish.layout.parts().iter().filter(|part| part.by_token()) {
        let (start, row_bytes) = (wish.layout.part_range(part, wish.tokens).start, wish.layout.row_bytes(part));
        for rows in missing.ranges() {
            let place = start + rows.start as usize * row_bytes..start + rows.end as usize * row_bytes;
            let (Some(to), Some(from)) = (data.get_mut(place.clone()), known.data.get(place)) else {
                return Err(format!("foreign: layers of {bytes} and {known_bytes} bytes do not fit"));
            };
            to.copy_from_slice(from);
        }
    }
    Ok(Entry { data: data.freeze(), lacks: came.lacks.intersection(&known.lacks) })
}

#[cfg(test)]
mod tests;
