//! Request → prompt plan: the parts with their token ids, chunk ids and slots.
//!
//! Parts are tokenized apart and joined, never re-tokenized; the ids are the same for every strategy. Does not look at
//! what is cached.

use kvsplice_kv::record::{Chunk, Tokens};
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, ModelDigest, Options, Strategy};

use crate::Error;
use crate::text::{Frame, Template, TextModel};

/// At most this many chunks in one prompt.
const MAX_CHUNKS: usize = 4096;

/// What a request brings, chunks already looked up.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) chunks: Vec<SourceChunk>,
    pub(crate) frame: SourceFrame,
    pub(crate) encoding: Encoding,
    pub(crate) on_miss: OnMiss,
    /// Set when no chunk can be cached behind this prompt's prefix: why.
    pub(crate) all_fresh: Option<String>,
}

/// A chunk before its tokens are known.
#[derive(Debug)]
pub(crate) enum SourceChunk {
    /// Of a corpus; tokenized at ingest.
    Stored(Chunk),
    /// In the request.
    Text(String),
}

/// What stands around the chunks.
#[derive(Debug)]
pub(crate) enum SourceFrame {
    /// Rendered by the chat template.
    Template(Template),
    /// Taken literally.
    Raw { prefix: String, question: String },
}

/// What to do with a chunk that is not cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnMiss {
    /// The worker encodes it anew and stores it.
    Repair,
    /// Encode and store it first.
    Store,
    /// Compute it in the context of the prompt.
    Fresh,
}

/// The prompt as token ids.
#[derive(Clone, Debug)]
pub(crate) struct PromptPlan {
    pub(crate) options: Options,
    pub(crate) primary: Frame,
    /// Empty unless the strategy or a store needs the auxiliary model.
    pub(crate) auxiliary: Frame,
    /// The prefix's own KV, behind nothing.
    pub(crate) prefix_id: ChunkId,
    pub(crate) chunks: Vec<PlannedChunk>,
    /// First slot of each chunk, and of the question.
    pub(crate) chunk_starts: Vec<u32>,
    pub(crate) prompt_tokens: u32,
    pub(crate) encoding: Encoding,
    pub(crate) on_miss: OnMiss,
    pub(crate) all_fresh: Option<String>,
}

/// One chunk of the prompt.
#[derive(Clone, Debug)]
pub(crate) struct PlannedChunk {
    pub(crate) id: ChunkId,
    pub(crate) auxiliary_id: ChunkId,
    pub(crate) primary: Tokens,
    pub(crate) auxiliary: Tokens,
}

/// Who plans: both models, and the namespace of the chunks.
pub(crate) struct Planner<'a> {
    pub(crate) primary: &'a TextModel,
    pub(crate) auxiliary: &'a TextModel,
    pub(crate) owner: &'a str,
}

impl Planner<'_> {
    /// Tokenizes and checks a prompt that `output` more tokens may follow. Takes a while for long texts: not for an
    /// async task.
    pub(crate) fn plan(
        &self,
        source: Source,
        options: Options,
        output: u32,
        both_models: bool,
    ) -> Result<PromptPlan, Error> {
        let with_auxiliary = both_models || options.strategy == Strategy::Clip || source.on_miss == OnMiss::Store;
        if source.chunks.is_empty() {
            return Err(Error::invalid("chunks", "must not be empty: send at least one"));
        }
        if source.chunks.len() > MAX_CHUNKS {
            let detail = format!("must be at most {MAX_CHUNKS}, got {}", source.chunks.len());
            return Err(Error::invalid("chunks", detail));
        }
        let primary = frame(self.primary, &source.frame)?;
        if primary.question.is_empty() {
            return Err(Error::invalid("question", "must have at least one token"));
        }
        let auxiliary = if with_auxiliary { frame(self.auxiliary, &source.frame)? } else { Frame::default() };
        let mut chunks = Vec::with_capacity(source.chunks.len());
        for (index, chunk) in source.chunks.into_iter().enumerate() {
            let (primary_tokens, auxiliary_tokens) = match chunk {
                SourceChunk::Stored(chunk) => (chunk.primary, chunk.auxiliary),
                SourceChunk::Text(text) => {
                    let auxiliary = if with_auxiliary { self.auxiliary.chunk(&text)? } else { Tokens::default() };
                    (self.primary.chunk(&text)?, auxiliary)
                }
            };
            if primary_tokens.ids.is_empty() || (with_auxiliary && auxiliary_tokens.ids.is_empty()) {
                return Err(Error::invalid(format!("chunk {index}"), "must not be empty: it has no token"));
            }
            if with_auxiliary {
                let rest = auxiliary.prefix.len() + auxiliary.question.len();
                check_context(self.auxiliary, (rest + auxiliary_tokens.ids.len()) as u64, 0)?;
            }
            let behind: &[u32] = if behind_prefix(&options, index) { &primary.prefix } else { &[] };
            chunks.push(PlannedChunk {
                id: self.key(self.primary.digest, behind, &primary_tokens.ids).id(),
                auxiliary_id: self.key(self.auxiliary.digest, &auxiliary.prefix, &auxiliary_tokens.ids).id(),
                primary: primary_tokens,
                auxiliary: auxiliary_tokens,
            });
        }
        let lengths = chunks.iter().map(|chunk| chunk.primary.ids.len());
        let total = primary.prefix.len() + lengths.clone().sum::<usize>() + primary.question.len();
        check_context(self.primary, total as u64, u64::from(output))?;
        let mut slot = primary.prefix.len() as u32;
        let mut chunk_starts = vec![slot];
        for length in lengths {
            slot += length as u32;
            chunk_starts.push(slot);
        }
        Ok(PromptPlan {
            prefix_id: self.key(self.primary.digest, &[], &primary.prefix).id(),
            options,
            primary,
            auxiliary,
            chunks,
            chunk_starts,
            prompt_tokens: total as u32,
            encoding: source.encoding,
            on_miss: source.on_miss,
            all_fresh: source.all_fresh,
        })
    }

    fn key(&self, model: ModelDigest, prefix: &[u32], ids: &[u32]) -> ChunkKey {
        ChunkKey::new(model, prefix, ids, self.owner)
    }
}

impl PromptPlan {
    /// Every token id of the prompt.
    pub(crate) fn token_ids(&self) -> Vec<u32> {
        let chunks = self.chunks.iter().flat_map(|chunk| &chunk.primary.ids);
        self.primary.prefix.iter().chain(chunks).chain(&self.primary.question).copied().collect()
    }

    /// First slot of chunk `index`.
    pub(crate) fn first_slot(&self, index: usize) -> u32 {
        self.chunk_starts.get(index).copied().unwrap_or(self.prompt_tokens)
    }

    /// Whether the KV of chunk `index` was computed behind the prefix.
    pub(crate) fn behind_prefix(&self, index: usize) -> bool {
        behind_prefix(&self.options, index)
    }

    /// Whether the KV of chunk `index`, as stored, equals what full attention computes at its place: the first chunk
    /// stands behind its own prefix in every strategy.
    pub(crate) fn exact(&self, index: usize) -> bool {
        index == 0 && self.options.strategy != Strategy::Ape && !self.encoding.quantized()
    }
}

/// `direct` without a shared prefix reuses chunks that were encoded behind nothing, except the first one, which the
/// prompt itself puts behind the prefix.
fn behind_prefix(options: &Options, index: usize) -> bool {
    options.shared_prefix || index == 0
}

fn frame(model: &TextModel, frame: &SourceFrame) -> Result<Frame, Error> {
    match frame {
        SourceFrame::Template(template) if template.question.trim().is_empty() => {
            Err(Error::invalid("question", "must not be empty: ask something"))
        }
        SourceFrame::Template(template) => model.render(template),
        SourceFrame::Raw { question, .. } if question.is_empty() => {
            Err(Error::invalid("question", "must not be empty: the answer follows its last token"))
        }
        SourceFrame::Raw { prefix, question } => model.literal(prefix, question),
    }
}

fn check_context(model: &TextModel, prompt: u64, output: u64) -> Result<(), Error> {
    let context = u64::from(model.config.context);
    if prompt + output <= context {
        return Ok(());
    }
    Err(Error::TooLong { model: model.role, context, prompt, output })
}
