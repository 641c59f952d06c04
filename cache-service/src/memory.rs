//! The memory tier: verified layers and parsed headers, bounded in bytes by one setting.
//!
//! A layer carries the digest it was verified against, so one that belongs to an object since replaced is never served.
//! Pinned and leased layers stay, within the bound: when they fill the tier, newcomers are served but not kept. A layer that
//! several want is loaded once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvsplice_kv::eviction::{Book, Eviction};
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tokio::sync::watch;

use crate::protect::Protection;
use crate::tier::{Layer, LayerKey, Object, ObjectKey, Removal};

/// Bookkeeping of one entry, in bytes.
const ENTRY_BYTES: u64 = 320;
/// One part in this many of the tier is for headers.
const HEADER_SHARE: u64 = 32;

#[derive(Clone, Debug)]
struct Weigh;

impl Weighter<ObjectKey, Arc<Object>> for Weigh {
    fn weight(&self, _: &ObjectKey, object: &Arc<Object>) -> u64 {
        let digests = 32 * object.header.layer_digests.len() as u64;
        digests + object.header.key.owner.len() as u64 + ENTRY_BYTES
    }
}

/// What a lookup of a layer gives.
pub(crate) enum Lookup<'a> {
    Found(Layer),
    Claimed(Claim<'a>),
}

/// The right to load one layer, while others that want it wait. Dropped without [`Memory::fill`], it goes to one of them.
pub(crate) struct Claim<'a> {
    memory: &'a Memory,
    key: LayerKey,
    number: u64,
    done: watch::Sender<Option<Layer>>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.memory.state().take_claim(&self.key, self.number);
    }
}

/// Verified layers and parsed headers.
pub(crate) struct Memory {
    state: Mutex<State>,
    headers: Cache<ObjectKey, Arc<Object>, Weigh>,
    protection: Arc<Protection>,
    limit_bytes: u64,
}

struct State {
    layers: Book<LayerKey, Layer>,
    /// Layers that are being loaded: the claim's number, and where the layer will appear.
    loading: HashMap<LayerKey, (u64, watch::Receiver<Option<Layer>>)>,
    claims: u64,
}

impl State {
    /// Whether the claim still stood; it falls when its chunk is removed.
    fn take_claim(&mut self, key: &LayerKey, number: u64) -> bool {
        let stands = self.loading.get(key).is_some_and(|(current, _)| *current == number);
        if stands {
            self.loading.remove(key);
        }
        stands
    }
}

impl Memory {
    pub(crate) fn new(limit_bytes: u64, eviction: Eviction, protection: Arc<Protection>) -> Self {
        let header_bytes = limit_bytes / HEADER_SHARE;
        let layers = Book::new(eviction, limit_bytes - header_bytes);
        let state = Mutex::new(State { layers, loading: HashMap::new(), claims: 0 });
        // One shard: the whole budget holds headers, however small it is.
        let options =
            OptionsBuilder::new().shards(1).estimated_items_capacity(1024).weight_capacity(header_bytes).build();
        let headers = options.map_or_else(
            |_| Cache::with_weighter(1024, header_bytes, Weigh),
            |options| Cache::with_options(options, Weigh, Default::default(), Default::default()),
        );
        Self { state, headers, protection, limit_bytes }
    }

    // A panic while the lock was held cannot leave an entry that is served wrong: digests are compared on every lookup.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_claim(&self, state: &mut State, key: &LayerKey) -> Claim<'_> {
        state.claims += 1;
        let (done, result) = watch::channel(None);
        state.loading.insert(*key, (state.claims, result));
        Claim { memory: self, key: *key, number: state.claims, done }
    }

    /// The layer, or the right to load it once nobody else does. A layer with another digest is of a replaced object.
    pub(crate) async fn lookup(&self, key: &LayerKey, digest: &[u8; 32]) -> Lookup<'_> {
        loop {
            let mut result = {
                let mut state = self.state();
                match state.layers.get(key).cloned() {
                    Some(layer) if layer.digest == *digest => {
                        state.layers.touch(key);
                        return Lookup::Found(layer);
                    }
                    Some(_stale) => drop(state.layers.remove(key)),
                    None => {}
                }
                match state.loading.get(key) {
                    None => return Lookup::Claimed(self.new_claim(&mut state, key)),
                    Some((_, result)) => result.clone(),
                }
            };
            if let Ok(layer) = result.wait_for(Option::is_some).await
                && let Some(layer) = layer.as_ref().filter(|layer| layer.digest == *digest)
            {
                return Lookup::Found(layer.clone());
            }
        }
    }

    /// The right to load a layer that is neither here nor being loaded.
    pub(crate) fn claim(&self, key: &LayerKey) -> Option<Claim<'_>> {
        let mut state = self.state();
        let free = state.layers.get(key).is_none() && !state.loading.contains_key(key);
        free.then(|| self.new_claim(&mut state, key))
    }

    /// Hands a loaded layer to those who wait for it. With `cost_us`, the microseconds that computing it anew takes, it is
    /// kept if there is room.
    pub(crate) fn fill(&self, claim: Claim<'_>, layer: Layer, cost_us: Option<f64>) {
        let mut evicted = Vec::new();
        {
            let mut state = self.state();
            if state.take_claim(&claim.key, claim.number)
                && let Some(cost_us) = cost_us
            {
                evicted = self.keep(&mut state, claim.key, layer.clone(), cost_us);
            }
        }
        claim.done.send_replace(Some(layer));
        drop(evicted);
    }

    /// Keeps a layer that was just written.
    pub(crate) fn insert(&self, key: LayerKey, layer: Layer, cost_us: f64) {
        let evicted = self.keep(&mut self.state(), key, layer, cost_us);
        drop(evicted);
    }

    /// Returns what must be freed: better without the lock, for layers are large.
    fn keep(&self, state: &mut State, key: LayerKey, layer: Layer, cost_us: f64) -> Vec<(LayerKey, Layer)> {
        let bytes = (layer.bytes.len() + 4 * layer.sums.len()) as u64 + ENTRY_BYTES;
        let replaced = state.layers.remove(&key);
        let (mut evicted, room) = state.layers.make_room(bytes, |key| self.protection.covers(&key.object.chunk));
        if room {
            state.layers.insert(key, layer, bytes, cost_us);
        }
        evicted.extend(replaced.map(|layer| (key, layer)));
        evicted
    }

    /// The header of an object; `load` runs once however many wait for it.
    pub(crate) async fn header<E>(
        &self,
        key: &ObjectKey,
        load: impl Future<Output = Result<Arc<Object>, E>>,
    ) -> Result<Arc<Object>, E> {
        self.headers.get_or_insert_async(key, load).await
    }

    /// Forgets the header, so that it is read again.
    pub(crate) fn forget_header(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.headers.remove(key).map(|(_, object)| object)
    }

    /// Removes what `gone` covers, and what is being loaded of it.
    pub(crate) fn remove(&self, gone: &Removal) {
        self.headers.retain(|key, _| !gone.covers(key));
        let mut state = self.state();
        state.loading.retain(|key, _| !gone.covers(&key.object));
        let covered = |key: &&LayerKey| gone.covers(&key.object);
        let keys: Vec<LayerKey> = state.layers.iter().map(|(key, _)| key).filter(covered).copied().collect();
        for key in keys {
            state.layers.remove(&key);
        }
    }

    /// Bytes and layers held, and the limit in bytes.
    pub(crate) fn usage(&self) -> (u64, u64, u64) {
        let state = self.state();
        (state.layers.bytes() + self.headers.weight(), state.layers.len() as u64, self.limit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvsplice_kv::{ChunkId, Encoding, Variant};

    use super::*;

    fn key(chunk: u8, layer: u32) -> LayerKey {
        let chunk = ChunkId::from_bytes([chunk; 32]);
        LayerKey { object: ObjectKey { chunk, variant: Variant::clean(Encoding::Bf16) }, layer }
    }

    fn layer(bytes: usize) -> Layer {
        Layer { digest: [bytes as u8; 32], bytes: vec![1; bytes].into(), sums: Arc::default() }
    }

    fn memory(limit: u64, eviction: Eviction) -> (Memory, Arc<Protection>) {
        let protection = Arc::new(Protection::new());
        (Memory::new(limit, eviction, protection.clone()), protection)
    }

    #[tokio::test]
    async fn the_bound_holds_even_when_everything_is_pinned() {
        for eviction in [Eviction::Lru, Eviction::Value] {
            let (memory, protection) = memory(1 << 20, eviction);
            for chunk in 0..=255 {
                protection.pin(&[key(chunk, 0).object.chunk]).unwrap();
            }
            for chunk in 0..=255 {
                memory.insert(key(chunk, 0), layer(10_000), 1.0);
                assert!(memory.usage().0 <= 1 << 20);
            }
            assert!(memory.usage().1 > 90);
            assert!(matches!(memory.lookup(&key(0, 0), &[10_000usize as u8; 32]).await, Lookup::Found(_)));
        }
    }

    #[tokio::test]
    async fn a_leased_layer_outlives_a_flood() {
        for eviction in [Eviction::Lru, Eviction::Value] {
            let (memory, protection) = memory(1 << 20, eviction);
            memory.insert(key(7, 3), layer(10_000), 1.0);
            protection.lease([key(7, 3).object.chunk].into_iter(), Duration::from_secs(60), None).unwrap();
            for round in 0..4000 {
                memory.insert(key(8, round), layer(10_000), 1.0);
            }
            assert!(memory.usage().0 <= 1 << 20);
            assert!(matches!(memory.lookup(&key(7, 3), &[10_000usize as u8; 32]).await, Lookup::Found(_)));
        }
    }

    #[tokio::test]
    async fn a_layer_of_a_replaced_object_is_not_served() {
        let (memory, _) = memory(1 << 20, Eviction::Lru);
        memory.insert(key(1, 0), layer(100), 1.0);
        assert!(matches!(memory.lookup(&key(1, 0), &[9; 32]).await, Lookup::Claimed(_)));
    }

    #[tokio::test]
    async fn without_memory_nothing_is_kept() {
        let (memory, _) = memory(0, Eviction::Lru);
        memory.insert(key(1, 0), layer(100), 1.0);
        assert_eq!(memory.usage().0, 0);
    }

    #[test]
    fn removing_a_chunk_leaves_the_others() {
        let (memory, _) = memory(1 << 20, Eviction::Lru);
        memory.insert(key(1, 0), layer(100), 1.0);
        memory.insert(key(1, 1), layer(100), 1.0);
        memory.insert(key(2, 0), layer(100), 1.0);
        memory.remove(&Removal::of(key(1, 0).object));
        assert_eq!(memory.usage().1, 1);
    }

    #[tokio::test]
    async fn those_who_wait_get_a_layer_that_is_not_kept() {
        let (memory, _) = memory(1 << 20, Eviction::Lru);
        let Lookup::Claimed(claim) = memory.lookup(&key(1, 0), &[100; 32]).await else { panic!("nothing is there") };
        assert!(memory.claim(&key(1, 0)).is_none(), "somebody loads it");
        let digest = [100; 32];
        let first_key = key(1, 0);
        let waiting = memory.lookup(&first_key, &digest);
        let (found, ()) = tokio::join!(waiting, async { memory.fill(claim, layer(100), None) });
        assert!(matches!(found, Lookup::Found(_)));
        assert_eq!(memory.usage().1, 0);
        assert!(memory.claim(&key(1, 0)).is_some());
    }

    #[tokio::test]
    async fn a_claim_that_is_given_up_goes_to_one_who_waits() {
        let (memory, _) = memory(1 << 20, Eviction::Lru);
        let (first_key, digest) = (key(1, 0), [100; 32]);
        let Lookup::Claimed(claim) = memory.lookup(&first_key, &digest).await else { panic!("nothing is there") };
        let (next, ()) = tokio::join!(memory.lookup(&first_key, &digest), async { drop(claim) });
        let Lookup::Claimed(next) = next else { panic!("nobody loaded it") };
        memory.fill(next, layer(100), Some(1.0));
        assert_eq!(memory.usage().1, 1);
    }

    #[tokio::test]
    async fn what_was_being_loaded_of_a_removed_chunk_is_not_kept() {
        let (memory, _) = memory(1 << 20, Eviction::Lru);
        let Lookup::Claimed(old) = memory.lookup(&key(1, 0), &[100; 32]).await else { panic!("nothing is there") };
        memory.remove(&Removal::of(key(1, 0).object));
        let Lookup::Claimed(new) = memory.lookup(&key(1, 0), &[100; 32]).await else { panic!("the claim fell") };
        memory.fill(old, layer(100), Some(1.0));
        assert_eq!(memory.usage().1, 0);
        memory.fill(new, layer(100), Some(1.0));
        assert_eq!(memory.usage().1, 1);
    }
}
