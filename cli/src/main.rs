//! The program `kvsplice`: every role, and the commands that talk to them.
//!
//! Exit codes: 0 ok, 64 usage or configuration, 65 bad input, 69 server unreachable or refused, 70 internal, 130 Ctrl-C.
//! A failure is one line on stderr that says what failed and what to do.
#![forbid(unsafe_code)]

mod args;
#[cfg(feature = "client")]
mod ask;
#[cfg(all(feature = "client", feature = "head", feature = "worker", feature = "cache"))]
mod bench;
#[cfg(feature = "client")]
mod compare;
mod config;
mod doctor;
#[cfg(feature = "client")]
mod documents;
#[cfg(feature = "client")]
mod dump;
#[cfg(any(feature = "head", feature = "worker"))]
mod environment;
#[cfg(feature = "client")]
mod eval;
mod failure;
mod flags;
#[cfg(feature = "client")]
mod generate;
#[cfg(feature = "client")]
mod ingest;
mod models;
mod output;
#[cfg(feature = "client")]
mod prompt;
#[cfg(feature = "client")]
mod receipt;
mod roles;
mod serve;
#[cfg(feature = "client")]
mod session;
mod signals;
#[cfg(feature = "client")]
mod stats;
#[cfg(feature = "client")]
mod store;
mod telemetry;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::args::{Cli, Command};
use crate::failure::Kind;

/// Blocking work that nobody waits for any more may take this long to end.
const LEFTOVERS: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return refuse(&error),
    };
    #[cfg(any(feature = "head", feature = "worker"))]
    if command.computes() {
        environment::ensure();
        let code = exit_code(run(command));
        // What cannot be written now cannot be reported either.
        drop(std::io::Write::flush(&mut std::io::stdout()));
        kvsplice_model::leave(code);
    }
    ExitCode::from(exit_code(run(command)))
}

/// Says what went wrong, if anything did.
fn exit_code(result: anyhow::Result<()>) -> u8 {
    let Err(error) = result else { return 0 };
    if failure::is_broken_pipe(&error) {
        return 0;
    }
    eprintln!("kvsplice: {}", failure::one_line(&error));
    failure::exit_code(&error)
}

fn run(command: Command) -> anyhow::Result<()> {
    if let Command::Models(args) = command {
        return models::run(args);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(command.run());
    runtime.shutdown_timeout(LEFTOVERS);
    result
}

/// Help and version go to stdout; anything else is one line and exit code 64.
fn refuse(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Nobody reads a closed stdout.
        let _closed = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _closed = error.print();
        return ExitCode::from(Kind::Usage as u8);
    }
    let text = error.to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let told: Vec<&str> =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information")).collect();
    let told = told.join(" ");
    eprintln!("kvsplice: {}; see kvsplice help", told.strip_prefix("error: ").unwrap_or(&told));
    ExitCode::from(Kind::Usage as u8)
}
