//! One question, from plan to the last token. Start goes out before scoring, so the worker loads while the head scores.
//!
//! Dropping the stream drops the worker's stream with it: a caller that goes away frees its work.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use kvsplice_kv::{ChunkId, Options, Sampling, Variant};
use kvsplice_proto::v1::generate_event::Event;
use kvsplice_proto::v1::prefill_event::Event as WorkerEvent;
use kvsplice_proto::v1::prefill_request::Message;
use kvsplice_proto::{convert, v1};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::Error;
use crate::clock::Clock;
use crate::corpus::blocking;
use crate::head::Head;
use crate::pick::{Picked, pick};
use crate::plan::PromptPlan;
use crate::prepare::{Prepared, prepare};
use crate::receipt::receipt;
use crate::source::resolve;

/// A request that the worker answers.
struct Running {
    head: Arc<Head>,
    clock: Clock,
    prepared: Prepared,
    picked: Picked,
    events: Streaming<v1::PrefillEvent>,
    dump: bool,
}

/// Looks up, tokenizes and checks a prompt that `output` more tokens may follow. The auxiliary model's tokens are there
/// when the strategy needs them or `both_models` says so.
pub(crate) async fn plan(
    head: &Arc<Head>,
    prompt: Option<v1::Prompt>,
    options: Options,
    output: u32,
    both_models: bool,
    clock: &mut Clock,
) -> Result<PromptPlan, Error> {
    let start = clock.ms();
    let source = resolve(head, prompt).await?;
    let planning = Arc::clone(head);
    let plan = blocking("tokenize", move || planning.planner().plan(source, options, output, both_models)).await??;
    clock.record("tokenize", start);
    Ok(plan)
}

/// Answers a question. What is wrong with the request is this call's error, not the stream's.
pub(crate) async fn generate(
    head: Arc<Head>,
    request: v1::GenerateRequest,
    deadline: Duration,
) -> Result<impl Stream<Item = Result<v1::GenerateEvent, Status>> + Send + 'static, Error> {
    let mut clock = Clock::start();
    let options = convert::options(request.options)?;
    let sampling = convert::sampling(request.sampling)?;
    let plan = plan(&head, request.prompt, options, sampling.max_tokens, false, &mut clock).await?;
    let prepared = prepare(&head, plan, deadline, &mut clock).await?;
    let running = start(head, prepared, &sampling, request.dump, deadline, clock).await?;
    Ok(running.stream())
}

/// Sends Start, picks rows while the worker loads, sends Rows.
async fn start(
    head: Arc<Head>,
    prepared: Prepared,
    sampling: &Sampling,
    dump: bool,
    deadline: Duration,
    mut clock: Clock,
) -> Result<Running, Error> {
    let (messages, receiver) = mpsc::channel(2);
    let gone = || Error::Task { task: "prefill", detail: "the worker stopped listening".into() };
    let start = prepared.start(&head, sampling, clock.ms(), dump);
    messages.send(v1::PrefillRequest { message: Some(Message::Start(start)) }).await.map_err(|_| gone())?;
    let opening = head.worker.prefill(receiver, deadline);
    let picking = async {
        let picked = pick(&head, &prepared, dump, &mut clock).await?;
        let rows = picked.rows(prepared.plan.prompt_tokens);
        // A worker that does not listen any more says why on its own stream.
        let _answered_elsewhere = messages.send(v1::PrefillRequest { message: Some(Message::Rows(rows)) }).await;
        Ok::<_, Error>(picked)
    };
    let (events, picked) = together(&head, opening, picking, dump).await?;
    Ok(Running { clock, prepared, picked, events, dump, head })
}

/// The worker's stream, and the rows that were picked meanwhile. Picking stops when the worker says that it computes every
/// chunk, unless `scores` are wanted all the same.
async fn together(
    head: &Head,
    opening: impl Future<Output = Result<Streaming<v1::PrefillEvent>, Error>>,
    picking: impl Future<Output = Result<Picked, Error>>,
    scores: bool,
) -> Result<(Streaming<v1::PrefillEvent>, Picked), Error> {
    tokio::pin!(opening, picking);
    let mut events = tokio::select! {
        picked = &mut picking => {
            let picked = picked?;
            return Ok((opening.await?, picked));
        }
        events = &mut opening => events?,
    };
    if scores {
        return Ok((events, picking.await?));
    }
    tokio::select! {
        picked = picking => Ok((events, picked?)),
        first = events.message() => {
            let first = first.map_err(|status| head.worker.failed(status))?;
            match first.and_then(|first| first.event) {
                Some(WorkerEvent::RowsUnneeded(_)) => Ok((events, Picked::default())),
                other => Err(out_of_turn(other.as_ref())),
            }
        }
    }
}

impl Running {
    fn stream(mut self) -> impl Stream<Item = Result<v1::GenerateEvent, Status>> + Send + 'static {
        async_stream::try_stream! {
            yield event(Event::Planned(self.planned()));
            let (mut text, mut logits) = (String::new(), Vec::new());
            loop {
                let next = self.events.message().await.map_err(|status| self.head.worker.failed(status))?;
                let Some(next) = next else {
                    Err(Error::Task { task: "prefill", detail: "the worker's stream ended without a receipt".into() })?;
                    break;
                };
                match next.event {
                    Some(WorkerEvent::Token(token)) => {
                        text.push_str(&token.text);
                        yield event(Event::Delta(v1::Delta { text: token.text, token_ids: vec![token.id] }));
                    }
                    Some(WorkerEvent::Logits(bytes)) => logits = floats(&bytes),
                    Some(WorkerEvent::Done(done)) => {
                        if self.dump {
                            yield event(Event::Dump(self.dumped(&done, std::mem::take(&mut logits))?));
                        }
                        let receipt = receipt(&self.head, &self.prepared, &self.picked, &self.clock, done)?;
                        account(&self.head, &self.prepared);
                        tracing::debug!(
                            effective = %receipt.effective,
                            ratio_charged = receipt.ratio_charged,
                            rows = self.picked.selection.rows.len(),
                            candidates = self.picked.selection.candidates,
                            "answered"
                        );
                        yield event(Event::Done(v1::Done { receipt: Some(receipt.into()), text: std::mem::take(&mut text) }));
                        break;
                    }
                    // Rows were named already.
                    Some(WorkerEvent::RowsUnneeded(_)) | None => {}
                }
            }
        }
    }

    fn planned(&self) -> v1::Planned {
        let plan = &self.prepared.plan;
        v1::Planned {
            chunks: plan.chunks.iter().map(|chunk| chunk.id.to_string()).collect(),
            prompt_tokens: plan.prompt_tokens,
        }
    }

    fn dumped(&self, done: &v1::PrefillDone, logits: Vec<f32>) -> Result<v1::Dump, Error> {
        let plan = &self.prepared.plan;
        // Where the worker picked, the head has no scores.
        let scores = if done.scores.is_empty() { &self.picked.scores } else { &done.scores };
        Ok(v1::Dump {
            token_ids: plan.token_ids(),
            chunk_starts: plan.chunk_starts.clone(),
            rows: convert::rows(&done.rows)?.slots().collect(),
            scores: scores.clone(),
            aux_scores: self.picked.aux_scores.clone(),
            logits,
        })
    }
}

/// Cache-Craft's bookkeeping, behind the answer: uses of captures, and room for new ones.
pub(crate) fn account(head: &Head, prepared: &Prepared) {
    let captures = Arc::clone(&head.captures);
    if prepared.capture {
        let ids: Vec<ChunkId> = prepared.plan.chunks.iter().map(|chunk| chunk.id).collect();
        let encoding = prepared.plan.encoding;
        let new: Vec<(ChunkId, Variant)> =
            (1..ids.len()).map(|index| (ids[index], Variant::context(encoding, &ids[..index]))).collect();
        kvsplice_proto::context::spawn(async move {
            if let Err(error) = captures.admit(&new).await {
                tracing::warn!(%error, "captures over the limit are not removed");
            }
        });
    } else if !prepared.decisions.is_empty() {
        let decisions = prepared.decisions.clone();
        kvsplice_proto::context::spawn(async move { captures.used(&decisions).await });
    }
}

/// A worker that answers before it has the rows.
fn out_of_turn(event: Option<&WorkerEvent>) -> Error {
    let detail = match event {
        Some(_) => "the worker answered before it had the rows",
        None => "the worker's stream ended without a receipt",
    };
    Error::Task { task: "prefill", detail: detail.into() }
}

fn event(event: Event) -> v1::GenerateEvent {
    v1::GenerateEvent { event: Some(event) }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
