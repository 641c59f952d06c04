//! The cache service: chunk KV and records in an object store, behind a memory and a disk tier of verified layers.
//!
//! One layer of one chunk is the unit: it is read by range, verified once when it enters the tier, and streamed to workers in
//! layer order. An object becomes visible only after its header and every layer have been checked. What is missing or damaged
//! is a counted miss of that chunk, never of the request. The service computes nothing and knows no tensor; all its state but
//! leases is in the store, so any number of them may share one.
#![forbid(unsafe_code)]

mod admission;
mod config;
mod disk;
mod error;
mod fetch;
mod frame;
mod gc;
mod heads;
mod kept;
mod lookups;
mod mapping;
mod memory;
mod protect;
mod put;
mod records;
mod service;
mod staging;
mod store;
mod stream;
mod tier;
pub mod trace;
mod verify;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kvsplice_proto::frames::ChunkServer;
use kvsplice_proto::server::{self, Limits};
use object_store::ObjectStore;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tracing::info;

pub use admission::Admission;
pub use config::Config;
pub use error::Error;
pub use kvsplice_kv::eviction::Eviction;

use crate::service::Service;
use crate::store::Store;

/// The service's name, as health reports it.
pub const SERVICE: &str = "kvsplice.v1.Cache";

/// Opens the store that `config` names, proves that it can be written, and serves on `listener` until `shutdown`.
///
/// # Errors
/// [`Error::Config`] for a bad setting, [`Error::Open`] when the store cannot be used, [`Error::Serve`] when serving fails.
pub async fn run(
    config: Config,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    config.validate()?;
    let store = store::open(&config).await?;
    serve(store, config, listener, shutdown).await
}

/// Like [`run`], on a store that the caller brings; `config.store` is only its name.
///
/// # Errors
/// [`Error::Config`] for a bad setting, [`Error::Serve`] when serving fails.
pub async fn run_with_store(
    store: Arc<dyn ObjectStore>,
    config: Config,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    config.validate()?;
    let timeout = Duration::from_secs(config.store_timeout_s);
    serve(Store::new(store, store::public_name(&config.store), timeout), config, listener, shutdown).await
}

/// Checks that the store that `config` names can be opened and written, as [`run`] does before it serves. Returns its name
/// without credentials.
///
/// # Errors
/// [`Error::Config`] for a bad setting, [`Error::Open`] when the store cannot be used.
pub async fn check_store(config: &Config) -> Result<String, Error> {
    config.validate()?;
    Ok(store::open(config).await?.name().to_owned())
}

async fn serve(
    store: Store,
    config: Config,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    info!(
        store = store.name(),
        memory_bytes = config.memory_bytes,
        disk_bytes = config.disk_bytes,
        "serving the cache"
    );
    let service = Service::open(store, &config).await?;
    let fetcher = service.fetcher();
    let limits = Limits {
        max_in_flight: config.max_in_flight,
        default_deadline: Duration::from_secs(config.deadline_s),
        grace: Duration::from_secs(config.grace_s),
    };
    let served = server::serve(Routes::new(ChunkServer::new(service)), &[SERVICE], listener, limits, shutdown).await;
    fetcher.disk.close().await;
    served.map_err(|source| Error::Serve { source })
}
