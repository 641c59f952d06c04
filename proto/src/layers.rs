//! What stands before every handler: a span with the request id, the concurrency limit and the deadline.
//!
//! One tower layer, so the order is plain to see. The permit, the span and the deadline live until the response body
//! ends, hence they hold for streams too. Health and reflection are probes: they take no permit and have no deadline.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tonic::codegen::{BoxFuture, Bytes};
use tower::{Layer, Service};
use tracing::{Instrument, Span, debug, info_span};

use crate::context;

/// What all requests of one server share.
#[derive(Clone)]
pub(crate) struct Guard {
    permits: Arc<Semaphore>,
    max_in_flight: usize,
    default_deadline: Duration,
    /// Ends probe streams, which would otherwise hold up a shutdown for ever.
    pub(crate) draining: CancellationToken,
    /// Ends every stream.
    pub(crate) cancelled: CancellationToken,
}

impl Guard {
    pub(crate) fn new(max_in_flight: usize, default_deadline: Duration) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(max_in_flight.min(Semaphore::MAX_PERMITS))),
            max_in_flight,
            default_deadline,
            draining: CancellationToken::new(),
            cancelled: CancellationToken::new(),
        }
    }
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, guard: self.clone() }
    }
}

/// A service behind a [`Guard`].
#[derive(Clone)]
pub(crate) struct Guarded<S> {
    inner: S,
    guard: Guard,
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Response<Body>, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        if path.starts_with("/grpc.health.") || path.starts_with("/grpc.reflection.") {
            let mut end = Box::pin(self.guard.draining.clone().cancelled_owned());
            let call = self.inner.call(request);
            return Box::pin(async move {
                tokio::select! {
                    biased;
                    response = call => Ok(response?.map(|body| probe_body(body, end))),
                    () = &mut end => Ok(shutting_down().into_http()),
                }
            });
        }
        let id = context::id_of(request.headers());
        let span = info_span!("request", otel.name = %path, otel.kind = "server", request_id = %id);
        context::adopt_parent(&span, request.headers());
        let Ok(permit) = Arc::clone(&self.guard.permits).try_acquire_owned() else {
            let status = Status::resource_exhausted(format!(
                "{} requests are in flight, which is the limit; try again later",
                self.guard.max_in_flight
            ));
            span.in_scope(|| debug!(path, "refused: too many requests in flight"));
            return Box::pin(async move { Ok(status.into_http()) });
        };
        let timeout = grpc_timeout(request.headers()).unwrap_or(self.guard.default_deadline);
        let request_span = RequestSpan { span: span.clone(), id: Arc::clone(&id), started: Instant::now() };
        // An instant too far to represent is no deadline at all.
        let deadline = Instant::now().checked_add(timeout).map(|at| Box::pin(tokio::time::sleep_until(at)));
        let cancelled = Box::pin(self.guard.cancelled.clone().cancelled_owned());
        let call = context::enter(&id, || span.in_scope(|| self.inner.call(request)));
        let ends = Ends { deadline, timeout, cancelled };
        Box::pin(context::with_request_id(id, respond(call, permit, ends, request_span).instrument(span)))
    }
}

/// Waits for the response's head, then hands everything that must outlive it to the body.
async fn respond<E>(
    call: impl Future<Output = Result<Response<Body>, E>>,
    permit: OwnedSemaphorePermit,
    mut ends: Ends,
    span: RequestSpan,
) -> Result<Response<Body>, E> {
    tokio::pin!(call);
    let status = tokio::select! {
        biased;
        response = &mut call => {
            let response = response?;
            let code = response.headers().get("grpc-status").and_then(|code| code.to_str().ok()).map(str::to_owned);
            let guarded = |body| Body::new(GuardedBody { body, ends, span, _permit: permit, code, done: false });
            return Ok(response.map(guarded));
        }
        status = std::future::poll_fn(|cx| ends.poll_end(cx)) => status,
    };
    debug!(code = ?status.code(), elapsed_ms = span.elapsed_ms(), "request ended before its response");
    Ok(status.into_http())
}

fn shutting_down() -> Status {
    Status::unavailable("the server is shutting down; try another one")
}

/// What ends a request from outside.
struct Ends {
    deadline: Option<Pin<Box<Sleep>>>,
    timeout: Duration,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Ends {
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        if self.cancelled.as_mut().poll(cx).is_ready() {
            return Poll::Ready(shutting_down());
        }
        let Some(deadline) = &mut self.deadline else {
            return Poll::Pending;
        };
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Status::deadline_exceeded(format!("the deadline of {:?} passed", self.timeout)))
    }
}

struct RequestSpan {
    span: Span,
    id: Arc<str>,
    started: Instant,
}

impl RequestSpan {
    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// A response body that holds its request's permit, and ends with a status when the deadline passes.
struct GuardedBody {
    body: Body,
    ends: Ends,
    span: RequestSpan,
    _permit: OwnedSemaphorePermit,
    code: Option<String>,
    done: bool,
}

impl HttpBody for GuardedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        let RequestSpan { span, id, .. } = &this.span;
        let body = &mut this.body;
        // A stream that always has the next frame ready must not outrun its deadline, so the ends are polled first.
        if let Poll::Ready(status) = this.ends.poll_end(cx) {
            this.done = true;
            this.code = Some((status.code() as i32).to_string());
            context::enter(id, || span.in_scope(|| *body = Body::empty()));
            return Poll::Ready(Some(Ok(Frame::trailers(trailers(&status)))));
        }
        let frame = ready!(context::enter(id, || span.in_scope(|| Pin::new(body).poll_frame(cx))));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(code) = frame.trailers_ref().and_then(|trailers| trailers.get("grpc-status")) {
                    this.code = code.to_str().ok().map(str::to_owned);
                }
            }
            Some(Err(_)) | None => this.done = true,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.done || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.done { SizeHint::with_exact(0) } else { self.body.size_hint() }
    }
}

impl Drop for GuardedBody {
    fn drop(&mut self) {
        let code = self.code.as_deref().unwrap_or("none, the client went away");
        self.span.span.in_scope(|| debug!(code, elapsed_ms = self.span.elapsed_ms(), "request done"));
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    // Fails only for metadata that is not a header value, and these statuses have none.
    let _infallible = status.add_header(&mut headers);
    headers
}

/// A probe's stream, which ends with UNAVAILABLE once the server drains and everything before was delivered.
fn probe_body(body: Body, end: Pin<Box<WaitForCancellationFutureOwned>>) -> Body {
    Body::new(ProbeBody { body, end, done: false })
}

struct ProbeBody {
    body: Body,
    end: Pin<Box<WaitForCancellationFutureOwned>>,
    done: bool,
}

impl HttpBody for ProbeBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        ready!(this.end.as_mut().poll(cx));
        this.done = true;
        Poll::Ready(Some(Ok(Frame::trailers(trailers(&shutting_down())))))
    }

    fn is_end_stream(&self) -> bool {
        self.done || self.body.is_end_stream()
    }
}

/// The `grpc-timeout` header: at most eight digits and a unit. Anything else counts as absent.
fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_header_is_read_in_every_unit() {
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            grpc_timeout(&headers)
        };
        assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(read("5m"), Some(Duration::from_millis(5)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "5", "m", "123456789S", "-1S", "5s", "+5S"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
