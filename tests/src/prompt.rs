//! Texts and requests for tests. The texts are the demo corpus.

use std::sync::OnceLock;

use kvsplice_proto::v1;

use crate::project;

/// The whole corpus as one text, in the order of its files' names.
fn corpus() -> &'static str {
    static CORPUS: OnceLock<String> = OnceLock::new();
    CORPUS.get_or_init(|| {
        let folder = project().join("demo/corpus");
        let mut paths: Vec<_> = std::fs::read_dir(folder)
            .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
            .unwrap_or_default();
        paths.sort();
        paths.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect::<Vec<_>>().join("\n")
    })
}

/// The path of one article of the corpus.
pub fn article(name: &str) -> String {
    project().join("demo/corpus").join(name).display().to_string()
}

/// `count` words from the word `first` on; the corpus starts again at its end.
pub fn words(first: usize, count: usize) -> String {
    corpus().split_whitespace().cycle().skip(first).take(count).collect::<Vec<_>>().join(" ")
}

/// `count` characters from the character `first` on, wherever that cuts; the corpus starts again at its end.
pub fn characters(first: usize, count: usize) -> String {
    corpus().chars().cycle().skip(first).take(count).collect()
}

/// Chunks in the request, behind the default system prompt.
pub fn inline<S: AsRef<str>>(chunks: &[S], question: &str, store: bool) -> v1::Prompt {
    let chunks = chunks.iter().map(|chunk| chunk.as_ref().to_owned()).collect();
    let source = v1::InlineSource { chunks, store, ..Default::default() };
    v1::Prompt { source: Some(v1::prompt::Source::Inline(source)), question: question.to_owned(), ..Default::default() }
}

/// A literal prompt.
pub fn raw<S: AsRef<str>>(prefix: &str, chunks: &[S], question: &str, store: bool) -> v1::Prompt {
    let chunks = chunks.iter().map(|chunk| chunk.as_ref().to_owned()).collect();
    let source = v1::RawSource { prefix: prefix.to_owned(), chunks, store };
    v1::Prompt { source: Some(v1::prompt::Source::Raw(source)), question: question.to_owned(), ..Default::default() }
}

/// A strategy, with the ratio if it has one. Nothing is kept from one prompt to the next, so that each computes all its
/// rows.
pub fn options(strategy: &str, ratio: f32) -> v1::Options {
    let ratio = ["clip", "guided", "blend"].contains(&strategy).then_some(ratio);
    let prefix_cache = (strategy != "full").then_some(false);
    v1::Options { strategy: Some(strategy.to_owned()), ratio, prefix_cache, ..v1::Options::default() }
}

/// The options of a specification such as `clip:0.2:group=none`.
///
/// # Panics
/// When it is none.
pub fn specification(text: &str) -> v1::Options {
    text.parse::<kvsplice_kv::Options>().unwrap_or_else(|error| panic!("{text}: {error}")).into()
}

/// The same; nothing is kept from one prompt to the next, so that each computes all its rows.
///
/// # Panics
/// When it is none.
pub fn strategy(text: &str) -> v1::Options {
    let options = specification(text);
    v1::Options { prefix_cache: options.prefix_cache.map(|_| false), ..options }
}

/// So many greedy tokens, whatever they are.
pub fn greedy(max_tokens: u32) -> v1::Sampling {
    v1::Sampling { max_tokens: Some(max_tokens), ignore_eos: Some(true), ..v1::Sampling::default() }
}

/// A request whose answer has logits and rows.
pub fn request(prompt: v1::Prompt, options: v1::Options, max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest { prompt: Some(prompt), options: Some(options), sampling: Some(greedy(max_tokens)), dump: true }
}
