//! `kvsplice eval report`: reads a folder of results and reports on what is there. Needs no server.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::report::{self, Report};
use super::store;
use crate::output;

/// Flags of `eval report`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReportFlags {
    /// Folder that an eval command wrote
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// Reports, and writes the report's files anew.
pub(crate) fn run(flags: ReportFlags) -> anyhow::Result<()> {
    let (header, records) = store::load(&flags.folder)?;
    let report = Report::of(&header, &records);
    report::write(&flags.folder, &report)?;
    if flags.json {
        return output::json(&json!({"event": "done", "report": report}));
    }
    report::show(&report)
}
