//! The cache service inside the test's process, on a store that the test brings. It ends like a crash: every connection
//! breaks at once.

use std::sync::Arc;

use anyhow::{Context, Result};
use kvsplice_cache_service::{Config, run_with_store};
use object_store::ObjectStore;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// A running cache service.
#[derive(Debug)]
pub struct CacheService {
    address: String,
    /// Its own, so that its connections end with it.
    runtime: Option<Runtime>,
}

impl CacheService {
    /// Serves `store` at `listen`, behind a memory tier of `memory_bytes`.
    pub fn start(store: Arc<dyn ObjectStore>, memory_bytes: u64, listen: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.context("start tokio")?;
        let listener = runtime.block_on(TcpListener::bind(listen)).context("listen")?;
        let address = listener.local_addr().context("read the address")?.to_string();
        let config = Config { store: "memory://test".to_owned(), memory_bytes, ..Config::default() };
        runtime.spawn(run_with_store(store, config, listener, std::future::pending()));
        Ok(Self { address, runtime: Some(runtime) })
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for CacheService {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
