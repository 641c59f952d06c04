//! `kvsplice eval ruler`: answers to RULER's needle tasks, scored as the benchmark does.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::count::counting;
use super::flags::{self, CommonFlags};
use super::plan::{Item, Measures, Plan};
use super::run::carry_out;
use super::tasks::ruler::{Setup, Task, essay, generate};

pub(super) const EXAMPLES: &str = "Examples:\n  kvsplice eval ruler --tasks all --length 2048 --samples 5\n  \
    kvsplice eval ruler --tasks single_2,multivalue --length 4096 --strategies clip:0.2,guided:0.2 --essay essays.txt";

/// Flags of `eval ruler`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RulerFlags {
    /// single_1, single_2, single_3, multikey_1, multikey_2, multikey_3, multivalue, multiquery, or all
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    tasks: Vec<String>,
    /// Prompt and output together, in tokens
    #[arg(long, value_name = "N", default_value_t = 4096)]
    length: usize,
    /// Prompts of each task; the benchmark has 500
    #[arg(long, value_name = "N", default_value_t = 25)]
    samples: usize,
    /// UTF-8 text of the essay haystacks; a short one ships with the program
    #[arg(long, value_name = "FILE")]
    essay: Option<PathBuf>,
    #[command(flatten)]
    pub(super) cuts: CutFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// Strategies, and how a context becomes chunks.
#[derive(Args, Clone, Debug)]
pub(super) struct CutFlags {
    /// Strategies, each NAME, NAME:RATIO or NAME:OPTION=VALUE; full is always among them. For craft, each prompt's chunks
    /// are first captured in another order
    #[arg(long, value_name = "LIST", default_value = "full,direct,clip,guided")]
    pub(super) strategies: String,
    /// Tokens a chunk, at most
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub(super) chunk_tokens: usize,
    /// Tokens that neighboring chunks share
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub(super) overlap: usize,
}

impl CutFlags {
    /// Words of a command line that cuts alike.
    pub(super) fn words(&self) -> [String; 4] {
        ["--chunk-tokens".into(), self.chunk_tokens.to_string(), "--overlap".into(), self.overlap.to_string()]
    }
}

/// Measures, and reports.
pub(crate) async fn run(flags: RulerFlags) -> anyhow::Result<()> {
    let strategies = flags::strategies(&flags.cuts.strategies)?;
    let tasks = Task::read(&flags.tasks)?;
    let haystack = essay(flags.essay.as_deref())?;
    if flags.samples == 0 {
        return Err(crate::failure::usage("zero samples: nothing to measure; ask for at least one with --samples"));
    }
    let (common, cuts) = (&flags.common, &flags.cuts);
    carry_out(common, "ruler", async |client| {
        let overhead = client.overhead(true).await?;
        let (length, samples, seed) = (flags.length, flags.samples, common.seed);
        let (chunk_tokens, overlap) = (cuts.chunk_tokens, cuts.overlap);
        let wanted = tasks.clone();
        let generated = counting(client, move |count| {
            let published = Setup::published(&haystack);
            let setup = Setup { length, overhead, chunk_tokens, overlap, samples, seed, ..published };
            wanted.iter().map(|&task| generate(task, &setup, count)).collect::<anyhow::Result<Vec<_>>>()
        })
        .await?;
        let names: Vec<&str> = tasks.iter().map(|task| task.name()).collect();
        let words = ["eval", "ruler", "--tasks", &names.join(","), "--length", &length.to_string()];
        let mut words: Vec<String> = words.map(str::to_owned).to_vec();
        words.extend(["--samples".to_owned(), samples.to_string()]);
        words.extend(cuts.words());
        if let Some(essay) = &flags.essay {
            words.extend(["--essay".to_owned(), essay.display().to_string()]);
        }
        words.extend(common.words());
        Ok(Plan {
            command: "ruler",
            settings: json!({
                "tasks": names,
                "length": length,
                "chunk_tokens": chunk_tokens,
                "overlap": overlap,
                "prefix_cache": common.prefix_cache,
            }),
            seed,
            items: in_turns(generated)?,
            strategies,
            measures: Measures { agreement: false, text: true },
            prefix_cache: common.prefix_cache,
            words,
            set_flag: "",
        })
    })
    .await
}

/// The first sample of each task, then the second: an interrupt leaves every task with about as many.
fn in_turns(tasks: Vec<Vec<super::tasks::Sample>>) -> anyhow::Result<Vec<Item>> {
    let mut tasks: Vec<_> = tasks.into_iter().map(Vec::into_iter).collect();
    let mut items = Vec::new();
    loop {
        let before = items.len();
        for sample in tasks.iter_mut().filter_map(Iterator::next) {
            items.push(Item::new("", sample)?);
        }
        if items.len() == before {
            return Ok(items);
        }
    }
}
