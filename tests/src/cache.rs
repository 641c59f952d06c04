//! The cache service inside the test's process, on a store that the test brings. It ends like a crash: every connection
//! breaks at once.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kvsplice_cache_service::{Config, run_with_store};
use kvsplice_kv::{ChunkId, Variant};
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::{client, v1};
use object_store::ObjectStore;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::Status;

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
        Self::start_with(store, Config { memory_bytes, ..Config::default() }, listen)
    }

    /// Serves `store` at `listen`, as `config` says but for the store.
    pub fn start_with(store: Arc<dyn ObjectStore>, config: Config, listen: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.context("start tokio")?;
        let listener = runtime.block_on(TcpListener::bind(listen)).context("listen")?;
        let address = listener.local_addr().context("read the address")?.to_string();
        let config = Config { store: "memory://test".to_owned(), ..config };
        runtime.spawn(run_with_store(store, config, listener, std::future::pending()));
        Ok(Self { address, runtime: Some(runtime) })
    }

    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// What the cache service at `address` says of itself.
pub fn cache_stats(address: &str) -> Result<v1::StatsResponse> {
    call(address, async |cache| cache.stats().await).context("ask for the cache service's counts")
}

/// Which of these chunks the cache service at `address` has.
pub fn find_chunks(address: &str, chunks: &[ChunkId], variant: Variant) -> Result<Vec<bool>> {
    let found = call(address, async |cache| cache.contains(chunks, variant, Duration::ZERO).await);
    Ok(found.context("look up chunks")?.found)
}

/// Removes chunks from the store and every tier, whoever holds a lease.
pub fn delete_chunks(address: &str, chunks: &[ChunkId]) -> Result<Vec<String>> {
    call(address, async |cache| cache.delete(chunks, &[]).await).context("delete chunks")
}

fn call<T>(address: &str, call: impl AsyncFnOnce(CacheClient) -> Result<T, Status>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    runtime.block_on(async {
        let cache = CacheClient::new(client::channel(address)?, Duration::from_secs(10));
        Ok(call(cache).await?)
    })
}

impl Drop for CacheService {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
