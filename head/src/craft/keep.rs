//! Which captures stay: at most so many variants a chunk, and so many chunks that have any.
//!
//! Source: Cache-Craft's frequency-reuse score f_r, the sum of inverse costs. What was captured just now stays, since its
//! uses are still to come; among equals the older one goes. Clean-room chunks are not touched: ingest owns them.

use std::collections::{BTreeMap, HashSet};

use futures::{StreamExt, TryStreamExt, stream};
use kvsplice_kv::craft::RECORDS;
use kvsplice_kv::layout::Provenance;
use kvsplice_kv::{Capture, ChunkId, Variant};
use kvsplice_proto::cache::CacheClient;
use tracing::{info, warn};

use super::Captures;
use crate::Error;

/// Records read at once, and objects removed in one call.
const READS: usize = 32;
const BATCH: usize = 1024;
/// When there are too many chunks, this part of them goes beyond what must: then not every capture reads every record.
const SLACK: usize = 16;

/// A capture as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kept {
    chunk: ChunkId,
    variant: Variant,
    uses: f64,
    created_ms: u64,
}

impl Captures {
    /// Makes room after `new` captures were stored: removes the least used variants of their chunks, then the least used
    /// chunks' variants, KV and record. For a task of its own. Returns the paths of what was removed.
    ///
    /// # Errors
    /// [`Error::Cache`] when the cache service fails; a later call goes on.
    pub async fn admit(&self, new: &[(ChunkId, Variant)]) -> Result<Vec<String>, Error> {
        let _alone = self.changing.lock().await;
        let new: HashSet<(ChunkId, Variant)> = new.iter().copied().collect();
        let chunks: HashSet<ChunkId> = new.iter().map(|(chunk, _)| *chunk).collect();
        self.held.retain(|(chunk, _), _| !chunks.contains(chunk));
        let mut removed = Vec::new();
        for &chunk in &chunks {
            removed.extend(self.bound_variants(chunk, &new).await?);
        }
        removed.extend(self.bound_chunks(&chunks).await?);
        if !removed.is_empty() {
            info!(objects = removed.len(), "removed the least used captures");
        }
        Ok(removed)
    }

    async fn bound_variants(&self, chunk: ChunkId, new: &HashSet<(ChunkId, Variant)>) -> Result<Vec<String>, Error> {
        let names = list(&self.cache, &Capture::folder(chunk)).await?;
        let Some(surplus) = names.len().checked_sub(self.most_variants).filter(|&surplus| surplus > 0) else {
            return Ok(Vec::new());
        };
        let old = names.into_iter().filter(|name| !new.contains(name)).collect();
        let mut kept = self.read_uses(old).await?;
        kept.sort_by(least_used);
        kept.truncate(surplus);
        self.remove(&kept).await
    }

    async fn bound_chunks(&self, new: &HashSet<ChunkId>) -> Result<Vec<String>, Error> {
        let names = list(&self.cache, RECORDS).await?;
        let distinct: HashSet<ChunkId> = names.iter().map(|(chunk, _)| *chunk).collect();
        if distinct.len() <= self.most_chunks {
            return Ok(Vec::new());
        }
        let surplus = distinct.len() - (self.most_chunks - self.most_chunks / SLACK);
        let old = names.into_iter().filter(|(chunk, _)| !new.contains(chunk)).collect();
        let mut groups: BTreeMap<ChunkId, Vec<Kept>> = BTreeMap::new();
        for kept in self.read_uses(old).await? {
            groups.entry(kept.chunk).or_default().push(kept);
        }
        let total = |group: &[Kept]| (group.iter().map(|kept| kept.uses).sum::<f64>(), newest(group));
        let mut groups: Vec<Vec<Kept>> = groups.into_values().collect();
        groups.sort_by(|one, other| {
            let ((uses, created_ms), (other_uses, other_created_ms)) = (total(one), total(other));
            uses.total_cmp(&other_uses).then(created_ms.cmp(&other_created_ms))
        });
        groups.truncate(surplus);
        self.remove(&groups.concat()).await
    }

    /// How often each was used. One whose record cannot be used was used less than never: it goes first.
    async fn read_uses(&self, names: Vec<(ChunkId, Variant)>) -> Result<Vec<Kept>, Error> {
        let read = |(chunk, variant)| async move {
            let key = format!("{}/{variant}", Capture::folder(chunk));
            let json = self.cache.get_record(&key).await.map_err(Error::cache("read captures"))?;
            let (uses, created_ms) = match json.as_deref().map(Capture::from_json) {
                Some(Ok(capture)) => (capture.uses, capture.created_ms),
                Some(Err(error)) => {
                    warn!(key, %error, "a record cannot be used");
                    (-1.0, 0)
                }
                None => (-1.0, 0),
            };
            Ok(Kept { chunk, variant, uses, created_ms })
        };
        stream::iter(names).map(read).buffered(READS).try_collect().await
    }

    async fn remove(&self, kept: &[Kept]) -> Result<Vec<String>, Error> {
        let mut removed = Vec::new();
        for batch in kept.chunks(BATCH) {
            let names: Vec<(ChunkId, Variant)> = batch.iter().map(|kept| (kept.chunk, kept.variant)).collect();
            let keys: Vec<String> =
                names.iter().map(|(chunk, variant)| format!("{}/{variant}", Capture::folder(*chunk))).collect();
            let gone = self.cache.delete_variants(&names, &keys).await.map_err(Error::cache("remove captures"))?;
            removed.extend(gone);
            let chunks: HashSet<ChunkId> = names.into_iter().map(|(chunk, _)| chunk).collect();
            self.held.retain(|(chunk, _), _| !chunks.contains(chunk));
        }
        Ok(removed)
    }
}

/// Removes the records of all captures of `chunks`, whose KV is gone. Returns the paths of what was removed.
///
/// # Errors
/// [`Error::Cache`] when the cache service fails.
pub async fn forget(cache: &CacheClient, chunks: &[ChunkId]) -> Result<Vec<String>, Error> {
    let chunks: HashSet<&ChunkId> = chunks.iter().collect();
    let gone = list(cache, RECORDS).await?.into_iter().filter(|(chunk, _)| chunks.contains(chunk));
    let keys: Vec<String> = gone.map(|(chunk, variant)| format!("{}/{variant}", Capture::folder(chunk))).collect();
    let mut removed = Vec::new();
    for batch in keys.chunks(BATCH) {
        removed.extend(cache.delete(&[], batch).await.map_err(Error::cache("remove captures"))?);
    }
    Ok(removed)
}

/// The captures whose records lie below `prefix`.
async fn list(cache: &CacheClient, prefix: &str) -> Result<Vec<(ChunkId, Variant)>, Error> {
    let keys = cache.list_records(prefix).await.map_err(Error::cache("list captures"))?;
    Ok(keys.iter().filter_map(|key| parse(key)).collect())
}

/// Chunk and variant of a record's key; none for a key of another kind, such as one of an owner of that name.
pub(super) fn parse(key: &str) -> Option<(ChunkId, Variant)> {
    let (chunk, variant) = key.strip_prefix(RECORDS)?.strip_prefix('/')?.split_once('/')?;
    let (chunk, variant): (ChunkId, Variant) = (chunk.parse().ok()?, variant.parse().ok()?);
    matches!(variant.provenance, Provenance::Context(_)).then_some((chunk, variant))
}

fn newest(group: &[Kept]) -> u64 {
    group.iter().map(|kept| kept.created_ms).max().unwrap_or(0)
}

fn least_used(one: &Kept, other: &Kept) -> std::cmp::Ordering {
    one.uses.total_cmp(&other.uses).then(one.created_ms.cmp(&other.created_ms)).then(one.variant.cmp(&other.variant))
}
