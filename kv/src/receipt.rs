//! The receipt: what was asked, what was done, and what it cost. It comes with every answer.
//!
//! Invariant: approximate reuse is never counted as exact.

use serde::{Deserialize, Serialize};

use crate::{ChunkId, ModelDigest, Options, Strategy};

/// Where the KV of one chunk came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// The worker's own memory: an exact beginning that an earlier prompt left, or its pool of loaded chunks.
    Device,
    /// The cache service's memory tier.
    Memory,
    /// The cache service's disk tier.
    Disk,
    /// The object store.
    Object,
    /// Encoded anew from prefix and chunk, clean room.
    Repaired,
    /// Computed in the context of the prompt, as `full` does.
    Fresh,
}

impl Source {
    /// The wire and JSON name.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Device => "device",
            Source::Memory => "memory",
            Source::Disk => "disk",
            Source::Object => "object",
            Source::Repaired => "repaired",
            Source::Fresh => "fresh",
        }
    }
}

/// What became of one chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkReceipt {
    /// The chunk.
    pub id: ChunkId,
    /// Its tokens in the prompt.
    pub tokens: u32,
    /// How many of them were computed in the context of the prompt.
    pub rows: u32,
    /// Where the others came from.
    pub source: Source,
    /// Why it was repaired or fresh; empty else.
    pub reason: String,
    /// Bytes of KV received for it over the wire: none of what the worker had, nor of what was mapped from a file of the same
    /// host, whose source is the tier that holds the file.
    pub bytes: u64,
}

/// Prompt tokens, each counted once in one of `reused_exact`, `reused_approximate` and `recomputed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// Tokens of the prefix.
    pub prefix: u32,
    /// Tokens of all chunks.
    pub chunk: u32,
    /// Tokens of the question with the template's tail.
    pub question: u32,
    /// Reused KV that equals what full attention computes (prefix, and the first chunk behind its own prefix).
    pub reused_exact: u32,
    /// Reused KV that full attention would compute differently.
    pub reused_approximate: u32,
    /// Computed for this request.
    pub recomputed: u32,
    /// Output tokens.
    pub output: u32,
}

/// One stage on the request's clock, in milliseconds since the head received the request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// `tokenize`, `score`, `select`, `queue`, `load`, `rows.N` (block N of computed rows), `first_token`, `decode`.
    pub stage: String,
    /// When it began.
    pub start_ms: f64,
    /// When it ended.
    pub end_ms: f64,
}

/// The digests of the models that took part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Models {
    /// The model that answers.
    pub primary: ModelDigest,
    /// The model that scores.
    pub auxiliary: Option<ModelDigest>,
}

/// What was asked, what was done, and what it cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// The request's id, as in logs and traces.
    pub request_id: String,
    /// Strategy and options as asked.
    pub requested: Options,
    /// The strategy that was carried out (`full` when every chunk was fresh).
    pub effective: Strategy,
    /// Why `effective` differs from what was asked; empty else.
    pub effective_reason: String,
    /// Share of the selectable tokens that the options ask for.
    pub ratio_nominal: f64,
    /// Share of the selectable tokens that was recomputed.
    pub ratio_charged: f64,
    /// What became of each chunk, in prompt order.
    pub chunks: Vec<ChunkReceipt>,
    /// Where the auxiliary KV came from: `memory`, `object`, `computed`, or empty when none was needed.
    pub auxiliary_source: String,
    /// Prompt and output tokens.
    pub tokens: TokenCounts,
    /// Stages on one clock, in order of their start.
    pub spans: Vec<Span>,
    /// The models that took part.
    pub models: Models,
    /// Why output ended: `eos`, `stop`, `length`.
    pub finish: String,
}

impl Receipt {
    /// The span of `stage`, if it was recorded.
    pub fn span(&self, stage: &str) -> Option<&Span> {
        self.spans.iter().find(|span| span.stage == stage)
    }
}
