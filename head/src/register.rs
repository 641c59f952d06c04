//! Another named prefix of a corpus: every chunk's KV of both models once more, behind the new system prompt.
//!
//! Invariant: the corpus's settings name the prefix only after all of the KV is there. Idempotent; a second run resumes
//! and makes up for documents that came while the first one ran.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvsplice_kv::ChunkId;
use kvsplice_kv::record::{Chunk, Document};
use kvsplice_proto::v1;
use kvsplice_proto::v1::ingest_event::Event;
use tracing::info;

use crate::corpus::{Index, blocking, check_prefix, unknown_corpus};
use crate::document::Cutter;
use crate::head::Head;
use crate::store::{self, BATCH, Events};
use crate::{Error, delete, record};

/// Registers a prefix and reports on it, until the caller goes away.
pub(crate) async fn register(head: Arc<Head>, request: v1::RegisterPrefixRequest, events: Events) {
    if let Err(error) = run(&head, &request, &events).await {
        let _caller_gone = events.send(Err(error.into())).await;
    }
}

fn gone() -> Error {
    Error::Task { task: "register a prefix", detail: "the caller went away".into() }
}

async fn run(head: &Arc<Head>, request: &v1::RegisterPrefixRequest, events: &Events) -> Result<(), Error> {
    let v1::RegisterPrefixRequest { corpus, name, system_prompt } = request;
    record::check_corpus(corpus)?;
    record::check_prefix(name)?;
    if system_prompt.trim().is_empty() {
        return Err(Error::invalid("system_prompt", "must not be empty"));
    }
    let Some(manifest) = head.corpora.manifest(corpus).await? else { return Err(unknown_corpus(corpus)) };
    head.corpora.check_models(&manifest)?;
    check_prefix(&manifest, name, system_prompt)?;
    let named: BTreeMap<String, String> = [(name.clone(), system_prompt.clone())].into();
    let prefixes = store::tokenize(head, &named).await?;
    head.worker.check().await?;
    let index = head.corpora.get_now(corpus).await?;
    let (primary, auxiliary) = (head.primary.clone(), head.auxiliary_text.clone());
    let cutter = Cutter { primary, auxiliary, manifest, prefixes };
    check(&cutter, &index).await?;
    let chunks_known = index.chunks().count() as u64;
    let mut registering = Registering { head, events, cutter, name, chunks_known, totals: v1::IngestDone::default() };
    registering.send(Event::Sizes(store::sizes(head, &registering.cutter.manifest))).await?;
    let outcome = tokio::select! {
        outcome = registering.all(&index, system_prompt) => outcome,
        () = events.closed() => Err(gone()),
    };
    // Documents name more KV now, even if something went wrong later.
    head.corpora.touch(corpus).await?;
    let replaced = outcome?;
    if !replaced.is_empty() {
        delete::unused_chunks(head, replaced).await?;
    }
    info!(corpus, name, totals = ?registering.totals, "prefix registered");
    registering.send(Event::Done(registering.totals)).await
}

/// Refuses a system prompt that is too long for one of the chunks, before anything is computed.
async fn check(cutter: &Cutter, index: &Arc<Index>) -> Result<(), Error> {
    let (cutter, index) = (cutter.clone(), Arc::clone(index));
    let check = move || index.chunks().try_for_each(|(document, _, chunk)| cutter.fits(&document.id, chunk));
    blocking("check the chunks", check).await?
}

/// One run.
struct Registering<'a> {
    head: &'a Arc<Head>,
    events: &'a Events,
    /// Its only prefix is the new one.
    cutter: Cutter,
    name: &'a str,
    chunks_known: u64,
    totals: v1::IngestDone,
}

impl Registering<'_> {
    /// Stores everything, then names the prefix. Returns ids that a broken-off run left under this name.
    async fn all(&mut self, index: &Index, system: &str) -> Result<Vec<ChunkId>, Error> {
        let Cutter { manifest, prefixes, .. } = &self.cutter;
        store::prefixes(self.head, manifest, prefixes).await?;
        let mut replaced = Vec::new();
        let mut group: Vec<Arc<Document>> = Vec::new();
        for document in index.documents() {
            group.push(Arc::clone(document));
            let waiting: usize = group.iter().map(|document| document.chunks.len()).sum();
            if waiting >= BATCH {
                self.documents(std::mem::take(&mut group), &mut replaced).await?;
            }
        }
        self.documents(group, &mut replaced).await?;
        self.head.corpora.add_prefix(&self.cutter.manifest.name, self.name, system).await?;
        Ok(replaced)
    }

    /// Stores the KV of some documents in batches, then writes their records.
    async fn documents(&mut self, group: Vec<Arc<Document>>, replaced: &mut Vec<ChunkId>) -> Result<(), Error> {
        let (cutter, before) = (self.cutter.clone(), group.clone());
        let name = move || {
            let named = before.iter().map(|document| {
                let mut document = Document::clone(document);
                document.chunks.iter_mut().try_for_each(|chunk| cutter.name(&document.id, chunk))?;
                Ok(Arc::new(document))
            });
            named.collect::<Result<Vec<_>, Error>>()
        };
        let named = blocking("name chunks", name).await??;
        let chunks: Vec<&Chunk> = named.iter().flat_map(|document| &document.chunks).collect();
        for batch in chunks.chunks(BATCH) {
            let Cutter { manifest, prefixes, .. } = &self.cutter;
            store::chunks(self.head, manifest, prefixes, batch, &mut self.totals).await?;
            self.send(Event::Progress(self.progress())).await?;
        }
        for (old, new) in group.iter().zip(&named) {
            self.totals.documents += 1;
            if old == new {
                self.totals.documents_unchanged += 1;
                continue;
            }
            let manifest = &self.cutter.manifest;
            let key = record::document_key(&manifest.owner, &manifest.name, &new.id);
            let rewritten = self.head.corpora.rewrite(key, Arc::clone(new)).await?;
            // A text that was replaced or removed meanwhile leaves what was stored for it to nobody.
            let left = if rewritten { old } else { new };
            replaced.extend(left.chunks.iter().flat_map(|chunk| self.under(chunk)));
        }
        if !group.is_empty() {
            self.send(Event::Progress(self.progress())).await?;
        }
        Ok(())
    }

    /// The ids that a chunk has under the prefix's name.
    fn under(&self, chunk: &Chunk) -> Vec<ChunkId> {
        [chunk.ids.get(self.name), chunk.auxiliary_ids.get(self.name)].into_iter().flatten().copied().collect()
    }

    fn progress(&self) -> v1::IngestProgress {
        v1::IngestProgress {
            documents: self.totals.documents,
            chunks_done: self.totals.chunks_created + self.totals.chunks_present,
            chunks_known: self.chunks_known,
            tokens_done: self.totals.primary_tokens,
        }
    }

    async fn send(&self, event: Event) -> Result<(), Error> {
        let sent = self.events.send(Ok(v1::IngestEvent { event: Some(event) })).await;
        sent.map_err(|_closed| gone())
    }
}
