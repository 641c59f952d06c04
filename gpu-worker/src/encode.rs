//! Encode calls: chunks that wait, the batch that is computed, and objects on their way to the cache service.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use kvsplice_kv::{ChunkKey, Variant, object};
use kvsplice_model::Dtype;
use kvsplice_model::encode::{ChunkKv, Encoder};
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::client::explain;
use kvsplice_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::pass::{Batch, Pass};

/// A chunk to encode.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) key: ChunkKey,
    pub(crate) ids: Vec<u32>,
}

/// One Encode call.
pub(crate) struct Call {
    pub(crate) prefix_ids: Vec<u32>,
    pub(crate) waiting: VecDeque<Chunk>,
    pub(crate) variant: Variant,
    pub(crate) events: mpsc::Sender<Result<v1::EncodeEvent, Status>>,
    /// The batch in hand.
    pub(crate) running: Option<(Vec<Chunk>, Pass)>,
    /// What computing it has taken so far.
    pub(crate) spent: Duration,
}

impl Call {
    /// Takes the next batch in hand unless there is one. Returns whether there is work.
    pub(crate) fn prepare(&mut self) -> bool {
        if self.running.is_none() && !self.waiting.is_empty() {
            let size = Encoder::batch(self.waiting.iter().map(|chunk| chunk.ids.len()));
            let chunks: Vec<Chunk> = self.waiting.drain(..size).collect();
            let batch = Batch {
                prefix_ids: self.prefix_ids.clone(),
                chunks: chunks.iter().map(|chunk| chunk.ids.clone()).collect(),
                encoding: self.variant.encoding,
            };
            self.running = Some((chunks, Pass::Waiting(batch)));
            self.spent = Duration::ZERO;
        }
        self.running.is_some()
    }
}

/// The tokens of these chunks.
pub(crate) fn tokens(chunks: &[ChunkKv]) -> u64 {
    chunks.iter().map(|kv| u64::from(kv.tokens)).sum()
}

/// Stores one chunk's KV; `us_per_token` is what computing it took, 0 for unknown. Returns what was stored and whether this call created it.
pub(crate) async fn store(
    cache: &CacheClient,
    key: &ChunkKey,
    variant: Variant,
    dtype: Dtype,
    kv: ChunkKv,
    us_per_token: f64,
) -> Result<v1::EncodeEvent, Status> {
    let id = key.id();
    let written = object::write(key, &kv.layout, variant, kv.tokens, &dtype.to_string(), &kv.layers);
    let object = Bytes::from(written.map_err(|error| Status::internal(error.to_string()))?);
    let bytes = object.len() as u64;
    let created = cache.put_computed_chunk(id, variant, object, us_per_token).await.map_err(of_cache)?;
    Ok(v1::EncodeEvent { chunk: id.to_string(), created, bytes })
}

/// The status of a call to the cache service as the worker's caller should see it.
pub(crate) fn of_cache(status: Status) -> Status {
    let status = explain(status);
    Status::new(status.code(), format!("cache service: {}", status.message()))
}
