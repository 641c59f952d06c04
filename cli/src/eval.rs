//! What `kvsplice eval` measures with: prompts whose right answer is known, and the scores of an answer.

pub(crate) mod score;
pub(crate) mod tasks;
