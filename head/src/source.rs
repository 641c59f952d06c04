//! The prompt of a request → its chunks and frame, looked up but not tokenized.

use std::sync::Arc;

use kvsplice_kv::record::DEFAULT_PREFIX;
use kvsplice_proto::convert::required;
use kvsplice_proto::v1;
use kvsplice_proto::v1::prompt::Source as Wire;

use crate::Error;
use crate::corpus::blocking;
use crate::head::Head;
use crate::plan::{OnMiss, Source, SourceChunk, SourceFrame};
use crate::text::Template;

const DEFAULT_TOP_K: u32 = 4;

/// Resolves a prompt.
pub(crate) async fn resolve(head: &Head, prompt: Option<v1::Prompt>) -> Result<Source, Error> {
    let v1::Prompt { source, question, answer_prefix } = required("prompt", prompt)?;
    let text = |chunks: Vec<String>| chunks.into_iter().map(SourceChunk::Text).collect();
    let encoding = head.config.encoding;
    match required("prompt source", source)? {
        Wire::Corpus(source) => from_corpus(head, source, question, answer_prefix).await,
        Wire::Inline(source) => Ok(Source {
            chunks: text(source.chunks),
            frame: SourceFrame::Template(Template {
                system: system_or_default(head, source.system_prompt),
                intro: source.intro,
                question,
                answer_prefix,
            }),
            encoding,
            on_miss: on_miss(source.store),
            all_fresh: None,
        }),
        Wire::Raw(source) => Ok(Source {
            chunks: text(source.chunks),
            frame: SourceFrame::Raw { prefix: source.prefix, question: question + &answer_prefix },
            encoding,
            on_miss: on_miss(source.store),
            all_fresh: None,
        }),
    }
}

async fn from_corpus(
    head: &Head,
    source: v1::CorpusSource,
    question: String,
    answer_prefix: String,
) -> Result<Source, Error> {
    if question.trim().is_empty() {
        return Err(Error::invalid("question", "must not be empty: ask something"));
    }
    let prefix = if source.prefix.is_empty() { DEFAULT_PREFIX } else { &source.prefix };
    let mut index = head.corpora.get(&source.corpus).await?;
    if !index.manifest.prefixes.contains_key(prefix) {
        // Another head may have registered it just now.
        index = head.corpora.get_now(&source.corpus).await?;
    }
    let chunks = if source.chunks.is_empty() {
        let count = if source.top_k == 0 { DEFAULT_TOP_K } else { source.top_k };
        let (ranked, question) = (Arc::clone(&index), question.clone());
        blocking("rank chunks", move || ranked.best(&question, usize::try_from(count).unwrap_or(usize::MAX))).await?
    } else {
        let find = |index: &crate::corpus::Index| source.chunks.iter().map(|name| index.find(name)).collect();
        let found: Result<Vec<_>, Error> = find(&index);
        match found {
            // Another head may have ingested it just now.
            Err(Error::NotFound { .. }) => find(&*head.corpora.get_now(&source.corpus).await?)?,
            found => found?,
        }
    };
    if chunks.is_empty() {
        let hint = "it has no chunks: ingest documents into it first".to_owned();
        return Err(Error::NotFound { what: "chunk of corpus", name: source.corpus, hint });
    }
    let manifest = &index.manifest;
    let Some(named) = manifest.prefixes.get(prefix) else {
        let known: Vec<&str> = manifest.prefixes.keys().map(String::as_str).collect();
        let hint = format!("corpus {:?} has: {}; register another first", source.corpus, known.join(", "));
        return Err(Error::NotFound { what: "prefix", name: prefix.to_owned(), hint });
    };
    let other = !source.system_prompt.is_empty() && source.system_prompt != *named;
    let all_fresh = other.then(|| format!("the system prompt is not that of the corpus's prefix {prefix:?}"));
    let system = if other { source.system_prompt } else { named.clone() };
    Ok(Source {
        chunks: chunks.into_iter().map(SourceChunk::Stored).collect(),
        frame: SourceFrame::Template(Template { system, intro: None, question, answer_prefix }),
        encoding: manifest.encoding,
        on_miss: OnMiss::Repair,
        all_fresh,
    })
}

fn system_or_default(head: &Head, system: String) -> String {
    if system.is_empty() { head.config.system_prompt.clone() } else { system }
}

fn on_miss(store: bool) -> OnMiss {
    if store { OnMiss::Store } else { OnMiss::Fresh }
}
