//! The commands of the program, and which of them a build has.

use clap::{Parser, Subcommand};

#[cfg(any(feature = "head", feature = "worker", feature = "cache", feature = "client"))]
use crate::roles::Role;
#[cfg(any(feature = "head", feature = "worker", feature = "cache", feature = "client"))]
use crate::serve::{self, ServeFlags};
use crate::{doctor, models};

/// Answers questions over documents from precomputed KV caches of the retrieved chunks.
#[derive(Parser)]
#[command(name = "kvsplice", version, arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run head, worker and cache service in one process
    #[cfg(all(feature = "head", feature = "worker", feature = "cache"))]
    #[command(after_help = "Example: kvsplice up --listen 127.0.0.1:7400")]
    Up(Box<ServeFlags>),
    /// Run the head: what callers talk to
    #[cfg(feature = "head")]
    #[command(after_help = "Example: kvsplice head --config kvsplice.toml --set head.worker=10.0.0.7:7401")]
    Head(Box<ServeFlags>),
    /// Run a worker: it loads, recomputes and decodes
    #[cfg(feature = "worker")]
    #[command(after_help = "Example: kvsplice worker --config kvsplice.toml --set worker.cache=10.0.0.8:7402")]
    Worker(Box<ServeFlags>),
    /// Run the cache service, or look into one
    #[cfg(any(feature = "cache", feature = "client"))]
    #[command(after_help = "Examples:\n  kvsplice cache --object-store file:///srv/kv\n  kvsplice cache stats")]
    Cache(Box<CacheFlags>),
    /// Download and list models
    Models(models::Args),
    /// Check CPU, libraries, models, ports and the store
    #[command(after_help = "Example: kvsplice doctor --config kvsplice.toml")]
    Doctor(Box<doctor::DoctorFlags>),
    /// Add documents to a corpus
    #[cfg(feature = "client")]
    #[command(after_help = "Examples:\n  kvsplice ingest --corpus wiki --chunk-tokens 250 articles/ notes.jsonl\n  \
        kvsplice ingest --corpus wiki --register-prefix brief --system-prompt \"Answer in one sentence.\"")]
    Ingest(Box<crate::ingest::IngestFlags>),
    /// Answer one question
    #[cfg(feature = "client")]
    #[command(after_help = "Examples:\n  kvsplice ask --corpus wiki \"Who built the ferry?\"\n  \
        kvsplice ask --documents chunks.jsonl \"Who built the ferry?\" --strategy clip --ratio 0.3 --json")]
    Ask(Box<crate::ask::AskFlags>),
    /// Answer the same question under several strategies, side by side
    #[cfg(feature = "client")]
    #[command(
        after_help = "Example: kvsplice compare --corpus wiki \"Who built the ferry?\" --strategies full,clip:0.2"
    )]
    Compare(Box<crate::compare::CompareFlags>),
    /// Compare strategies on prompts whose right answer is known
    #[cfg(feature = "client")]
    Eval(Box<crate::eval::EvalFlags>),
    /// Measure this machine
    #[cfg(all(feature = "client", feature = "head", feature = "worker", feature = "cache"))]
    Bench(crate::bench::BenchFlags),
}

/// Flags of `cache`.
#[cfg(any(feature = "cache", feature = "client"))]
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct CacheFlags {
    #[cfg(feature = "client")]
    #[command(subcommand)]
    look: Option<crate::store::Command>,
    #[command(flatten)]
    serve: ServeFlags,
}

impl Command {
    /// Whether models run in this process.
    #[cfg(any(feature = "head", feature = "worker"))]
    pub(crate) fn computes(&self) -> bool {
        match self {
            #[cfg(all(feature = "head", feature = "worker", feature = "cache"))]
            Command::Up(_) => true,
            #[cfg(feature = "head")]
            Command::Head(_) => true,
            #[cfg(feature = "worker")]
            Command::Worker(_) => true,
            #[cfg(feature = "client")]
            Command::Ingest(flags) => flags.is_embedded(),
            #[cfg(feature = "client")]
            Command::Ask(flags) => flags.is_embedded(),
            #[cfg(feature = "client")]
            Command::Compare(flags) => flags.is_embedded(),
            #[cfg(feature = "client")]
            Command::Eval(flags) => flags.is_embedded(),
            #[cfg(all(feature = "client", feature = "head", feature = "worker", feature = "cache"))]
            Command::Bench(_) => true,
            _ => false,
        }
    }

    /// Runs it within the tokio runtime.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        match self {
            #[cfg(all(feature = "head", feature = "worker", feature = "cache"))]
            Command::Up(flags) => serve::run(*flags, &Role::ALL).await,
            #[cfg(feature = "head")]
            Command::Head(flags) => serve::run(*flags, &[Role::Head]).await,
            #[cfg(feature = "worker")]
            Command::Worker(flags) => serve::run(*flags, &[Role::Worker]).await,
            #[cfg(any(feature = "cache", feature = "client"))]
            Command::Cache(flags) => {
                let flags = *flags;
                #[cfg(feature = "client")]
                if let Some(look) = flags.look {
                    return crate::store::run(look).await;
                }
                serve::run(flags.serve, &[Role::Cache]).await
            }
            Command::Models(args) => models::run(args),
            Command::Doctor(flags) => doctor::run(*flags).await,
            #[cfg(feature = "client")]
            Command::Ingest(flags) => crate::ingest::run(*flags).await,
            #[cfg(feature = "client")]
            Command::Ask(flags) => crate::ask::run(*flags).await,
            #[cfg(feature = "client")]
            Command::Compare(flags) => crate::compare::run(*flags).await,
            #[cfg(feature = "client")]
            Command::Eval(flags) => crate::eval::run(*flags).await,
            #[cfg(all(feature = "client", feature = "head", feature = "worker", feature = "cache"))]
            Command::Bench(flags) => crate::bench::run(flags).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_command_shows_an_example() {
        Cli::command().debug_assert();
        for command in Cli::command().get_subcommands() {
            let leaves: Vec<_> = command.get_subcommands().collect();
            let text = |command: &clap::Command| command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let shown =
                text(command).contains("kvsplice ") || leaves.iter().all(|leaf| text(leaf).contains("kvsplice "));
            assert!(shown, "{} has no example", command.get_name());
        }
    }
}
