//! `kvsplice eval longbench`: answers to LongBench's question answering sets, scored as the benchmark does.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::client::Client;
use super::count::counting;
use super::flags::{self, CommonFlags};
use super::plan::{Item, Measures, Plan};
use super::ruler::CutFlags;
use super::run::carry_out;
use super::tasks::longbench::{Setup, load};
use crate::failure::usage;
use crate::output;

pub(super) const EXAMPLES: &str = "Examples:\n  kvsplice eval longbench --folder LongBench/data --datasets hotpotqa,2wikimqa --limit 20\n  \
    kvsplice eval longbench --folder LongBench/data --templates dataset2prompt.json --budget 8192";

/// Room for the output; no dataset asks for more.
const OUTPUT_TOKENS: usize = 128;

/// Flags of `eval longbench`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LongbenchFlags {
    /// Folder with the benchmark's files, such as hotpotqa.jsonl
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// Datasets, or all that the folder has
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    datasets: Vec<String>,
    /// The benchmark's file of prompts, dataset2prompt.json; ours are worded anew
    #[arg(long, value_name = "FILE")]
    templates: Option<PathBuf>,
    /// Only the first so many samples of each dataset
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Tokens of the whole prompt, at most; a longer one loses its middle [default: what the model's context leaves]
    #[arg(long, value_name = "N")]
    budget: Option<usize>,
    #[command(flatten)]
    pub(super) cuts: CutFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// Measures, and reports.
pub(crate) async fn run(flags: LongbenchFlags) -> anyhow::Result<()> {
    let strategies = flags::strategies(&flags.cuts.strategies)?;
    if flags.limit == Some(0) {
        return Err(usage("zero samples: nothing to measure; ask for at least one with --limit"));
    }
    carry_out(&flags.common, "longbench", async |client| plan(&flags, client, strategies).await).await
}

async fn plan(flags: &LongbenchFlags, client: &Client, strategies: Vec<kvsplice_kv::Options>) -> anyhow::Result<Plan> {
    let (common, cuts) = (&flags.common, &flags.cuts);
    let budget = budget(flags, client).await?;
    let overhead = client.overhead(true).await?;
    let read = flags.clone();
    let loaded = counting(client, move |count| {
        let (cuts, templates) = (&read.cuts, read.templates.as_deref());
        load(
            &Setup {
                folder: &read.folder,
                datasets: &read.datasets,
                templates,
                budget,
                overhead,
                chunk_tokens: cuts.chunk_tokens,
                overlap: cuts.overlap,
                limit: read.limit,
            },
            count,
        )
    })
    .await?;
    if loaded.truncated > 0 && !common.json {
        let (truncated, all) = (loaded.truncated, loaded.samples.len());
        output::note(format_args!(
            "{truncated} of {all} samples lose the middle of their context to fit {budget} tokens"
        ));
    }
    let datasets = flags.datasets.join(",");
    let words = ["eval", "longbench", "--folder", &flags.folder.display().to_string(), "--datasets", &datasets];
    let mut words: Vec<String> = words.map(str::to_owned).to_vec();
    words.extend(["--budget".to_owned(), budget.to_string()]);
    words.extend(flags.limit.into_iter().flat_map(|limit| ["--limit".to_owned(), limit.to_string()]));
    words.extend(flags.templates.iter().flat_map(|path| ["--templates".to_owned(), path.display().to_string()]));
    words.extend(cuts.words());
    words.extend(common.words());
    Ok(Plan {
        command: "longbench",
        settings: json!({
            "datasets": flags.datasets,
            "own_templates": flags.templates.is_some(),
            "budget": budget,
            "chunk_tokens": cuts.chunk_tokens,
            "overlap": cuts.overlap,
            "prefix_cache": common.prefix_cache,
        }),
        seed: common.seed,
        items: loaded.samples.into_iter().map(|sample| Item::new("", sample)).collect::<anyhow::Result<_>>()?,
        strategies,
        measures: Measures { agreement: false, text: true },
        prefix_cache: common.prefix_cache,
        words,
        set_flag: "",
    })
}

/// The prompt's budget; with its output it must fit the model.
async fn budget(flags: &LongbenchFlags, client: &Client) -> anyhow::Result<usize> {
    let models = client.models().await?;
    let primary = models.iter().find(|model| model.role == "primary");
    let context = primary.map_or(0, |model| model.context as usize);
    let most = context.saturating_sub(OUTPUT_TOKENS);
    match flags.budget {
        Some(budget) if budget > most => Err(usage(format!(
            "--budget {budget} and {OUTPUT_TOKENS} output tokens are more than the model's context of {context}; take {most} or less"
        ))),
        Some(budget) => Ok(budget),
        None => Ok(most),
    }
}
