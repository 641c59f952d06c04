//! Flags that say what to ask, and how: prompt, options and sampling, as wire messages.

use std::path::{Path, PathBuf};

use clap::Args;
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
    /// The answer's beginning, given: it follows the prompt literally
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, conflicts_with = "raw")]
    answer_prefix: String,
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
                intro: None,
            })
        } else {
            return Err(usage("name the chunks with --corpus, --documents or --raw"));
        };
        Ok(v1::Prompt { source: Some(source), question, answer_prefix: self.answer_prefix.clone() })
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
        Ok(v1::Prompt { source: Some(v1::prompt::Source::Raw(source)), question: raw.question, ..Default::default() })
    }
}

/// Every option of a strategy but its name. Values are checked where they are set, by the strategy's own rules.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Strategy options")]
pub(crate) struct OptionFlags {
    /// clip, guided, blend: share of the chunk tokens to recompute, 0 to 1 [default: 0.2, blend 0.15]
    #[arg(long)]
    pub(crate) ratio: Option<String>,
    /// clip, guided: charged or nominal [default: charged]
    #[arg(long)]
    budget: Option<String>,
    /// clip, guided, blend: WINDOW,THRESHOLD in scored tokens, or none [default: 8,5, blend none]
    #[arg(long)]
    group: Option<String>,
    /// clip: chunk or joint [default: chunk]
    #[arg(long)]
    softmax: Option<String>,
    /// clip: auxiliary layers that score: last (the paper) or a range of depth [default: 0.5..0.8]
    #[arg(long, value_name = "LAYERS")]
    aux_layers: Option<String>,
    /// clip, guided: mean or max over rows and heads [default: mean]
    #[arg(long)]
    reduce: Option<String>,
    /// direct, lego, blend, clip, guided: chunks encoded behind the prompt's prefix, else alone [default: true]
    #[arg(long, value_name = "BOOL")]
    shared_prefix: Option<String>,
    /// direct: chunk keys move to their slots, else keep the positions of their encoding [default: true]
    #[arg(long, value_name = "BOOL")]
    renumber: Option<String>,
    /// lego, blend, clip, guided: right, or bottom-right (wrong, to reproduce others' figures) [default: right]
    #[arg(long)]
    mask: Option<String>,
    /// lego: tokens recomputed at the start of each chunk but the first [default: 16]
    #[arg(long, value_name = "K")]
    first_tokens: Option<String>,
    /// blend: paper or code [default: paper]
    #[arg(long, value_name = "MODE")]
    blend: Option<String>,
    /// guided: context or question (last-layer keys only) [default: context]
    #[arg(long, value_name = "SEEN")]
    guide: Option<String>,
    /// guided: layers of the primary model that score [default: 0.5..0.8]
    #[arg(long, value_name = "LAYERS")]
    guide_layers: Option<String>,
    /// all that reuse chunks: T of the two-part attention [default: 1, ape 0.9]
    #[arg(long, value_name = "T")]
    context_temperature: Option<String>,
    /// all that reuse chunks: S of the two-part attention [default: 1, ape 0.9]
    #[arg(long, value_name = "S")]
    context_scale: Option<String>,
    /// all that reuse chunks: paper (exponent S) or code (S·T) [default: paper]
    #[arg(long, value_name = "FORM")]
    context_form: Option<String>,
    /// lego, blend, craft, clip, guided: WINDOW,GAP,FROM or none [default: none, craft 3,0.05,0.3]
    #[arg(long, value_name = "RULE")]
    early_stop: Option<String>,
    /// craft: α of the CFO; more is recomputed with a greater one [default: 1]
    #[arg(long)]
    alpha: Option<String>,
    /// craft: compute in full and keep the chunks as variants of this context [default: false]
    #[arg(long, value_name = "BOOL")]
    capture: Option<String>,
    /// all but full: reuse what earlier prompts began with, which is exact [default: true]
    #[arg(long, value_name = "BOOL")]
    prefix_cache: Option<String>,
}

impl OptionFlags {
    /// The flags that were given.
    fn given(&self) -> Vec<(&'static str, &str)> {
        let mut given = Vec::new();
        macro_rules! collect {
            ($($field:ident)*) => {$(
                if let Some(text) = &self.$field {
                    given.push((stringify!($field), text.as_str()));
                }
            )*};
        }
        collect!(ratio budget group softmax aux_layers reduce shared_prefix renumber mask first_tokens blend guide
                 guide_layers context_temperature context_scale context_form early_stop alpha capture prefix_cache);
        given
    }

    /// The options of `strategy`; a flag that it does not use is refused.
    pub(crate) fn of(&self, strategy: Strategy) -> anyhow::Result<Options> {
        let mut options = Options::of(strategy);
        for (name, text) in self.given() {
            options.set(name, text).map_err(|error| usage(error.to_string()))?;
        }
        Ok(options)
    }

    /// Adds the flags to specifications: each to those that use it. A flag that none uses, or that a specification
    /// says itself, is refused.
    pub(crate) fn add_to(&self, specifications: &mut [Options]) -> anyhow::Result<()> {
        for (name, text) in self.given() {
            let mut refused = None;
            let mut used = false;
            for options in specifications.iter_mut() {
                if !options.uses(name) {
                    refused = options.set(name, text).err();
                    continue;
                }
                options.set(name, text).map_err(|error| usage(error.to_string()))?;
                used = true;
            }
            if let (false, Some(error)) = (used, refused) {
                return Err(usage(error.to_string()));
            }
        }
        Ok(())
    }
}

/// A ratio in 0..=1, as a flag.
#[cfg(all(feature = "head", feature = "worker", feature = "cache"))]
pub(crate) fn ratio(text: &str) -> Result<f32, String> {
    let ratio: f32 = text.parse().map_err(|error| format!("{error}"))?;
    Options { ratio, ..Options::default() }.validate().map_err(|error| error.to_string())?;
    Ok(ratio)
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
