//! Starts real `kvsplice` processes for the tests of the whole system.
//!
//! It knows the program only from outside: its command line, the addresses that it prints, and gRPC. Invariants: nothing
//! uses a fixed port, everything written lies in the test's own folder, and no process outlives its value.
#![forbid(unsafe_code)]

mod cache;
mod client;
mod disk;
mod gate;
mod process;
mod prompt;
mod reference;
mod store;
mod storm;
mod wait;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

pub use cache::{CacheService, cache_stats, delete_chunks, find_chunks};
pub use client::{Answer, Answering, Client, Crowd, worker_status};
pub use disk::{SmallDisk, file_bytes, on_a_small_disk};
pub use gate::Gate;
pub use process::Process;
pub use prompt::{article, characters, greedy, inline, options, raw, request, specification, strategy, words};
pub use reference::{EXACT, Reference, TINY, Verdict};
pub use store::FaultyStore;
pub use storm::{Fault, StormStore, Weather};
pub use wait::{wait_idle, wait_serving, wait_until, watch};

/// The built program. Fails when it has not been built: `make test` does that first.
pub fn program() -> Result<PathBuf> {
    // The test binary lies in target/release/deps.
    let test = std::env::current_exe().context("find the test binary")?;
    let release = test.parent().and_then(Path::parent).context("the test binary lies in target/release/deps")?;
    let program = release.join("kvsplice");
    ensure!(program.is_file(), "{} is missing; build it with: make build", program.display());
    Ok(program)
}

/// The top folder of the project.
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// Where models and tools lie: `$KVSPLICE_HOME`, else `~/.cache/kvsplice`.
pub fn home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("KVSPLICE_HOME").filter(|home| !home.is_empty()) {
        return Ok(home.into());
    }
    Ok(std::env::home_dir().context("no home folder: set KVSPLICE_HOME")?.join(".cache/kvsplice"))
}

/// Runs `kvsplice` with these arguments to its end.
pub fn run<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Result<Output> {
    let output = Command::new(program()?).args(arguments).stdin(Stdio::null()).output();
    output.context("run kvsplice")
}

/// Runs `kvsplice`, which must succeed, and returns its standard output.
pub fn run_ok<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Result<String> {
    let output = run(arguments)?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "kvsplice ended with {}:\n{stdout}\n{stderr}", output.status);
    Ok(stdout.into_owned())
}

/// Runs Python with the packages of `make python`; `code` sees `arguments` as `sys.argv[1:]`. Returns what it printed.
pub fn python<S: AsRef<std::ffi::OsStr>>(code: &str, arguments: &[S]) -> Result<String> {
    let packages = home()?.join("tools/python");
    ensure!(packages.is_dir(), "{} is missing; fetch it with: make python", packages.display());
    let mut command = Command::new("python3");
    command.arg("-c").arg(code).args(arguments).env("PYTHONPATH", packages).stdin(Stdio::null());
    let output = command.output().context("run python3")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "python3 ended with {}:\n{stderr}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The worker asks the cache service for every chunk, so that a test sees its tiers. Settings that a test brings come later
/// and may say otherwise.
const NO_POOL: [&str; 2] = ["--set", "worker.pool_bytes=0"];

/// Cache service, worker and head as three processes on loopback, with a folder as the object store.
#[derive(Debug)]
pub struct Cluster {
    // Fields drop in this order: callers before those they call, the folder last.
    /// The head.
    pub head: Process,
    /// The worker.
    pub worker: Process,
    /// The cache service.
    pub cache: Process,
    folder: TempDir,
}

impl Cluster {
    /// Starts the three and waits until they serve. `settings` go to each of them, such as
    /// `["--shape", "tiny", "--random-weights"]`.
    pub fn start(settings: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir().context("make a folder")?;
        std::fs::create_dir(folder.path().join("store")).context("make the store's folder")?;
        Self::start_in(folder, settings)
    }

    /// Kills the three at once, as a power failure would, and starts them again on what the store has.
    pub fn start_again(mut self, settings: &[&str]) -> Result<Self> {
        for process in [&mut self.head, &mut self.worker, &mut self.cache] {
            process.kill()?;
        }
        Self::start_in(self.folder, settings)
    }

    fn start_in(folder: TempDir, settings: &[&str]) -> Result<Self> {
        let store = format!("file://{}", folder.path().join("store").display());
        let cache = Process::start("cache", &[&["--object-store", &store], settings].concat(), folder.path())?;
        let to_cache = format!("cache={}", cache.address());
        let worker = format!("worker.{to_cache}");
        let worker = Process::start("worker", &[&NO_POOL, &["--set", &worker], settings].concat(), folder.path())?;
        let head_cache = format!("head.{to_cache}");
        let head_worker = format!("head.worker={}", worker.address());
        let settings = [&["--set", &head_cache, "--set", &head_worker], settings].concat();
        let head = Process::start("head", &settings, folder.path())?;
        for process in [&cache, &worker, &head] {
            wait_serving(process)?;
        }
        Ok(Self { head, worker, cache, folder })
    }

    /// The head's address, for `--server`.
    pub fn server(&self) -> &str {
        self.head.address()
    }

    /// The folder that is the object store.
    pub fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// A folder for what a test writes; it goes with the cluster.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A cluster that the tests of one file share for as long as one of them uses it.
pub type Shared = Mutex<Weak<Cluster>>;

/// The cluster of `slot`; started if nobody has it.
pub fn shared(slot: &Shared, settings: &[&str]) -> Result<Arc<Cluster>> {
    let mut held = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = held.upgrade() {
        return Ok(cluster);
    }
    let cluster = Arc::new(Cluster::start(settings)?);
    *held = Arc::downgrade(&cluster);
    Ok(cluster)
}

/// A worker and a head as two processes, on a cache service that the test brings.
#[derive(Debug)]
pub struct Pair {
    /// The head.
    pub head: Process,
    /// The worker.
    pub worker: Process,
    folder: TempDir,
}

impl Pair {
    /// Starts the two and waits until they serve. `settings` go to both.
    pub fn start(cache: &str, settings: &[&str]) -> Result<Self> {
        Self::start_through(cache, cache, settings)
    }

    /// The same; the worker reaches the cache service at an address of its own, such as that of a [`Gate`].
    pub fn start_through(cache: &str, workers_cache: &str, settings: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir().context("make a folder")?;
        let to_cache = format!("worker.cache={workers_cache}");
        let worker = Process::start("worker", &[&NO_POOL, &["--set", &to_cache], settings].concat(), folder.path())?;
        let (to_cache, to_worker) = (format!("head.cache={cache}"), format!("head.worker={}", worker.address()));
        let head =
            Process::start("head", &[&["--set", &to_cache, "--set", &to_worker], settings].concat(), folder.path())?;
        for process in [&worker, &head] {
            wait_serving(process)?;
        }
        Ok(Self { head, worker, folder })
    }

    /// A folder for what a test writes; it goes with the pair.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}
