//! A gRPC client of the head for tests that are not async: logits and rows, many requests at once, and streams that are
//! read as far as a test likes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::FutureExt;
use kvsplice_proto::server::MESSAGE_BYTES;
use kvsplice_proto::v1::generate_event::Event;
use kvsplice_proto::v1::head_client::HeadClient;
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_proto::{client, v1};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// Longer than any request of a test takes.
const DEADLINE: Duration = Duration::from_secs(300);

/// A client of one head.
#[derive(Debug)]
pub struct Client {
    runtime: Runtime,
    head: HeadClient<Channel>,
}

/// What a request gave.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The whole output.
    pub text: String,
    /// Output tokens.
    pub token_ids: Vec<u32>,
    /// When each event with tokens was read.
    pub times: Vec<Instant>,
    /// Empty unless asked for.
    pub dump: v1::Dump,
    /// What was done.
    pub receipt: v1::Receipt,
    /// Ids of the chunks, and the prompt's length.
    pub planned: v1::Planned,
}

impl Answer {
    /// The median time between two events with tokens.
    pub fn median_gap(&self) -> Duration {
        let mut gaps: Vec<Duration> = self.times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps.sort_unstable();
        gaps.get(gaps.len() / 2).copied().unwrap_or_default()
    }

    /// Where each chunk came from.
    pub fn sources(&self) -> Vec<&str> {
        self.receipt.chunks.iter().map(|chunk| chunk.source.as_str()).collect()
    }

    /// The greatest difference of two answers' first logits. Infinite when they have not as many.
    pub fn logit_difference(&self, other: &Self) -> f32 {
        let (ours, theirs) = (&self.dump.logits, &other.dump.logits);
        if ours.is_empty() || ours.len() != theirs.len() {
            return f32::INFINITY;
        }
        ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}

/// A request under way. Dropping it is a client that goes away.
#[derive(Debug)]
pub struct Answering {
    runtime: Handle,
    events: Streaming<v1::GenerateEvent>,
    /// What came so far.
    pub answer: Answer,
}

impl Client {
    /// A client of the head at `address`; it connects when it is first used.
    pub fn connect(address: &str) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().context("start tokio")?;
        let channel = {
            let _inside = runtime.enter();
            client::channel(address)?
        };
        let head = HeadClient::new(channel).max_decoding_message_size(MESSAGE_BYTES);
        Ok(Self { runtime, head: head.max_encoding_message_size(MESSAGE_BYTES) })
    }

    /// Sends a request; it comes back when the head has accepted it.
    pub fn open(&self, request: v1::GenerateRequest) -> Result<Answering, Status> {
        let mut head = self.head.clone();
        let events = self.runtime.block_on(head.generate(client::request(request, DEADLINE)))?.into_inner();
        Ok(Answering { runtime: self.runtime.handle().clone(), events, answer: Answer::default() })
    }

    /// One request to its end.
    pub fn generate(&self, request: v1::GenerateRequest) -> Result<Answer, Status> {
        self.open(request)?.finish()
    }

    /// Begins every request at the same time; each has this long.
    pub fn begin_each(&self, requests: Vec<v1::GenerateRequest>, deadline: Duration) -> Crowd {
        let progress = Arc::new(Progress::default());
        let begin = |request| {
            let (mut head, progress) = (self.head.clone(), Arc::clone(&progress));
            self.runtime.spawn(async move {
                let mut events = head.generate(client::request(request, deadline)).await?.into_inner();
                let mut answer = Answer::default();
                while let Some(event) = events.message().await? {
                    progress.add(&event, answer.token_ids.is_empty());
                    answer.add(event);
                }
                Ok(answer)
            })
        };
        let tasks = requests.into_iter().map(begin).collect();
        Crowd { runtime: self.runtime.handle().clone(), progress, tasks }
    }

    /// Every request at the same time, each with an end of its own; in the order of the requests.
    pub fn generate_each(&self, requests: Vec<v1::GenerateRequest>) -> Vec<Result<Answer, Status>> {
        self.begin_each(requests, DEADLINE).finish()
    }

    /// Every request at the same time; the answers in the order of the requests.
    pub fn generate_together(&self, requests: Vec<v1::GenerateRequest>) -> Result<Vec<Answer>, Status> {
        self.generate_each(requests).into_iter().collect()
    }

    /// Log-probabilities of an answer.
    pub fn score(&self, request: v1::ScoreAnswerRequest) -> Result<v1::ScoreAnswerResponse, Status> {
        let mut head = self.head.clone();
        Ok(self.runtime.block_on(head.score(client::request(request, DEADLINE)))?.into_inner())
    }

    /// Log-probabilities of answers, all at the same time.
    pub fn score_together(
        &self,
        requests: Vec<v1::ScoreAnswerRequest>,
    ) -> Result<Vec<v1::ScoreAnswerResponse>, Status> {
        let tasks: Vec<_> = requests
            .into_iter()
            .map(|request| {
                let mut head = self.head.clone();
                self.runtime.spawn(async move { head.score(client::request(request, DEADLINE)).await })
            })
            .collect();
        let joined = |error: tokio::task::JoinError| Status::internal(error.to_string());
        tasks.into_iter().map(|task| Ok(self.runtime.block_on(task).map_err(joined)??.into_inner())).collect()
    }

    /// Every chunk of a corpus.
    pub fn list_chunks(&self, corpus: &str) -> Result<Vec<v1::ListedChunk>, Status> {
        let mut head = self.head.clone();
        let request = client::request(v1::ListChunksRequest { corpus: corpus.to_owned() }, DEADLINE);
        self.runtime.block_on(async move {
            let mut pages = head.list_chunks(request).await?.into_inner();
            let mut chunks = Vec::new();
            while let Some(page) = pages.message().await? {
                chunks.extend(page.chunks);
            }
            Ok(chunks)
        })
    }

    /// Runs a call of a test's own in this client's runtime.
    pub fn run<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(call)
    }
}

/// Requests under way at the same time.
#[derive(Debug)]
pub struct Crowd {
    runtime: Handle,
    progress: Arc<Progress>,
    tasks: Vec<JoinHandle<Result<Answer, Status>>>,
}

/// How far a crowd is.
#[derive(Debug, Default)]
struct Progress {
    planned: AtomicUsize,
    begun: AtomicUsize,
}

impl Progress {
    fn add(&self, event: &v1::GenerateEvent, first: bool) {
        match event.event {
            Some(Event::Planned(_)) => self.planned.fetch_add(1, Ordering::SeqCst),
            Some(Event::Delta(_)) if first => self.begun.fetch_add(1, Ordering::SeqCst),
            _ => 0,
        };
    }
}

impl Crowd {
    /// Requests whose rows are chosen.
    pub fn planned(&self) -> usize {
        self.progress.planned.load(Ordering::SeqCst)
    }

    /// Requests that have their first token.
    pub fn begun(&self) -> usize {
        self.progress.begun.load(Ordering::SeqCst)
    }

    /// Waits for all of them; in the order of the requests.
    pub fn finish(self) -> Vec<Result<Answer, Status>> {
        let joined = |error: tokio::task::JoinError| Status::internal(error.to_string());
        self.tasks.into_iter().map(|task| self.runtime.block_on(task).map_err(joined)?).collect()
    }
}

impl Answering {
    /// Reads on until so many tokens have come in all, or the end.
    pub fn read_tokens(&mut self, tokens: usize) -> Result<(), Status> {
        let (runtime, events, answer) = (self.runtime.clone(), &mut self.events, &mut self.answer);
        runtime.block_on(async {
            while answer.token_ids.len() < tokens {
                let Some(event) = events.message().await? else { break };
                answer.add(event);
            }
            Ok(())
        })
    }

    /// Takes in what has come already, without waiting.
    pub fn read_ready(&mut self) -> Result<(), Status> {
        let _inside = self.runtime.enter();
        while let Some(event) = self.events.message().now_or_never() {
            let Some(event) = event? else { break };
            self.answer.add(event);
        }
        Ok(())
    }

    /// Reads to the end.
    pub fn finish(mut self) -> Result<Answer, Status> {
        let (runtime, events, answer) = (self.runtime.clone(), &mut self.events, &mut self.answer);
        runtime.block_on(async {
            while let Some(event) = events.message().await? {
                answer.add(event);
            }
            Ok::<_, Status>(())
        })?;
        Ok(self.answer)
    }
}

impl Answer {
    fn add(&mut self, event: v1::GenerateEvent) {
        match event.event {
            Some(Event::Planned(planned)) => self.planned = planned,
            Some(Event::Delta(delta)) => {
                self.times.push(Instant::now());
                self.token_ids.extend(delta.token_ids);
            }
            Some(Event::Dump(dump)) => self.dump = dump,
            Some(Event::Done(done)) => {
                self.text = done.text;
                self.receipt = done.receipt.unwrap_or_default();
            }
            None => {}
        }
    }
}

/// What the worker at `address` says of itself.
pub fn worker_status(address: &str) -> Result<v1::WorkerStatusResponse> {
    let runtime = Builder::new_current_thread().enable_all().build().context("start tokio")?;
    runtime.block_on(async {
        let mut worker = WorkerClient::new(client::channel(address)?);
        let request = client::request(v1::WorkerStatusRequest {}, Duration::from_secs(10));
        Ok(worker.status(request).await.context("ask for the worker's status")?.into_inner())
    })
}
