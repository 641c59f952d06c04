//! `kvsplice eval`: measures strategies on prompts whose right answer is known, over the public API alone.
//!
//! Every command makes a plan (samples and strategies); one runner carries it out, keeps each finished pair, and reports.

mod ablation;
mod agree;
mod agreement;
mod alignment;
mod client;
mod count;
mod flags;
mod longbench;
mod plan;
mod progress;
mod report;
mod ruler;
mod run;
pub(crate) mod score;
mod shelf;
mod store;
pub(crate) mod tasks;
mod tune;

use clap::{Args, Subcommand};

/// Flags of `eval`.
#[derive(Args)]
pub(crate) struct EvalFlags {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    /// KL divergence, argmax agreement and answers against full attention, on generated prompts
    #[command(after_help = agreement::EXAMPLES)]
    Agreement(Box<agreement::AgreementFlags>),
    /// Answers to RULER's needle-in-a-haystack tasks
    #[command(after_help = ruler::EXAMPLES)]
    Ruler(Box<ruler::RulerFlags>),
    /// Answers to LongBench's question answering sets, read from the official files
    #[command(after_help = longbench::EXAMPLES)]
    Longbench(Box<longbench::LongbenchFlags>),
    /// A strategy's design choices, one by one: shared prefix, grouping, mask, windows, thresholds, ratios
    #[command(after_help = ablation::EXAMPLES)]
    Ablation(Box<ablation::AblationFlags>),
    /// Whether the auxiliary model looks where the primary model looks
    #[command(after_help = alignment::EXAMPLES)]
    Alignment(Box<alignment::AlignmentFlags>),
    /// The setting of a strategy to take, by validation prompts
    #[command(after_help = tune::EXAMPLES)]
    Tune(Box<tune::TuneFlags>),
    /// The report of a run that is finished or was interrupted, once more
    #[command(after_help = "Example: kvsplice eval report ./kvsplice-eval-agreement")]
    Report(shelf::ReportFlags),
}

impl EvalFlags {
    /// Whether models run in this process.
    #[cfg(any(feature = "head", feature = "worker"))]
    pub(crate) fn is_embedded(&self) -> bool {
        match &self.which {
            Which::Agreement(flags) => flags.common.is_embedded(),
            Which::Ruler(flags) => flags.common.is_embedded(),
            Which::Longbench(flags) => flags.common.is_embedded(),
            Which::Ablation(flags) => flags.common.is_embedded(),
            Which::Alignment(flags) => flags.common.is_embedded(),
            Which::Tune(flags) => flags.is_embedded(),
            Which::Report(_) => false,
        }
    }
}

/// Runs a command of `eval`.
pub(crate) async fn run(flags: EvalFlags) -> anyhow::Result<()> {
    match flags.which {
        Which::Agreement(flags) => agreement::run(*flags).await,
        Which::Ruler(flags) => ruler::run(*flags).await,
        Which::Longbench(flags) => longbench::run(*flags).await,
        Which::Ablation(flags) => ablation::run(*flags).await,
        Which::Alignment(flags) => alignment::run(*flags).await,
        Which::Tune(flags) => tune::run(*flags).await,
        Which::Report(flags) => shelf::run(flags),
    }
}
