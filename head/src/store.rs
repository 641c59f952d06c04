//! What ingest and the registration of a prefix share: naming prefixes, and storing both models' KV of chunks.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvsplice_kv::record::{Chunk, Corpus, Tokens};
use kvsplice_kv::{ChunkId, ChunkKey};
use kvsplice_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;

use crate::Error;
use crate::auxiliary::Wanted;
use crate::corpus::blocking;
use crate::document::NamedPrefix;
use crate::encode::{self, Batch};
use crate::head::Head;
use crate::text::Template;

/// Chunks a batch: what both models encode before the next progress event.
pub(crate) const BATCH: usize = 16;

/// Where progress goes.
pub(crate) type Events = mpsc::Sender<Result<v1::IngestEvent, Status>>;

/// The first event of a run.
pub(crate) fn sizes(head: &Head, manifest: &Corpus) -> v1::IngestSizes {
    v1::IngestSizes {
        primary_bytes_per_token: head.primary_layout(manifest.encoding).token_bytes() as u64,
        auxiliary_bytes_per_token: head.auxiliary.layout.token_bytes() as u64,
    }
}

/// Tokenizes named prefixes (name → system prompt). What comes after the chunks does not change what comes before.
pub(crate) async fn tokenize(head: &Arc<Head>, prefixes: &BTreeMap<String, String>) -> Result<Vec<NamedPrefix>, Error> {
    let (head, prefixes) = (Arc::clone(head), prefixes.clone());
    let tokenize = move || {
        let named = |(name, system): (&String, &String)| {
            let primary = head.primary.render(&Template::any_question(system))?.prefix;
            let auxiliary = head.auxiliary_text.render(&Template::any_question(system))?.prefix;
            Ok(NamedPrefix { name: name.clone(), primary, auxiliary })
        };
        prefixes.iter().map(named).collect::<Result<Vec<_>, Error>>()
    };
    blocking("tokenize the prefixes", tokenize).await?
}

/// Stores the primary's KV of the prefixes themselves.
pub(crate) async fn prefixes(head: &Head, manifest: &Corpus, prefixes: &[NamedPrefix]) -> Result<(), Error> {
    for prefix in prefixes.iter().filter(|prefix| !prefix.primary.is_empty()) {
        let id = ChunkKey::new(head.primary.digest, &[], &prefix.primary, &manifest.owner).id();
        encode::prefix(head, id, &prefix.primary, manifest.encoding).await?;
    }
    Ok(())
}

/// Stores the KV of a batch of chunks behind each prefix that they name, and adds it to `totals`.
pub(crate) async fn chunks(
    head: &Head,
    manifest: &Corpus,
    prefixes: &[NamedPrefix],
    chunks: &[&Chunk],
    totals: &mut v1::IngestDone,
) -> Result<(), Error> {
    let encoding = manifest.encoding;
    for prefix in prefixes {
        let named = |ids: &BTreeMap<String, ChunkId>, tokens: &[u32]| {
            ids.get(&prefix.name).map(|&id| Wanted { id, ids: tokens.to_vec() })
        };
        let batch = Batch {
            primary_prefix: prefix.primary.clone(),
            primary: chunks.iter().filter_map(|chunk| named(&chunk.ids, &chunk.primary.ids)).collect(),
            auxiliary_prefix: prefix.auxiliary.clone(),
            auxiliary: chunks.iter().filter_map(|chunk| named(&chunk.auxiliary_ids, &chunk.auxiliary.ids)).collect(),
            encoding,
        };
        let stored = encode::batch(head, batch).await?;
        totals.chunks_created += stored.created;
        totals.chunks_present += stored.present;
    }
    let (primary, auxiliary) = (head.primary_layout(encoding), head.auxiliary.layout);
    for chunk in chunks {
        let tokens = |tokens: &Tokens| u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
        totals.primary_tokens += u64::from(tokens(&chunk.primary));
        totals.auxiliary_tokens += u64::from(tokens(&chunk.auxiliary));
        totals.primary_bytes += primary.object_bytes(tokens(&chunk.primary)) as u64;
        totals.auxiliary_bytes += auxiliary.object_bytes(tokens(&chunk.auxiliary)) as u64;
    }
    Ok(())
}
