//! Documents → chunks → KV of both models → records. Idempotent by content; a second run resumes.
//!
//! Invariant: a document's record is written after all of its KV, so what can be found can be answered from cache.

use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::Encoding;
use kvsplice_kv::record::{Chunk, Corpus, DEFAULT_PREFIX, Document};
use kvsplice_proto::v1::ingest_event::Event;
use kvsplice_proto::v1::ingest_request::Message;
use kvsplice_proto::{convert, v1};
use tokio::time::Instant;
use tonic::Streaming;
use tracing::info;

use crate::corpus::{Index, blocking, ids_of};
use crate::document::{self, Cutter};
use crate::head::Head;
use crate::store::{self, BATCH, Events};
use crate::{Error, delete, record};

/// How often other heads are told during a long ingest.
const TOUCH: Duration = Duration::from_secs(30);
const DEFAULT_CHUNK_TOKENS: u32 = 1000;
const DEFAULT_OVERLAP: u32 = 50;
/// Smaller chunks are not worth an object, and some characters take several tokens.
const MIN_CHUNK_TOKENS: u32 = 16;

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
        let prefixes = store::tokenize(head, &manifest.prefixes).await?;
        if prefixes.is_empty() {
            return Err(convert::Error::Missing { field: "the corpus's default prefix" }.into());
        }
        head.worker.check().await?;
        let before = if is_new { None } else { Some(head.corpora.get_now(&start.corpus).await?) };
        if is_new {
            head.corpora.write_manifest(&manifest).await?;
        }
        let sizes = store::sizes(head, &manifest);
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
        store::prefixes(head, &ingest.cutter.manifest, &ingest.cutter.prefixes).await?;
        Ok(ingest)
    }

    async fn send(&self, event: Event) -> Result<(), Error> {
        let sent = self.events.send(Ok(v1::IngestEvent { event: Some(event) })).await;
        sent.map_err(|_closed| gone())
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
            Some(document) if document.digest == document::digest(&text) && self.cutter.named(&document) => {
                Pending { document, unchanged: true }
            }
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
            let Cutter { manifest, prefixes, .. } = &self.cutter;
            store::chunks(self.head, manifest, prefixes, batch, &mut self.totals).await?;
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
            self.head.corpora.write(key, document).await?;
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
        self.head.corpora.remove(&pages).await?;
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
