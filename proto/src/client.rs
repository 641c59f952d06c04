//! Channels to the roles, and requests that carry deadline, request id and trace context.
//!
//! A channel connects on first use and again after a failure; a peer that is down is UNAVAILABLE within the connect
//! timeout, never a hang.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use crate::context;
use crate::server::{FRAME_BYTES, WINDOW_BYTES};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a channel cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is not `HOST:PORT` or `http://HOST:PORT`.
    #[error("address must be HOST:PORT or http://HOST:PORT, got {address:?}")]
    Address {
        /// The address as given.
        address: String,
    },
}

impl From<Error> for tonic::Status {
    fn from(error: Error) -> Self {
        tonic::Status::invalid_argument(error.to_string())
    }
}

/// A channel to `HOST:PORT` (or `http://HOST:PORT`). Does not connect yet; must be called within a tokio runtime.
pub fn channel(address: &str) -> Result<Channel, Error> {
    let wrong = || Error::Address { address: address.to_owned() };
    let authority = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
    let (host, port) = authority.rsplit_once(':').ok_or_else(wrong)?;
    if host.is_empty() || authority.contains('/') || port.parse::<u16>().is_err() {
        return Err(wrong());
    }
    let endpoint = Endpoint::from_shared(format!("http://{authority}")).map_err(|_| wrong())?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        // Else a message of 1 MiB comes in frames of 16 KiB.
        .max_frame_size(FRAME_BYTES as u32)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_lazy())
}

/// Wraps a message with its deadline (`grpc-timeout`, which the server holds for streams too), the request id of the
/// request in hand (else a new one) and the current span's `traceparent`.
pub fn request<T>(message: T, deadline: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(deadline);
    context::inject(request.metadata_mut());
    request
}

/// The status as a caller should see it. The transport reports a deadline that passed at this end as CANCELLED, and a
/// connection that broke in the middle of an answer as UNKNOWN or INTERNAL: that is a peer that is UNAVAILABLE.
pub fn explain(status: tonic::Status) -> tonic::Status {
    if status.code() == tonic::Code::Cancelled && status.message() == "Timeout expired" {
        return tonic::Status::deadline_exceeded("the deadline passed before an answer came");
    }
    // What a peer answers has no source; what went wrong at this end has.
    let Some(mut cause) = std::error::Error::source(&status) else { return status };
    if !matches!(status.code(), tonic::Code::Unknown | tonic::Code::Internal) {
        return status;
    }
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    tonic::Status::unavailable(format!("the connection broke: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_host_and_port_make_a_channel() {
        for good in ["127.0.0.1:7400", "http://localhost:7400", "http://[::1]:7400/"] {
            assert!(channel(good).is_ok(), "{good}");
        }
        for bad in ["", "localhost", ":7400", "https://localhost:7400", "localhost:port", "http://a:1/path", "a b:1"] {
            assert!(channel(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_connection_that_broke_is_a_peer_that_is_unavailable() {
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let broken = explain(tonic::Status::from_error(Box::new(reset)));
        assert_eq!(broken.code(), tonic::Code::Unavailable);
        assert_eq!(broken.message(), "the connection broke: connection reset");
        assert_eq!(explain(tonic::Status::unknown("an answer")).code(), tonic::Code::Unknown);
        assert_eq!(explain(tonic::Status::not_found("an answer")).code(), tonic::Code::NotFound);
    }

    #[tokio::test]
    async fn a_request_carries_its_deadline_and_id() {
        let request = context::with_request_id("r1".into(), async { request((), Duration::from_secs(5)) }).await;
        assert_eq!(request.metadata().get("request_id").unwrap(), "r1");
        assert!(request.metadata().get("grpc-timeout").is_some());
    }
}
