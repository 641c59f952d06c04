//! Removes orphans: chunk KV that no document of any corpus names.
//!
//! Named are the chunks behind each prefix of their corpus, the same chunks behind no prefix, and the prefixes themselves; all
//! variants of a named chunk stay. If one record cannot be read, nothing is removed. What is pinned, leased or young stays:
//! KV is stored before the record that names it. Then staging files go that killed puts have left (`staging`). A chunk that comes to be named while this runs may be lost; it is then
//! computed anew when it is asked for.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

use futures::{StreamExt, TryStreamExt, stream};
use kvsplice_kv::id::TokensDigest;
use kvsplice_kv::record::{Corpus, Document};
use kvsplice_kv::{ChunkId, ChunkKey, ModelDigest};
use kvsplice_proto::v1::{CollectOrphansRequest, CollectOrphansResponse};
use object_store::ObjectMeta;
use object_store::path::Path;
use serde::de::DeserializeOwned;
use tracing::info;

use crate::fetch::{Fetcher, Miss};
use crate::protect::Protection;
use crate::service::PARALLEL;
use crate::store::{KV, object_key};
use crate::tier::Removal;
use crate::{Error, kept, records, staging};

/// Objects that one call removes at most.
const MAX_REMOVED: usize = 100_000;
const DEFAULT_MIN_AGE_S: u64 = 24 * 60 * 60;

/// Finds orphans and removes them.
pub(crate) async fn collect(
    fetcher: &Fetcher,
    protection: &Protection,
    request: CollectOrphansRequest,
) -> Result<CollectOrphansResponse, Error> {
    let min_age = Duration::from_secs(request.min_age_s.unwrap_or(DEFAULT_MIN_AGE_S));
    let now = SystemTime::now();
    // Before the records: what is stored from now on is no candidate.
    let mut stored: BTreeMap<ChunkId, Vec<ObjectMeta>> = BTreeMap::new();
    for meta in fetcher.store.list_objects(&Path::from(KV)).await? {
        // A form that this version does not know may be a later one's.
        if let Some(key) = object_key(&meta.location) {
            stored.entry(key.chunk).or_default().push(meta);
        }
    }
    let named = Named::read(fetcher).await?;
    // Those of other services too.
    let pinned: HashSet<ChunkId> = kept::pins(&fetcher.store).await?.into_iter().collect();
    let mut response = CollectOrphansResponse::default();
    let mut orphans: Vec<(ChunkId, Vec<ObjectMeta>)> = Vec::new();
    for (chunk, objects) in stored {
        let count = objects.len() as u64;
        // A time in the future is that of a young object.
        let age = |meta: &ObjectMeta| now.duration_since(meta.last_modified.into()).unwrap_or(Duration::ZERO);
        if named.chunks.contains(&chunk) {
            response.named += count;
        } else if protection.covers(&chunk) || pinned.contains(&chunk) {
            response.protected += count;
        } else if objects.iter().any(|meta| age(meta) < min_age) {
            response.young += count;
        } else if named.is_prefix(fetcher, &objects).await? {
            response.named += count;
        } else if orphans.len() >= MAX_REMOVED {
            response.more = true;
            break;
        } else {
            orphans.push((chunk, objects));
        }
    }
    let metas: Vec<ObjectMeta> = orphans.iter().flat_map(|(_, objects)| objects.iter().cloned()).collect();
    if !request.dry_run {
        let remove = |meta: &ObjectMeta| {
            let path = meta.location.clone();
            async move { fetcher.store.delete(&path).await }
        };
        let removals: Vec<_> = metas.iter().map(remove).collect();
        let removed: Result<Vec<bool>, Error> = stream::iter(removals).buffered(PARALLEL).try_collect().await;
        // Even if some could not be removed: the tiers must not hold what the store does not.
        let chunks = orphans.into_iter().map(|(chunk, _)| chunk).collect();
        fetcher.remove(Removal { chunks, ..Removal::default() }).await;
        removed?;
        info!(objects = metas.len(), named = response.named, young = response.young, "removed orphans");
    }
    let staging = staging::collect(&fetcher.store, min_age, request.dry_run).await?;
    response.staging = staging.files;
    response.staging_bytes = staging.bytes;
    response.staging_young = staging.young;
    response.bytes = metas.iter().map(|meta| meta.size).sum();
    response.removed = metas.into_iter().map(|meta| meta.location.to_string()).collect();
    Ok(response)
}

/// What the documents name.
#[derive(Default)]
struct Named {
    chunks: HashSet<ChunkId>,
    /// One chunk behind each prefix of each corpus, by its id: with a prefix's tokens the id can be computed.
    behind: HashMap<ChunkId, (ModelDigest, TokensDigest)>,
}

impl Named {
    async fn read(fetcher: &Fetcher) -> Result<Self, Error> {
        let store = &fetcher.store;
        let keys = records::list(store, "").await?;
        let mut named = Self::default();
        let manifests: Vec<&String> = keys.iter().filter(|key| is_manifest(key)).collect();
        let mut corpora: HashMap<String, Corpus> = HashMap::new();
        let read = |key: String| async move {
            match records::get(store, &key).await {
                Ok(json) => Ok(Some((key, json))),
                // Removed since it was listed.
                Err(Error::NoRecord { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let reads: Vec<_> = manifests.into_iter().cloned().map(read).collect();
        let mut reads = stream::iter(reads).buffered(PARALLEL);
        while let Some(record) = reads.try_next().await? {
            let Some((key, json)) = record else { continue };
            let corpus: Corpus = parse(&key, "corpus", &json)?;
            corpora.insert(key.trim_end_matches("manifest").to_owned(), corpus);
        }
        let mut samples: HashSet<(String, String, bool)> = HashSet::new();
        let reads: Vec<_> = keys.iter().filter(|key| is_document(key)).cloned().map(read).collect();
        let mut reads = stream::iter(reads).buffered(PARALLEL);
        while let Some(record) = reads.try_next().await? {
            let Some((key, json)) = record else { continue };
            let document: Document = parse(&key, "document", &json)?;
            let folder = key.split_once("documents/").map_or("", |(folder, _)| folder).to_owned();
            named.add(&folder, corpora.get(&folder), &document, &mut samples);
        }
        Ok(named)
    }

    fn add(
        &mut self,
        folder: &str,
        corpus: Option<&Corpus>,
        document: &Document,
        samples: &mut HashSet<(String, String, bool)>,
    ) {
        for chunk in &document.chunks {
            let roles = [(true, &chunk.ids, &chunk.primary), (false, &chunk.auxiliary_ids, &chunk.auxiliary)];
            for (is_primary, ids, tokens) in roles {
                self.chunks.extend(ids.values());
                let Some(corpus) = corpus else { continue };
                let model = if is_primary { corpus.primary } else { corpus.auxiliary };
                self.chunks.insert(ChunkKey::new(model, &[], &tokens.ids, &corpus.owner).id());
                for (prefix, id) in ids {
                    if samples.insert((folder.to_owned(), prefix.clone(), is_primary)) {
                        self.behind.insert(*id, (model, TokensDigest::of(&tokens.ids)));
                    }
                }
            }
        }
    }

    /// Whether a chunk, which no document names, is the prefix of one that is named.
    async fn is_prefix(&self, fetcher: &Fetcher, objects: &[ObjectMeta]) -> Result<bool, Error> {
        for key in objects.iter().filter_map(|meta| object_key(&meta.location)) {
            let prefix = match fetcher.read_object(&key).await {
                Ok(object) => object.header.key.clone(),
                Err(Miss::Store(detail)) => {
                    return Err(Error::Unread { path: crate::store::object_path(&key).to_string(), detail });
                }
                // It cannot be used as it is, whatever it was.
                Err(_) => continue,
            };
            if prefix.prefix != TokensDigest::of(&[]) {
                return Ok(false);
            }
            let is_behind = |(id, (model, tokens)): (&ChunkId, &(ModelDigest, TokensDigest))| {
                let owner = prefix.owner.clone();
                *model == prefix.model
                    && ChunkKey { model: *model, prefix: prefix.tokens, tokens: *tokens, owner }.id() == *id
            };
            return Ok(self.behind.iter().any(is_behind));
        }
        Ok(false)
    }
}

fn is_manifest(key: &str) -> bool {
    let segments: Vec<&str> = key.split('/').collect();
    matches!(segments.as_slice(), [_, _, "manifest"])
}

fn is_document(key: &str) -> bool {
    let segments: Vec<&str> = key.split('/').collect();
    matches!(segments.as_slice(), [_, _, "documents", _])
}

fn parse<T: DeserializeOwned>(key: &str, what: &'static str, json: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(json).map_err(|source| Error::ForeignRecord { key: key.to_owned(), what, source })
}
