//! What the cache service is told at its start. Every field has a default; `validate` checks each once.

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvsplice_kv::ModelDigest;
use serde::{Deserialize, Serialize};

use crate::{Admission, Error, Eviction, disk};

/// The cache service's settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// URL of the object store: `file:///folder`, `memory://`, `s3://bucket/prefix`, `gs://bucket/prefix`,
    /// `az://container/prefix`.
    /// Credentials come from the environment (such as `AWS_ACCESS_KEY_ID`), never from the URL.
    pub store: String,
    /// Bytes of verified layers and headers held in memory, pinned and leased ones included.
    pub memory_bytes: u64,
    /// Bytes of chunk objects held as files in `disk_dir`, between memory and the store; 0 for none. Choose it below what
    /// the disk has free: when it is full the tier is not written until there is room again.
    pub disk_bytes: u64,
    /// Folder of the disk tier, for one service alone. Its files may be opened and mapped by other programs, never changed.
    pub disk_dir: PathBuf,
    /// Name the files of whole chunks (of the disk tier, or of a `file://` store without one) to workers that ask, so that
    /// one on the same host maps them.
    pub hand_out_paths: bool,
    /// What goes first when the memory or the disk tier is full: `lru` (asked for longest ago) or `value` (recompute cost ×
    /// frequency ÷ bytes). Pinned and leased chunks stay.
    pub eviction: Eviction,
    /// What enters the memory and the disk tier: `always` or `second` (what is asked for twice, or pinned).
    pub admission: Admission,
    /// What computing the KV of one token takes, in microseconds; for `value`, until workers have measured it.
    pub recompute_us_per_token: f64,
    /// The same by model digest; takes the place of what workers measure.
    pub recompute_us_by_model: BTreeMap<ModelDigest, f64>,
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
            disk_bytes: 0,
            disk_dir: disk::default_folder(&home()),
            hand_out_paths: true,
            eviction: Eviction::default(),
            admission: Admission::default(),
            recompute_us_per_token: 500.0,
            recompute_us_by_model: BTreeMap::new(),
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
        let costs = std::iter::once(&self.recompute_us_per_token).chain(self.recompute_us_by_model.values());
        for cost in costs {
            if !(cost.is_finite() && *cost > 0.0) {
                let detail = format!("must be above 0, got {cost}");
                return Err(Error::Config { field: "recompute_us_per_token", detail });
            }
        }
        if self.disk_bytes > 0 && self.disk_dir.as_os_str().is_empty() {
            return Err(Error::Config { field: "disk_dir", detail: "must name a folder, got \"\"".into() });
        }
        if !self.store.contains("://") {
            let detail = format!("must be a URL such as file:///var/lib/kvsplice or s3://bucket, got {:?}", self.store);
            return Err(Error::Config { field: "store", detail });
        }
        Ok(())
    }
}

/// The data folder: `$KVSPLICE_HOME`, else `~/.cache/kvsplice`.
fn home() -> PathBuf {
    let home = std::env::var_os("KVSPLICE_HOME").filter(|home| !home.is_empty()).map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/tmp".into())).join(".cache/kvsplice"),
        PathBuf::from,
    );
    std::path::absolute(home).unwrap_or_else(|_| PathBuf::from("/tmp/kvsplice"))
}

/// `store/` in the data folder.
fn default_store() -> String {
    let folder = home().join("store");
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
        assert!(named(Config { recompute_us_per_token: -1.0, ..Config::default() }).starts_with("recompute_us_"));
        let nowhere = Config { disk_bytes: 1, disk_dir: PathBuf::new(), ..Config::default() };
        assert!(named(nowhere).starts_with("disk_dir "));
        assert!(named(Config { store_timeout_s: 0, ..Config::default() }).starts_with("store_timeout_s "));
    }
}
