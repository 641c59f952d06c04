//! What all tiers share: how objects and layers are named, and what recomputing one costs.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use kvsplice_kv::object::Header;
use kvsplice_kv::{ChunkId, ModelDigest, Variant};

use crate::Config;

/// One stored object: a chunk in one variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ObjectKey {
    pub(crate) chunk: ChunkId,
    pub(crate) variant: Variant,
}

/// The header of an object, and where it was read.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: ObjectKey,
    pub(crate) header: Header,
    pub(crate) origin: Origin,
}

/// Where a header was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// In the object store, under the tag that tells the object from a later one.
    Store(Option<String>),
    /// In the disk tier: what the store holds now has not been asked.
    Disk,
}

impl Object {
    /// The layer's key and digest; none if the object has no such layer.
    pub(crate) fn layer(&self, layer: u32) -> Option<(LayerKey, [u8; 32])> {
        let digest = self.header.layer_digests.get(layer as usize)?;
        Some((LayerKey { object: self.key, layer }, *digest))
    }
}

/// The unit of the tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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

/// What leaves the tiers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Removal {
    /// Every variant of these.
    pub(crate) chunks: HashSet<ChunkId>,
    pub(crate) objects: HashSet<ObjectKey>,
}

impl Removal {
    pub(crate) fn of(object: ObjectKey) -> Self {
        Self { objects: HashSet::from([object]), ..Self::default() }
    }

    pub(crate) fn covers(&self, key: &ObjectKey) -> bool {
        self.chunks.contains(&key.chunk) || self.objects.contains(key)
    }
}

/// What computing KV anew takes, from the settings.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    us_per_token: f64,
    by_model: Arc<BTreeMap<ModelDigest, f64>>,
}

impl Costs {
    pub(crate) fn new(config: &Config) -> Self {
        Self { us_per_token: config.recompute_us_per_token, by_model: Arc::new(config.recompute_us_by_model.clone()) }
    }

    /// Microseconds for the whole chunk.
    pub(crate) fn chunk_us(&self, header: &Header) -> f64 {
        let per_token = self.by_model.get(&header.key.model).copied().unwrap_or(self.us_per_token);
        per_token * f64::from(header.tokens)
    }

    /// Microseconds for an equal share of the chunk's layers.
    pub(crate) fn layer_us(&self, header: &Header) -> f64 {
        self.chunk_us(header) / f64::from(header.layout.layers.max(1))
    }
}
