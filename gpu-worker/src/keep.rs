//! Captured chunks → objects and records at the cache service: KV first, then the record that names it, so that a record
//! never promises KV that is not there. The first chunk needs none: behind the prefix alone, it is the clean-room chunk.

use std::future::Future;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvsplice_kv::craft::FORMAT;
use kvsplice_kv::{Capture, ChunkId, ChunkKey, Variant};
use kvsplice_model::{Dtype, Model};
use kvsplice_proto::cache::CacheClient;
use tonic::Status;
use tracing::warn;

use crate::capture::Captured;
use crate::encode::store;
use crate::request::{Kind, Request};

/// Stores all but the first chunk; gives the number stored. `us_per_token` is what computing the prompt took. One that is not stored is logged, and the others go on.
pub(crate) fn keep(
    cache: CacheClient,
    model: &Model,
    request: Arc<Request>,
    dtype: Dtype,
    captured: Vec<Captured>,
    us_per_token: f64,
) -> impl Future<Output = u32> + Send + 'static {
    let chunk_parts = (0..request.parts.len()).filter(|&index| request.parts[index].kind == Kind::Chunk);
    let keys: Vec<ChunkKey> = chunk_parts.map(|index| request.chunk_key(index, model)).collect();
    let ids: Vec<ChunkId> = keys.iter().map(ChunkKey::id).collect();
    let encoding = request.variant.encoding;
    async move {
        let tokens: Vec<u32> = captured.iter().map(|chunk| chunk.kv.tokens).collect();
        let mut stored = 0;
        for (index, (chunk, key)) in captured.into_iter().zip(&keys).enumerate().skip(1) {
            let record = Capture {
                format: FORMAT,
                chunk: ids[index],
                variant: Variant::context(encoding, &ids[..index]),
                tokens: chunk.kv.tokens,
                prefix: ids[..index].to_vec(),
                inter: chunk.inter.iter().map(|&mass| mass.max(0.0)).collect(),
                prefix_tokens: tokens[..index].to_vec(),
                intra: chunk.intra.max(0.0),
                external: chunk.external.iter().map(|&mass| mass.max(0.0)).collect(),
                // It cost the whole chunk once.
                uses: 1.0,
                created_ms: SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            };
            match put(&cache, key, dtype, chunk, &record, us_per_token).await {
                Ok(()) => stored += 1,
                Err(status) => warn!(chunk = %key.id().short(), error = status.message(), "a capture is not stored"),
            }
        }
        stored
    }
}

async fn put(
    cache: &CacheClient,
    key: &ChunkKey,
    dtype: Dtype,
    chunk: Captured,
    record: &Capture,
    us_per_token: f64,
) -> Result<(), Status> {
    store(cache, key, record.variant, dtype, chunk.kv, us_per_token).await?;
    let json = record.to_json().map_err(|error| Status::internal(error.to_string()))?;
    cache.put_record(&record.key(), json).await?;
    Ok(())
}
