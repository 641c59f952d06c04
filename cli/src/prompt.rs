//! Flags that say what to ask, and how: prompt, options and sampling, as wire messages.

use std::path::{Path, PathBuf};

use clap::Args;
use kvsplice_kv::options::{AuxLayers, Budget, Group, Softmax};
use kvsplice_kv::{Options, Strategy};
use kvsplice_proto::v1;
use serde::Deserialize;

use crate::documents;
use crate::failure::{data, usage};

/// Where the chunks come from, and the question.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Prompt")]
pub(crate) struct PromptFlags {
    /// The question; not with --raw
    question: Option<String>,
    /// Chunks of an ingested corpus
    #[arg(long, value_name = "NAME")]
    corpus: Option<String>,
    /// Chunks from a .jsonl file, one {"text"} a line, in order; they hit the cache by content
    #[arg(long, value_name = "FILE", conflicts_with = "corpus")]
    documents: Option<PathBuf>,
    /// A JSON file {"prefix","chunks":[...],"question"}, taken literally, without a template
    #[arg(long, value_name = "FILE", conflicts_with_all = ["corpus", "documents", "question"])]
    raw: Option<PathBuf>,
    /// Chunks of the corpus to take, best first by BM25 [default: 4]
    #[arg(long, value_name = "N", requires = "corpus", conflicts_with = "chunks",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    top_k: Option<u32>,
    /// These chunks of the corpus, in this order: ids, starts of ids, or DOCUMENT#INDEX
    #[arg(long, value_name = "ID,ID", value_delimiter = ',', requires = "corpus")]
    chunks: Vec<String>,
    /// A named prefix of the corpus
    #[arg(long, value_name = "NAME", requires = "corpus", conflicts_with = "system_prompt")]
    prefix: Option<String>,
    /// Another system prompt; chunks of a corpus then run fresh
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system_prompt: Option<String>,
    /// Encode and keep chunks of --documents or --raw that are not cached
    #[arg(long, conflicts_with = "corpus")]
    store: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    prefix: String,
    chunks: Vec<String>,
    question: String,
}

impl PromptFlags {
    /// The prompt on the wire; reads the files that the flags name.
    pub(crate) fn read(&self) -> anyhow::Result<v1::Prompt> {
        if let Some(path) = &self.raw {
            return self.read_raw(path);
        }
        let question = self.question.clone().unwrap_or_default();
        if question.trim().is_empty() {
            return Err(data("the question is empty; give it as the last argument"));
        }
        let source = if let Some(corpus) = &self.corpus {
            v1::prompt::Source::Corpus(v1::CorpusSource {
                corpus: corpus.clone(),
                chunks: self.chunks.clone(),
                top_k: self.top_k.unwrap_or(0),
                prefix: self.prefix.clone().unwrap_or_default(),
                system_prompt: self.system_prompt.clone().unwrap_or_default(),
            })
        } else if let Some(path) = &self.documents {
            v1::prompt::Source::Inline(v1::InlineSource {
                chunks: documents::chunks(path)?,
                store: self.store,
                system_prompt: self.system_prompt.clone().unwrap_or_default(),
            })
        } else {
            return Err(usage("name the chunks with --corpus, --documents or --raw"));
        };
        Ok(v1::Prompt { source: Some(source), question })
    }

    fn read_raw(&self, path: &Path) -> anyhow::Result<v1::Prompt> {
        let place = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| data(format!("read {place}: {error}")))?;
        let raw: Raw = serde_json::from_str(&text).map_err(|error| {
            data(format!("{place}: {error}; it must be {{\"prefix\":…,\"chunks\":[…],\"question\":…}}"))
        })?;
        if raw.question.is_empty() {
            return Err(data(format!("{place}: the question is empty")));
        }
        let source = v1::RawSource { prefix: raw.prefix, chunks: raw.chunks, store: self.store };
        Ok(v1::Prompt { source: Some(v1::prompt::Source::Raw(source)), question: raw.question })
    }
}

/// Every option of a strategy but its name.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Strategy options")]
pub(crate) struct OptionFlags {
    /// clip: share of the chunk tokens to recompute, 0 to 1 [default: 0.2]
    #[arg(long, value_parser = ratio)]
    pub(crate) ratio: Option<f32>,
    /// clip: charged or nominal [default: charged]
    #[arg(long)]
    budget: Option<Budget>,
    /// clip: WINDOW,THRESHOLD in auxiliary tokens, or none [default: 8,5]
    #[arg(long)]
    group: Option<Group>,
    /// clip: chunk or joint [default: chunk]
    #[arg(long)]
    softmax: Option<Softmax>,
    /// clip: last, or a range of depth such as 0.5..0.8 [default: last]
    #[arg(long)]
    aux_layers: Option<AuxLayers>,
    /// direct: chunks encoded behind the prompt's prefix, else alone [default: true]
    #[arg(long, value_name = "BOOL")]
    shared_prefix: Option<bool>,
    /// direct: chunk keys move to their slots, else keep the positions of their encoding [default: true]
    #[arg(long, value_name = "BOOL")]
    renumber: Option<bool>,
}

/// A ratio in 0..=1, as a flag.
pub(crate) fn ratio(text: &str) -> Result<f32, String> {
    let ratio: f32 = text.parse().map_err(|error| format!("{error}"))?;
    Options { ratio, ..Options::default() }.validate().map_err(|error| error.to_string())?;
    Ok(ratio)
}

impl OptionFlags {
    /// The options of `strategy`.
    pub(crate) fn with(&self, strategy: Strategy) -> anyhow::Result<Options> {
        let default = Options::default();
        let direct = strategy == Strategy::Direct;
        let options = Options {
            strategy,
            ratio: self.ratio.unwrap_or(default.ratio),
            budget: self.budget.unwrap_or(default.budget),
            group: self.group.unwrap_or(default.group),
            softmax: self.softmax.unwrap_or(default.softmax),
            aux_layers: self.aux_layers.unwrap_or(default.aux_layers),
            shared_prefix: self.shared_prefix.unwrap_or(default.shared_prefix) || !direct,
            renumber: self.renumber.unwrap_or(default.renumber) || !direct,
        };
        options.validate().map_err(|error| usage(error.to_string()))?;
        Ok(options)
    }

    /// Refuses `direct`'s options with another strategy, where they would do nothing.
    pub(crate) fn check(&self, strategy: Strategy) -> anyhow::Result<()> {
        let unused = self.shared_prefix == Some(false) || self.renumber == Some(false);
        if unused && strategy != Strategy::Direct {
            return Err(usage(format!("--shared-prefix and --renumber go with --strategy direct, not {strategy}")));
        }
        Ok(())
    }
}

/// How output tokens are drawn.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingFlags {
    /// At most this many output tokens [default: 128]
    #[arg(long, value_name = "M")]
    max_tokens: Option<u32>,
    /// 0 is greedy [default: 0]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// The smallest set of tokens with at least this probability [default: 1]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Draw from the K most likely tokens; 0 for all [default: 0]
    #[arg(long, value_name = "K")]
    sample_top_k: Option<u32>,
    /// Seeds the draw [default: 0]
    #[arg(long)]
    seed: Option<u64>,
    /// End the output before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on past the model's end token
    #[arg(long)]
    ignore_eos: bool,
}

impl SamplingFlags {
    /// The sampling on the wire, checked.
    pub(crate) fn read(&self) -> anyhow::Result<v1::Sampling> {
        let wire = v1::Sampling {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.sample_top_k,
            seed: self.seed,
            stop: self.stop.clone(),
            ignore_eos: Some(self.ignore_eos),
        };
        kvsplice_kv::Sampling::try_from(wire.clone()).map_err(|error| usage(error.to_string()))?;
        Ok(wire)
    }
}
