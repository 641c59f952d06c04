//! Flags that several commands share.

use std::path::PathBuf;
#[cfg(feature = "client")]
use std::time::Duration;

use clap::Args;
use figment::value::Value;

use crate::config::{self, Config};
use crate::failure::usage;

/// Flags over the configuration file.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Configuration")]
pub(crate) struct ConfigFlags {
    /// TOML file with the sections listen, head, worker and cache
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the effective configuration as TOML and exit
    #[arg(long)]
    pub(crate) print_config: bool,
    /// Any setting, such as --set head.max_in_flight=8; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// What to log, such as info or kvsplice_head=debug
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
    /// Primary model of head and worker: a demo model's name, a .gguf file or a Hugging Face folder
    #[arg(long, value_name = "MODEL")]
    primary: Option<String>,
    /// Auxiliary model of the head
    #[arg(long, value_name = "MODEL")]
    auxiliary: Option<String>,
    /// What the models compute in: f32 or bf16; by default bf16 on a GPU, else the best for this CPU
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Device of the worker, such as cpu or cuda:0
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Model shape for tests: tiny or qwen2.5-14b (needs --random-weights)
    #[arg(long, value_name = "SHAPE")]
    shape: Option<String>,
    /// Seeded random weights, for tests
    #[arg(long)]
    random_weights: bool,
    /// Object store of the cache service, such as file:///srv/kv, memory:// or s3://bucket/path
    #[arg(long, value_name = "URL")]
    object_store: Option<String>,
}

impl ConfigFlags {
    /// Reads every source; `more` are settings of a command's own flags, which win.
    pub(crate) fn load(&self, more: Vec<(String, Value)>) -> anyhow::Result<Config> {
        let mut settings = self.settings()?;
        settings.extend(more);
        config::load(self.config.as_deref(), std::env::vars_os().filter_map(utf8), &settings)
    }

    /// Whether a flag names the object store.
    #[cfg(feature = "client")]
    pub(crate) fn names_store(&self) -> bool {
        self.object_store.is_some() || self.set.iter().any(|setting| setting.trim_start().starts_with("cache.store"))
    }

    /// The flags as words of a command line that reads the same configuration; without `--print-config`.
    #[cfg(feature = "client")]
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let mut flag = |name: &str, value: Option<String>| {
            words.extend(value.into_iter().flat_map(|value| [name.to_owned(), value]))
        };
        flag("--config", self.config.as_ref().map(|path| path.display().to_string()));
        for setting in &self.set {
            flag("--set", Some(setting.clone()));
        }
        flag("--log", self.log.clone());
        flag("--primary", self.primary.clone());
        flag("--auxiliary", self.auxiliary.clone());
        flag("--dtype", self.dtype.clone());
        flag("--device", self.device.clone());
        flag("--shape", self.shape.clone());
        flag("--object-store", self.object_store.clone());
        if self.random_weights {
            words.push("--random-weights".to_owned());
        }
        words
    }

    fn settings(&self) -> anyhow::Result<Vec<(String, Value)>> {
        let mut settings: Vec<(String, Value)> = Vec::new();
        let mut set = |keys: &[&str], value: &Option<String>| {
            if let Some(value) = value {
                settings.extend(keys.iter().map(|key| ((*key).to_owned(), Value::from(value.clone()))));
            }
        };
        set(&["log"], &self.log);
        set(&["head.primary.model", "worker.primary.model"], &self.primary);
        set(&["head.auxiliary.model"], &self.auxiliary);
        set(&["head.primary.dtype", "head.auxiliary.dtype", "worker.primary.dtype"], &self.dtype);
        set(&["head.primary.device", "worker.primary.device"], &self.device);
        set(&["head.primary.shape", "worker.primary.shape"], &self.shape);
        // Any other shape is the primary's: the auxiliary model stays a real one, on the CPU.
        let tiny = self.shape.as_deref().is_none_or(|shape| shape == "tiny");
        if tiny {
            set(&["head.auxiliary.shape"], &self.shape);
        }
        set(&["cache.store"], &self.object_store);
        if self.random_weights {
            let auxiliary = if tiny { &["head.auxiliary"][..] } else { &[] };
            for model in ["head.primary", "worker.primary"].iter().chain(auxiliary) {
                settings.push((format!("{model}.random_weights"), Value::from(true)));
            }
        }
        for text in &self.set {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| usage(format!("--set needs KEY=VALUE, got {text:?}; such as head.max_in_flight=8")))?;
            let Ok(value) = value.parse::<Value>();
            settings.push((key.trim().to_owned(), value));
        }
        Ok(settings)
    }
}

fn utf8((name, value): (std::ffi::OsString, std::ffi::OsString)) -> Option<(String, String)> {
    Some((name.into_string().ok()?, value.into_string().ok()?))
}

/// Which server a command talks to.
#[cfg(feature = "client")]
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerFlags {
    /// HOST:PORT of a running role; without it the roles run inside this command
    #[arg(long, value_name = "ADDR")]
    pub(crate) server: Option<String>,
    /// Deadline of the whole command, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: u64,
}

#[cfg(feature = "client")]
impl ServerFlags {
    /// What a command with flags of its own was given; `timeout` in seconds.
    pub(crate) const fn new(server: Option<String>, timeout: u64) -> Self {
        Self { server, timeout }
    }

    /// No server: the roles run inside the command.
    #[cfg(all(feature = "client", feature = "head", feature = "worker", feature = "cache"))]
    pub(crate) const fn embedded() -> Self {
        Self { server: None, timeout: 600 }
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}
