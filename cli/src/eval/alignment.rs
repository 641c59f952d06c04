//! `kvsplice eval alignment`: whether the auxiliary model looks where the primary model looks (CacheClip, arXiv 2510.10129,
//! table 1), on the user's own pair of models.
//!
//! As in the paper, both models see the whole prompt and its last token attends. That is not what `clip` scores with, which
//! sees one chunk at a time and averages over the question. Nothing follows the question: a given answer would be copied.

mod kept;
mod measure;
mod overlap;
mod prompts;
mod report;

use std::collections::HashSet;
use std::path::PathBuf;

use clap::Args;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use self::kept::Kept;
use self::prompts::{Own, Prompt, Setup};
use super::client::Client;
use super::count::counting;
use super::flags::CommonFlags;
use super::progress::Progress;
use super::run::open;
use crate::failure::usage;
use crate::output;

pub(super) const EXAMPLES: &str = "Examples:\n  kvsplice eval alignment --lengths 1000,2000 --samples 20\n  \
    kvsplice eval alignment --layers first,0.6,last --documents notes.jsonl --question \"Who built the ferry?\"";

const COMMAND: &str = "alignment";

/// Flags of `eval alignment`.
#[derive(Args, Clone, Debug)]
pub(crate) struct AlignmentFlags {
    /// Tokens of the prompts, in the primary model
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1000,2000,4000",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    lengths: Vec<u32>,
    /// Layers of both models: first, last, an index, or a share of the depth such as 0.6; at most 16
    #[arg(long, value_name = "LAYER,LAYER", value_delimiter = ',', default_value = "first,last", value_parser = layer)]
    layers: Vec<String>,
    /// Prompts of each length
    #[arg(long, value_name = "N", default_value_t = 12)]
    samples: u32,
    /// Tokens a chunk, at most
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunk_tokens: u32,
    /// Fill the prompts from this .jsonl file, one {"text"} a line, in seeded orders, instead of generating them
    #[arg(long, value_name = "FILE", requires = "question")]
    documents: Option<PathBuf>,
    /// The question about the documents
    #[arg(long, value_name = "TEXT", requires = "documents")]
    question: Option<String>,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// The name of a layer as the head takes it; whether a model has it, the head knows.
fn layer(text: &str) -> Result<String, String> {
    let named = matches!(text, "first" | "last") || text.parse::<u32>().is_ok();
    let share = text.parse::<f32>().is_ok_and(|share| (0.0..=1.0).contains(&share));
    if named || share {
        Ok(text.to_owned())
    } else {
        Err("take first, last, an index, or a share such as 0.6".to_owned())
    }
}

/// Measures every prompt that the folder does not have, then reports.
pub(super) async fn run(mut flags: AlignmentFlags) -> anyhow::Result<()> {
    if flags.common.prefix_cache {
        return Err(usage("--prefix-cache goes with strategies; alignment runs none"));
    }
    if flags.samples == 0 {
        return Err(usage("zero samples: nothing to measure; ask for at least one"));
    }
    let mut seen = HashSet::new();
    flags.lengths.retain(|&length| seen.insert(length));
    let own = match (&flags.documents, &flags.question) {
        (Some(path), Some(question)) => Some(prompts::own(path, question)?),
        _ => None,
    };
    let Some(opened) = open(&flags.common, &flags.common.folder(COMMAND)).await? else { return Ok(()) };
    let result = measure_all(&flags, own, &opened.client).await;
    let closed = opened.close().await;
    result.and(closed)
}

async fn measure_all(flags: &AlignmentFlags, own: Option<Own>, client: &Client) -> anyhow::Result<()> {
    let own_digest = own.as_ref().map(prompts::digest);
    let setup = Setup {
        lengths: flags.lengths.clone(),
        samples: flags.samples,
        seed: flags.common.seed,
        chunk_tokens: flags.chunk_tokens as usize,
        overhead: client.overhead(false).await?,
        own,
    };
    let prompts = counting(client, move |count| prompts::all(&setup, count)).await?;
    let what = what(flags, own_digest, client).await?;
    let folder = flags.common.folder(COMMAND);
    let mut kept = Kept::open(&folder, &what)?;
    let measured = each(flags, client, &prompts, &mut kept).await;
    if let Err(error) = measured {
        let (done, all, folder) = (kept.prompts.len(), prompts.len(), folder.display());
        return Err(
            error.context(format!("{done} of {all} prompts are kept in {folder}; the same command goes on there"))
        );
    }
    let mut finished = Vec::new();
    for prompt in &prompts {
        finished.extend(kept.find(&prompt.id).cloned());
    }
    let lengths = report::by_length(&flags.lengths, &finished);
    let report = json!({
        "what": what,
        "command": flags.words().join(" "),
        "top_share": overlap::TOP_SHARE,
        "kl_floor": overlap::FLOOR,
        "expected_chance": overlap::expected_chance(),
        "lengths": &lengths,
    });
    let path = folder.join("report.json");
    let written = std::fs::write(&path, format!("{report:#}\n"));
    written.map_err(|error| usage(format!("write {}: {error}", path.display())))?;
    if flags.common.json {
        return output::json(&json!({"event": "done", "report": report}));
    }
    output::line(report::table(&lengths))?;
    output::note(format_args!(
        "Jaccard of the top {:.0} % of the characters, and KL(of ‖ guess) in nats, mean ± standard error of {} prompts a \
         length; {} has every figure",
        overlap::TOP_SHARE * 100.0,
        flags.samples,
        path.display(),
    ));
    Ok(())
}

/// Everything that decides a result. How many prompts, and of which lengths, may grow in a folder.
async fn what(flags: &AlignmentFlags, own: Option<String>, client: &Client) -> anyhow::Result<Value> {
    let model = |model: kvsplice_proto::v1::Model| json!({"role": model.role, "name": model.name, "digest": model.digest, "dtype": model.dtype});
    let models: Vec<Value> = client.models().await?.into_iter().map(model).collect();
    Ok(json!({
        "eval": COMMAND,
        "version": env!("CARGO_PKG_VERSION"),
        "seed": flags.common.seed,
        "layers": flags.layers,
        "chunk_tokens": flags.chunk_tokens,
        "documents": own,
        "models": models,
    }))
}

async fn each(flags: &AlignmentFlags, client: &Client, prompts: &[Prompt], kept: &mut Kept) -> anyhow::Result<()> {
    let before = prompts.iter().filter(|prompt| kept.find(&prompt.id).is_some()).count();
    let mut progress = Progress::new(flags.common.json, before, prompts.len());
    let result = async {
        for prompt in prompts {
            if kept.find(&prompt.id).is_some() {
                continue;
            }
            let mut rng = ChaCha8Rng::seed_from_u64(flags.common.seed);
            rng.set_stream(prompt.stream());
            let measured = measure::measure(client, &flags.layers, prompt.clone(), rng).await;
            let measured = measured.map_err(|error| error.context(format!("prompt {}", prompt.id)))?;
            progress.finished(&measured.sample);
            if flags.common.json {
                let mut event = serde_json::to_value(&measured)?;
                event["event"] = "result".into();
                output::json(&event)?;
            }
            kept.add(measured)?;
        }
        Ok(())
    };
    let result = result.await;
    progress.clear();
    result
}

impl AlignmentFlags {
    /// The command line that measures this again.
    fn words(&self) -> Vec<String> {
        let join = |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let mut words: Vec<String> = ["kvsplice", "eval", COMMAND].map(str::to_owned).into();
        words.extend(["--lengths".to_owned(), join(&self.lengths), "--layers".to_owned(), self.layers.join(",")]);
        words.extend(["--samples".to_owned(), self.samples.to_string()]);
        words.extend(["--chunk-tokens".to_owned(), self.chunk_tokens.to_string()]);
        if let (Some(path), Some(question)) = (&self.documents, &self.question) {
            words.extend(["--documents".to_owned(), path.display().to_string()]);
            words.extend(["--question".to_owned(), format!("{question:?}")]);
        }
        words.extend(self.common.words());
        words
    }
}
