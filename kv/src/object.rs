//! The chunk object: a safetensors file whose byte ranges follow from [`KvLayout`](crate::KvLayout).

/// Why a chunk object was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The file ends too early.
    #[error("truncated: {got} bytes, need {need}")]
    Truncated {
        /// Bytes there.
        got: usize,
        /// Bytes needed.
        need: usize,
    },
}
