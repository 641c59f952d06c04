//! `kvsplice bench`: figures of this machine, with everything needed to repeat them.

mod flops;
mod prompt;
mod ttft;

use clap::{Args, Subcommand};

/// Flags of `bench`.
#[derive(Args)]
pub(crate) struct BenchFlags {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand)]
enum Which {
    /// Time to the first token of full, direct and clip on the same prompt, in turns
    #[command(
        after_help = "Example: kvsplice bench ttft --tokens 4096 --chunk-tokens 256 --question-tokens 32 --ratio 0.2"
    )]
    Ttft(Box<ttft::TtftFlags>),
}

/// Runs a benchmark.
pub(crate) async fn run(flags: BenchFlags) -> anyhow::Result<()> {
    match flags.which {
        Which::Ttft(flags) => ttft::run(*flags).await,
    }
}
