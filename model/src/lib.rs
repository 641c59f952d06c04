//! Decoder models of the Llama and Qwen2 families: weights, tokenizer, chat template, forward pass, sampling.
//!
//! Order of use: [`Spec`] names a model, [`Model::load`] reads it, [`decoder::Decoder`] computes ragged batches of rows
//! over [`cache::KvCache`]s, one layer at a time. Every call of the tensor library of a process runs on its one
//! [`Compute`] thread. This crate knows nothing of the network or of requests.
#![forbid(unsafe_code)]

pub mod attention;
pub mod auxiliary;
pub mod cache;
pub mod compute;
pub mod config;
pub mod decoder;
mod digest;
pub mod encode;
mod gguf;
pub mod gpu;
mod hub;
mod matrix;
pub mod measure;
mod random;
pub mod resident;
pub mod sampling;
pub mod spec;
pub mod stored;
pub mod template;
#[cfg(test)]
mod testing;
pub mod tokenizer;
mod weights;

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use kvsplice_kv::ModelDigest;

pub use compute::Compute;
pub use config::Config;
pub use decoder::Decoder;
pub use kvsplice_kernels::process::leave;
pub use spec::{Dtype, Spec, home};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;

/// Why a model cannot be read or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such model.
    #[error(
        "model {name:?} not found at {path}; pull it with `kvsplice models pull {name}` or name a .gguf file or a Hugging Face folder"
    )]
    NotFound {
        /// As configured.
        name: String,
        /// Where it was looked for.
        path: String,
    },
    /// A file cannot be read.
    #[error("read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A model file is not what it should be.
    #[error("model file {path}: {what}")]
    Format {
        /// The file.
        path: String,
        /// What is wrong with it.
        what: String,
    },
    /// The model is of a kind that is not implemented.
    #[error("model {path} is not supported: {what}")]
    Unsupported {
        /// The file.
        path: String,
        /// Which property, and what is supported.
        what: String,
    },
    /// A tensor does not fit the model's configuration.
    #[error("model's {tensor} has shape {found:?}, its configuration needs {expected:?}")]
    Shape {
        /// Which tensor.
        tensor: String,
        /// Its shape.
        found: Vec<i64>,
        /// What it should be.
        expected: Vec<i64>,
    },
    /// An option of a [`Spec`] has no such value.
    #[error("{0}")]
    Option(String),
    /// Text cannot be tokenized or decoded.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template cannot be rendered or split.
    #[error("chat template: {0}")]
    Template(String),
    /// An argument does not fit the model.
    #[error("{0}")]
    Argument(String),
    /// The model computed something that is not a number.
    #[error("model computed non-finite {0}")]
    NonFinite(&'static str),
    /// A job on the compute thread panicked, or the thread is gone.
    #[error("compute thread: {0}")]
    Compute(String),
    /// The device cannot be used.
    #[error("device {device}: {source}")]
    Device {
        /// As configured.
        device: String,
        /// Why, and what to do.
        #[source]
        source: kvsplice_kernels::Error,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Kernel(#[from] kvsplice_kernels::Error),
    /// The tensor library failed.
    #[error("tensor library: {0}")]
    Library(#[from] tch::TchError),
}

impl Error {
    /// Whether the device's memory is exhausted: a smaller request may still be answered.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Kernel(error) => matches!(error, kvsplice_kernels::Error::OutOfMemory { .. }),
            Error::Library(error) => kvsplice_kernels::out_of_memory(error).is_some(),
            _ => false,
        }
    }
}

/// What is known of a model without its weights in memory: enough to tokenize and to name its KV.
#[derive(Clone, Debug)]
pub struct Description {
    /// Name as configured.
    pub name: String,
    /// BLAKE3 over weights, tokenizer and configuration.
    pub digest: ModelDigest,
    /// Shape.
    pub config: Config,
    /// Text ⇄ token ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages → text.
    pub template: Arc<ChatTemplate>,
}

impl Description {
    /// Reads tokenizer, template and configuration, and digests the files (remembered from run to run).
    pub fn read(spec: &Spec) -> Result<Self, Error> {
        let source = spec.open()?;
        Ok(source.description)
    }
}

/// A model with its weights. Clones share everything.
#[derive(Clone, Debug)]
pub struct Model {
    /// All but the weights.
    pub description: Description,
    /// The weights; locked by jobs on the compute thread only.
    pub decoder: Arc<Mutex<Decoder>>,
}

impl Model {
    /// Opens the device and reads a model. Takes seconds: call it on the compute thread.
    pub fn load(spec: &Spec) -> Result<Self, Error> {
        let device = spec.open_device()?;
        let source = spec.open()?;
        spec.check_memory(&source.description.config)?;
        let decoder = Decoder::load(&source.description.config, source.weights, spec.dtype(), device)?;
        Ok(Self { description: source.description, decoder: Arc::new(Mutex::new(decoder)) })
    }
}

impl Model {
    /// Runs `job` on the weights. For the compute thread.
    pub fn with_decoder<R>(&self, job: impl FnOnce(&Decoder) -> R) -> R {
        // Nothing changes the weights, so a job that panicked has left them as they were.
        job(&self.decoder.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Deref for Model {
    type Target = Description;

    fn deref(&self) -> &Description {
        &self.description
    }
}
