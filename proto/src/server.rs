//! One way to serve: health, reflection, limits, deadlines, spans, and a shutdown that cuts no stream early.
//!
//! Order of a shutdown: health says NOT_SERVING, no new connection, running requests finish within the grace time, the
//! rest ends with UNAVAILABLE. A second signal is the caller's business.

use std::future::Future;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tracing::{info, warn};

use crate::layers::Guard;
use crate::v1;

/// HTTP/2 window of a stream and of a connection, both directions, in bytes.
pub const WINDOW_BYTES: u32 = 16 << 20;
/// Largest HTTP/2 frame, and the most data that one message of a stream carries, in bytes.
pub const FRAME_BYTES: usize = 1 << 20;
/// Largest message that services and clients decode, in bytes.
pub const MESSAGE_BYTES: usize = 64 << 20;

const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a canceled request may take to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

/// How much a server takes on, and how long it takes to stop.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests in flight, streams included; more are refused with RESOURCE_EXHAUSTED. Health and reflection are free.
    pub max_in_flight: usize,
    /// Deadline of a request that brings none.
    pub default_deadline: Duration,
    /// How long running requests may go on after the shutdown signal.
    pub grace: Duration,
}

/// Why a server stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The transport failed.
    #[error("serve: {source}")]
    Transport {
        /// What the transport says.
        #[source]
        source: tonic::transport::Error,
    },
    /// The descriptors that reflection serves cannot be read.
    #[error("read the reflection descriptors: {source}")]
    Reflection {
        /// What is wrong with them.
        #[source]
        source: tonic_reflection::server::Error,
    },
}

/// Serves `routes` on `listener` until `shutdown` resolves and what was running has ended. `health_services` are the
/// full names, such as `kvsplice.v1.Head`, that health reports beside the overall status.
pub async fn serve(
    routes: Routes,
    health_services: &[&'static str],
    listener: TcpListener,
    limits: Limits,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Error> {
    let (reporter, health) = tonic_health::server::health_reporter();
    for service in health_services {
        reporter.set_service_status(service, ServingStatus::Serving).await;
    }
    let guard = Guard::new(limits.max_in_flight, limits.default_deadline);
    let mut server = Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES as u32)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .layer(guard.clone());
    let router = server
        .add_routes(routes)
        .add_service(health)
        .add_service(reflection().build_v1().map_err(|source| Error::Reflection { source })?)
        .add_service(reflection().build_v1alpha().map_err(|source| Error::Reflection { source })?);

    let names = [&[""], health_services].concat();
    let draining = guard.draining.clone();
    let signal = async move {
        shutdown.await;
        info!("shutting down: finishing what is running");
        for name in names {
            reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
        draining.cancel();
    };
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let serving = router.serve_with_incoming_shutdown(incoming, signal);
    tokio::pin!(serving);
    let result = tokio::select! {
        result = &mut serving => return result.map_err(|source| Error::Transport { source }),
        () = guard.draining.cancelled() => tokio::time::timeout(limits.grace, &mut serving).await,
    };
    let ended = match result {
        Ok(ended) => ended,
        Err(_grace_is_over) => {
            warn!(grace = ?limits.grace, "requests still running after the grace time are canceled");
            guard.cancelled.cancel();
            tokio::time::timeout(CANCEL_TIMEOUT, serving).await.unwrap_or(Ok(()))
        }
    };
    ended.map_err(|source| Error::Transport { source })
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}
