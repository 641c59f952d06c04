//! `kvsplice bench`: figures of this machine, with everything needed to repeat them.

mod cache;
mod flops;
mod gpu;
mod kernels;
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
    /// Rates of the kernels beside the matrix-product peak and the memory bandwidth, in turns
    #[command(after_help = "Example: kvsplice bench kernels --rounds 9 --json")]
    Kernels(kernels::KernelFlags),
    /// Time to the first token of full, direct and clip on the same prompt, in turns
    #[command(
        after_help = "Example: kvsplice bench ttft --tokens 4096 --chunk-tokens 256 --question-tokens 32 --ratio 0.2"
    )]
    Ttft(Box<ttft::TtftFlags>),
    /// What the cache tiers give, each figure beside a ceiling measured in the same run
    #[command(
        after_help = "Examples:\n  kvsplice bench cache\n  kvsplice bench cache --only mapped --only disk --temp /srv --json"
    )]
    Cache(Box<cache::CacheFlags>),
    /// The CUDA kernels against the CPU's, and what they reach of the device's peak
    #[command(after_help = "Example: kvsplice bench gpu --device cuda:0 --keys 16384")]
    Gpu(gpu::GpuFlags),
}

/// Runs a benchmark.
pub(crate) async fn run(flags: BenchFlags) -> anyhow::Result<()> {
    match flags.which {
        Which::Kernels(flags) => kernels::run(flags).await,
        Which::Ttft(flags) => ttft::run(*flags).await,
        Which::Cache(flags) => cache::run(*flags).await,
        Which::Gpu(flags) => gpu::run(flags).await,
    }
}
