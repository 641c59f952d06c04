//! The Worker service: messages in and out, nothing else.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use kvsplice_kv::ChunkKey;
use kvsplice_model::attention::last_attention;
use kvsplice_model::{Compute, Model};
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::v1::prefill_event::Event as WireEvent;
use kvsplice_proto::v1::prefill_request::Message;
use kvsplice_proto::v1::worker_server::Worker;
use kvsplice_proto::{context, convert, v1};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::active::{Event, event_room};
use crate::encode::{Call, Chunk, of_cache};
use crate::handle::Handle;
use crate::{Config, Error, request};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(crate) struct Service {
    model: Model,
    engine: Handle,
    cache: CacheClient,
    epoch: String,
    queue_limit: u32,
    device: String,
    compute: Compute,
    /// Attention calls.
    looking: Semaphore,
    /// Kept here: Status must not wait for the compute thread, which holds the weights.
    dtype: String,
}

impl Service {
    pub(crate) fn new(config: &Config, model: Model, compute: Compute, engine: Handle, cache: CacheClient) -> Self {
        Self {
            compute,
            looking: Semaphore::new(1),
            dtype: config.primary.dtype().to_string(),
            model,
            engine,
            cache,
            epoch: context::new_request_id().to_string(),
            queue_limit: config.queue_limit,
            device: config.primary.device.clone(),
        }
    }

    /// Forwards rows until the caller has said everything or has left.
    async fn forward_rows(engine: Handle, id: u64, mut messages: Streaming<v1::PrefillRequest>) {
        loop {
            let failure = match messages.message().await {
                Ok(Some(v1::PrefillRequest { message: Some(Message::Rows(rows)) })) => {
                    match convert::rows(&rows.ranges) {
                        Ok(ranges) => match engine.rows(id, ranges, rows.complete_below).await {
                            Ok(()) => continue,
                            Err(_) => return,
                        },
                        Err(error) => Some(error.into()),
                    }
                }
                Ok(Some(_)) => Some(Status::invalid_argument("only Rows may follow Start")),
                // The caller has said everything; whether it still listens is seen at the other stream.
                Ok(None) => return,
                Err(_) => None,
            };
            return engine.cancel(id, failure).await;
        }
    }
}

#[tonic::async_trait]
impl Worker for Service {
    type PrefillStream = Answers<v1::PrefillEvent>;
    type EncodeStream = Answers<v1::EncodeEvent>;

    async fn prefill(
        &self,
        messages: Request<Streaming<v1::PrefillRequest>>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let mut messages = messages.into_inner();
        let Some(v1::PrefillRequest { message: Some(Message::Start(start)) }) = messages.message().await? else {
            return Err(Status::invalid_argument("the first message must be Start"));
        };
        let request = request::Request::new(start, Vec::new(), false, &self.model)?;
        let (events, receiver) = mpsc::channel(event_room(&request));
        let watched = events.clone();
        let id = self.engine.submit(request, events).await?;
        context::spawn(Self::forward_rows(self.engine.clone(), id, messages));
        let engine = self.engine.clone();
        context::spawn(async move {
            watched.closed().await;
            engine.cancel(id, None).await;
        });
        let stream = ReceiverStream::new(receiver).map(|event| event.map(wire));
        Ok(Response::new(ended(stream)))
    }

    async fn encode(&self, message: Request<v1::EncodeRequest>) -> Result<Response<Self::EncodeStream>, Status> {
        let message = message.into_inner();
        let expected = convert::model_digest("model", &message.model)?;
        if expected != self.model.digest {
            return Err(Error::OtherModel { expected, found: self.model.digest }.into());
        }
        let variant = convert::variant("variant", &message.variant)?;
        let mut chunks = Vec::with_capacity(message.chunks.len());
        for chunk in message.chunks {
            let key = ChunkKey::new(self.model.digest, &message.prefix_ids, &chunk.token_ids, &message.owner);
            let given = convert::chunk_id("chunk", &chunk.chunk)?;
            if given != key.id() {
                return Err(Error::OtherChunk { given, expected: key.id() }.into());
            }
            let tokens = (message.prefix_ids.len() + chunk.token_ids.len()) as u64;
            if chunk.token_ids.is_empty() || tokens > u64::from(self.model.config.context) {
                return Err(Error::TooLong { prompt: tokens, output: 0, context: self.model.config.context }.into());
            }
            chunks.push(Chunk { key, ids: chunk.token_ids });
        }
        let ids: Vec<_> = chunks.iter().map(|chunk| chunk.key.id()).collect();
        let found = self.cache.contains(&ids, variant, Duration::ZERO).await.map_err(of_cache)?.found;
        let (events, receiver) = mpsc::channel(chunks.len().max(1));
        let mut waiting = VecDeque::new();
        for (chunk, found) in chunks.into_iter().zip(found) {
            if found {
                let event = v1::EncodeEvent { chunk: chunk.key.id().to_string(), created: false, bytes: 0 };
                drop(events.try_send(Ok(event)));
            } else {
                waiting.push_back(chunk);
            }
        }
        if !waiting.is_empty() {
            let call =
                Call { prefix_ids: message.prefix_ids, waiting, variant, events, running: None, spent: Duration::ZERO };
            self.engine.encode(call).await?;
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn score(&self, message: Request<v1::ScoreRequest>) -> Result<Response<v1::ScoreResponse>, Status> {
        let message = message.into_inner();
        if message.target_ids.is_empty() {
            return Err(Status::invalid_argument("target_ids is empty: name at least one token to score"));
        }
        let start = convert::required("start", message.start)?;
        let rows = convert::required("rows", message.rows)?;
        let request = request::Request::new(start, message.target_ids, message.distributions, &self.model)?;
        let (events, mut receiver) = mpsc::channel(event_room(&request));
        let id = self.engine.submit(request, events).await?;
        self.engine.rows(id, convert::rows(&rows.ranges)?, rows.complete_below).await?;
        let mut answer = v1::ScoreResponse::default();
        while let Some(event) = receiver.recv().await {
            match event? {
                Event::Scores(scores) => {
                    answer.logprobs = scores.logprobs;
                    answer.argmax_ids = scores.argmax_ids;
                    answer.distributions = bytes(&scores.distributions);
                }
                Event::Done(done) => {
                    answer.done = Some(done);
                    return Ok(Response::new(answer));
                }
                Event::Token(_) | Event::Logits(_) | Event::RowsUnneeded => {}
            }
        }
        Err(Error::Stopping.into())
    }

    async fn attention(
        &self,
        message: Request<v1::WorkerAttentionRequest>,
    ) -> Result<Response<v1::WorkerAttentionResponse>, Status> {
        let v1::WorkerAttentionRequest { model, token_ids, layers } = message.into_inner();
        let expected = convert::model_digest("model", &model)?;
        if expected != self.model.digest {
            return Err(Error::OtherModel { expected, found: self.model.digest }.into());
        }
        let config = &self.model.config;
        if token_ids.len() as u64 > u64::from(config.context) {
            return Err(Error::TooLong { prompt: token_ids.len() as u64, output: 0, context: config.context }.into());
        }
        if let Some(id) = token_ids.iter().find(|&&id| id >= config.vocabulary) {
            return Err(Error::Request(format!("token id {id} is not below {}", config.vocabulary)).into());
        }
        // One at a time: its KV is not in the engine's budget.
        let _one = self.looking.acquire().await.map_err(|_| Error::Stopping)?;
        let found = last_attention(&self.compute, &self.model.decoder, token_ids, layers).await;
        let layers = found.map_err(Error::Model)?.into_iter().map(|weights| v1::TokenWeights { weights });
        Ok(Response::new(v1::WorkerAttentionResponse { layers: layers.collect() }))
    }

    async fn status(&self, _: Request<v1::WorkerStatusRequest>) -> Result<Response<v1::WorkerStatusResponse>, Status> {
        let config = &self.model.config;
        let load = &self.engine.load;
        let (pool, device_pool) = self.engine.pool.status();
        Ok(Response::new(v1::WorkerStatusResponse {
            model: Some(v1::Model {
                name: self.model.name.clone(),
                digest: self.model.digest.to_string(),
                layers: config.layers,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                vocabulary: config.vocabulary,
                context: config.context,
                dtype: self.dtype.clone(),
                role: "primary".to_owned(),
            }),
            epoch: self.epoch.clone(),
            running: load.running.load(Ordering::Relaxed),
            queued: load.queued.load(Ordering::Relaxed),
            queue_limit: self.queue_limit,
            kv_bytes: load.kv_bytes.load(Ordering::Relaxed),
            device: self.device.clone(),
            beginnings: Some(self.engine.beginnings.status()),
            pool: Some(pool),
            device_pool: Some(device_pool),
        }))
    }
}

fn wire(event: Event) -> v1::PrefillEvent {
    let event = match event {
        Event::Token(token) => WireEvent::Token(token),
        Event::Logits(logits) => WireEvent::Logits(bytes(&logits)),
        Event::Done(done) => WireEvent::Done(done),
        Event::RowsUnneeded => WireEvent::RowsUnneeded(v1::RowsUnneeded {}),
        // Scores are asked for by Score only.
        Event::Scores(_) => return v1::PrefillEvent { event: None },
    };
    v1::PrefillEvent { event: Some(event) }
}

/// Little-endian.
fn bytes(numbers: &[f32]) -> Bytes {
    Bytes::from_iter(numbers.iter().flat_map(|number| number.to_le_bytes()))
}

/// Ends a stream with an error when the engine is gone before the last event.
fn ended(stream: impl Stream<Item = Result<v1::PrefillEvent, Status>> + Send + 'static) -> Answers<v1::PrefillEvent> {
    Box::pin(async_stream::stream! {
        let mut stream = std::pin::pin!(stream);
        while let Some(event) = stream.next().await {
            let last = matches!(&event, Err(_) | Ok(v1::PrefillEvent { event: Some(WireEvent::Done(_)) }));
            yield event;
            if last {
                return;
            }
        }
        yield Err(Error::Stopping.into());
    })
}
