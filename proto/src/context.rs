//! What travels with a request besides its message: the request id and the trace context.
//!
//! The id lives in a task-local that [`crate::server`] sets around a handler and its response stream. Work that a
//! handler spawns keeps it only through [`in_request`] or [`spawn`].

use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::codegen::http::{HeaderMap, HeaderName, HeaderValue};
use tonic::metadata::{MetadataKey, MetadataMap};
use tracing::{Instrument, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Metadata key of the request id.
pub const REQUEST_ID: &str = "request_id";

const MAX_ID_BYTES: usize = 128;

tokio::task_local! {
    static CURRENT: Arc<str>;
}

/// The id of the request that this task serves, if any.
pub fn current_request_id() -> Option<Arc<str>> {
    CURRENT.try_with(Arc::clone).ok()
}

/// The id of the request that this task serves, or a new one.
pub fn request_id() -> Arc<str> {
    current_request_id().unwrap_or_else(new_request_id)
}

/// A new id: 32 hexadecimal digits, keyed by the process's random state.
pub fn new_request_id() -> Arc<str> {
    let half = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", half(), half()).into()
}

/// Runs `future` with the caller's request id and span.
pub fn in_request<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let id = current_request_id();
    let future = future.instrument(Span::current());
    async move {
        match id {
            Some(id) => CURRENT.scope(id, future).await,
            None => future.await,
        }
    }
}

/// Runs `future` under the request id `id`: for callers that are not served by [`crate::server`].
pub fn with_request_id<F: Future>(id: Arc<str>, future: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(id, future)
}

/// Spawns `future` with the caller's request id and span.
pub fn spawn<F>(future: F) -> tokio::task::JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(in_request(future))
}

pub(crate) fn enter<R>(id: &Arc<str>, poll: impl FnOnce() -> R) -> R {
    CURRENT.sync_scope(Arc::clone(id), poll)
}

/// The caller's id when it is short and printable, else a new one.
pub(crate) fn id_of(headers: &HeaderMap) -> Arc<str> {
    headers
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(|byte| byte.is_ascii_graphic()))
        .map_or_else(new_request_id, Arc::from)
}

/// Makes `span` a child of the W3C trace context in `headers`. Does nothing when traces are not recorded.
pub(crate) fn adopt_parent(span: &Span, headers: &HeaderMap) {
    let parent = TraceContextPropagator::new().extract(&Headers(headers));
    let _not_recorded = span.set_parent(parent);
}

/// Adds the request id and the current span's trace context.
pub(crate) fn inject(metadata: &mut MetadataMap) {
    if let Ok(id) = request_id().parse() {
        metadata.insert(REQUEST_ID, id);
    }
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut Metadata(metadata));
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value: &HeaderValue| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct Metadata<'a>(&'a mut MetadataMap);

impl Injector for Metadata<'_> {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(key), Ok(value)) = (MetadataKey::from_bytes(key.as_bytes()), value.parse()) {
            self.0.insert(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_s_id_is_kept_only_when_it_is_printable() {
        let with = |id: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_str(id).unwrap());
            id_of(&headers)
        };
        assert_eq!(&*with("order-7"), "order-7");
        assert_eq!(with("two words").len(), 32);
        assert_eq!(with(&"x".repeat(200)).len(), 32);
        assert_ne!(new_request_id(), new_request_id());
    }

    #[tokio::test]
    async fn spawned_work_keeps_the_request_id() {
        let seen = with_request_id("abc".into(), async { spawn(async { request_id() }).await.unwrap() }).await;
        assert_eq!(&*seen, "abc");
        assert_eq!(current_request_id(), None);
    }
}
