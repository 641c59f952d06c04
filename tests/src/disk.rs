//! What files take on a disk, and disks that are really small.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Set for a test that runs again on a small disk.
const SMALL_DISK: &str = "KVSPLICE_TEST_SMALL_DISK";

/// Bytes that the files below `folder` take. What comes or goes while it looks may count or not, but never twice.
pub fn file_bytes(folder: &Path) -> u64 {
    let mut files = HashMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => folders.push(entry.path()),
                Ok(meta) => drop(files.insert(meta.ino(), meta.blocks() * 512)),
                // It is gone.
                Err(_) => {}
            }
        }
    }
    files.values().sum()
}

/// Runs the test `name` on a small disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SmallDisk {
    /// This is that run; the disk's folder.
    Here(PathBuf),
    /// It has run, and passed.
    Passed,
    /// This system lets nobody mount a disk.
    NotTried,
}

/// Runs the test `name` of this program again, in a mount namespace of its own with a file system of `kib` KiB. Fails when
/// the test does.
pub fn on_a_small_disk(name: &str, kib: u32) -> Result<SmallDisk> {
    if let Some(folder) = std::env::var_os(SMALL_DISK) {
        return Ok(SmallDisk::Here(folder.into()));
    }
    let folder = tempfile::tempdir().context("make a folder")?;
    let mount = format!("mount -t tmpfs -o size={kib}k tmpfs {}", folder.path().display());
    let namespace = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]);
        command
    };
    if !namespace(&mount).status().is_ok_and(|status| status.success()) {
        return Ok(SmallDisk::NotTried);
    }
    let program = std::env::current_exe().context("find the test binary")?;
    let script = format!("{mount} && exec {} --exact {name} --nocapture", program.display());
    let status = namespace(&script).env(SMALL_DISK, folder.path()).status().context("run the test again")?;
    ensure!(status.success(), "{name} fails on a small disk");
    Ok(SmallDisk::Passed)
}
