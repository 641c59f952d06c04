//! The head's two peers, as small as the wire allows: a cache service over a map, and a worker that records what it is
//! asked and answers with one token. They hold no tensors; the real ones are tested in their own crates and end to end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use kvsplice_kv::object::Header;
use kvsplice_model::{Compute, Description, Spec};
use kvsplice_proto::v1::head_client::HeadClient;
use kvsplice_proto::v1::{self, prefill_event, prefill_request};
use tokio::net::TcpListener;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status, Streaming};

static COMPUTE: OnceLock<Compute> = OnceLock::new();

type Answer<T> = Result<Response<T>, Status>;
type Items<T> = tokio_stream::Iter<std::vec::IntoIter<Result<T, Status>>>;

fn items<T>(items: Vec<T>) -> Answer<Items<T>> {
    Ok(Response::new(tokio_stream::iter(items.into_iter().map(Ok).collect::<Vec<_>>())))
}

/// Objects by (chunk, variant), and records.
#[derive(Clone, Default)]
pub(crate) struct Cache {
    pub(crate) chunks: Arc<Mutex<BTreeMap<(String, String), Bytes>>>,
    pub(crate) records: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
}

#[tonic::async_trait]
impl v1::cache_server::Cache for Cache {
    type GetChunksStream = Items<v1::Frame>;
    type ListRecordsStream = Items<v1::ListRecordsResponse>;

    async fn contains(&self, request: Request<v1::ContainsRequest>) -> Answer<v1::ContainsResponse> {
        let request = request.into_inner();
        let chunks = self.chunks.lock().unwrap();
        let found = request.chunks.iter().map(|id| chunks.contains_key(&(id.clone(), request.variant.clone())));
        let lease = if request.lease_ms > 0 { "lease-1".to_owned() } else { String::new() };
        Ok(Response::new(v1::ContainsResponse { found: found.collect(), lease, lease_expires_ms: 0 }))
    }

    async fn get_chunks(&self, request: Request<Streaming<v1::GetChunksRequest>>) -> Answer<Self::GetChunksStream> {
        let first = request.into_inner().message().await?.and_then(|request| request.message);
        let Some(v1::get_chunks_request::Message::Want(want)) = first else {
            return Err(Status::invalid_argument("want first"));
        };
        let mut frames = Vec::new();
        for (place, id) in want.chunks.iter().enumerate() {
            let object = self.chunks.lock().unwrap().get(&(id.clone(), want.variant.clone())).cloned();
            let header = object.as_ref().map(|object| Header::parse(object).unwrap());
            let (Some(object), Some(header)) = (object, header) else {
                let error = "missing".to_owned();
                frames.push(v1::Frame { chunk: place as u32, error, ..v1::Frame::default() });
                continue;
            };
            for layer in 0..header.layout.layers {
                let bytes = object.slice(header.layout.layer_range(layer, header.tokens));
                for (part, half) in [(0, bytes.slice(..bytes.len() / 2)), (1, bytes.slice(bytes.len() / 2..))] {
                    frames.push(v1::Frame {
                        chunk: place as u32,
                        layer,
                        part,
                        first_row: 0,
                        rows: header.tokens,
                        crc32c: crc32c::crc32c(&half),
                        data: half,
                        source: "object".to_owned(),
                        error: String::new(),
                        gathered: Vec::new(),
                        mapping: None,
                    });
                }
            }
        }
        items(frames)
    }

    async fn put_chunk(&self, request: Request<Streaming<v1::PutChunkRequest>>) -> Answer<v1::PutChunkResponse> {
        let mut stream = request.into_inner();
        let (mut name, mut object) = (None, Vec::new());
        while let Some(part) = stream.message().await? {
            match part.message {
                Some(v1::put_chunk_request::Message::Start(start)) => name = Some((start.chunk, start.variant)),
                Some(v1::put_chunk_request::Message::Data(data)) => object.extend_from_slice(&data),
                None => {}
            }
        }
        let name = name.ok_or_else(|| Status::invalid_argument("start first"))?;
        let header = Header::parse(&object).map_err(|error| Status::invalid_argument(error.to_string()))?;
        header.check_id(name.0.parse().unwrap()).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let created = self.chunks.lock().unwrap().insert(name, object.into()).is_none();
        Ok(Response::new(v1::PutChunkResponse { created }))
    }

    async fn release(&self, _: Request<v1::ReleaseRequest>) -> Answer<v1::ReleaseResponse> {
        Ok(Response::new(v1::ReleaseResponse {}))
    }

    async fn put_record(&self, request: Request<v1::PutRecordRequest>) -> Answer<v1::PutRecordResponse> {
        let v1::PutRecordRequest { key, value } = request.into_inner();
        self.records.lock().unwrap().insert(key, value);
        Ok(Response::new(v1::PutRecordResponse {}))
    }

    async fn get_record(&self, request: Request<v1::GetRecordRequest>) -> Answer<v1::GetRecordResponse> {
        let value = self.records.lock().unwrap().get(&request.into_inner().key).cloned();
        let value = value.ok_or_else(|| Status::not_found("no such record"))?;
        Ok(Response::new(v1::GetRecordResponse { value }))
    }

    async fn list_records(&self, request: Request<v1::ListRecordsRequest>) -> Answer<Self::ListRecordsStream> {
        let below = format!("{}/", request.into_inner().prefix);
        let records = self.records.lock().unwrap();
        let keys = records.keys().filter(|key| key.starts_with(&below)).cloned().collect();
        items(vec![v1::ListRecordsResponse { keys }])
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Answer<v1::DeleteResponse> {
        let request = request.into_inner();
        let mut removed = Vec::new();
        self.chunks.lock().unwrap().retain(|(id, variant), _| {
            let single = request.variants.iter().any(|named| named.chunk == *id && named.variant == *variant);
            let keep = !request.chunks.contains(id) && !single;
            if !keep {
                removed.push(format!("kv/{id}/{variant}"));
            }
            keep
        });
        for key in request.records {
            if self.records.lock().unwrap().remove(&key).is_some() {
                removed.push(format!("records/{key}"));
            }
        }
        Ok(Response::new(v1::DeleteResponse { removed }))
    }

    async fn renew(&self, _: Request<v1::RenewRequest>) -> Answer<v1::RenewResponse> {
        Ok(Response::new(v1::RenewResponse {}))
    }

    async fn pin(&self, _: Request<v1::PinRequest>) -> Answer<v1::PinResponse> {
        Ok(Response::new(v1::PinResponse {}))
    }

    async fn collect_orphans(&self, _: Request<v1::CollectOrphansRequest>) -> Answer<v1::CollectOrphansResponse> {
        Ok(Response::new(v1::CollectOrphansResponse::default()))
    }

    async fn verify(&self, _: Request<v1::VerifyRequest>) -> Answer<v1::VerifyResponse> {
        Ok(Response::new(v1::VerifyResponse::default()))
    }

    async fn stats(&self, _: Request<v1::StatsRequest>) -> Answer<v1::StatsResponse> {
        Ok(Response::new(v1::StatsResponse::default()))
    }
}

/// What a worker was asked.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) start: v1::PrefillStart,
    pub(crate) rows: v1::Rows,
}

/// Records what it is asked. Its KV has no data: the map only says that the chunk is there.
#[derive(Clone)]
pub(crate) struct Worker {
    pub(crate) digest: String,
    pub(crate) cache: Cache,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
}

impl Worker {
    fn done(start: &v1::PrefillStart, rows: &v1::Rows) -> v1::PrefillDone {
        let chunks = start.parts.iter().filter(|part| part.kind == v1::part::Kind::Chunk as i32);
        let receipt = |part: &v1::Part| v1::ChunkReceipt {
            id: part.chunk.clone(),
            tokens: part.token_ids.len() as u32,
            rows: 0,
            source: if part.chunk.is_empty() { "fresh" } else { "object" }.to_owned(),
            reason: part.fresh_reason.clone(),
            bytes: 0,
        };
        v1::PrefillDone {
            finish: "length".to_owned(),
            chunks: chunks.map(receipt).collect(),
            tokens: Some(v1::TokenCounts::default()),
            spans: vec![v1::Span { stage: "load".to_owned(), start_ms: start.elapsed_ms, end_ms: start.elapsed_ms }],
            rows: rows.ranges.clone(),
            charged_rows: rows.ranges.iter().map(|range| f64::from(range.end - range.first)).sum(),
            selectable: start
                .parts
                .iter()
                .filter(|part| part.kind == v1::part::Kind::Chunk as i32 && !part.chunk.is_empty() && !part.exact)
                .map(|part| part.token_ids.len() as u32)
                .sum(),
            scores: Vec::new(),
            captured: 0,
        }
    }
}

#[tonic::async_trait]
impl v1::worker_server::Worker for Worker {
    type PrefillStream = ReceiverStream<Result<v1::PrefillEvent, Status>>;
    type EncodeStream = Items<v1::EncodeEvent>;

    async fn prefill(&self, request: Request<Streaming<v1::PrefillRequest>>) -> Answer<Self::PrefillStream> {
        let mut messages = request.into_inner();
        let (events, receiver) = tokio::sync::mpsc::channel(4);
        let this = self.clone();
        tokio::spawn(async move {
            let first = messages.message().await.unwrap().unwrap().message;
            let Some(prefill_request::Message::Start(start)) = first else { panic!("start comes first") };
            let Some(prefill_request::Message::Rows(rows)) = messages.message().await.unwrap().unwrap().message else {
                panic!("rows come second")
            };
            let done = Self::done(&start, &rows);
            let logits: Vec<u8> = [0.5f32, -1.0].iter().flat_map(|logit| logit.to_le_bytes()).collect();
            let wanted = start.want_logits.then(|| prefill_event::Event::Logits(logits.into()));
            this.asked.lock().unwrap().push(Asked { start, rows });
            let token = prefill_event::Event::Token(v1::Token { id: 7, text: "seven".to_owned(), at_ms: 1.0 });
            for event in wanted.into_iter().chain([token, prefill_event::Event::Done(done)]) {
                events.send(Ok(v1::PrefillEvent { event: Some(event) })).await.unwrap();
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn encode(&self, request: Request<v1::EncodeRequest>) -> Answer<Self::EncodeStream> {
        let request = request.into_inner();
        let mut events = Vec::new();
        for chunk in request.chunks {
            let name = (chunk.chunk.clone(), request.variant.clone());
            let created = self.cache.chunks.lock().unwrap().insert(name, Bytes::new()).is_none();
            events.push(v1::EncodeEvent { chunk: chunk.chunk, created, bytes: 0 });
        }
        items(events)
    }

    async fn score(&self, request: Request<v1::ScoreRequest>) -> Answer<v1::ScoreResponse> {
        let v1::ScoreRequest { start, target_ids, rows, .. } = request.into_inner();
        let done = Some(Self::done(&start.unwrap(), &rows.unwrap()));
        let logprobs = vec![-0.5; target_ids.len()];
        Ok(Response::new(v1::ScoreResponse { logprobs, argmax_ids: target_ids, done, distributions: Bytes::new() }))
    }

    async fn attention(&self, request: Request<v1::WorkerAttentionRequest>) -> Answer<v1::WorkerAttentionResponse> {
        let request = request.into_inner();
        let weights = vec![1.0 / request.token_ids.len() as f32; request.token_ids.len()];
        let layers = request.layers.iter().map(|_| v1::TokenWeights { weights: weights.clone() }).collect();
        Ok(Response::new(v1::WorkerAttentionResponse { layers }))
    }

    async fn status(&self, _: Request<v1::WorkerStatusRequest>) -> Answer<v1::WorkerStatusResponse> {
        let model = Some(v1::Model { digest: self.digest.clone(), ..v1::Model::default() });
        Ok(Response::new(v1::WorkerStatusResponse { model, ..v1::WorkerStatusResponse::default() }))
    }
}

/// Which peers run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peers {
    pub(crate) cache: bool,
    pub(crate) worker: bool,
    /// The worker has the head's primary model.
    pub(crate) same_model: bool,
}

impl Default for Peers {
    fn default() -> Self {
        Self { cache: true, worker: true, same_model: true }
    }
}

/// A head with its peers, until dropped.
pub(crate) struct World {
    pub(crate) head: HeadClient<Channel>,
    pub(crate) cache: Cache,
    pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

fn tiny(model: &str) -> Spec {
    Spec { model: model.to_owned(), shape: Some("tiny".to_owned()), random_weights: true, seed: 7, ..Spec::default() }
}

pub(crate) async fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

impl World {
    /// Starts everything on free ports. A peer that does not run leaves an address at which nobody listens.
    pub(crate) async fn start(peers: Peers) -> Self {
        let (primary, auxiliary) = (tiny("qwen2.5-coder-0.5b-instruct"), tiny("smollm2-135m-instruct"));
        let digest = Description::read(&primary).unwrap().digest.to_string();
        let cache = Cache::default();
        let worker = Worker {
            digest: if peers.same_model { digest } else { "0".repeat(64) },
            cache: cache.clone(),
            asked: Arc::default(),
        };
        let asked = Arc::clone(&worker.asked);
        let (cache_listener, cache_address) = listener().await;
        let (worker_listener, worker_address) = listener().await;
        if peers.cache {
            let service = v1::cache_server::CacheServer::new(cache.clone());
            let incoming = TcpListenerStream::new(cache_listener);
            tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        }
        if peers.worker {
            let service = v1::worker_server::WorkerServer::new(worker);
            let incoming = TcpListenerStream::new(worker_listener);
            tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        }
        let config = kvsplice_head::Config {
            primary,
            auxiliary,
            worker: worker_address,
            cache: cache_address,
            // Every test of the file computes at once, on however few cores.
            call_deadline_s: 60,
            ..kvsplice_head::Config::default()
        };
        let (head_listener, address) = listener().await;
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let shutdown = async move {
            let _dropped = stopped.await;
        };
        // One compute thread a process, as in the program.
        let compute = COMPUTE.get_or_init(|| Compute::start().unwrap()).clone();
        tokio::spawn(kvsplice_head::run(config, compute, head_listener, shutdown));
        let head = HeadClient::new(kvsplice_proto::client::channel(&address).unwrap());
        Self { head, cache, asked, _stop: stop }
    }

    /// Sends one question and returns every event.
    pub(crate) async fn generate(
        &self,
        request: v1::GenerateRequest,
    ) -> Result<Vec<v1::generate_event::Event>, Status> {
        let request = kvsplice_proto::client::request(request, Duration::from_secs(60));
        let mut stream = self.head.clone().generate(request).await?.into_inner();
        let mut events = Vec::new();
        while let Some(event) = stream.message().await? {
            events.extend(event.event);
        }
        Ok(events)
    }

    /// Ingests documents of (id, text) and returns the last event.
    pub(crate) async fn ingest(
        &self,
        start: v1::IngestStart,
        documents: &[(&str, &str)],
    ) -> Result<v1::IngestDone, Status> {
        let start = v1::ingest_request::Message::Start(start);
        let documents = documents.iter().map(|(id, text)| {
            let document = v1::DocumentText { id: (*id).to_owned(), text: (*text).to_owned(), chunk: false };
            v1::ingest_request::Message::Document(document)
        });
        let messages: Vec<_> = std::iter::once(start).chain(documents).collect();
        let messages = messages.into_iter().map(|message| v1::IngestRequest { message: Some(message) });
        let request = kvsplice_proto::client::request(tokio_stream::iter(messages), Duration::from_secs(60));
        let mut stream = self.head.clone().ingest_documents(request).await?.into_inner();
        let mut last = None;
        while let Some(event) = stream.message().await? {
            last = event.event;
        }
        match last {
            Some(v1::ingest_event::Event::Done(done)) => Ok(done),
            other => panic!("the last event is {other:?}"),
        }
    }
}
