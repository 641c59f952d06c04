//! Flags that every measuring command of `eval` has.

use std::path::PathBuf;

use clap::Args;
use kvsplice_kv::{Options, Strategy};

use crate::failure::usage;
use crate::flags::{ConfigFlags, ServerFlags};

/// What is compared, where it goes, and who answers.
#[derive(Args, Clone, Debug)]
pub(crate) struct CommonFlags {
    /// Folder of the results and the report; the same command goes on where it stopped [default: ./kvsplice-eval-COMMAND]
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// Seeds the prompts and the confidence intervals
    #[arg(long, default_value_t = 42)]
    pub(super) seed: u64,
    /// Let strategies reuse what earlier prompts began with; off, because each strategy gets the same prompts in turn
    #[arg(long)]
    pub(super) prefix_cache: bool,
    /// Print one JSON object a line: each finished pair, then the report
    #[arg(long)]
    pub(super) json: bool,
    /// HOST:PORT of a running head; without it the roles run inside this command
    #[arg(long, value_name = "ADDR", help_heading = "Server")]
    server: Option<String>,
    /// Deadline of each request, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, help_heading = "Server",
          value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: u64,
    #[command(flatten)]
    pub(super) config: ConfigFlags,
}

impl CommonFlags {
    /// Whether models run in this process.
    #[cfg(any(feature = "head", feature = "worker"))]
    pub(super) fn is_embedded(&self) -> bool {
        self.server.is_none()
    }

    /// Which server is asked, and how long each request may take.
    pub(super) fn server(&self) -> ServerFlags {
        ServerFlags::new(self.server.clone(), self.timeout)
    }

    /// The folder of `command`.
    pub(super) fn folder(&self, command: &str) -> PathBuf {
        self.out.clone().unwrap_or_else(|| PathBuf::from(format!("kvsplice-eval-{command}")))
    }

    /// Words of a command line that asks the same models.
    pub(super) fn words(&self) -> Vec<String> {
        let mut words = vec!["--seed".to_owned(), self.seed.to_string()];
        if self.prefix_cache {
            words.push("--prefix-cache".to_owned());
        }
        if let Some(server) = &self.server {
            words.extend(["--server".to_owned(), server.clone()]);
        }
        words.extend(self.config.words());
        words
    }
}

/// The strategies that `text` lists, each once; `full` comes first, as the reference.
///
/// # Errors
/// A usage failure that names what is wrong and what is valid.
pub(super) fn strategies(text: &str) -> anyhow::Result<Vec<Options>> {
    let listed = Options::parse_list(text).map_err(|error| usage(format!("--strategies: {error}")))?;
    Ok(with_full(listed))
}

/// `full`, then the others in their order, each once.
pub(super) fn with_full(listed: Vec<Options>) -> Vec<Options> {
    let mut strategies = vec![Options::of(Strategy::Full)];
    for options in listed {
        if !strategies.contains(&options) {
            strategies.push(options);
        }
    }
    strategies
}
