//! Chunk layers that requests have had, kept in this worker's memory for the next prompt that has them.
//!
//! Two tiers under one set of rules: what came over the wire stays on the host, and whole layers of a chunk that is asked for
//! a second time go to the device when they are placed (`promotion`), mapped ones too, so that they cross the bus once. Each
//! tier has its byte limit, always held; what goes first is decided by the clock of the cache tiers
//! (`kvsplice_kv::eviction`). A chunk that a request holds (its lease here, which ends with the request, however that ends)
//! is never evicted. What no request has asked for during the longest lease is dropped: then the cache service may have been
//! told to erase it. Whoever takes a layer has the cache service's word, of this request, that the chunk is stored; the pool
//! does not ask. The host's copy of a layer that is on the device stays until the host's clock takes it: nobody asks for it
//! there, so it goes first, and until then it costs nothing and saves the wire when the device has evicted its own.
//!
//! Rows that a request computes anew are not loaded, so a layer may be kept on the host with gaps. What it has need not come
//! again: the next request loads only the missing rows, and puts both together (`keeper`) before anything looks at them.

mod chunks;
mod hold;
mod keeper;
mod promotion;
mod tier;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvsplice_kv::{ChunkId, KvLayout, RowRanges, Variant};
use kvsplice_model::resident::ResidentLayer;
use kvsplice_proto::v1;

use chunks::Chunks;
pub(crate) use hold::{Hold, Taken};
pub(crate) use keeper::Keeper;
pub(crate) use promotion::Promotion;
use tier::Tier;

/// Layers of a chunk that no request has asked for during this time are dropped. The longest lease of the cache service.
const UNASKED: Duration = Duration::from_secs(600);
/// How often that is looked after.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Bookkeeping of one layer on the host, in bytes.
const ENTRY_BYTES: u64 = 256;

/// One stored form of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    pub(crate) chunk: ChunkId,
    pub(crate) variant: Variant,
}

/// One layer of it.
type LayerKey = (PoolKey, u32);

/// The most bytes of each tier; 0 turns it off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) host_bytes: u64,
    pub(crate) device_bytes: u64,
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

/// A layer that is kept on the host, as it is stored; zeros stand for the rows that it lacks.
#[derive(Clone, Debug)]
struct Entry {
    data: Bytes,
    lacks: RowRanges,
}

/// The pool; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    /// None when both tiers are off.
    state: Option<Arc<Mutex<State>>>,
    limits: Limits,
    /// Of each chunk.
    layers: u32,
}

#[derive(Debug)]
struct State {
    host: Tier<Entry>,
    device: Tier<ResidentLayer>,
    chunks: Chunks,
    /// Until then no layer goes to the device: it had no memory left.
    full_until: Option<Instant>,
}

impl Pool {
    /// A pool of chunks with so many layers.
    pub(crate) fn new(limits: Limits, layers: u32) -> Self {
        let state = || State {
            host: Tier::new(limits.host_bytes),
            device: Tier::new(limits.device_bytes),
            chunks: Chunks::default(),
            full_until: None,
        };
        let on = limits.host_bytes > 0 || limits.device_bytes > 0;
        Self { state: on.then(|| Arc::new(Mutex::new(state()))), limits, layers }
    }

    /// Drops what nobody asks for, from now on, until the pool is gone. Must be called within a tokio runtime.
    pub(crate) fn watch(&self) {
        let Some(state) = &self.state else { return };
        let (state, limits, layers) = (Arc::downgrade(state), self.limits, self.layers);
        tokio::spawn(async move {
            let mut clock = tokio::time::interval(LOOK_EVERY);
            loop {
                clock.tick().await;
                let Some(state) = state.upgrade() else { return };
                Self { state: Some(state), limits, layers }.drop_unasked(Instant::now());
            }
        });
    }

    // A panic while the lock was held cannot leave a layer that is wrong, only counts.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        Some(self.state.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What Status says of the host's tier, and of the device's.
    pub(crate) fn status(&self) -> (v1::ChunkPool, v1::ChunkPool) {
        let Some(state) = self.state() else { return Default::default() };
        let held = state.chunks.held();
        (state.host.status(held), state.device.status(held))
    }

    fn drop_unasked(&self, now: Instant) {
        let Some(mut state) = self.state() else { return };
        for key in state.chunks.unasked(now, UNASKED) {
            state.forget(&key, self.layers);
        }
    }

    /// What computing one layer takes.
    fn layer_cost(&self, wish: &Wish) -> f64 {
        wish.cost / f64::from(self.layers.max(1))
    }
}

impl State {
    /// Drops the layers of a chunk; whoever holds it goes on holding it, but keeps no more of it.
    fn forget(&mut self, key: &PoolKey, layers: u32) {
        for layer in 0..layers {
            self.host.remove(&(*key, layer));
            self.device.remove(&(*key, layer));
        }
        self.chunks.forget(key);
    }

    /// Keeps a layer on the host if there is room beside what is held, in the place of one that lacks more. Returns what must
    /// be freed: better without the lock.
    fn keep(&mut self, key: LayerKey, since: u64, entry: Entry, cost: f64) -> Vec<Entry> {
        let known = self.host.get(&key);
        // A request that is over does not fill the pool any more.
        let held = self.chunks.admits(&key.0, since);
        if !held || known.is_some_and(|known| known.lacks.len() <= entry.lacks.len()) {
            return Vec::new();
        }
        let bytes = entry.data.len() as u64 + ENTRY_BYTES;
        let replaced = self.host.remove(&key);
        if replaced.is_some() {
            self.chunks.lose(&key.0);
        }
        let (mut freed, room) = self.host.make_room(bytes, &mut self.chunks);
        freed.extend(replaced);
        if room {
            self.host.insert(key, entry, bytes, cost);
            self.chunks.gain(&key.0);
        }
        freed
    }
}

#[cfg(test)]
mod tests;
