//! The results of a run in `DIR/results.jsonl`: a header line, then one line a finished pair, on disk before the next begins.
//!
//! A last line that an interrupt tore is dropped; every other line that cannot be read is an error. One command at a time
//! has the file, and only one that measures the same things on the same models may add to it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use kvsplice_proto::v1;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::{Item, Plan};
use crate::failure::{data, usage};

/// The file's name in the folder.
const FILE: &str = "results.jsonl";
/// Raised when the lines change their meaning.
const FORMAT: u32 = 1;

/// The first line: what is measured, on what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) format: u32,
    pub(super) command: String,
    /// Every setting that decides a result.
    pub(super) settings: Value,
    pub(super) seed: u64,
    pub(super) models: Vec<Model>,
    /// Of the program that measured.
    pub(super) version: String,
    /// Words of a command line that measures the same samples, without its set and strategies.
    pub(super) words: Vec<String>,
    /// The flag that takes a set's name; empty where there is one set.
    pub(super) set_flag: String,
}

/// A model that answered or scored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Model {
    /// `primary` or `auxiliary`.
    pub(super) role: String,
    pub(super) name: String,
    pub(super) digest: String,
    /// What it computed in.
    pub(super) dtype: String,
}

/// One finished (sample, strategy) pair.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) set: String,
    pub(super) sample: String,
    /// Of the whole sample, hexadecimal.
    pub(super) digest: String,
    pub(super) task: String,
    /// The strategy's specification.
    pub(super) strategy: String,
    /// What was carried out, and why if that is something else.
    pub(super) effective: String,
    pub(super) effective_reason: String,
    /// Shares of the selectable tokens.
    pub(super) ratio_nominal: f64,
    pub(super) ratio_charged: f64,
    /// Chunk tokens that were computed.
    pub(super) rows: u64,
    pub(super) prompt_tokens: u64,
    /// Bytes of KV that were loaded.
    pub(super) bytes: u64,
    pub(super) agreement: Option<Agreement>,
    pub(super) answer: Option<Answered>,
}

/// The gold answer's log-probabilities beside those of full attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Agreement {
    /// KL(full ‖ strategy), mean over the gold tokens, nats.
    pub(super) kl: f64,
    /// Share of the gold tokens where both find the same token most likely.
    pub(super) argmax: f64,
    /// Every most likely token is the gold one.
    pub(super) right: bool,
    /// Mean log-probability of the gold tokens.
    pub(super) gold_logprob: f64,
    pub(super) gold_tokens: u64,
}

/// The greedy answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Answered {
    pub(super) text: String,
    /// By the sample's metric, 0..=1.
    pub(super) score: f64,
    /// Full attention gave the same text.
    pub(super) same_text: bool,
    /// From the client's send to its first token.
    pub(super) ttft_ms: f64,
    /// The time includes encoding: the chunks could not be had from the cache.
    pub(super) cold: bool,
    pub(super) output_tokens: u64,
}

impl Header {
    /// The header of a plan that these models carry out.
    pub(super) fn new(plan: &Plan, models: Vec<v1::Model>) -> Self {
        let model =
            |model: v1::Model| Model { role: model.role, name: model.name, digest: model.digest, dtype: model.dtype };
        Self {
            format: FORMAT,
            command: plan.command.to_owned(),
            settings: plan.settings.clone(),
            seed: plan.seed,
            models: models.into_iter().map(model).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            words: plan.words.clone(),
            set_flag: plan.set_flag.to_owned(),
        }
    }

    /// The command line that measures one strategy on one set again.
    pub(super) fn command_line(&self, set: &str, strategy: &str) -> String {
        let mut words = vec!["kvsplice".to_owned()];
        words.extend(self.words.iter().map(|word| quoted(word)));
        if !self.set_flag.is_empty() {
            words.extend([self.set_flag.clone(), quoted(set)]);
        }
        let strategies = if strategy == "full" { strategy.to_owned() } else { format!("full,{strategy}") };
        words.extend(["--strategies".to_owned(), quoted(&strategies)]);
        words.join(" ")
    }

    /// What differs in a way that would mix unlike results.
    fn conflict(&self, wanted: &Self) -> Option<String> {
        let differs = |what: &str, has: &dyn std::fmt::Display, wants: &dyn std::fmt::Display| {
            let (has, wants) = (has.to_string(), wants.to_string());
            (has != wants).then(|| format!("{what} {has}, not {wants}"))
        };
        let models = |header: &Self| {
            let named = header.models.iter().map(|model| {
                let digest = model.digest.get(..12).unwrap_or(&model.digest);
                format!("{} {digest} in {}", model.role, model.dtype)
            });
            named.collect::<Vec<_>>().join(" and ")
        };
        differs("format", &self.format, &wanted.format)
            .or_else(|| differs("eval", &self.command, &wanted.command))
            .or_else(|| differs("seed", &self.seed, &wanted.seed))
            .or_else(|| self.setting_conflict(wanted))
            .or_else(|| differs("models", &models(self), &models(wanted)))
            .or_else(|| differs("version", &self.version, &wanted.version))
    }

    fn setting_conflict(&self, wanted: &Self) -> Option<String> {
        if self.settings == wanted.settings {
            return None;
        }
        let (Value::Object(has), Value::Object(wants)) = (&self.settings, &wanted.settings) else {
            return Some(format!("settings {}, not {}", self.settings, wanted.settings));
        };
        let names = has.keys().chain(wants.keys());
        let mut differing = names.filter(|name| has.get(*name) != wants.get(*name));
        let name = differing.next()?;
        let text = |value: Option<&Value>| value.map_or_else(|| "none".to_owned(), ToString::to_string);
        Some(format!("{name} {}, not {}", text(has.get(name)), text(wants.get(name))))
    }
}

/// The word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |char: char| char.is_ascii_alphanumeric() || "_-./:=,@+%".contains(char);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// An open results file. The lock goes with it.
#[derive(Debug)]
pub(super) struct Store {
    file: File,
    path: PathBuf,
    header: Header,
    records: Vec<Record>,
    /// (set, sample, strategy) → place in `records`.
    places: HashMap<(String, String, String), usize>,
}

impl Store {
    /// Opens the results in `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// A usage failure when another command has the folder, or the results are of something else.
    pub(super) fn open(folder: &Path, header: Header) -> anyhow::Result<Self> {
        let shown = folder.display();
        std::fs::create_dir_all(folder).map_err(|error| usage(format!("--out: make the folder {shown}: {error}")))?;
        let path = folder.join(FILE);
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let mut file = file.map_err(|error| usage(format!("--out: open {}: {error}", path.display())))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(usage(format!("{shown} is in use by another command; name another folder with --out")));
            }
            Err(TryLockError::Error(error)) => return Err(usage(format!("--out: lock {}: {error}", path.display()))),
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let whole = whole_lines(&text);
        if whole < text.len() {
            file.set_len(whole as u64)?;
            file.seek(SeekFrom::End(0))?;
        }
        let (found, records) = read(&path, text.get(..whole).unwrap_or_default())?;
        if let Some(conflict) = found.as_ref().and_then(|found| found.conflict(&header)) {
            return Err(usage(format!("{shown} holds other results: {conflict}; name another folder with --out")));
        }
        let is_new = found.is_none();
        let mut store =
            Self { file, path, header: found.unwrap_or(header), records: Vec::new(), places: HashMap::new() };
        if is_new {
            store.write(&serde_json::to_string(&store.header)?)?;
        }
        for record in records {
            store.keep(record);
        }
        Ok(store)
    }

    /// What is measured.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Every finished pair, in the order in which they finished.
    pub(super) fn records(&self) -> &[Record] {
        &self.records
    }

    /// The finished pair, if it is one.
    ///
    /// # Errors
    /// A usage failure when the pair was measured on a sample of the same name with another content.
    pub(super) fn find(&self, item: &Item, strategy: &str) -> anyhow::Result<Option<&Record>> {
        let key = (item.set.clone(), item.sample.id.clone(), strategy.to_owned());
        let Some(record) = self.places.get(&key).and_then(|&place| self.records.get(place)) else { return Ok(None) };
        if record.digest != item.digest {
            return Err(usage(format!(
                "{} holds other results: sample {} was another one; name another folder with --out",
                self.path.display(),
                item.sample.id
            )));
        }
        Ok(Some(record))
    }

    /// Adds a pair and waits until it is on disk.
    pub(super) fn add(&mut self, record: Record) -> anyhow::Result<()> {
        let line = serde_json::to_string(&record)?;
        self.write(&line)?;
        // As it will be read again: a number may differ in its last bit, and reports must not.
        self.keep(serde_json::from_str(&line)?);
        Ok(())
    }

    fn keep(&mut self, record: Record) {
        let key = (record.set.clone(), record.sample.clone(), record.strategy.clone());
        self.places.insert(key, self.records.len());
        self.records.push(record);
    }

    fn write(&mut self, line: &str) -> anyhow::Result<()> {
        let written = self.file.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| usage(format!("write {}: {error}; what was written is kept", self.path.display())))
    }
}

/// The header and the finished pairs in `folder`, for a report. Changes nothing.
///
/// # Errors
/// A data failure when there are none or a line cannot be read.
pub(super) fn load(folder: &Path) -> anyhow::Result<(Header, Vec<Record>)> {
    let path = folder.join(FILE);
    let text = std::fs::read(&path).map_err(|error| {
        data(format!("read {}: {error}; name the folder that a kvsplice eval command wrote", path.display()))
    })?;
    let (header, records) = read(&path, text.get(..whole_lines(&text)).unwrap_or_default())?;
    let header = header.ok_or_else(|| data(format!("{} is empty: nothing was measured yet", path.display())))?;
    Ok((header, records))
}

/// Bytes up to the end of the last line that is whole.
fn whole_lines(text: &[u8]) -> usize {
    text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1)
}

fn read(path: &Path, text: &[u8]) -> anyhow::Result<(Option<Header>, Vec<Record>)> {
    let wrong = |line: usize, error: &dyn std::fmt::Display| {
        data(format!("{} line {line}: {error}; name another folder with --out", path.display()))
    };
    let mut lines = text.split(|&byte| byte == b'\n').enumerate().filter(|(_, line)| !line.is_empty());
    let header = match lines.next() {
        None => return Ok((None, Vec::new())),
        Some((index, line)) => serde_json::from_slice(line).map_err(|error| wrong(index + 1, &error))?,
    };
    let records = lines.map(|(index, line)| serde_json::from_slice(line).map_err(|error| wrong(index + 1, &error)));
    Ok((Some(header), records.collect::<anyhow::Result<_>>()?))
}

#[cfg(test)]
#[path = "store/tests.rs"]
mod tests;
