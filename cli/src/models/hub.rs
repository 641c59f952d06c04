//! Downloads from the Hugging Face hub, by the hub's own client (which honors `HF_ENDPOINT` and the user's token).
//!
//! Invariant: the network is bounded in time: 5 s to answer at first, 60 s without a byte later, then the caller hears why.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};

use super::Error;
use super::archive;
use super::catalog::{DemoModel, HubFile};
use super::progress::Progress;

const FIRST_ANSWER: Duration = Duration::from_secs(5);
const STALL: Duration = Duration::from_secs(60);
/// What a folder needs to be loaded.
const WANTED: [&str; 4] = [".safetensors", ".json", ".jinja", "merges.txt"];

/// Brings one pinned file to `target`, or says why not (an error is a reason to try the next source).
pub(super) fn pull_file(folder: &Path, source: &HubFile, model: &DemoModel, target: &Path) -> Result<()> {
    let cache = folder.join(".hub");
    connect(&cache, source.repository)?;
    let file = fetch(&cache, source.repository, source.file, model.name)?;
    let fits = archive::has_digest(&file, model.bytes, model.sha256)?;
    if fits {
        fs::rename(&file, target).with_context(|| format!("move to {}", target.display()))?;
    }
    fs::remove_dir_all(&cache).with_context(|| format!("remove {}", cache.display()))?;
    ensure!(fits, "its file is not the pinned one");
    Ok(())
}

/// Brings a whole model folder (`org/name`) to `models/org/name` and returns that.
pub(super) fn pull_folder(folder: &Path, repository: &str) -> Result<PathBuf> {
    let (organization, name) = split(repository)?;
    let target = folder.join(organization).join(name);
    if target.exists() {
        return Ok(target);
    }
    let cache = folder.join(".hub");
    let files = connect(&cache, repository).map_err(|error| unreachable(repository, &error))?;
    let files: Vec<String> = files.into_iter().filter(|file| is_wanted(file)).collect();
    if !files.iter().any(|file| file.ends_with(".safetensors")) || !files.iter().any(|file| file == "config.json") {
        let message =
            format!("hf:{repository} has no config.json with .safetensors files; name a repository that does");
        return Err(Error::Usage(message).into());
    }

    let partial = folder.join(format!(".{organization}--{name}.part"));
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    for file in &files {
        let place = partial.join(file);
        if place.exists() {
            continue; // A pull that was cut off left it whole.
        }
        let fetched = fetch(&cache, repository, file, file).map_err(|error| unreachable(repository, &error))?;
        fs::rename(&fetched, &place).with_context(|| format!("move to {}", place.display()))?;
    }
    let parent = folder.join(organization);
    fs::create_dir_all(&parent).with_context(|| format!("create {}", parent.display()))?;
    fs::rename(&partial, &target).with_context(|| format!("move to {}", target.display()))?;
    fs::remove_dir_all(&cache).with_context(|| format!("remove {}", cache.display()))?;
    Ok(target)
}

fn unreachable(repository: &str, error: &anyhow::Error) -> Error {
    Error::Unreachable(format!(
        "cannot pull hf:{repository}: {error:#}; check the name and the network, then pull again"
    ))
}

/// Top-level files only: repositories keep other formats in folders.
fn is_wanted(file: &str) -> bool {
    let plain = !file.contains(['/', '\\']) && !file.starts_with('.');
    plain && WANTED.iter().any(|ending| file.ends_with(ending))
}

/// `org/name` in two; refuses what could leave the models folder.
fn split(repository: &str) -> Result<(&str, &str), Error> {
    let is_plain = |part: &str| {
        let allowed = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
    };
    match repository.split_once('/') {
        Some((organization, name)) if is_plain(organization) && is_plain(name) => Ok((organization, name)),
        _ => Err(Error::Usage(format!("expected hf:ORG/NAME, got {:?}", format!("hf:{repository}")))),
    }
}

fn repository_at(cache: &Path, repository: &str) -> Result<ApiRepo> {
    let api = ApiBuilder::from_env().with_cache_dir(cache.to_owned()).with_progress(false).build()?;
    Ok(api.model(repository.to_owned()))
}

/// Asks for the repository's files; at most [`FIRST_ANSWER`].
fn connect(cache: &Path, repository: &str) -> Result<Vec<String>> {
    let remote = repository_at(cache, repository)?;
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::spawn(move || sender.send(remote.info()));
    match receiver.recv_timeout(FIRST_ANSWER) {
        Ok(info) => Ok(info?.siblings.into_iter().map(|file| file.rfilename).collect()),
        Err(_) => bail!("no answer within {} s", FIRST_ANSWER.as_secs()),
    }
}

enum Event {
    Size(u64),
    Bytes(u64),
    Done(Result<PathBuf>),
}

/// Hands the client's progress to the waiting thread.
struct Forward(SyncSender<Event>);

impl hf_hub::api::Progress for Forward {
    fn init(&mut self, size: usize, _file: &str) {
        let _ = self.0.send(Event::Size(size as u64)); // A receiver that is gone gave up; there is nobody to tell.
    }
    fn update(&mut self, size: usize) {
        let _ = self.0.send(Event::Bytes(size as u64));
    }
    fn finish(&mut self) {}
}

/// Downloads one file into the client's cache and returns where it lies; fails when no byte comes for [`STALL`].
fn fetch(cache: &Path, repository: &str, file: &str, label: &str) -> Result<PathBuf> {
    let remote = repository_at(cache, repository)?;
    let (sender, receiver) = mpsc::sync_channel(64);
    let name = file.to_owned();
    std::thread::spawn(move || {
        let fetched = remote.download_with_progress(&name, Forward(sender.clone()));
        // The client returns a link; the file behind it is what moves.
        let fetched = fetched.map_err(anyhow::Error::from).and_then(|link| Ok(fs::canonicalize(link)?));
        let _ = sender.send(Event::Done(fetched));
    });
    let mut progress = None;
    loop {
        match receiver.recv_timeout(STALL) {
            Ok(Event::Size(total)) => progress = Some(Progress::new(label, total)),
            Ok(Event::Bytes(bytes)) => {
                if let Some(progress) = &mut progress {
                    progress.add(bytes);
                }
            }
            Ok(Event::Done(fetched)) => return fetched.with_context(|| format!("download {file}")),
            Err(_) => bail!("download {file}: no byte within {} s", STALL.as_secs()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_two_plain_names() {
        assert_eq!(split("Qwen/Qwen2.5-0.5B").unwrap(), ("Qwen", "Qwen2.5-0.5B"));
        for bad in ["", "name", "org/", "/name", "org/../up", "org/a/b", "../x/y", "org/na me"] {
            assert!(split(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn only_what_loading_needs_is_wanted() {
        for file in ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"] {
            assert!(is_wanted(file), "{file}");
        }
        for file in ["README.md", "onnx/model.json", ".gitattributes", "../config.json", "pytorch_model.bin"] {
            assert!(!is_wanted(file), "{file}");
        }
    }
}
