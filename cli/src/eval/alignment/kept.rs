//! Finished prompts in `DIR/prompts.jsonl`: a line that says what is measured, then one line a prompt, on disk before the
//! next begins. A last line that an interrupt tore is dropped; one command at a time has the file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::report::Measured;
use crate::failure::{data, usage};

const FILE: &str = "prompts.jsonl";

/// An open file. The lock goes with it.
#[derive(Debug)]
pub(super) struct Kept {
    file: File,
    path: PathBuf,
    /// In the order in which they were finished.
    pub(super) prompts: Vec<Measured>,
}

impl Kept {
    /// Opens the file in `folder`, which is made if it is not there. `what` is an object with everything that decides a
    /// result.
    ///
    /// # Errors
    /// A usage failure when another command has the file or it holds something else; a data failure for a broken line.
    pub(super) fn open(folder: &Path, what: &Value) -> anyhow::Result<Self> {
        let path = folder.join(FILE);
        let shown = path.display();
        std::fs::create_dir_all(folder).map_err(|error| usage(format!("--out: make {}: {error}", folder.display())))?;
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let mut file = file.map_err(|error| usage(format!("--out: open {shown}: {error}")))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let folder = folder.display();
                return Err(usage(format!("{folder} is in use by another command; name another folder with --out")));
            }
            Err(TryLockError::Error(error)) => return Err(usage(format!("--out: lock {shown}: {error}"))),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        if whole < bytes.len() {
            file.set_len(whole as u64)?;
            file.seek(SeekFrom::End(0))?;
        }
        let wrong = |line: usize, error: serde_json::Error| {
            data(format!("{shown} line {line}: {error}; name another folder with --out"))
        };
        let lines = bytes.get(..whole).unwrap_or_default().split(|&byte| byte == b'\n').enumerate();
        let mut lines = lines.filter(|(_, line)| !line.is_empty());
        let Some((_, first)) = lines.next() else {
            let mut kept = Self { file, path, prompts: Vec::new() };
            kept.write(&what.to_string())?;
            return Ok(kept);
        };
        let found: Value = serde_json::from_slice(first).map_err(|error| wrong(1, error))?;
        if let Some(conflict) = conflict(&found, what) {
            let folder = folder.display();
            return Err(usage(format!("{folder} holds other results: {conflict}; name another folder with --out")));
        }
        let prompts = lines.map(|(place, line)| serde_json::from_slice(line).map_err(|error| wrong(place + 1, error)));
        let prompts = prompts.collect::<anyhow::Result<_>>()?;
        Ok(Self { file, path, prompts })
    }

    /// The finished prompt of this name.
    pub(super) fn find(&self, sample: &str) -> Option<&Measured> {
        self.prompts.iter().find(|prompt| prompt.sample == sample)
    }

    /// Adds a prompt and waits until it is on disk.
    pub(super) fn add(&mut self, prompt: Measured) -> anyhow::Result<()> {
        self.write(&serde_json::to_string(&prompt)?)?;
        self.prompts.push(prompt);
        Ok(())
    }

    fn write(&mut self, line: &str) -> anyhow::Result<()> {
        let written = self.file.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|error| usage(format!("write {}: {error}; what was written is kept", self.path.display())))
    }
}

/// The first field in which two objects differ.
fn conflict(found: &Value, wanted: &Value) -> Option<String> {
    let fields = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let (found, wanted) = (fields(found), fields(wanted));
    let mut names = wanted.keys().chain(found.keys());
    let name = names.find(|name| found.get(*name) != wanted.get(*name))?;
    let text = |value: Option<&Value>| value.map_or_else(|| "none".to_owned(), Value::to_string);
    Some(format!("{name} {}, not {}", text(found.get(name)), text(wanted.get(name))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn prompt(sample: &str) -> Measured {
        let (primary_tokens, auxiliary_tokens, characters) = (1, 2, 3);
        let (sample, pairs) = (sample.to_owned(), Vec::new());
        Measured { sample, length: 1000, primary_tokens, auxiliary_tokens, characters, pairs }
    }

    #[test]
    fn a_torn_line_is_dropped_and_what_is_whole_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let what = json!({"seed": 1});
        let mut kept = Kept::open(folder.path(), &what).unwrap();
        kept.add(prompt("hop-0@1000")).unwrap();
        let busy = Kept::open(folder.path(), &what).unwrap_err().to_string();
        assert!(busy.contains("in use"), "{busy}");
        drop(kept);
        let path = folder.path().join(FILE);
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"sample\":\"hop-1").unwrap();
        drop(file);
        let mut kept = Kept::open(folder.path(), &what).unwrap();
        assert!(kept.find("hop-0@1000").is_some() && kept.find("hop-1@1000").is_none());
        kept.add(prompt("hop-1@1000")).unwrap();
        drop(kept);
        assert_eq!(Kept::open(folder.path(), &what).unwrap().prompts, [prompt("hop-0@1000"), prompt("hop-1@1000")]);
    }

    #[test]
    fn other_results_are_refused_with_what_differs() {
        let folder = tempfile::tempdir().unwrap();
        drop(Kept::open(folder.path(), &json!({"seed": 1, "layers": ["first"]})).unwrap());
        let other = Kept::open(folder.path(), &json!({"seed": 2, "layers": ["first"]})).unwrap_err().to_string();
        assert!(other.contains("seed 1, not 2") && other.contains("--out"), "{other}");
        std::fs::write(folder.path().join(FILE), "{\"seed\": 1}\nno json\n").unwrap();
        let broken = Kept::open(folder.path(), &json!({"seed": 1})).unwrap_err().to_string();
        assert!(broken.contains("line 2"), "{broken}");
    }
}
