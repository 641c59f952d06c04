//! The one configuration: defaults < TOML file < environment (`KVSPLICE_HEAD__WORKER=...`) < flags.
//!
//! Unknown keys are refused in every source. A build without a role keeps that role's section unread.

use std::path::Path;

use figment::Figment;
use figment::providers::{Format, Serialized, Toml};
use figment::value::Value;
use serde::{Deserialize, Serialize};

use crate::failure::usage;

#[cfg(feature = "head")]
type HeadConfig = kvsplice_head::Config;
#[cfg(not(feature = "head"))]
type HeadConfig = toml::Table;
#[cfg(feature = "worker")]
type WorkerConfig = kvsplice_gpu_worker::Config;
#[cfg(not(feature = "worker"))]
type WorkerConfig = toml::Table;
#[cfg(feature = "cache")]
type CacheConfig = kvsplice_cache_service::Config;
#[cfg(not(feature = "cache"))]
type CacheConfig = toml::Table;

/// Everything that can be set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    /// What is logged, such as `info` or `info,kvsplice_head=debug`. Default: `info` for roles, `warn` for commands.
    pub(crate) log: Option<String>,
    /// Where traces go (OTLP over gRPC), such as `http://127.0.0.1:4317`; nowhere by default.
    pub(crate) otlp: Option<String>,
    /// Where each role listens.
    pub(crate) listen: Listen,
    /// The head.
    pub(crate) head: HeadConfig,
    /// The worker.
    pub(crate) worker: WorkerConfig,
    /// The cache service.
    pub(crate) cache: CacheConfig,
}

/// Listen addresses; loopback unless said otherwise.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Listen {
    /// Of the head.
    pub(crate) head: String,
    /// Of the worker.
    pub(crate) worker: String,
    /// Of the cache service.
    pub(crate) cache: String,
}

impl Default for Listen {
    fn default() -> Self {
        Self { head: "127.0.0.1:7400".into(), worker: "127.0.0.1:7401".into(), cache: "127.0.0.1:7402".into() }
    }
}

const ENVIRONMENT_PREFIX: &str = "KVSPLICE_";

/// Reads every source. `environment` is passed in so that tests need not change the process's. `flags` are dotted keys.
pub(crate) fn load(
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    flags: &[(String, Value)],
) -> anyhow::Result<Config> {
    let mut figment = Figment::from(Serialized::defaults(Config::default()));
    if let Some(path) = file {
        let text = std::fs::read_to_string(path)
            .map_err(|error| usage(format!("read the configuration {}: {error}", path.display())))?;
        figment = figment.merge(Toml::string(&text));
    }
    for (name, text) in environment {
        if let Some(key) = environment_key(&name) {
            // Parsing cannot fail: what is no number, boolean, list or table is a string.
            let Ok(value) = text.parse::<Value>();
            figment = figment.merge((key, value));
        }
    }
    for (key, value) in flags {
        figment = figment.merge((key, value));
    }
    let config: Config = figment.extract().map_err(|error| {
        let source = file.map_or_else(|| "environment or flags".to_owned(), |path| path.display().to_string());
        usage(format!("configuration ({source}): {error}"))
    })?;
    config.validate()?;
    Ok(config)
}

/// `KVSPLICE_HEAD__WORKER` → `head.worker`. Only nested names and the two top-level settings count: other names with our
/// prefix, such as `KVSPLICE_HOME`, are no settings.
fn environment_key(name: &str) -> Option<String> {
    let key = name.strip_prefix(ENVIRONMENT_PREFIX)?.to_ascii_lowercase();
    (key.contains("__") || key == "log" || key == "otlp").then(|| key.replace("__", "."))
}

impl Config {
    fn validate(&self) -> anyhow::Result<()> {
        #[cfg(feature = "head")]
        self.head.validate().map_err(|error| usage(format!("configuration, [head]: {error}")))?;
        #[cfg(feature = "worker")]
        self.worker.validate().map_err(|error| usage(format!("configuration, [worker]: {error}")))?;
        #[cfg(feature = "cache")]
        self.cache.validate().map_err(|error| usage(format!("configuration, [cache]: {error}")))?;
        Ok(())
    }

    /// The effective configuration as TOML.
    pub(crate) fn to_toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string_pretty(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn a_later_source_wins() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvsplice.toml");
        std::fs::write(&file, "log = \"debug\"\n[listen]\nhead = \"127.0.0.1:1\"\nworker = \"127.0.0.1:2\"\n").unwrap();
        let env = environment(&[("KVSPLICE_LISTEN__WORKER", "127.0.0.1:3"), ("KVSPLICE_HOME", "/x"), ("OTHER", "1")]);
        let flags = [("listen.cache".to_owned(), Value::from("127.0.0.1:4"))];
        let config = load(Some(&file), env, &flags).unwrap();
        assert_eq!(config.log.as_deref(), Some("debug"));
        assert_eq!(config.listen.head, "127.0.0.1:1");
        assert_eq!(config.listen.worker, "127.0.0.1:3");
        assert_eq!(config.listen.cache, "127.0.0.1:4");
        let printed: Config = toml::from_str(&config.to_toml().unwrap()).unwrap();
        assert_eq!(printed.to_toml().unwrap(), config.to_toml().unwrap());
    }

    #[test]
    fn an_unknown_key_and_a_missing_file_are_refused_with_code_64() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kvsplice.toml");
        std::fs::write(&file, "[listen]\nhaed = \"127.0.0.1:1\"\n").unwrap();
        let error = load(Some(&file), [], &[]).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 64);
        assert!(error.to_string().contains("haed"), "{error}");
        let error = load(None, environment(&[("KVSPLICE_LISTEN__HAED", "x")]), &[]).unwrap_err();
        assert!(error.to_string().contains("haed"), "{error}");
        let error = load(Some(Path::new("/nonexistent.toml")), [], &[]).unwrap_err();
        assert_eq!(crate::failure::exit_code(&error), 64);
    }
}
