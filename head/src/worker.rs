//! The head's side of the worker's service: one channel, the model checked before first use.
//!
//! A worker that is down is UNAVAILABLE within the channel's connect timeout. Dropping a stream cancels its work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvsplice_kv::ModelDigest;
use kvsplice_proto::client::{channel, explain, request};
use kvsplice_proto::server::MESSAGE_BYTES;
use kvsplice_proto::v1;
use kvsplice_proto::v1::worker_client::WorkerClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::Error;

/// A worker at one address.
pub(crate) struct Worker {
    client: WorkerClient<Channel>,
    address: String,
    model: ModelDigest,
    status_deadline: Duration,
    checked: AtomicBool,
}

impl Worker {
    pub(crate) fn new(address: &str, model: ModelDigest, status_deadline: Duration) -> Result<Self, Error> {
        let client = WorkerClient::new(channel(address)?)
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        Ok(Self { client, address: address.to_owned(), model, status_deadline, checked: AtomicBool::new(false) })
    }

    /// Makes sure that the worker answers and has the model that this head expects. Asks again after a failure.
    pub(crate) async fn check(&self) -> Result<(), Error> {
        if self.checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let status = self.status().await?;
        let found = status.model.map(|model| model.digest).unwrap_or_default();
        if found != self.model.to_string() {
            return Err(Error::WorkerModel { worker: self.address.clone(), expected: self.model, found });
        }
        self.checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// What the worker says of itself.
    pub(crate) async fn status(&self) -> Result<v1::WorkerStatusResponse, Error> {
        let request = request(v1::WorkerStatusRequest {}, self.status_deadline);
        let answer = self.client.clone().status(request).await.map_err(|status| self.failed(status))?;
        Ok(answer.into_inner())
    }

    /// Opens a prefill. The first message should be in the channel already.
    pub(crate) async fn prefill(
        &self,
        messages: mpsc::Receiver<v1::PrefillRequest>,
        deadline: Duration,
    ) -> Result<Streaming<v1::PrefillEvent>, Error> {
        let request = request(ReceiverStream::new(messages), deadline);
        let answer = self.client.clone().prefill(request).await.map_err(|status| self.failed(status))?;
        Ok(answer.into_inner())
    }

    /// Log-probabilities of given tokens.
    pub(crate) async fn score(
        &self,
        message: v1::ScoreRequest,
        deadline: Duration,
    ) -> Result<v1::ScoreResponse, Error> {
        let answer = self.client.clone().score(request(message, deadline)).await;
        Ok(answer.map_err(|status| self.failed(status))?.into_inner())
    }

    /// What the last token attends to.
    pub(crate) async fn attention(
        &self,
        message: v1::WorkerAttentionRequest,
        deadline: Duration,
    ) -> Result<v1::WorkerAttentionResponse, Error> {
        let answer = self.client.clone().attention(request(message, deadline)).await;
        Ok(answer.map_err(|status| self.failed(status))?.into_inner())
    }

    /// Encodes and stores chunks; returns the events, one a chunk.
    pub(crate) async fn encode(
        &self,
        message: v1::EncodeRequest,
        deadline: Duration,
    ) -> Result<Vec<v1::EncodeEvent>, Error> {
        let wanted = message.chunks.len();
        let answer = self.client.clone().encode(request(message, deadline)).await;
        let mut stream = answer.map_err(|status| self.failed(status))?.into_inner();
        let mut events = Vec::with_capacity(wanted);
        while let Some(event) = stream.message().await.map_err(|status| self.failed(status))? {
            events.push(event);
        }
        if events.len() != wanted {
            let detail = format!("the worker encoded {} of {wanted} chunks", events.len());
            return Err(self.failed(Status::internal(detail)));
        }
        Ok(events)
    }

    /// The error of a failed call. Another worker may answer at this address next time.
    pub(crate) fn failed(&self, status: Status) -> Error {
        let status = explain(status);
        if matches!(status.code(), Code::Unavailable | Code::FailedPrecondition | Code::Unknown) {
            self.checked.store(false, Ordering::Relaxed);
        }
        Error::Worker { address: self.address.clone(), source: Box::new(status) }
    }
}
