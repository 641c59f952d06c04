//! LongBench's question answering sets (arXiv:2308.14508), read from the official JSONL files in a folder.
//!
//! The prompts are worded anew; the official ones can be loaded from their file. An over-long prompt loses its middle.
//! Invariant: the uncut prompt, and the prompt with its overlapping chunks, have at most `budget` tokens.

mod dataset;
mod prompt;
mod read;
mod truncate;

use std::path::{Path, PathBuf};

use self::dataset::Dataset;
use self::prompt::{Prompt, Templates};
use self::read::Record;
use self::truncate::Cut;
use super::{Count, Sample};
use crate::failure::{data, usage};

/// Which samples are read, and how they are cut. Lengths are tokens of the primary model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// Holds `hotpotqa.jsonl` and the like.
    pub(crate) folder: &'a Path,
    /// Names of datasets; `all` or none takes those that the folder has.
    pub(crate) datasets: &'a [String],
    /// A JSON file of prompts as the benchmark ships it: `{"hotpotqa": "… {context} … {input} …"}`.
    pub(crate) templates: Option<&'a Path>,
    /// The whole prompt, template included, at most.
    pub(crate) budget: usize,
    /// What the chat template adds.
    pub(crate) overhead: usize,
    /// Chunks of the context, at most.
    pub(crate) chunk_tokens: usize,
    /// Tokens that neighboring chunks share, less than `chunk_tokens`.
    pub(crate) overlap: usize,
    /// The first so many samples of each dataset; none takes all.
    pub(crate) limit: Option<usize>,
}

/// Samples in the order of the datasets and of their files.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    pub(crate) samples: Vec<Sample>,
    /// How many of them lost the middle of their context.
    pub(crate) truncated: usize,
}

/// Reads and cuts the samples.
///
/// # Errors
/// A usage failure for an unknown dataset, zero samples or an overlap that is no smaller than a chunk; a data failure that
/// names the file, and the line in it, for everything that is wrong with the files.
pub(crate) fn load(setup: &Setup<'_>, count: &dyn Count) -> anyhow::Result<Loaded> {
    if setup.limit == Some(0) {
        return Err(usage("zero samples: nothing to measure; ask for at least one"));
    }
    if setup.overlap >= setup.chunk_tokens {
        let Setup { overlap, chunk_tokens, .. } = setup;
        return Err(usage(format!("an overlap of {overlap} tokens is no less than the chunk of {chunk_tokens}")));
    }
    let templates = setup.templates.map_or_else(|| Ok(Templates::default()), Templates::read)?;
    let mut loaded = Loaded { samples: Vec::new(), truncated: 0 };
    for (dataset, file) in files(setup)? {
        for record in read::records(&file, setup.limit)? {
            let prompt = templates.render(dataset, &record.input);
            let cut = cut(&record, &prompt, setup, count)?;
            loaded.truncated += usize::from(cut.truncated);
            loaded.samples.push(sample(dataset, record, prompt, cut.chunks));
        }
    }
    Ok(loaded)
}

/// The datasets that are wanted, with their files.
fn files(setup: &Setup<'_>) -> anyhow::Result<Vec<(&'static Dataset, PathBuf)>> {
    let folder = setup.folder.display();
    if !setup.folder.is_dir() {
        return Err(data(format!("{folder}: no such folder; name the one that holds LongBench's .jsonl files")));
    }
    let path = |dataset: &Dataset| setup.folder.join(format!("{}.jsonl", dataset.name));
    let mut files = Vec::new();
    if setup.datasets.is_empty() || setup.datasets.iter().any(|name| name == "all") {
        let present = dataset::ALL.iter().filter(|dataset| path(dataset).is_file());
        files.extend(present.map(|dataset| (dataset, path(dataset))));
        if files.is_empty() {
            let valid = dataset::names();
            return Err(data(format!("{folder}: holds no dataset; expected NAME.jsonl with NAME one of {valid}")));
        }
        return Ok(files);
    }
    for name in setup.datasets {
        let dataset = dataset::named(name)?;
        if !files.iter().any(|(known, _)| *known == dataset) {
            files.push((dataset, path(dataset)));
        }
    }
    Ok(files)
}

/// The context of `record` in chunks that fit between the texts of `prompt`.
fn cut(record: &Record, prompt: &Prompt, setup: &Setup<'_>, count: &dyn Count) -> anyhow::Result<Cut> {
    let (before, after) = (count.tokens(&prompt.before), count.tokens(&prompt.after));
    // Each half of the prompt gives some of its room to the text on its side of the context.
    let half = setup.budget.saturating_sub(setup.overhead) / 2;
    let (Some(head), Some(tail)) = (half.checked_sub(before), half.checked_sub(after)) else {
        let (place, budget, needed) = (&record.place, setup.budget, 2 * before.max(after) + setup.overhead);
        return Err(data(format!(
            "{place}: the question alone needs a budget of {needed} tokens, not {budget}; take a larger one"
        )));
    };
    let room = truncate::Room { head, tail, chunk_tokens: setup.chunk_tokens, overlap: setup.overlap };
    Ok(truncate::cut(&record.context, room, count))
}

fn sample(dataset: &Dataset, record: Record, prompt: Prompt, chunks: Vec<String>) -> Sample {
    Sample {
        id: format!("{}-{}", dataset.name, record.line),
        task: dataset.name.to_owned(),
        system: None,
        intro: Some(prompt.before),
        chunks,
        question: prompt.after,
        answer_prefix: String::new(),
        gold: record.answers.first().cloned().unwrap_or_default(),
        answers: record.answers,
        max_tokens: dataset.max_tokens,
        metric: dataset.metric,
        stop_at_newline: false,
    }
}

#[cfg(test)]
mod tests;
