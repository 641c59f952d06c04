//! The memory tier: verified layers and parsed headers, bounded in bytes by one setting.
//!
//! A layer carries the digest it was verified against, so one that belongs to an object since replaced is never served.
//! Pinned and leased layers stay, within the bound: when they fill the tier, newcomers are served but not kept.

use std::sync::Arc;

use bytes::Bytes;
use kvsplice_kv::object::Header;
use kvsplice_kv::{ChunkId, Variant};
use quick_cache::sync::{Cache, GuardResult, PlaceholderGuard};
use quick_cache::{DefaultHashBuilder, Lifecycle, OptionsBuilder, Weighter};

use crate::protect::Protection;

/// Bookkeeping of one entry, in bytes.
const ENTRY_BYTES: u64 = 160;
/// One part in this many of the tier is for headers.
const HEADER_SHARE: u64 = 32;
/// A shard must have room for many layers, else large ones are never kept.
const SHARD_BYTES: u64 = 1 << 30;
const MAX_SHARDS: u64 = 16;

/// One stored object: a chunk in one variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ObjectKey {
    pub(crate) chunk: ChunkId,
    pub(crate) variant: Variant,
}

/// The header of an object, and the tag by which the store tells it from a later one.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: ObjectKey,
    pub(crate) header: Header,
    pub(crate) e_tag: Option<String>,
}

/// The unit of the tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LayerKey {
    pub(crate) object: ObjectKey,
    pub(crate) layer: u32,
}

/// A verified layer: K, then V.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) digest: [u8; 32],
    pub(crate) bytes: Bytes,
}

#[derive(Clone, Debug)]
pub(crate) struct Weigh;

impl Weighter<LayerKey, Layer> for Weigh {
    fn weight(&self, _: &LayerKey, layer: &Layer) -> u64 {
        layer.bytes.len() as u64 + ENTRY_BYTES
    }
}

impl Weighter<ObjectKey, Arc<Object>> for Weigh {
    fn weight(&self, _: &ObjectKey, object: &Arc<Object>) -> u64 {
        let digests = 32 * object.header.layer_digests.len() as u64;
        digests + object.header.key.owner.len() as u64 + 2 * ENTRY_BYTES
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Keep(Arc<Protection>);

impl Lifecycle<LayerKey, Layer> for Keep {
    type RequestState = ();

    fn is_pinned(&self, key: &LayerKey, _: &Layer) -> bool {
        self.0.covers(&key.object.chunk)
    }
}

/// The right to load one layer, while others that want it wait.
pub(crate) type Claim<'a> = PlaceholderGuard<'a, LayerKey, Layer, Weigh, DefaultHashBuilder, Keep>;

/// What a lookup of a layer gives.
pub(crate) enum Lookup<'a> {
    Found(Layer),
    Claimed(Claim<'a>),
}

/// Verified layers and parsed headers.
pub(crate) struct Tier {
    layers: Cache<LayerKey, Layer, Weigh, DefaultHashBuilder, Keep>,
    headers: Cache<ObjectKey, Arc<Object>, Weigh>,
    limit_bytes: u64,
}

impl Tier {
    pub(crate) fn new(limit_bytes: u64, protection: Arc<Protection>) -> Self {
        let header_bytes = limit_bytes / HEADER_SHARE;
        let layer_bytes = limit_bytes - header_bytes;
        let shards = (layer_bytes / SHARD_BYTES).clamp(1, MAX_SHARDS);
        // How many entries are expected is a hint for bookkeeping: layers of 128 KiB.
        let items = (layer_bytes >> 17).clamp(1024, 1 << 20) as usize;
        let options = OptionsBuilder::new()
            .shards(shards as usize)
            .estimated_items_capacity(items)
            .weight_capacity(layer_bytes)
            .build()
            .expect("both capacities are set");
        let layers = Cache::with_options(options, Weigh, DefaultHashBuilder::default(), Keep(protection));
        Self { layers, headers: Cache::with_weighter(1024, header_bytes, Weigh), limit_bytes }
    }

    /// The layer, or the right to load it once nobody else does. A layer with another digest is of a replaced object.
    pub(crate) async fn lookup(&self, key: &LayerKey, digest: &[u8; 32]) -> Lookup<'_> {
        loop {
            match self.layers.get_value_or_guard_async(key).await {
                Ok(layer) if layer.digest == *digest => return Lookup::Found(layer),
                Ok(_stale) => drop(self.layers.remove_if(key, |layer| layer.digest != *digest)),
                Err(claim) => return Lookup::Claimed(claim),
            }
        }
    }

    /// The right to load a layer that is neither here nor being loaded.
    pub(crate) fn claim(&self, key: &LayerKey) -> Option<Claim<'_>> {
        match self.layers.get_value_or_guard(key, Some(std::time::Duration::ZERO)) {
            GuardResult::Guard(claim) => Some(claim),
            GuardResult::Value(_) | GuardResult::Timeout => None,
        }
    }

    /// Hands a loaded layer to those who wait for it and keeps it if there is room.
    pub(crate) fn fill(&self, claim: Claim<'_>, key: &LayerKey, layer: Layer) {
        // Fails only if the claim was overtaken by a put or a removal, which is right as well.
        let _ = claim.insert(layer);
        self.hold_bound(key);
    }

    /// Keeps a layer that was just written.
    pub(crate) fn insert(&self, key: LayerKey, layer: Layer) {
        self.layers.insert(key, layer);
        self.hold_bound(&key);
    }

    /// The cache exceeds its capacity only when all else is protected: then the newcomer goes.
    fn hold_bound(&self, newest: &LayerKey) {
        if self.layers.weight() > self.layers.capacity() {
            self.layers.remove(newest);
        }
    }

    /// The header of an object; `load` runs once however many wait for it.
    pub(crate) async fn header<E>(
        &self,
        key: &ObjectKey,
        load: impl Future<Output = Result<Arc<Object>, E>>,
    ) -> Result<Arc<Object>, E> {
        self.headers.get_or_insert_async(key, load).await
    }

    /// Forgets the header, so that the store is asked again.
    pub(crate) fn forget_header(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.headers.remove(key).map(|(_, object)| object)
    }

    /// Removes every variant of a chunk.
    pub(crate) fn remove_chunk(&self, chunk: &ChunkId) {
        self.headers.retain(|key, _| key.chunk != *chunk);
        self.layers.retain(|key, _| key.object.chunk != *chunk);
    }

    /// Bytes and layers held, and the limit in bytes.
    pub(crate) fn usage(&self) -> (u64, u64, u64) {
        (self.layers.weight() + self.headers.weight(), self.layers.len() as u64, self.limit_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvsplice_kv::Encoding;

    use super::*;

    fn key(chunk: u8, layer: u32) -> LayerKey {
        let chunk = ChunkId::from_bytes([chunk; 32]);
        LayerKey { object: ObjectKey { chunk, variant: Variant::clean(Encoding::Bf16) }, layer }
    }

    fn layer(bytes: usize) -> Layer {
        Layer { digest: [bytes as u8; 32], bytes: vec![1; bytes].into() }
    }

    fn tier(limit: u64) -> (Tier, Arc<Protection>) {
        let protection = Arc::new(Protection::new());
        (Tier::new(limit, protection.clone()), protection)
    }

    #[tokio::test]
    async fn the_bound_holds_even_when_everything_is_pinned() {
        let (tier, protection) = tier(1 << 20);
        for chunk in 0..=255 {
            protection.pin(&[key(chunk, 0).object.chunk]).unwrap();
        }
        for chunk in 0..=255 {
            tier.insert(key(chunk, 0), layer(10_000));
            assert!(tier.usage().0 <= 1 << 20);
        }
        assert!(tier.usage().1 > 90);
        assert!(matches!(tier.lookup(&key(0, 0), &[10_000usize as u8; 32]).await, Lookup::Found(_)));
    }

    #[tokio::test]
    async fn a_leased_layer_outlives_a_flood() {
        let (tier, protection) = tier(1 << 20);
        tier.insert(key(7, 3), layer(10_000));
        protection.lease([key(7, 3).object.chunk].into_iter(), Duration::from_secs(60)).unwrap();
        for round in 0..4000 {
            tier.insert(key(8, round), layer(10_000));
        }
        assert!(tier.usage().0 <= 1 << 20);
        assert!(matches!(tier.lookup(&key(7, 3), &[10_000usize as u8; 32]).await, Lookup::Found(_)));
    }

    #[tokio::test]
    async fn a_layer_of_a_replaced_object_is_not_served() {
        let (tier, _) = tier(1 << 20);
        tier.insert(key(1, 0), layer(100));
        assert!(matches!(tier.lookup(&key(1, 0), &[9; 32]).await, Lookup::Claimed(_)));
    }

    #[tokio::test]
    async fn without_memory_nothing_is_kept() {
        let (tier, _) = tier(0);
        tier.insert(key(1, 0), layer(100));
        assert_eq!(tier.usage().0, 0);
    }

    #[test]
    fn removing_a_chunk_leaves_the_others() {
        let (tier, _) = tier(1 << 20);
        tier.insert(key(1, 0), layer(100));
        tier.insert(key(1, 1), layer(100));
        tier.insert(key(2, 0), layer(100));
        tier.remove_chunk(&key(1, 0).object.chunk);
        assert_eq!(tier.usage().1, 1);
    }
}
