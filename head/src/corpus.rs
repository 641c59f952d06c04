//! The head's index over corpora: rebuilt from the records in the store, so any number of heads may run.
//!
//! A corpus's version record changes with its documents; an index older than a second is compared with it before use,
//! and a name that is not known makes the index be read again. Holds texts and token ids, never KV.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use kvsplice_kv::record::{Chunk, Corpus, Document};
use kvsplice_kv::{ChunkId, ModelDigest};
use kvsplice_proto::cache::CacheClient;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::rank::Ranker;
use crate::{Error, record};

/// How long an index is used without a look at the version record.
const TRUSTED: Duration = Duration::from_secs(1);
/// Records read at once.
const READS: usize = 32;
/// Digits that a start of a chunk id needs.
const MIN_START: usize = 8;

/// Every corpus of one owner.
pub(crate) struct Corpora {
    cache: CacheClient,
    owner: String,
    primary: ModelDigest,
    auxiliary: ModelDigest,
    held: Mutex<HashMap<String, Arc<Mutex<Held>>>>,
    /// Held while records change, so that a change that reads first does not undo another of this head.
    writing: Mutex<()>,
}

#[derive(Default)]
struct Held {
    index: Option<Arc<Index>>,
    version: Vec<u8>,
    checked: Option<Instant>,
}

impl Corpora {
    pub(crate) fn new(cache: CacheClient, owner: String, primary: ModelDigest, auxiliary: ModelDigest) -> Self {
        Self { cache, owner, primary, auxiliary, held: Mutex::default(), writing: Mutex::default() }
    }

    /// The index of a corpus. With the cache service down, the one that is held.
    pub(crate) async fn get(&self, corpus: &str) -> Result<Arc<Index>, Error> {
        self.index(corpus, TRUSTED).await
    }

    /// The index of a corpus, compared with the store now.
    pub(crate) async fn get_now(&self, corpus: &str) -> Result<Arc<Index>, Error> {
        self.index(corpus, Duration::ZERO).await
    }

    async fn index(&self, corpus: &str, trusted: Duration) -> Result<Arc<Index>, Error> {
        record::check_corpus(corpus)?;
        let slot = Arc::clone(self.held.lock().await.entry(corpus.to_owned()).or_default());
        // One task reads a corpus, others wait for it.
        let mut held = slot.lock().await;
        let fresh = held.checked.is_some_and(|checked| checked.elapsed() < trusted);
        if let (true, Some(index)) = (fresh, &held.index) {
            return Ok(Arc::clone(index));
        }
        let key = record::version_key(&self.owner, corpus);
        let version = match self.cache.get_record(&key).await {
            Ok(version) => version.map(|version| version.to_vec()).unwrap_or_default(),
            Err(status) => {
                let Some(index) = &held.index else { return Err(Error::cache("read a corpus")(status)) };
                warn!(corpus, error = status.message(), "cache service unavailable: using the index in memory");
                return Ok(Arc::clone(index));
            }
        };
        if let Some(index) = held.index.clone().filter(|_| version == held.version) {
            held.checked = Some(Instant::now());
            return Ok(index);
        }
        let read = self.read(corpus).await;
        if let Err(Error::NotFound { .. }) = &read {
            // Asking for names at random must not fill the memory.
            self.held.lock().await.remove(corpus);
        }
        let index = Arc::new(read?);
        info!(corpus, documents = index.documents.len(), chunks = index.places.len(), "read corpus");
        *held = Held { index: Some(Arc::clone(&index)), version, checked: Some(Instant::now()) };
        Ok(index)
    }

    /// The settings of a corpus, if there is one.
    pub(crate) async fn manifest(&self, corpus: &str) -> Result<Option<Corpus>, Error> {
        let key = record::manifest_key(&self.owner, corpus);
        let json = self.cache.get_record(&key).await.map_err(Error::cache("read a corpus"))?;
        json.map(|json| record::parse(&key, &json)).transpose()
    }

    /// Writes a corpus's settings.
    pub(crate) async fn write_manifest(&self, manifest: &Corpus) -> Result<(), Error> {
        let _alone = self.writing.lock().await;
        self.put_manifest(manifest).await
    }

    /// Adds a prefix to what the settings are now. A prefix of that name must have the same system prompt.
    pub(crate) async fn add_prefix(&self, corpus: &str, name: &str, system: &str) -> Result<(), Error> {
        let _alone = self.writing.lock().await;
        let Some(mut manifest) = self.manifest(corpus).await? else { return Err(unknown_corpus(corpus)) };
        check_prefix(&manifest, name, system)?;
        if manifest.prefixes.insert(name.to_owned(), system.to_owned()).is_some() {
            return Ok(());
        }
        self.put_manifest(&manifest).await
    }

    async fn put_manifest(&self, manifest: &Corpus) -> Result<(), Error> {
        let key = record::manifest_key(&manifest.owner, &manifest.name);
        let json = serde_json::to_vec(manifest).map_err(|source| Error::Record { key: key.clone(), source })?;
        self.cache.put_record(&key, json).await.map_err(Error::cache("write a corpus"))
    }

    /// Writes a document.
    pub(crate) async fn write(&self, key: String, document: Arc<Document>) -> Result<(), Error> {
        let _alone = self.writing.lock().await;
        self.put(key, document).await
    }

    /// Writes a document whose text is still that of the stored one. Returns whether it was.
    pub(crate) async fn rewrite(&self, key: String, document: Arc<Document>) -> Result<bool, Error> {
        let _alone = self.writing.lock().await;
        let stored = self.cache.get_record(&key).await.map_err(Error::cache("read a document"))?;
        let stored: Option<Document> = stored.map(|json| record::parse(&key, &json)).transpose()?;
        if stored.is_none_or(|stored| stored.digest != document.digest) {
            return Ok(false);
        }
        self.put(key, document).await?;
        Ok(true)
    }

    async fn put(&self, key: String, document: Arc<Document>) -> Result<(), Error> {
        for (key, json) in blocking("write a document", move || record::pages(&key, &document)).await?? {
            self.cache.put_record(&key, json).await.map_err(Error::cache("write a document"))?;
        }
        Ok(())
    }

    /// Removes records.
    pub(crate) async fn remove(&self, keys: &[String]) -> Result<Vec<String>, Error> {
        let _alone = self.writing.lock().await;
        self.cache.delete(&[], keys).await.map_err(Error::cache("remove documents"))
    }

    /// Tells every head, this one included, that documents changed.
    pub(crate) async fn touch(&self, corpus: &str) -> Result<(), Error> {
        let version = kvsplice_proto::context::new_request_id();
        let key = record::version_key(&self.owner, corpus);
        self.cache.put_record(&key, version.as_bytes().to_vec()).await.map_err(Error::cache("write a corpus"))?;
        // The outer lock must not be held while waiting for the inner one: a reader takes them the other way round.
        let slot = self.held.lock().await.get(corpus).cloned();
        if let Some(slot) = slot {
            slot.lock().await.checked = None;
        }
        Ok(())
    }

    /// Every chunk id, of either model, that a document of this owner uses.
    pub(crate) async fn ids_in_use(&self) -> Result<HashSet<ChunkId>, Error> {
        let keys = self.cache.list_records(&self.owner).await.map_err(Error::cache("list corpora"))?;
        let mut ids = HashSet::new();
        for key in &keys {
            let Some((_, rest)) = key.split_once('/') else { continue };
            let Some(corpus) = rest.strip_suffix("/manifest").filter(|corpus| record::is_segment(corpus)) else {
                continue;
            };
            for document in self.documents(corpus).await?.values() {
                ids.extend(document.chunks.iter().flat_map(ids_of));
            }
        }
        Ok(ids)
    }

    async fn read(&self, corpus: &str) -> Result<Index, Error> {
        let Some(manifest) = self.manifest(corpus).await? else {
            return Err(unknown_corpus(corpus));
        };
        self.check_models(&manifest)?;
        let documents = self.documents(corpus).await?;
        blocking("build the index of a corpus", move || Index::new(manifest, documents)).await
    }

    /// Refuses a corpus that was ingested with other models.
    pub(crate) fn check_models(&self, manifest: &Corpus) -> Result<(), Error> {
        for (what, expected, got) in
            [("primary model", manifest.primary, self.primary), ("auxiliary model", manifest.auxiliary, self.auxiliary)]
        {
            if expected != got {
                let corpus = manifest.name.clone();
                return Err(Error::CorpusMismatch {
                    corpus,
                    what,
                    expected: expected.to_string(),
                    got: got.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Reads every document of a corpus, by id.
    async fn documents(&self, corpus: &str) -> Result<BTreeMap<String, Arc<Document>>, Error> {
        let prefix = record::documents_prefix(&self.owner, corpus);
        let keys = self.cache.list_records(&prefix).await.map_err(Error::cache("list documents"))?;
        let mut pages: BTreeMap<&str, BTreeMap<usize, &str>> = BTreeMap::new();
        for key in &keys {
            let (document, page) = record::page_of(key);
            pages.entry(document).or_default().insert(page, key);
        }
        // Without page 0 the document was not finished, or is being removed.
        let whole: Vec<Vec<String>> = pages
            .into_values()
            .filter(|pages| pages.contains_key(&0))
            .map(|pages| pages.into_values().map(str::to_owned).collect())
            .collect();
        let reads = futures::stream::iter(whole).map(|keys| self.document(keys)).buffer_unordered(READS);
        let documents: Vec<Option<Document>> = reads.try_collect().await?;
        Ok(documents.into_iter().flatten().map(|document| (document.id.clone(), Arc::new(document))).collect())
    }

    async fn document(&self, keys: Vec<String>) -> Result<Option<Document>, Error> {
        let mut pages = Vec::with_capacity(keys.len());
        for (number, key) in keys.iter().enumerate() {
            match self.cache.get_record(key).await.map_err(Error::cache("read a document"))? {
                Some(json) => {
                    let key = key.clone();
                    let page = blocking("read a document", move || {
                        let page: Document = record::parse(&key, &json)?;
                        check_document(&key, &page)?;
                        Ok::<_, Error>(page)
                    });
                    pages.push(page.await??);
                }
                // Removed since it was listed.
                None if number == 0 => return Ok(None),
                None => {}
            }
        }
        Ok(record::join(pages))
    }
}

pub(crate) fn unknown_corpus(corpus: &str) -> Error {
    Error::NotFound { what: "corpus", name: corpus.to_owned(), hint: "ingest documents into it first".into() }
}

/// Refuses a name that a corpus has for another system prompt.
pub(crate) fn check_prefix(manifest: &Corpus, name: &str, system: &str) -> Result<(), Error> {
    match manifest.prefixes.get(name) {
        Some(known) if known != system => Err(Error::PrefixMismatch {
            corpus: manifest.name.clone(),
            prefix: name.to_owned(),
            expected: known.clone(),
            got: system.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Every id under which a chunk's KV is stored, of either model.
pub(crate) fn ids_of(chunk: &Chunk) -> impl Iterator<Item = ChunkId> + '_ {
    chunk.ids.values().chain(chunk.auxiliary_ids.values()).copied()
}

/// Spans from outside are used to index texts and scores: they must fit.
fn check_document(key: &str, document: &Document) -> Result<(), Error> {
    for chunk in &document.chunks {
        for tokens in [&chunk.primary, &chunk.auxiliary] {
            let inside = |&(start, end): &(u32, u32)| start <= end && end as usize <= chunk.text.len();
            if tokens.ids.len() != tokens.spans.len() || !tokens.spans.iter().all(inside) {
                let source = serde::de::Error::custom("token spans do not fit the text");
                return Err(Error::Record { key: key.to_owned(), source });
            }
        }
    }
    Ok(())
}

/// Runs slow work beside the async tasks.
pub(crate) async fn blocking<R: Send + 'static>(
    task: &'static str,
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R, Error> {
    let span = tracing::Span::current();
    let joined = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    joined.map_err(|error| Error::Task { task, detail: error.to_string() })
}

/// One corpus in memory, never changed.
pub(crate) struct Index {
    pub(crate) manifest: Corpus,
    documents: BTreeMap<String, Arc<Document>>,
    /// (document, place in it), in document order.
    places: Vec<(Arc<Document>, usize)>,
    by_id: BTreeMap<String, usize>,
    ranker: Ranker,
}

impl Index {
    fn new(manifest: Corpus, documents: BTreeMap<String, Arc<Document>>) -> Self {
        let mut places = Vec::new();
        let mut by_id = BTreeMap::new();
        for document in documents.values() {
            for (index, chunk) in document.chunks.iter().enumerate() {
                for id in chunk.ids.values() {
                    by_id.entry(id.to_string()).or_insert(places.len());
                }
                places.push((Arc::clone(document), index));
            }
        }
        let texts: Vec<&str> = places
            .iter()
            .map(|(document, index)| document.chunks.get(*index).map_or("", |chunk| chunk.text.as_str()))
            .collect();
        let ranker = Ranker::new(&texts);
        Self { manifest, documents, places, by_id, ranker }
    }

    /// A document by its id.
    pub(crate) fn document(&self, id: &str) -> Option<&Arc<Document>> {
        self.documents.get(id)
    }

    /// Every document, by its id.
    pub(crate) fn documents(&self) -> impl Iterator<Item = &Arc<Document>> {
        self.documents.values()
    }

    /// Every chunk with its document and place, in document order.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = (&Document, usize, &Chunk)> {
        self.places.iter().filter_map(|(document, index)| Some((&**document, *index, document.chunks.get(*index)?)))
    }

    /// The `count` chunks that fit a question best, the best first.
    pub(crate) fn best(&self, question: &str, count: usize) -> Vec<Chunk> {
        self.ranker.best(question, count).into_iter().filter_map(|place| self.chunk(place)).collect()
    }

    /// A chunk by its id, a start of it, or `document#index`.
    pub(crate) fn find(&self, name: &str) -> Result<Chunk, Error> {
        let hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if (MIN_START..=64).contains(&name.len()) && hexadecimal(name) {
            let start = name.to_ascii_lowercase();
            let mut found =
                self.by_id.range(start.clone()..).take_while(|(id, _)| id.starts_with(&start)).map(|(_, place)| *place);
            if let Some(first) = found.next() {
                if found.any(|other| other != first) {
                    return Err(Error::invalid("chunk", format!("must be a unique id, but {name:?} starts several")));
                }
                return self.chunk(first).ok_or_else(|| self.unknown(name));
            }
        }
        let placed = name.rsplit_once('#').and_then(|(document, index)| {
            self.documents.get(document)?.chunks.get(index.parse::<usize>().ok()?).cloned()
        });
        placed.ok_or_else(|| self.unknown(name))
    }

    fn chunk(&self, place: usize) -> Option<Chunk> {
        let (document, index) = self.places.get(place)?;
        document.chunks.get(*index).cloned()
    }

    fn unknown(&self, name: &str) -> Error {
        Error::NotFound {
            what: "chunk",
            name: name.to_owned(),
            hint: format!(
                "corpus {:?} is asked by id, a unique start of at least {MIN_START} digits, or \"document#index\"",
                self.manifest.name
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> Index {
        let chunk = |byte: u8| Chunk {
            ids: [("default".to_owned(), ChunkId::from_bytes([byte; 32]))].into(),
            auxiliary_ids: BTreeMap::new(),
            text: format!("text {byte}"),
            document_offset: 0,
            primary: Default::default(),
            auxiliary: Default::default(),
        };
        let mut twin = chunk(0xab);
        let mut bytes = [0xab; 32];
        bytes[31] = 0;
        twin.ids.insert("default".into(), ChunkId::from_bytes(bytes));
        let document = Document { id: "a#b".into(), digest: String::new(), chunks: vec![chunk(1), chunk(0xab), twin] };
        let manifest = Corpus {
            name: "c".into(),
            owner: "o".into(),
            primary: ModelDigest::from_bytes([0; 32]),
            auxiliary: ModelDigest::from_bytes([0; 32]),
            chunk_tokens: 1000,
            overlap: 50,
            encoding: kvsplice_kv::Encoding::Bf16,
            prefixes: BTreeMap::new(),
        };
        Index::new(manifest, [("a#b".to_owned(), Arc::new(document))].into())
    }

    #[test]
    fn a_chunk_is_found_by_id_unique_start_and_place() {
        let index = index();
        assert_eq!(index.find("01010101").unwrap().text, "text 1");
        assert_eq!(index.find(&"ab".repeat(32)).unwrap().text, "text 171");
        assert_eq!(index.find(&"AB".repeat(32)).unwrap().text, "text 171");
        assert_eq!(index.find("a#b#0").unwrap().text, "text 1");
        assert!(matches!(index.find("abababab"), Err(Error::Invalid { .. })));
        for unknown in ["0101", "02020202", "a#b#3", "a#b#x", "", "#"] {
            assert!(matches!(index.find(unknown), Err(Error::NotFound { .. })), "{unknown}");
        }
    }
}
