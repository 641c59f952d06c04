//! The eight needle-in-a-haystack tasks of RULER (arXiv:2404.06654, §3 and its public generator), written anew.
//!
//! The wording and the word lists are our own, so scores compare between strategies, not with published tables.
//! Invariant: prompt tokens (template included, chunks not yet cut) plus the 128 output tokens are at most `length`.

mod haystack;
mod needle;
mod size;
mod words;

use std::path::Path;

pub(crate) use self::haystack::Essay;
use self::needle::{Draft, Haystack, Plan, Type};
use super::{Count, Sample, random};
use crate::eval::score::Metric;
use crate::failure::usage;

/// Output tokens, which count toward the length.
pub(crate) const OUTPUT_TOKENS: u32 = 128;

/// A task: what is hidden where, and what is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Single1,
    Single2,
    Single3,
    Multikey1,
    Multikey2,
    Multikey3,
    Multivalue,
    Multiquery,
}

impl Task {
    /// Every task.
    pub(crate) const ALL: [Self; 8] = [
        Self::Single1,
        Self::Single2,
        Self::Single3,
        Self::Multikey1,
        Self::Multikey2,
        Self::Multikey3,
        Self::Multivalue,
        Self::Multiquery,
    ];

    /// The benchmark's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Single1 => "single_1",
            Self::Single2 => "single_2",
            Self::Single3 => "single_3",
            Self::Multikey1 => "multikey_1",
            Self::Multikey2 => "multikey_2",
            Self::Multikey3 => "multikey_3",
            Self::Multivalue => "multivalue",
            Self::Multiquery => "multiquery",
        }
    }

    /// The tasks that `names` names; `all` or nothing gives every one.
    ///
    /// # Errors
    /// A usage failure that lists the valid names.
    pub(crate) fn read(names: &[String]) -> anyhow::Result<Vec<Self>> {
        if names.is_empty() || names.iter().any(|name| name == "all") {
            return Ok(Self::ALL.to_vec());
        }
        let mut tasks = Vec::new();
        for name in names {
            let short = name.strip_prefix("niah_").unwrap_or(name);
            let Some(&task) = Self::ALL.iter().find(|task| task.name() == short) else {
                let valid = Self::ALL.map(Self::name).join(", ");
                return Err(usage(format!("unknown task {name:?}; valid are {valid} and all")));
            };
            if !tasks.contains(&task) {
                tasks.push(task);
            }
        }
        Ok(tasks)
    }

    fn plan(self) -> Plan {
        let one =
            Plan { haystack: Haystack::Essay, key: Type::Words, value: Type::Numbers, keys: 1, values: 1, asked: 1 };
        match self {
            Self::Single1 => Plan { haystack: Haystack::Noise, ..one },
            Self::Single2 => one,
            Self::Single3 => Plan { value: Type::Uuids, ..one },
            Self::Multikey1 => Plan { keys: 4, ..one },
            Self::Multikey2 => Plan { haystack: Haystack::Needles, ..one },
            Self::Multikey3 => Plan { haystack: Haystack::Needles, key: Type::Uuids, value: Type::Uuids, ..one },
            Self::Multivalue => Plan { values: 4, ..one },
            Self::Multiquery => Plan { keys: 4, asked: 4, ..one },
        }
    }
}

/// How prompts are made. Lengths are tokens of the primary model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// Prompt and output together, at most.
    pub(crate) length: usize,
    /// What the chat template adds.
    pub(crate) overhead: usize,
    /// Chunks of the context, at most.
    pub(crate) chunk_tokens: usize,
    /// Tokens that neighboring chunks share, less than `chunk_tokens`; they come on top of `length`.
    pub(crate) overlap: usize,
    /// Prompts of each task.
    pub(crate) samples: usize,
    pub(crate) seed: u64,
    /// The haystack of the essay tasks.
    pub(crate) essay: &'a Essay,
}

impl<'a> Setup<'a> {
    /// The published protocol: 500 prompts of 4,096 tokens, seed 42, chunks of 1,000 that share 50.
    pub(crate) fn published(essay: &'a Essay) -> Self {
        Self { length: 4096, overhead: 40, chunk_tokens: 1000, overlap: 50, samples: 500, seed: 42, essay }
    }
}

/// The haystack in `file`, or the one that ships with the program.
///
/// # Errors
/// A data failure: the file cannot be read, is no UTF-8, or has too few words.
pub(crate) fn essay(file: Option<&Path>) -> anyhow::Result<Essay> {
    file.map_or_else(Essay::shipped, Essay::read)
}

/// The prompts of `task`.
///
/// # Errors
/// A usage failure: no samples, an overlap that is no smaller than a chunk, or a length too small for the task.
pub(crate) fn generate(task: Task, setup: &Setup<'_>, count: &dyn Count) -> anyhow::Result<Vec<Sample>> {
    if setup.samples == 0 {
        return Err(usage("zero samples: nothing to measure; ask for at least one"));
    }
    if setup.overlap >= setup.chunk_tokens {
        let Setup { overlap, chunk_tokens, .. } = setup;
        return Err(usage(format!("an overlap of {overlap} tokens is no less than the chunk of {chunk_tokens}")));
    }
    let plan = task.plan();
    let fit = size::Fit { task, plan, setup, count };
    let largest = fit.largest()?;
    (0..setup.samples).map(|index| Ok(sample(task, index, fit.draft(index, largest)?, setup, count))).collect()
}

fn sample(task: Task, index: usize, draft: Draft, setup: &Setup<'_>, count: &dyn Count) -> Sample {
    Sample {
        id: format!("{}-{}-{index}", task.name(), setup.length),
        task: task.name().to_owned(),
        system: None,
        intro: Some(draft.intro),
        chunks: count.cut(&draft.context, setup.chunk_tokens, setup.overlap),
        question: draft.question,
        answer_prefix: draft.answer_prefix,
        gold: format!(" {}.", needle::listed(&draft.answers)),
        answers: draft.answers,
        max_tokens: OUTPUT_TOKENS,
        metric: Metric::Recall,
        stop_at_newline: false,
    }
}

#[cfg(test)]
mod tests;
