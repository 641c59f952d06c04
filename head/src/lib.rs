//! The head: what callers talk to. It tokenizes, scores with the auxiliary model, picks rows and hands the prompt to a
//! worker; it ingests documents and keeps an index of corpora that it can rebuild from the store.
//!
//! One file a stage, in data order: `source` → `plan` → `prepare` → `auxiliary` → `score` → [`kvsplice_kv::select`] → `pick` →
//! `generate` → `receipt`. The head never holds KV of the primary model.
#![forbid(unsafe_code)]

mod answer;
mod attention;
mod auxiliary;
mod clock;
mod config;
mod corpus;
pub mod craft;
mod cut;
mod delete;
mod document;
mod encode;
mod error;
mod fetch;
mod generate;
mod head;
mod ingest;
mod lease;
mod pick;
mod plan;
mod prepare;
mod rank;
mod receipt;
mod record;
mod register;
mod score;
mod service;
mod source;
mod store;
mod text;
mod worker;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use kvsplice_model::Compute;
use kvsplice_proto::server::{Limits, MESSAGE_BYTES, serve};
use kvsplice_proto::v1::head_server::HeadServer;
use tokio::net::TcpListener;

pub use config::Config;
pub use error::Error;

/// Serves the head on `listener` until `shutdown` resolves and what was running has ended. `compute` is the process's
/// one thread that calls the tensor library; the auxiliary model runs there.
///
/// # Errors
/// A bad setting, a model that cannot be read, or a server that fails. A worker or cache service that is down is none:
/// requests then say so.
pub async fn run(
    config: Config,
    compute: Compute,
    listener: TcpListener,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let limits = Limits {
        max_in_flight: config.max_in_flight,
        default_deadline: Duration::from_secs(config.deadline_s),
        grace: Duration::from_secs(config.grace_s),
    };
    let head = Arc::new(head::Head::start(config, compute).await?);
    let service = HeadServer::new(service::Service(head))
        .max_decoding_message_size(MESSAGE_BYTES)
        .max_encoding_message_size(MESSAGE_BYTES);
    let routes = tonic::service::Routes::new(service);
    Ok(serve(routes, &["kvsplice.v1.Head"], listener, limits, shutdown).await?)
}
