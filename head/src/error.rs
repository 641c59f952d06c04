//! What can go wrong in the head, and which gRPC status a caller sees.

use kvsplice_kv::ModelDigest;
use tonic::{Code, Status};

/// One variant for each thing a caller can do differently.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is wrong.
    #[error("head configuration: {field} {detail}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// The request is wrong; the message names the field.
    #[error("{what} {detail}")]
    Invalid {
        /// Field or thing.
        what: String,
        /// What is wrong with it, and what would be right.
        detail: String,
    },
    /// Something that the request names does not exist.
    #[error("unknown {what} {name:?}; {hint}")]
    NotFound {
        /// Kind of thing.
        what: &'static str,
        /// Its name as given.
        name: String,
        /// What to do.
        hint: String,
    },
    /// The prompt and its output do not fit the model.
    #[error(
        "the {model} model takes {context} tokens, but the prompt has {prompt} and {output} more may follow; \
         send fewer or shorter chunks, or a smaller max_tokens"
    )]
    TooLong {
        /// `primary` or `auxiliary`.
        model: &'static str,
        /// Tokens that the model takes.
        context: u64,
        /// Tokens of the prompt.
        prompt: u64,
        /// Output tokens asked for.
        output: u64,
    },
    /// The worker answers with another model.
    #[error(
        "the worker at {worker} has the primary model {found}, this head expects {expected}; start both with one model"
    )]
    WorkerModel {
        /// Address of the worker.
        worker: String,
        /// Digest of this head's primary model.
        expected: ModelDigest,
        /// Digest of the worker's model.
        found: String,
    },
    /// A corpus was ingested under other settings.
    #[error("corpus {corpus:?} has {what} {expected}, got {got}; use the same or another corpus name")]
    CorpusMismatch {
        /// The corpus.
        corpus: String,
        /// The setting.
        what: &'static str,
        /// The corpus's value.
        expected: String,
        /// The value asked for.
        got: String,
    },
    /// A corpus has a prefix of that name with another system prompt.
    #[error(
        "prefix {prefix:?} of corpus {corpus:?} has the system prompt {expected:?}, got {got:?}; use the same or another \
         prefix name"
    )]
    PrefixMismatch {
        /// The corpus.
        corpus: String,
        /// The prefix's name.
        prefix: String,
        /// The system prompt that it has.
        expected: String,
        /// The system prompt asked for.
        got: String,
    },
    /// The worker failed or cannot be reached.
    #[error("worker at {address}: {}", source.message())]
    Worker {
        /// Address of the worker.
        address: String,
        /// What it answered.
        #[source]
        source: Box<Status>,
    },
    /// The cache service failed or cannot be reached.
    #[error("cache service, {action}: {}", source.message())]
    Cache {
        /// What was tried.
        action: &'static str,
        /// What it answered.
        #[source]
        source: Box<Status>,
    },
    /// A stored record cannot be read.
    #[error("record {key}: {source}; ingest the corpus again")]
    Record {
        /// The record's key.
        key: String,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// The auxiliary model's scores cannot be used.
    #[error("auxiliary model: {0}")]
    Select(#[source] kvsplice_kv::Error),
    /// A capture's record cannot be used.
    #[error(transparent)]
    Capture(#[from] kvsplice_kv::Error),
    /// A chunk's auxiliary KV could not be written as an object.
    #[error("write auxiliary KV: {0}")]
    Object(#[from] kvsplice_kv::object::Error),
    /// A model could not be read, or its computation failed.
    #[error(transparent)]
    Model(#[from] kvsplice_model::Error),
    /// A message is malformed.
    #[error(transparent)]
    Convert(#[from] kvsplice_proto::convert::Error),
    /// An address is malformed.
    #[error(transparent)]
    Address(#[from] kvsplice_proto::client::Error),
    /// The server failed.
    #[error(transparent)]
    Serve(#[from] kvsplice_proto::server::Error),
    /// A background task ended before its work was done.
    #[error("{task} ended early: {detail}")]
    Task {
        /// Which task.
        task: &'static str,
        /// Why.
        detail: String,
    },
}

impl Error {
    pub(crate) fn invalid(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), detail: detail.into() }
    }

    /// For `map_err` on calls to the cache service.
    pub(crate) fn cache(action: &'static str) -> impl Fn(Status) -> Self {
        move |source| Self::Cache { action, source: Box::new(kvsplice_proto::client::explain(source)) }
    }

    fn code(&self) -> Code {
        match self {
            Error::Config { .. } | Error::Invalid { .. } | Error::Convert(_) | Error::Address(_) => {
                Code::InvalidArgument
            }
            Error::NotFound { .. } => Code::NotFound,
            Error::TooLong { .. } => Code::OutOfRange,
            Error::WorkerModel { .. } | Error::CorpusMismatch { .. } | Error::PrefixMismatch { .. } => {
                Code::FailedPrecondition
            }
            Error::Worker { source, .. } | Error::Cache { source, .. } => source.code(),
            Error::Record { .. } | Error::Capture(_) => Code::DataLoss,
            Error::Select(_) | Error::Object(_) | Error::Model(_) | Error::Serve(_) | Error::Task { .. } => {
                Code::Internal
            }
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let code = error.code();
        if code == Code::Internal {
            tracing::error!(%error, "request failed");
        }
        Status::new(code, error.to_string())
    }
}
