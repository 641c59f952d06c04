//! The worker's settings.

use std::time::Duration;

use kvsplice_model::Spec;
use kvsplice_proto::server::Limits;
use serde::{Deserialize, Serialize};

use crate::{Error, Policy};

/// The worker's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model that answers.
    pub primary: Spec,
    /// Address of the cache service, host:port.
    pub cache: String,
    /// Requests in hand, waiting ones included; more are refused.
    pub queue_limit: u32,
    /// Bytes of KV of the requests that run at the same time; further ones wait. On a GPU this is computed from what is free
    /// after the weights, and the setting is not used.
    pub kv_bytes: u64,
    /// Bytes of exact beginnings of prompts that are kept for later ones; 0 for none.
    pub beginning_bytes: u64,
    /// Which beginnings go first: pgdsf or lru.
    pub beginning_policy: Policy,
    /// Bytes of chunk layers that came over the wire and are kept on the host for later prompts; 0 for none. Mapped ones are
    /// not kept: the page cache keeps them.
    pub pool_bytes: u64,
    /// Bytes of layers of chunks that were asked for twice and are kept in the device's memory; 0 for none. Unset: none on the
    /// CPU; on a GPU an eighth of what is free for KV after the weights, which requests in hand then have less.
    pub device_pool_bytes: Option<u64>,
    /// Connections to the cache service that chunks are spread over.
    pub cache_connections: u32,
    /// Map chunks that the cache service has in files of this host, instead of having them sent.
    pub map_files: bool,
    /// Compute a chunk instead of loading it where that is faster, as far as measured speeds tell.
    pub plan_loads: bool,
    /// Seconds that one call of the cache service may take.
    pub cache_deadline_s: u64,
    /// Seconds that a request may take when the caller sets no deadline.
    pub deadline_s: u64,
    /// Seconds that running requests get when the worker stops.
    pub grace_s: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            primary: Spec { model: "qwen2.5-coder-0.5b-instruct".to_owned(), ..Spec::default() },
            cache: "127.0.0.1:7402".to_owned(),
            queue_limit: 64,
            kv_bytes: 4 << 30,
            beginning_bytes: 1 << 30,
            beginning_policy: Policy::default(),
            pool_bytes: 1 << 30,
            device_pool_bytes: None,
            cache_connections: 1,
            map_files: true,
            plan_loads: true,
            cache_deadline_s: 60,
            deadline_s: 600,
            grace_s: 30,
        }
    }
}

impl Config {
    /// Checks every setting.
    pub fn validate(&self) -> Result<(), Error> {
        self.primary.validate()?;
        if self.queue_limit == 0 || self.kv_bytes == 0 || self.cache_deadline_s == 0 || self.deadline_s == 0 {
            return Err(Error::Config(
                "queue_limit, kv_bytes, cache_deadline_s and deadline_s must be above 0".to_owned(),
            ));
        }
        if !(1..=64).contains(&self.cache_connections) {
            return Err(Error::Config(format!("cache_connections must be 1 to 64, got {}", self.cache_connections)));
        }
        Ok(())
    }

    pub(crate) fn cache_deadline(&self) -> Duration {
        Duration::from_secs(self.cache_deadline_s)
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            // Room for Status beside a full queue, whose refusal names the queue.
            max_in_flight: self.queue_limit as usize + 16,
            default_deadline: Duration::from_secs(self.deadline_s),
            grace: Duration::from_secs(self.grace_s),
        }
    }
}
