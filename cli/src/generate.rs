//! One Generate call: streams its events, and keeps what they add up to.
//!
//! Times are this process's: from sending the request to receiving the event.

use std::time::{Duration, Instant};

use kvsplice_kv::Receipt;
use kvsplice_proto::v1::generate_event::Event;
use kvsplice_proto::{client, v1};
use tokio_util::sync::CancellationToken;

use crate::failure::{data, interrupted, refused};
use crate::session::Session;

/// What one call gave.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The whole output.
    pub(crate) text: String,
    pub(crate) receipt: Receipt,
    /// When asked for.
    pub(crate) dump: Option<v1::Dump>,
    /// From sending to the first event with a token; without output, to the end.
    pub(crate) first_token: Duration,
    /// When each event with tokens came, and how many tokens it had.
    pub(crate) deltas: Vec<(Duration, usize)>,
}

impl Answer {
    /// Milliseconds between tokens, one value for each event but the first.
    pub(crate) fn gaps_ms(&self) -> Vec<f64> {
        let gap = |pair: &[(Duration, usize)]| match pair {
            [(before, _), (at, tokens)] => at.saturating_sub(*before).as_secs_f64() * 1e3 / (*tokens).max(1) as f64,
            _ => 0.0,
        };
        self.deltas.windows(2).map(gap).collect()
    }
}

/// Runs the call. `see` is shown every event. Ends early, and cleanly for the server, when `stop` is cancelled.
pub(crate) async fn generate(
    session: &Session,
    request: v1::GenerateRequest,
    timeout: Duration,
    stop: &CancellationToken,
    mut see: impl FnMut(&Event) -> anyhow::Result<()>,
) -> anyhow::Result<Answer> {
    let started = Instant::now();
    let mut head = session.head();
    let call = async {
        let response = head.generate(client::request(request, timeout)).await;
        let mut events = response.map_err(|status| refused(status, &session.server))?.into_inner();
        let (mut deltas, mut dump, mut done) = (Vec::new(), None, None);
        while let Some(event) = events.message().await.map_err(|status| refused(status, &session.server))? {
            let Some(event) = event.event else { continue };
            see(&event)?;
            match event {
                Event::Planned(_) => {}
                Event::Delta(delta) => deltas.push((started.elapsed(), delta.token_ids.len())),
                Event::Dump(sent) => dump = Some(sent),
                Event::Done(sent) => done = Some(sent),
            }
        }
        let done = done.ok_or_else(|| data("the server's answer ended without a receipt; try again"))?;
        let receipt = done.receipt.ok_or_else(|| anyhow::anyhow!("the answer has no receipt"))?.try_into()?;
        let first_token = deltas.first().map_or_else(|| started.elapsed(), |(at, _)| *at);
        Ok(Answer { text: done.text, receipt, dump, first_token, deltas })
    };
    tokio::select! {
        // Dropping the call resets the stream, and the server frees its work.
        () = stop.cancelled() => Err(interrupted()),
        answer = tokio::time::timeout(timeout, call) => answer.unwrap_or_else(|_| {
            Err(refused(tonic::Status::deadline_exceeded("the answer took too long"), &session.server))
        }),
    }
}
