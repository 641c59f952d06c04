//! KV of the auxiliary model: from memory under a byte budget, else from the cache service, else computed here.
//!
//! Reports where it came from. KV that cannot be fetched (missing, damaged, cache service down) is computed anew; it is
//! stored only when the request says so.

use std::collections::HashMap;
use std::sync::Arc;

use kvsplice_kv::{ChunkId, ChunkKey, KvLayout, ModelDigest, Variant, object};
use kvsplice_model::auxiliary::ChunkKv;
use kvsplice_model::{Compute, Model};
use kvsplice_proto::cache::{CacheClient, us_per_token};
use kvsplice_proto::load::Loader;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};
use tracing::{debug, warn};

use crate::corpus::blocking;
use crate::fetch::fetch;
use crate::score::Engine;
use crate::{Config, Error};

/// For the cache's estimate of how many entries to expect.
const TYPICAL_CHUNK_BYTES: u64 = 1 << 20;

/// A chunk whose KV is wanted.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) id: ChunkId,
    pub(crate) ids: Vec<u32>,
}

/// Where the KV of one request came from: the slowest source counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    Memory,
    Object,
    Computed,
}

impl Origin {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Origin::Memory => "memory",
            Origin::Object => "object",
            Origin::Computed => "computed",
        }
    }
}

#[derive(Clone)]
struct Bytes;

impl Weighter<ChunkId, Arc<ChunkKv>> for Bytes {
    fn weight(&self, _: &ChunkId, kv: &Arc<ChunkKv>) -> u64 {
        kv.layout.layer_bytes(kv.tokens) as u64 * u64::from(kv.layout.layers)
    }
}

/// KV that was computed here, in order, and what that took.
struct Computed {
    chunks: Vec<Arc<ChunkKv>>,
    us_per_token: f64,
}

/// The auxiliary model with its KV.
pub(crate) struct Auxiliary {
    pub(crate) engine: Engine,
    digest: ModelDigest,
    pub(crate) layout: KvLayout,
    compute_dtype: String,
    owner: String,
    cache: CacheClient,
    loader: Loader,
    memory: Cache<ChunkId, Arc<ChunkKv>, Bytes>,
}

impl Auxiliary {
    pub(crate) fn new(model: Model, compute: Compute, loader: Loader, config: &Config) -> Result<Self, Error> {
        let memory_bytes = config.auxiliary_kv_bytes;
        // One shard: the whole budget may hold one large chunk.
        let options = OptionsBuilder::new()
            .shards(1)
            .estimated_items_capacity(usize::try_from(memory_bytes / TYPICAL_CHUNK_BYTES).unwrap_or(usize::MAX).max(16))
            .weight_capacity(memory_bytes)
            .build()
            .map_err(|error| Error::Config { field: "auxiliary_kv_bytes", detail: error.to_string() })?;
        let memory = Cache::with_options(options, Bytes, Default::default(), Default::default());
        Ok(Self {
            layout: kvsplice_model::encode::layout(&model.config, config.auxiliary_encoding),
            compute_dtype: config.auxiliary.dtype().to_string(),
            owner: config.owner.clone(),
            digest: model.digest,
            engine: Engine { compute, decoder: model.decoder },
            cache: loader.client(),
            loader,
            memory,
        })
    }

    pub(crate) fn variant(&self) -> Variant {
        Variant::clean(self.layout.encoding)
    }

    /// The KV of every wanted chunk behind `prefix`, in order; repeats share theirs. `fetch_stored` is false when the
    /// cache service is known to be down; `store` keeps what had to be computed.
    pub(crate) async fn get(
        self: &Arc<Self>,
        prefix: &[u32],
        wanted: &[Wanted],
        fetch_stored: bool,
        store: bool,
    ) -> Result<(Vec<Arc<ChunkKv>>, Origin), Error> {
        let mut found: HashMap<ChunkId, Arc<ChunkKv>> = HashMap::new();
        let mut origin = Origin::Memory;
        for chunk in wanted {
            if let Some(kv) = self.memory.get(&chunk.id) {
                found.insert(chunk.id, kv);
            }
        }
        let missing = self.missing(wanted, &found);
        if fetch_stored && !missing.is_empty() {
            let fetched = fetch(&self.loader, &missing, self.layout, self.variant()).await;
            for (chunk, kv) in missing.iter().zip(fetched) {
                let Some(kv) = kv else { continue };
                origin = origin.max(Origin::Object);
                let kv = Arc::new(kv);
                self.memory.insert(chunk.id, Arc::clone(&kv));
                found.insert(chunk.id, kv);
            }
        }
        let missing = self.missing(wanted, &found);
        if !missing.is_empty() {
            debug!(chunks = missing.len(), "auxiliary KV is not stored: computing it");
            origin = Origin::Computed;
            let Computed { chunks: computed, us_per_token } = self.compute(prefix, &missing).await?;
            found.extend(missing.iter().map(|chunk| chunk.id).zip(computed.iter().cloned()));
            if store {
                let this = Arc::clone(self);
                let prefix = prefix.to_vec();
                // The answer does not wait for the store.
                kvsplice_proto::context::spawn(async move {
                    for (chunk, kv) in missing.iter().zip(computed) {
                        if let Err(error) = this.put(&prefix, chunk, &kv, us_per_token).await {
                            warn!(%error, "auxiliary KV is not kept");
                        }
                    }
                });
            }
        }
        let kv = wanted.iter().map(|chunk| found.get(&chunk.id).cloned()).collect::<Option<Vec<_>>>();
        let kv = kv.ok_or_else(|| Error::Task { task: "auxiliary encode", detail: "a chunk is missing".into() })?;
        Ok((kv, origin))
    }

    /// Computes and stores what the cache service lacks. Returns how many were created.
    ///
    /// # Errors
    /// When the cache service is down or the store refuses: ingest does not go on without it.
    pub(crate) async fn store(&self, prefix: &[u32], wanted: &[Wanted]) -> Result<usize, Error> {
        let wanted = self.missing(wanted, &HashMap::new());
        let ids: Vec<ChunkId> = wanted.iter().map(|chunk| chunk.id).collect();
        let contained = self
            .cache
            .contains(&ids, self.variant(), std::time::Duration::ZERO)
            .await
            .map_err(Error::cache("look up auxiliary KV"))?;
        let missing: Vec<Wanted> =
            wanted.into_iter().zip(contained.found).filter(|(_, found)| !found).map(|(chunk, _)| chunk).collect();
        if missing.is_empty() {
            return Ok(0);
        }
        let Computed { chunks, us_per_token } = self.compute(prefix, &missing).await?;
        for (chunk, kv) in missing.iter().zip(chunks) {
            self.put(prefix, chunk, &kv, us_per_token).await?;
        }
        Ok(missing.len())
    }

    /// The wanted chunks that are not in `found`, each once.
    fn missing(&self, wanted: &[Wanted], found: &HashMap<ChunkId, Arc<ChunkKv>>) -> Vec<Wanted> {
        let mut seen = std::collections::HashSet::new();
        wanted.iter().filter(|chunk| !found.contains_key(&chunk.id) && seen.insert(chunk.id)).cloned().collect()
    }

    /// KV of the prefix alone, computed once and then from memory; none for an empty prefix.
    pub(crate) async fn prefix(&self, ids: &[u32]) -> Result<Option<Arc<ChunkKv>>, Error> {
        if ids.is_empty() {
            return Ok(None);
        }
        let id = ChunkKey::new(self.digest, &[], ids, &self.owner).id();
        if let Some(kv) = self.memory.get(&id) {
            return Ok(Some(kv));
        }
        Ok(self.compute(&[], &[Wanted { id, ids: ids.to_vec() }]).await?.chunks.pop())
    }

    async fn compute(&self, prefix: &[u32], chunks: &[Wanted]) -> Result<Computed, Error> {
        let ids = chunks.iter().map(|chunk| chunk.ids.clone()).collect();
        let (computed, spent) = self.engine.encode(prefix, ids, self.layout.encoding).await?;
        let tokens: usize = chunks.iter().map(|chunk| chunk.ids.len()).sum();
        let us_per_token = us_per_token(spent, tokens as u64);
        let computed: Vec<Arc<ChunkKv>> = computed.into_iter().map(Arc::new).collect();
        if computed.len() != chunks.len() {
            let detail = format!("{} of {} chunks", computed.len(), chunks.len());
            return Err(Error::Task { task: "auxiliary encode", detail });
        }
        for (chunk, kv) in chunks.iter().zip(&computed) {
            self.memory.insert(chunk.id, Arc::clone(kv));
        }
        Ok(Computed { chunks: computed, us_per_token })
    }

    async fn put(&self, prefix: &[u32], chunk: &Wanted, kv: &Arc<ChunkKv>, us_per_token: f64) -> Result<(), Error> {
        let key = ChunkKey::new(self.digest, prefix, &chunk.ids, &self.owner);
        let (kv, variant, dtype) = (Arc::clone(kv), self.variant(), self.compute_dtype.clone());
        let write = move || object::write(&key, &kv.layout, variant, kv.tokens, &dtype, kv.layers.iter());
        let bytes = blocking("write auxiliary KV", write).await??;
        let stored = self.cache.put_computed_chunk(chunk.id, variant, bytes.into(), us_per_token).await;
        stored.map_err(Error::cache("store auxiliary KV"))?;
        Ok(())
    }
}
