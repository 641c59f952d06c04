//! Flags of `eval tune`: the settings to try, the prompts, and when a setting is good enough.

use clap::{Args, Subcommand, ValueEnum};
use kvsplice_kv::Strategy;

use super::{Task, settings};
use crate::eval::agreement::PromptFlags;
use crate::eval::flags::CommonFlags;

/// Flags of `eval tune`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TuneFlags {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand, Clone, Debug)]
enum Which {
    /// α of Cache-Craft: the least recomputed that keeps the score; each prompt's chunks are first captured in another order
    #[command(after_help = "Example: kvsplice eval tune craft --alphas 0.25,0.5,1,2,3 --target 0.95")]
    Craft(Box<CraftFlags>),
    /// Temperature and scale of APE: the least KL divergence from full attention
    #[command(after_help = "Example: kvsplice eval tune ape --temperatures 0.8,0.9,1 --scales 0.8,0.9,1 --no-text")]
    Ape(Box<ApeFlags>),
    /// Ratio and auxiliary layers of CacheClip: the least recomputed that keeps the score
    #[command(after_help = "Example: kvsplice eval tune clip --ratios 0.1,0.2,0.3 --aux-layers last,0.5..0.8")]
    Clip(Box<ClipFlags>),
}

#[derive(Args, Clone, Debug)]
struct CraftFlags {
    /// Values of α
    #[arg(long, value_name = "A,A", value_delimiter = ',', default_value = "0.25,0.5,1,2,3")]
    alphas: Vec<String>,
    #[command(flatten)]
    target: TargetFlags,
    #[command(flatten)]
    tune: Common,
}

#[derive(Args, Clone, Debug)]
struct ApeFlags {
    /// Values of T; below 1 sharpens inside the context
    #[arg(long, value_name = "T,T", value_delimiter = ',', default_value = "0.7,0.8,0.9,1")]
    temperatures: Vec<String>,
    /// Values of S; below 1 takes mass away from the context
    #[arg(long, value_name = "S,S", value_delimiter = ',', default_value = "0.7,0.8,0.9,1")]
    scales: Vec<String>,
    #[command(flatten)]
    tune: Common,
}

#[derive(Args, Clone, Debug)]
struct ClipFlags {
    /// Shares of the chunk tokens to recompute
    #[arg(long, value_name = "R,R", value_delimiter = ',', default_value = "0.05,0.1,0.2,0.3,0.5")]
    ratios: Vec<String>,
    /// Auxiliary layers that score: last, or ranges of the depth
    #[arg(long, value_name = "L,L", value_delimiter = ',', default_value = "last,0.5..0.8")]
    aux_layers: Vec<String>,
    #[command(flatten)]
    target: TargetFlags,
    #[command(flatten)]
    tune: Common,
}

/// When a setting is good enough.
#[derive(Args, Clone, Debug)]
pub(super) struct TargetFlags {
    /// Share of full attention's score that a setting must keep
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = share)]
    pub(super) target: f64,
    /// What the score is
    #[arg(long, value_enum, default_value_t = By::Answer)]
    pub(super) by: By,
}

/// Prompts, folder, server.
#[derive(Args, Clone, Debug)]
pub(super) struct Common {
    /// Validation prompts in all, the kinds in turn
    #[arg(long, value_name = "N", default_value_t = 24)]
    pub(super) samples: usize,
    /// Tokens of the whole prompt, at most
    #[arg(long, value_name = "N", default_value_t = 1300)]
    pub(super) tokens: usize,
    #[command(flatten)]
    pub(super) prompts: PromptFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// What a setting is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum By {
    /// The answer's score against the accepted answers
    Answer,
    /// The share of prompts where the text is the one that full attention gives
    Match,
    /// The share of gold tokens where the most likely token is that of full attention
    Argmax,
}

impl By {
    /// The name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Answer => "answer",
            Self::Match => "match",
            Self::Argmax => "argmax",
        }
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if share > 0.0 && share <= 1.0 { Ok(share) } else { Err("must be above 0 and at most 1".to_owned()) }
}

impl TuneFlags {
    /// Whether models run in this process.
    #[cfg(any(feature = "head", feature = "worker"))]
    pub(in crate::eval) fn is_embedded(&self) -> bool {
        let tune = match &self.which {
            Which::Craft(flags) => &flags.tune,
            Which::Ape(flags) => &flags.tune,
            Which::Clip(flags) => &flags.tune,
        };
        tune.common.is_embedded()
    }

    /// What to measure.
    ///
    /// # Errors
    /// A usage failure for a value that an option cannot have.
    pub(super) fn task(&self) -> anyhow::Result<Task<'_>> {
        Ok(match &self.which {
            Which::Craft(flags) => Task {
                command: "tune-craft",
                candidates: settings::grid(Strategy::Craft, &[("alpha", &flags.alphas)])?,
                target: Some(&flags.target),
                tune: &flags.tune,
            },
            Which::Ape(flags) => {
                let (temperatures, scales) = (&flags.temperatures[..], &flags.scales[..]);
                let values = [("context_temperature", temperatures), ("context_scale", scales)];
                Task {
                    command: "tune-ape",
                    candidates: settings::grid(Strategy::Ape, &values)?,
                    target: None,
                    tune: &flags.tune,
                }
            }
            Which::Clip(flags) => Task {
                command: "tune-clip",
                candidates: settings::grid(
                    Strategy::Clip,
                    &[("aux_layers", &flags.aux_layers), ("ratio", &flags.ratios)],
                )?,
                target: Some(&flags.target),
                tune: &flags.tune,
            },
        })
    }
}
