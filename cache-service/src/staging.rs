//! Staging files of puts that were killed, in a store that is a folder of this host: `name#N` beside the object `name`.
//!
//! The store writes such a file, links or renames it to the object's name and removes it; no listing shows it. Only the
//! service's own folders are looked through, no link is followed, and what was written lately stays: a put may be under way,
//! of another service on the same folder too.

use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::Error;
use crate::store::Store;

/// No put goes on for so long without writing.
const LEAST_AGE: Duration = Duration::from_secs(15 * 60);

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staging {
    /// Files that were removed, or would be, and their bytes.
    pub(crate) files: u64,
    pub(crate) bytes: u64,
    /// Files that are too young.
    pub(crate) young: u64,
}

/// Removes staging files that were last written `min_age` ago or earlier; with `dry_run` only counts them. Other stores have
/// none.
pub(crate) async fn collect(store: &Store, min_age: Duration, dry_run: bool) -> Result<Staging, Error> {
    let folders = store.own_folders();
    let work = move || sweep(folders, min_age.max(LEAST_AGE), SystemTime::now(), dry_run);
    let swept = tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    swept.map_err(|error| Error::Store {
        action: "remove staging files",
        source: object_store::Error::Generic { store: "LocalFileSystem", source: Box::new(error) },
    })
}

fn sweep(mut folders: Vec<PathBuf>, min_age: Duration, now: SystemTime, dry_run: bool) -> io::Result<Staging> {
    let mut found = Staging::default();
    while let Some(folder) = folders.pop() {
        let Some(entries) = if_there(fs::read_dir(&folder))? else { continue };
        for entry in entries {
            let entry = entry?;
            let Some(kind) = if_there(entry.file_type())? else { continue };
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && is_staging(&entry) {
                let Some(meta) = if_there(entry.metadata())? else { continue };
                // A time in the future is that of a young file.
                let age = now.duration_since(meta.modified()?).unwrap_or(Duration::ZERO);
                if age < min_age {
                    found.young += 1;
                } else if dry_run || if_there(fs::remove_file(entry.path()))?.is_some() {
                    found.files += 1;
                    found.bytes += meta.len();
                }
            }
        }
    }
    Ok(found)
}

/// None for what has gone meanwhile, or was never there.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_staging(entry: &DirEntry) -> bool {
    // What the service itself names has no # in it.
    let name = entry.file_name();
    let number = Path::new(&name).to_str().and_then(|name| name.split_once('#'));
    number.is_some_and(|(_, number)| !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit()))
}
