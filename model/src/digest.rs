//! The digest of a model's files, remembered by path, size, time and inode so that it is computed once.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvsplice_kv::ModelDigest;

use crate::{Error, home};

fn read_error(path: &Path) -> impl FnOnce(std::io::Error) -> Error + '_ {
    move |source| Error::Read { path: path.display().to_string(), source }
}

/// BLAKE3 over a file, or over the names and contents of a folder's model files in order.
pub(crate) fn of_path(path: &Path) -> Result<ModelDigest, Error> {
    let files = if path.is_dir() { folder_files(path)? } else { vec![path.to_owned()] };
    let memo_path = home().join("digests.json");
    let mut memo: BTreeMap<String, ModelDigest> =
        fs::read(&memo_path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let mut digests = Vec::with_capacity(files.len());
    let mut learned = false;
    for file in &files {
        let meta = fs::metadata(file).map_err(read_error(file))?;
        let absolute = file.canonicalize().map_err(read_error(file))?;
        let key =
            format!("{}|{}|{}.{:09}|{}", absolute.display(), meta.len(), meta.mtime(), meta.mtime_nsec(), meta.ino());
        let digest = match memo.get(&key) {
            Some(&digest) => digest,
            None => {
                let digest = of_file(file)?;
                memo.insert(key, digest);
                learned = true;
                digest
            }
        };
        digests.push(digest);
    }
    if learned {
        remember(&memo_path, &memo);
    }
    if let [only] = digests[..] {
        return Ok(only);
    }
    let mut hasher = blake3::Hasher::new();
    for (file, digest) in files.iter().zip(&digests) {
        hasher.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        hasher.update(digest.as_bytes());
    }
    Ok(ModelDigest::from_bytes(*hasher.finalize().as_bytes()))
}

/// A memo that cannot be written costs time, not correctness.
fn remember(path: &Path, memo: &BTreeMap<String, ModelDigest>) {
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let temporary = path.with_extension(format!("json.{}", std::process::id()));
        fs::write(&temporary, serde_json::to_vec_pretty(memo)?)?;
        fs::rename(&temporary, path)
    };
    if let Err(error) = write() {
        tracing::debug!(path = %path.display(), %error, "model digest is not remembered");
    }
}

fn of_file(path: &Path) -> Result<ModelDigest, Error> {
    let mut file = fs::File::open(path).map_err(read_error(path))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(read_error(path))?;
        if read == 0 {
            return Ok(ModelDigest::from_bytes(*hasher.finalize().as_bytes()));
        }
        hasher.update(&buffer[..read]);
    }
}

fn folder_files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(read_error(folder))? {
        let path = entry.map_err(read_error(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && (name.ends_with(".safetensors") || name.ends_with(".json") || name.ends_with(".jinja")) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
