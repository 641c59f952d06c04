//! What all tiers share: how objects and layers are named, and what recomputing one costs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// CRC-32C of each frame that it makes when it is sent whole.
    pub(crate) sums: Arc<[u32]>,
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

/// What computing KV anew takes: the setting of the model, else what workers measured, else the setting for all.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    us_per_token: f64,
    by_model: Arc<BTreeMap<ModelDigest, f64>>,
    measured: Arc<Mutex<HashMap<ModelDigest, Measured>>>,
}

#[derive(Clone, Copy, Debug)]
struct Measured {
    us_per_token: f64,
    /// What the store was last told.
    stored: f64,
}

/// Models whose measured cost is remembered.
const MAX_MODELS: usize = 1024;
/// Share of a new measurement in the mean.
const NEW_SHARE: f64 = 0.2;
/// A mean that has moved by this share since it was stored is stored again.
const STORE_STEP: f64 = 0.25;

impl Costs {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            us_per_token: config.recompute_us_per_token,
            by_model: Arc::new(config.recompute_us_by_model.clone()),
            measured: Arc::default(),
        }
    }

    /// Takes what the store remembers.
    pub(crate) fn remember(&self, model: ModelDigest, us_per_token: f64) {
        if is_cost(us_per_token) {
            self.measured().insert(model, Measured { us_per_token, stored: us_per_token });
        }
    }

    /// Takes in a worker's measurement. Returns the mean when the store should be told.
    pub(crate) fn measure(&self, model: ModelDigest, us_per_token: f64) -> Option<f64> {
        if !is_cost(us_per_token) {
            return None;
        }
        let mut measured = self.measured();
        if measured.len() >= MAX_MODELS && !measured.contains_key(&model) {
            return None;
        }
        let known = measured.entry(model).or_insert(Measured { us_per_token, stored: 0.0 });
        known.us_per_token += NEW_SHARE * (us_per_token - known.us_per_token);
        let moved = (known.us_per_token - known.stored).abs() > STORE_STEP * known.stored;
        moved.then(|| {
            known.stored = known.us_per_token;
            known.us_per_token
        })
    }

    // A panic while the lock was held cannot leave a cost that matters.
    fn measured(&self) -> MutexGuard<'_, HashMap<ModelDigest, Measured>> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Microseconds a token that workers measured, by model.
    pub(crate) fn snapshot(&self) -> HashMap<String, f64> {
        self.measured().iter().map(|(model, measured)| (model.to_string(), measured.us_per_token)).collect()
    }

    /// Microseconds for the whole chunk.
    pub(crate) fn chunk_us(&self, header: &Header) -> f64 {
        let model = &header.key.model;
        let set = self.by_model.get(model).copied();
        let measured = || self.measured().get(model).map(|measured| measured.us_per_token);
        let per_token = set.or_else(measured).unwrap_or(self.us_per_token);
        per_token * f64::from(header.tokens)
    }

    /// Microseconds for an equal share of the chunk's layers.
    pub(crate) fn layer_us(&self, header: &Header) -> f64 {
        self.chunk_us(header) / f64::from(header.layout.layers.max(1))
    }
}

fn is_cost(us_per_token: f64) -> bool {
    us_per_token.is_finite() && us_per_token > 0.0
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::{ChunkKey, Encoding, KvLayout};

    use super::*;

    #[test]
    fn a_measured_cost_takes_the_place_of_the_guess_and_a_models_own_setting_stays() {
        let [guessed, set] = [1, 2].map(|byte| ModelDigest::from_bytes([byte; 32]));
        let config = Config { recompute_us_by_model: BTreeMap::from([(set, 70.0)]), ..Config::default() };
        let costs = Costs::new(&config);
        let of = |model| {
            let variant = Variant::clean(Encoding::Bf16);
            let layout = KvLayout { layers: 2, kv_heads: 1, head_dim: 2, encoding: Encoding::Bf16 };
            let (key, digests) = (ChunkKey::new(model, &[], &[1], "default"), vec![[0; 32]; 2]);
            let (build, compute_dtype) = ("1".to_owned(), "f32".to_owned());
            costs.chunk_us(&Header { key, layout, variant, tokens: 10, build, compute_dtype, layer_digests: digests })
        };
        assert_eq!((of(guessed), of(set)), (5000.0, 700.0));
        for model in [guessed, set] {
            assert_eq!(costs.measure(model, 40.0), Some(40.0), "the first is stored");
            assert_eq!(costs.measure(model, 41.0), None);
        }
        assert!((of(guessed) - 402.0).abs() < 1e-6);
        assert_eq!(of(set), 700.0);
        for _ in 0..20 {
            costs.measure(guessed, 80.0);
        }
        assert!((790.0..800.0).contains(&of(guessed)), "it follows what is measured");
        for wrong in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert_eq!(costs.measure(guessed, wrong), None);
        }
        assert!((790.0..800.0).contains(&of(guessed)));
    }
}
