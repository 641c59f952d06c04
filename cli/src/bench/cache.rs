//! `kvsplice bench cache`: what the cache tiers give, each figure beside a ceiling that is measured in the same run.
//!
//! The cache service runs inside the command and is talked to over loopback, by the worker's own loader. Rounds of a figure and
//! of its ceiling take turns after a warm-up. Files lie in a temporary folder that is removed at the end, Ctrl-C included.

mod bed;
mod disk;
mod eviction;
mod mapped;
mod measure;
mod records;
mod report;
mod wire;

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};
use tokio_util::sync::CancellationToken;

use self::bed::Bed;
use self::report::{Figure, Report};
use crate::failure::{interrupted, usage};
use crate::{output, signals, telemetry};

/// How often the removal of the temporary folder is tried.
const REMOVALS: usize = 100;

/// Flags of `bench cache`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CacheFlags {
    /// Only this figure; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<Name>,
    /// Chunks of the prompt
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    chunks: u32,
    /// Tokens a chunk; a token has 192 KiB, as in a model of 14B parameters
    #[arg(long, default_value_t = 250, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    tokens: u32,
    /// Chunk records of the synthetic store
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1000..=100_000_000))]
    records: u32,
    /// Measured rounds of each
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Folder for temporary files, on the disk to be measured
    #[arg(long, value_name = "DIR")]
    temp: Option<std::path::PathBuf>,
    /// Print one JSON object on one line, else a table
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Memory tier → worker over loopback, beside a raw TCP copy
    Memory,
    /// Files mapped on the same host, beside memcpy
    Mapped,
    /// Disk tier → worker, beside a sequential read; and how soon the first layer is there
    Disk,
    /// A store of many chunk records: start-up, memory, lookups
    Records,
    /// Eviction by value beside lru on a Zipf trace
    Eviction,
}

/// Measures and prints.
pub(crate) async fn run(flags: CacheFlags) -> anyhow::Result<()> {
    let _telemetry = telemetry::start("warn", None)?;
    let stop = signals::stop_token()?;
    let mut builder = tempfile::Builder::new();
    let builder = builder.prefix("kvsplice-bench-");
    let made = flags.temp.as_ref().map_or_else(|| builder.tempdir(), |parent| builder.tempdir_in(parent));
    let folder =
        made.map_err(|error| usage(format!("make a temporary folder: {error}; choose another with --temp")))?;
    let report = tokio::select! {
        report = measure(&flags, folder.path(), &stop) => report,
        () = stop.cancelled() => Err(interrupted()),
    };
    // A service that was cut off may still write for a moment.
    for _ in 0..REMOVALS {
        if std::fs::remove_dir_all(folder.path()).is_ok() || !folder.path().exists() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let report = report?;
    if flags.json { output::json(&serde_json::to_value(&report)?) } else { output::line(report) }
}

async fn measure(flags: &CacheFlags, folder: &Path, stop: &CancellationToken) -> anyhow::Result<Report> {
    let asked = |name| flags.only.is_empty() || flags.only.contains(&name);
    let mut figures: Vec<Figure> = Vec::new();
    if [Name::Memory, Name::Mapped, Name::Disk].into_iter().any(asked) {
        let bed = Bed::make(flags, folder, stop).await?;
        if asked(Name::Memory) {
            figures.extend(wire::measure(&bed).await?);
        }
        if asked(Name::Mapped) {
            figures.extend(mapped::measure(&bed).await?);
        }
        if asked(Name::Disk) {
            figures.extend(disk::measure(&bed).await?);
        }
    }
    if asked(Name::Records) {
        figures.extend(records::measure(flags.records, stop).await?);
    }
    if asked(Name::Eviction) {
        figures.extend(eviction::measure().await?);
    }
    Ok(Report::new(figures))
}

fn round_name(round: usize) -> String {
    if round == 0 { "warm-up".to_owned() } else { format!("round {round}") }
}
