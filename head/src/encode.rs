//! Makes sure that both models' KV of some chunks is stored: what is there is skipped.
//!
//! The worker encodes the primary's KV while this process encodes the auxiliary's.

use std::collections::HashSet;
use std::time::Duration;

use kvsplice_kv::{ChunkId, Encoding, Variant};
use kvsplice_proto::v1;

use crate::Error;
use crate::auxiliary::Wanted;
use crate::head::Head;

/// Chunks behind one prefix.
pub(crate) struct Batch {
    pub(crate) primary_prefix: Vec<u32>,
    pub(crate) primary: Vec<Wanted>,
    pub(crate) auxiliary_prefix: Vec<u32>,
    pub(crate) auxiliary: Vec<Wanted>,
    pub(crate) encoding: Encoding,
}

/// What became of a batch's primary chunks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) created: u64,
    pub(crate) present: u64,
}

/// Stores a batch. Repeats count as present.
pub(crate) async fn batch(head: &Head, batch: Batch) -> Result<Stored, Error> {
    let chunks = batch.primary.len() as u64;
    let primary = primary(head, batch.primary_prefix, &batch.primary, batch.encoding);
    let auxiliary = head.auxiliary.store(&batch.auxiliary_prefix, &batch.auxiliary);
    let (created, _) = tokio::try_join!(primary, auxiliary)?;
    Ok(Stored { created, present: chunks.saturating_sub(created) })
}

/// Stores the KV of a prefix itself: a chunk behind nothing. One of a quantized corpus is not stored but computed, so that
/// it stays exact.
pub(crate) async fn prefix(head: &Head, id: ChunkId, ids: &[u32], encoding: Encoding) -> Result<(), Error> {
    if encoding.quantized() {
        return Ok(());
    }
    let wanted = Wanted { id, ids: ids.to_vec() };
    primary(head, Vec::new(), &[wanted], encoding).await?;
    Ok(())
}

/// Returns how many chunks were created.
async fn primary(head: &Head, prefix: Vec<u32>, wanted: &[Wanted], encoding: Encoding) -> Result<u64, Error> {
    let variant = Variant::clean(encoding);
    let mut seen = HashSet::new();
    let wanted: Vec<&Wanted> = wanted.iter().filter(|chunk| seen.insert(chunk.id)).collect();
    let ids: Vec<ChunkId> = wanted.iter().map(|chunk| chunk.id).collect();
    let contained = head.cache.contains(&ids, variant, Duration::ZERO).await.map_err(Error::cache("look up chunks"))?;
    let missing = wanted.into_iter().zip(contained.found).filter(|(_, found)| !found).map(|(chunk, _)| chunk);
    let chunks: Vec<v1::EncodeChunk> =
        missing.map(|chunk| v1::EncodeChunk { chunk: chunk.id.to_string(), token_ids: chunk.ids.clone() }).collect();
    if chunks.is_empty() {
        return Ok(0);
    }
    head.worker.check().await?;
    let message = v1::EncodeRequest {
        model: head.primary.digest.to_string(),
        owner: head.config.owner.clone(),
        prefix_ids: prefix,
        chunks,
        variant: variant.to_string(),
    };
    let events = head.worker.encode(message, Duration::from_secs(head.config.encode_deadline_s)).await?;
    Ok(events.iter().filter(|event| event.created).count() as u64)
}
