//! Prompts with known answers: generated (`agreement`, `ruler`) or read from files (`longbench`).
//!
//! Knows no server and runs nothing. Invariant: the same seed, options and token counts give the same bytes.

pub(crate) mod agreement;
pub(crate) mod longbench;
mod random;
pub(crate) mod ruler;
#[cfg(test)]
mod testing;

use serde::{Deserialize, Serialize};

use super::score::Metric;

/// One prompt with what a right answer is.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub(crate) struct Sample {
    /// Unique and stable, such as `hop2-17` or `multikey_1-4096-3`.
    pub(crate) id: String,
    /// `hop`, `hop2`, `needle`, `multikey`, `multivalue`, `ordering`; or the name that RULER or LongBench gives it.
    pub(crate) task: String,
    /// System prompt; none takes the server's default.
    pub(crate) system: Option<String>,
    /// Text before the first chunk inside the user's turn, taken literally; none takes the template's own.
    pub(crate) intro: Option<String>,
    /// The chunks, in order.
    pub(crate) chunks: Vec<String>,
    /// What follows the chunks: literal text if `intro` is given, else the question for the template.
    pub(crate) question: String,
    /// Text after the assistant's head, where the answer goes on; may be empty.
    pub(crate) answer_prefix: String,
    /// Accepted answers, or every reference when the metric is a recall.
    pub(crate) answers: Vec<String>,
    /// Text after `answer_prefix` for teacher forcing.
    pub(crate) gold: String,
    /// Most output tokens.
    pub(crate) max_tokens: u32,
    /// How the output is scored.
    pub(crate) metric: Metric,
    /// Only the first line of the output is scored.
    pub(crate) stop_at_newline: bool,
}

/// Counts and cuts text in tokens of the primary model.
pub(crate) trait Count {
    /// Tokens of `text`, tokenized on its own, without special tokens.
    fn tokens(&self, text: &str) -> usize;
    /// `text` in pieces of at most `chunk` tokens, of which neighbors share about `overlap`; joined without the overlap they
    /// are the text again.
    fn cut(&self, text: &str, chunk: usize, overlap: usize) -> Vec<String>;
}
