//! Why the worker refused or failed a request, and the gRPC status of each case.

use kvsplice_kv::{ChunkId, ModelDigest};
use kvsplice_proto::{client, convert, server};
use tonic::Status;

/// Why the worker cannot start, or refused or failed a request.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting has no such value.
    #[error("{0}")]
    Config(String),
    /// The model cannot be read or run.
    #[error(transparent)]
    Model(#[from] kvsplice_model::Error),
    /// The address of the cache service is not one.
    #[error(transparent)]
    Client(#[from] client::Error),
    /// The service cannot be started.
    #[error(transparent)]
    Serve(#[from] server::Error),
    /// A message does not convert.
    #[error(transparent)]
    Message(#[from] convert::Error),
    /// A request does not make sense.
    #[error("{0}")]
    Request(String),
    /// The head expects another model.
    #[error("the head expects model {expected}, this worker has {found}; give both the same primary model")]
    OtherModel {
        /// What the head expects.
        expected: ModelDigest,
        /// What this worker has.
        found: ModelDigest,
    },
    /// A chunk id does not belong to its tokens.
    #[error("chunk id {given} does not belong to its prefix, tokens and owner, whose id is {expected}")]
    OtherChunk {
        /// As given.
        given: ChunkId,
        /// What the tokens hash to.
        expected: ChunkId,
    },
    /// The prompt does not fit the model.
    #[error("prompt of {prompt} tokens and {output} output tokens exceed the model's context of {context}")]
    TooLong {
        /// Prompt tokens.
        prompt: u64,
        /// Output tokens.
        output: u64,
        /// The model's context.
        context: u32,
    },
    /// No room.
    #[error("the worker is busy: {0}")]
    Busy(String),
    /// The worker is stopping.
    #[error("the worker is stopping")]
    Stopping,
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Message(error) => error.into(),
            Error::Config(_) | Error::Request(_) | Error::OtherChunk { .. } => Status::invalid_argument(text),
            Error::OtherModel { .. } => Status::failed_precondition(text),
            Error::TooLong { .. } => Status::out_of_range(text),
            Error::Busy(_) => Status::resource_exhausted(text),
            Error::Stopping => Status::unavailable(text),
            // The device is full: this request is too large for now, others may fit.
            Error::Model(error) if error.is_out_of_memory() => Status::resource_exhausted(text),
            Error::Model(_) | Error::Client(_) | Error::Serve(_) => Status::internal(text),
        }
    }
}
