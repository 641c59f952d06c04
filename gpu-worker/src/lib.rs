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

/// Bytes of KV that fit a device with `free` bytes, beside the beginnings that are kept there.
fn kv_budget(free: u64, beginning_bytes: u64) -> Result<u64, Error> {
    let usable = free / 100 * KV_PERCENT;
    match usable.saturating_sub(beginning_bytes) {
        0 => Err(Error::Config(format!(
            "{free} bytes of device memory are free after the weights, which leave no room for KV beside beginning_bytes \
             {beginning_bytes}; use a smaller model or smaller beginning_bytes"
        ))),
        budget => Ok(budget),
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
        config.kv_bytes = kv_budget(free as u64, config.beginning_bytes)?;
        info!(kv_bytes = config.kv_bytes, "KV budget of the device");
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
    fn kv_gets_what_weights_and_beginnings_leave() {
        assert_eq!(kv_budget(100 << 30, 5 << 30).unwrap(), (100u64 << 30) / 100 * 85 - (5 << 30));
        assert!(kv_budget(1 << 30, 1 << 30).is_err());
    }
}
