//! Tensor operations that the library lacks: ragged causal attention over scattered rows, rotation, placing of stored KV,
//! quantization.
//!
//! Safe functions: shapes and types are checked first, and every failure of the library is an [`Error`]. This crate
//! knows nothing of models, chunks or requests.

#[cfg(feature = "libtorch")]
pub mod activation;
#[cfg(feature = "libtorch")]
pub mod attention;
mod cpu;
#[cfg(feature = "libtorch")]
mod data;
pub mod memory;
mod parallel;
pub mod place;
pub mod quantize;
#[cfg(feature = "libtorch")]
pub mod rope;
#[cfg(test)]
mod testing;

pub use cpu::isa::Isa;

/// Tokens a block of a sequence's KV.
pub const BLOCK: u32 = 64;

/// Why an operation was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument does not fit.
    #[error("{op}: {what}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What does not fit, with the values.
        what: String,
    },
    /// A number that must be finite is not.
    #[error("{op}: number {index} is {value}, not finite")]
    NonFinite {
        /// The operation.
        op: &'static str,
        /// Which number.
        index: usize,
        /// What it is.
        value: f32,
    },
    /// The tensor library failed.
    #[cfg(feature = "libtorch")]
    #[error("tensor library: {0}")]
    Library(#[from] tch::TchError),
}

fn argument(op: &'static str, what: impl Into<String>) -> Error {
    Error::Argument { op, what: what.into() }
}
