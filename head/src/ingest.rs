//! Documents → chunks → KV of both models → records. Idempotent by content; a second run resumes.
//!
//! Invariant: a document's record is written after all of its KV, so what can be found can be answered from cache.

use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::record::{Chunk, Corpus, DEFAULT_PREFIX, Document};
use kvsplice_kv::{ChunkId, Encoding};
use kvsplice_proto::v1::ingest_event::Event;
use kvsplice_proto::v1::ingest_request::Message;
use kvsplice_proto::{convert, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Status, Streaming};
use tracing::info;

use crate::auxiliary::Wanted;
use crate::corpus::{Index, blocking, ids_of};
use crate::document::{self, Cutter, NamedPrefix};
use crate::encode::{self, Batch};
use crate::head::Head;
use crate::{Error, delete, record};

/// Chunks a batch: what both models encode before the next progress event.
const BATCH: usize = 16;
/// How often other heads are told during a long ingest.
const TOUCH: Duration = Duration::from_secs(30);
const DEFAULT_CHUNK_TOKENS: u32 = 1000;
const DEFAULT_OVERLAP: u32 = 50;
/// Smaller chunks are not worth an object, and some characters take several tokens.
const MIN_CHUNK_TOKENS: u32 = 16;

/// Where progress goes.
pub(crate) type Events = mpsc::Sender<Result<v1::IngestEvent, Status>>;

/// Ingests everything that the caller sends, until it goes away.
pub(crate) async fn ingest(head: Arc<Head>, requests: Streaming<v1::IngestRequest>, events: Events) {
    if let Err(error) = run(&head, requests, &events).await {
        let _caller_gone = events.send(Err(error.into())).await;
    }
}

async fn run(head: &Arc<Head>, mut requests: Streaming<v1::IngestRequest>, events: &Events) -> Result<(), Error> {
    let Some(Message::Start(start)) = next(&mut requests).await? else {
        return Err(Error::invalid("first message", "must be start"));
    };
    let mut ingest = Ingest::open(head, start, events).await?;
    let outcome = tokio::select! {
        outcome = ingest.take_all(&mut requests) => outcome,
        () = events.closed() => Err(gone()),
    };
    // What is written is announced even when something went wrong later.
    if ingest.unannounced {
        head.corpora.touch(&ingest.cutter.manifest.name).await?;
    }
    outcome?;
    ingest.remove_replaced().await?;
    info!(corpus = ingest.cutter.manifest.name, ?ingest.totals, "ingest done");
    ingest.send(Event::Done(ingest.totals)).await
}

async fn next(requests: &mut Streaming<v1::IngestRequest>) -> Result<Option<Message>, Error> {
    let message = requests.message().await.map_err(|status| Error::invalid("request stream", status.message()))?;
    Ok(message.and_then(|message| message.message))
}

fn gone() -> Error {
    Error::Task { task: "ingest", detail: "the caller went away".into() }
}

/// One run.
struct Ingest<'a> {
    head: &'a Arc<Head>,
    events: &'a Events,
    cutter: Cutter,
    /// The corpus as it was at the start; none when it is new.
    before: Option<Arc<Index>>,
    pending: Vec<Pending>,
    /// Documents of an older text with what took their place.
    replaced: Vec<(Arc<Document>, Arc<Document>)>,
    totals: v1::IngestDone,
    chunks_known: u64,
    unannounced: bool,
    announced: Instant,
}

struct Pending {
    document: Arc<Document>,
    unchanged: bool,
}

impl<'a> Ingest<'a> {
    async fn open(head: &'a Arc<Head>, start: v1::IngestStart, events: &'a Events) -> Result<Self, Error> {
        record::check_corpus(&start.corpus)?;
        let existing = head.corpora.manifest(&start.corpus).await?;
        let is_new = existing.is_none();
        let manifest = match existing {
            Some(manifest) => check_settings(head, &start, manifest)?,
            None => new_manifest(head, &start)?,
        };
        let prefixes = prefixes(head, &manifest).await?;
        head.worker.check().await?;
        let before = if is_new { None } else { Some(head.corpora.get_now(&start.corpus).await?) };
        if is_new {
            let key = record::manifest_key(&manifest.owner, &manifest.name);
            let json = serde_json::to_vec(&manifest).map_err(|source| Error::Record { key: key.clone(), source })?;
            head.cache.put_record(&key, json).await.map_err(Error::cache("write a corpus"))?;
        }
        let sizes = v1::IngestSizes {
            primary_bytes_per_token: head.primary_layout(manifest.encoding).token_bytes() as u64,
            auxiliary_bytes_per_token: head.auxiliary.layout.token_bytes() as u64,
        };
        let cutter =
            Cutter { primary: head.primary.clone(), auxiliary: head.auxiliary_text.clone(), manifest, prefixes };
        let ingest = Self {
            head,
            events,
            cutter,
            before,
            pending: Vec::new(),
            replaced: Vec::new(),
            totals: v1::IngestDone::default(),
            chunks_known: 0,
            unannounced: is_new,
            announced: Instant::now(),
        };
        ingest.send(Event::Sizes(sizes)).await?;
        ingest.store_prefixes().await?;
        Ok(ingest)
    }

    async fn send(&self, event: Event) -> Result<(), Error> {
        let sent = self.events.send(Ok(v1::IngestEvent { event: Some(event) })).await;
        sent.map_err(|_closed| gone())
    }

    async fn store_prefixes(&self) -> Result<(), Error> {
        let manifest = &self.cutter.manifest;
        for prefix in self.cutter.prefixes.iter().filter(|prefix| !prefix.primary.is_empty()) {
            let model = self.head.primary.digest;
            let id = kvsplice_kv::ChunkKey::new(model, &[], &prefix.primary, &manifest.owner).id();
            encode::prefix(self.head, id, &prefix.primary, manifest.encoding).await?;
        }
        Ok(())
    }

    async fn take_all(&mut self, requests: &mut Streaming<v1::IngestRequest>) -> Result<(), Error> {
        loop {
            let outcome = match next(requests).await {
                Ok(Some(Message::Document(document))) => self.take(document).await,
                Ok(Some(Message::Start(_))) => Err(Error::invalid("start", "must come first and once")),
                Ok(None) => return self.flush().await,
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                // A bad document loses nothing that came before it.
                self.flush().await?;
                return Err(error);
            }
        }
    }

    async fn take(&mut self, text: v1::DocumentText) -> Result<(), Error> {
        document::check(&text)?;
        let known = self.before.as_ref().and_then(|index| index.document(&text.id)).cloned();
        let pending = match known {
            Some(document) if document.digest == document::digest(&text) => Pending { document, unchanged: true },
            known => {
                let cutter = self.cutter.clone();
                let document = Arc::new(blocking("cut a document", move || cutter.cut(&text)).await??);
                self.replaced.extend(known.map(|known| (known, Arc::clone(&document))));
                Pending { document, unchanged: false }
            }
        };
        self.chunks_known += pending.document.chunks.len() as u64;
        self.pending.push(pending);
        let waiting: usize = self.pending.iter().map(|pending| pending.document.chunks.len()).sum();
        if waiting >= BATCH { self.flush().await } else { Ok(()) }
    }

    /// Stores what is pending: KV in batches, then the records.
    async fn flush(&mut self) -> Result<(), Error> {
        let pending = std::mem::take(&mut self.pending);
        let chunks: Vec<&Chunk> = pending.iter().flat_map(|pending| &pending.document.chunks).collect();
        for batch in chunks.chunks(BATCH) {
            self.store(batch).await?;
            self.send(Event::Progress(self.progress())).await?;
        }
        for Pending { document, unchanged } in &pending {
            self.totals.documents += 1;
            if *unchanged {
                self.totals.documents_unchanged += 1;
                continue;
            }
            let manifest = &self.cutter.manifest;
            let key = record::document_key(&manifest.owner, &manifest.name, &document.id);
            let document = Arc::clone(document);
            for (key, json) in blocking("write a document", move || record::pages(&key, &document)).await?? {
                self.head.cache.put_record(&key, json).await.map_err(Error::cache("write a document"))?;
            }
            self.unannounced = true;
        }
        if self.unannounced && self.announced.elapsed() >= TOUCH {
            self.head.corpora.touch(&self.cutter.manifest.name).await?;
            self.unannounced = false;
            self.announced = Instant::now();
        }
        if !pending.is_empty() {
            self.send(Event::Progress(self.progress())).await?;
        }
        Ok(())
    }

    async fn store(&mut self, chunks: &[&Chunk]) -> Result<(), Error> {
        let encoding = self.cutter.manifest.encoding;
        for prefix in &self.cutter.prefixes {
            let named = |ids: &std::collections::BTreeMap<String, ChunkId>, tokens: &[u32]| {
                ids.get(&prefix.name).map(|&id| Wanted { id, ids: tokens.to_vec() })
            };
            let batch = Batch {
                primary_prefix: prefix.primary.clone(),
                primary: chunks.iter().filter_map(|chunk| named(&chunk.ids, &chunk.primary.ids)).collect(),
                auxiliary_prefix: prefix.auxiliary.clone(),
                auxiliary: chunks
                    .iter()
                    .filter_map(|chunk| named(&chunk.auxiliary_ids, &chunk.auxiliary.ids))
                    .collect(),
                encoding,
            };
            let stored = encode::batch(self.head, batch).await?;
            self.totals.chunks_created += stored.created;
            self.totals.chunks_present += stored.present;
        }
        let (primary, auxiliary) = (self.head.primary_layout(encoding), self.head.auxiliary.layout);
        for chunk in chunks {
            let tokens = |tokens: &kvsplice_kv::record::Tokens| u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
            self.totals.primary_tokens += u64::from(tokens(&chunk.primary));
            self.totals.auxiliary_tokens += u64::from(tokens(&chunk.auxiliary));
            self.totals.primary_bytes += primary.object_bytes(tokens(&chunk.primary)) as u64;
            self.totals.auxiliary_bytes += auxiliary.object_bytes(tokens(&chunk.auxiliary)) as u64;
        }
        Ok(())
    }

    fn progress(&self) -> v1::IngestProgress {
        v1::IngestProgress {
            documents: self.totals.documents,
            chunks_done: self.totals.chunks_created + self.totals.chunks_present,
            chunks_known: self.chunks_known * self.cutter.prefixes.len() as u64,
            tokens_done: self.totals.primary_tokens,
        }
    }

    /// Removes KV and record pages that only the replaced texts used.
    async fn remove_replaced(&mut self) -> Result<(), Error> {
        if self.replaced.is_empty() {
            return Ok(());
        }
        let manifest = &self.cutter.manifest;
        let (mut ids, mut pages) = (Vec::new(), Vec::new());
        for (old, new) in std::mem::take(&mut self.replaced) {
            let key = record::document_key(&manifest.owner, &manifest.name, &old.id);
            let kept = record::pages(&key, &new)?.len();
            pages.extend(record::pages(&key, &old)?.into_iter().rev().skip(kept).map(|(key, _)| key));
            ids.extend(old.chunks.iter().flat_map(ids_of));
        }
        self.head.cache.delete(&[], &pages).await.map_err(Error::cache("remove old pages"))?;
        delete::unused_chunks(self.head, ids).await?;
        Ok(())
    }
}

/// Checks what the caller asks for against an existing corpus; what it leaves open is the corpus's.
fn check_settings(head: &Head, start: &v1::IngestStart, manifest: Corpus) -> Result<Corpus, Error> {
    head.corpora.check_models(&manifest)?;
    let system = manifest.prefixes.get(DEFAULT_PREFIX).map(String::as_str).unwrap_or_default();
    let chunk_tokens = if start.chunk_tokens == 0 { manifest.chunk_tokens } else { start.chunk_tokens };
    let asked_system = if start.system_prompt.is_empty() { system } else { &start.system_prompt };
    let encoding = |encoding: Encoding| encoding.to_string();
    for (what, expected, got) in [
        ("chunk_tokens", manifest.chunk_tokens.to_string(), chunk_tokens.to_string()),
        ("overlap", manifest.overlap.to_string(), start.overlap.unwrap_or(manifest.overlap).to_string()),
        ("system prompt", format!("{system:?}"), format!("{asked_system:?}")),
        ("encoding", encoding(manifest.encoding), encoding(head.config.encoding)),
    ] {
        if expected != got {
            return Err(Error::CorpusMismatch { corpus: manifest.name, what, expected, got });
        }
    }
    Ok(manifest)
}

fn new_manifest(head: &Head, start: &v1::IngestStart) -> Result<Corpus, Error> {
    let chunk_tokens = if start.chunk_tokens == 0 { DEFAULT_CHUNK_TOKENS } else { start.chunk_tokens };
    let overlap = start.overlap.unwrap_or(DEFAULT_OVERLAP);
    let context = head.primary.config.context;
    if !(MIN_CHUNK_TOKENS..context).contains(&chunk_tokens) {
        let detail = format!("must be at least {MIN_CHUNK_TOKENS} and less than {context}, got {chunk_tokens}");
        return Err(Error::invalid("chunk_tokens", detail));
    }
    if overlap >= chunk_tokens {
        let detail = format!("must be less than chunk_tokens {chunk_tokens}, got {overlap}");
        return Err(Error::invalid("overlap", detail));
    }
    let system = if start.system_prompt.is_empty() { &head.config.system_prompt } else { &start.system_prompt };
    Ok(Corpus {
        name: start.corpus.clone(),
        owner: head.config.owner.clone(),
        primary: head.primary.digest,
        auxiliary: head.auxiliary_text.digest,
        chunk_tokens,
        overlap,
        encoding: head.config.encoding,
        prefixes: [(DEFAULT_PREFIX.to_owned(), system.clone())].into(),
    })
}

/// Tokenizes a corpus's named prefixes. What comes after the chunks does not change what comes before.
async fn prefixes(head: &Arc<Head>, manifest: &Corpus) -> Result<Vec<NamedPrefix>, Error> {
    let (head, prefixes) = (Arc::clone(head), manifest.prefixes.clone());
    let tokenize = move || {
        let named = |(name, system): (&String, &String)| {
            let primary = head.primary.render(system, "?")?.prefix;
            let auxiliary = head.auxiliary_text.render(system, "?")?.prefix;
            Ok(NamedPrefix { name: name.clone(), primary, auxiliary })
        };
        prefixes.iter().map(named).collect::<Result<Vec<_>, Error>>()
    };
    let prefixes = blocking("tokenize the prefixes", tokenize).await??;
    if prefixes.is_empty() {
        return Err(convert::Error::Missing { field: "the corpus's default prefix" }.into());
    }
    Ok(prefixes)
}
