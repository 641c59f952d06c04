//! What the cache service is told at its start. Every field has a default; `validate` checks each once.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The cache service's settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// URL of the object store: `file:///folder`, `memory://`, `s3://bucket/prefix`; `gs://` and `az://` if built in.
    /// Credentials come from the environment (such as `AWS_ACCESS_KEY_ID`), never from the URL.
    pub store: String,
    /// Bytes of verified layers and headers held in memory, pinned and leased ones included.
    pub memory_bytes: u64,
    /// Requests in flight; more are refused with RESOURCE_EXHAUSTED. A stream of chunks holds at most 32 MiB of unsent data.
    pub max_in_flight: usize,
    /// Deadline of a request that brings none, in seconds.
    pub deadline_s: u64,
    /// How long one call to the object store may take, its retries included, in seconds.
    pub store_timeout_s: u64,
    /// Time for running requests after the shutdown signal, in seconds.
    pub grace_s: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            store: default_store(),
            memory_bytes: 1 << 30,
            max_in_flight: 256,
            deadline_s: 300,
            store_timeout_s: 30,
            grace_s: 30,
        }
    }
}

impl Config {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first bad field.
    pub fn validate(&self) -> Result<(), Error> {
        let positive = [
            ("max_in_flight", self.max_in_flight as u64),
            ("deadline_s", self.deadline_s),
            ("store_timeout_s", self.store_timeout_s),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(Error::Config { field, detail: "must be at least 1, got 0".into() });
            }
        }
        if !self.store.contains("://") {
            let detail = format!("must be a URL such as file:///var/lib/kvsplice or s3://bucket, got {:?}", self.store);
            return Err(Error::Config { field: "store", detail });
        }
        Ok(())
    }
}

/// `store/` in the data folder: `$KVSPLICE_HOME`, else `~/.cache/kvsplice`.
fn default_store() -> String {
    let home = std::env::var_os("KVSPLICE_HOME").filter(|home| !home.is_empty()).map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/tmp".into())).join(".cache/kvsplice"),
        PathBuf::from,
    );
    let folder = std::path::absolute(home.join("store")).unwrap_or_else(|_| PathBuf::from("/tmp/kvsplice/store"));
    url::Url::from_directory_path(folder).map_or_else(|()| "file:///tmp/kvsplice/store".to_owned(), String::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_bad_fields_are_named() {
        assert!(Config::default().validate().is_ok());
        let named = |config: Config| config.validate().unwrap_err().to_string();
        assert!(named(Config { store: "/data".into(), ..Config::default() }).starts_with("store "));
        assert!(named(Config { max_in_flight: 0, ..Config::default() }).starts_with("max_in_flight "));
        assert!(named(Config { store_timeout_s: 0, ..Config::default() }).starts_with("store_timeout_s "));
    }
}
