//! The worker: pulls chunk KV from the cache service, splices it into one sequence, recomputes the chosen rows, decodes.
//!
//! One request's way: `service` checks it into a `request`, layers come from the `pool` or are fetched, `prefill` places and recomputes them
//! layer by layer, `decode` generates, `text` turns tokens into text, `receipt` says what was done. `engine` owns all
//! requests and decides what the compute thread does next. Rows come from the head, except where only the primary's own KV
//! can tell: `guide` and `blend` pick, `focus` gives up.
#![forbid(unsafe_code)]

mod active;
mod beginning;
mod blend;
mod capture;
mod config;
mod decode;
mod encode;
mod engine;
mod error;
mod focus;
mod guide;
mod handle;
mod keep;
mod pace;
mod pass;
mod placing;
mod planner;
mod pool;
mod prefill;
mod prompt;
mod receipt;
mod request;
mod schedule;
mod service;
mod skip;
mod text;
mod through;
mod tree;

use std::future::Future;

use kvsplice_kernels::cuda;
use kvsplice_model::{Compute, Model};
use kvsplice_proto::load::Loader;
use kvsplice_proto::server;
use kvsplice_proto::v1::worker_server::WorkerServer;
use tch::Device;
use tokio::net::TcpListener;
use tracing::info;

pub use config::Config;
pub use error::Error;
pub use tree::Policy;

/// Share of the free device memory for KV, in percent; the rest is for activations and what fragments.
const KV_PERCENT: u64 = 85;

/// Unless a setting says otherwise, the device's chunk pool takes one part in so many of what KV would have.
const POOL_SHARE: u64 = 8;

/// What becomes of a device with `free` bytes: bytes of KV for requests in hand, and bytes of chunk layers, beside the
/// beginnings that are kept there. The three together are [`KV_PERCENT`] of it at most.
fn budgets(free: u64, beginning_bytes: u64, device_pool_bytes: Option<u64>) -> Result<(u64, u64), Error> {
    let usable = (free / 100 * KV_PERCENT).saturating_sub(beginning_bytes);
    let pool = device_pool_bytes.unwrap_or(usable / POOL_SHARE);
    match usable.saturating_sub(pool) {
        0 => Err(Error::Config(format!(
            "{free} bytes of device memory are free after the weights, which leave no room for KV beside beginning_bytes \
             {beginning_bytes} and device_pool_bytes {pool}; use a smaller model or make these smaller"
        ))),
        kv => Ok((kv, pool)),
    }
}

/// Loads the model, then serves on `listener` until `shutdown` resolves and what was running has ended.
pub async fn run(
    mut config: Config,
    compute: Compute,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    config.validate()?;
    let spec = config.primary.clone();
    let model = compute.run(move || Model::load(&spec)).await??;
    info!(model = %model.name, digest = %model.digest.short(), dtype = %config.primary.dtype(), "model loaded");
    if let Device::Cuda(index) = config.primary.device()? {
        let memory = compute.run(move || cuda::memory(index)).await?;
        let (free, _) = memory.map_err(kvsplice_model::Error::from)?;
        let (kv, pool) = budgets(free as u64, config.beginning_bytes, config.device_pool_bytes)?;
        (config.kv_bytes, config.device_pool_bytes) = (kv, Some(pool));
        info!(kv_bytes = kv, device_pool_bytes = pool, "KV budget of the device");
    }
    let loader = Loader::new(&config.cache, config.cache_connections, config.map_files, config.cache_deadline())?;
    let cache = loader.client();
    let engine = handle::Handle::start(&config, model.clone(), compute.clone(), loader);
    let service = service::Service::new(&config, model, compute, engine, cache);
    let service = WorkerServer::new(service)
        .max_decoding_message_size(server::MESSAGE_BYTES)
        .max_encoding_message_size(server::MESSAGE_BYTES);
    let mut routes = tonic::service::Routes::builder();
    routes.add_service(service);
    server::serve(routes.routes(), &["kvsplice.v1.Worker"], listener, config.limits(), shutdown).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_gets_what_weights_beginnings_and_the_pool_leave() {
        const GIB: u64 = 1 << 30;
        let usable = 100 * GIB / 100 * 85 - 5 * GIB;
        assert_eq!(budgets(100 * GIB, 5 * GIB, None).unwrap(), (usable - usable / 8, usable / 8));
        for setting in [0, 1, 7 * GIB, usable - 1] {
            assert_eq!(budgets(100 * GIB, 5 * GIB, Some(setting)).unwrap(), (usable - setting, setting));
        }
        for (free, beginnings, pool) in
            [(GIB, GIB, None), (GIB, 0, Some(GIB)), (GIB, GIB, Some(u64::MAX)), (0, 0, None)]
        {
            let error = budgets(free, beginnings, pool).unwrap_err().to_string();
            assert!(error.contains(&beginnings.to_string()) && error.contains("device_pool_bytes"), "{error}");
        }
        for free in [1000, GIB - 1, 80 * GIB + 12_345] {
            let (kv, pool) = budgets(free, 100, None).unwrap();
            assert!(kv + pool + 100 <= free / 100 * 85 && pool <= kv, "{free}: {kv} and {pool}");
        }
    }
}
