//! One clock a request: milliseconds since the head received it, and the stages measured on it.

use std::time::Instant;

use kvsplice_kv::receipt::Span;

/// The request's clock.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    received: Instant,
    pub(crate) spans: Vec<Span>,
}

impl Clock {
    /// Starts now.
    pub(crate) fn start() -> Self {
        Self { received: Instant::now(), spans: Vec::new() }
    }

    /// Milliseconds since the request came.
    pub(crate) fn ms(&self) -> f64 {
        self.received.elapsed().as_secs_f64() * 1e3
    }

    /// Records a stage that began at `start_ms` and ends now.
    pub(crate) fn record(&mut self, stage: &str, start_ms: f64) {
        self.spans.push(Span { stage: stage.to_owned(), start_ms, end_ms: self.ms() });
    }
}
