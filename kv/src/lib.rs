//! What every role agrees on, without a tensor: identities, layouts, the chunk object, rows, options and the receipt.
//!
//! This crate does no I/O and holds no model. Invariant: two values that compare equal here mean the same bytes everywhere.
#![forbid(unsafe_code)]

pub mod craft;
pub mod id;
pub mod layout;
pub mod object;
pub mod options;
pub mod receipt;
pub mod record;
pub mod rows;

pub use craft::Capture;
pub use id::{ChunkId, ChunkKey, ModelDigest};
pub use layout::{Encoding, KvLayout, Provenance, Variant};
pub use options::{Options, Sampling, Strategy};
pub use receipt::Receipt;
pub use rows::RowRanges;

/// What can be wrong with a value of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A digest is not 64 hexadecimal digits.
    #[error("{what} must be 64 hexadecimal digits, got {got:?}")]
    Digest {
        /// Which digest.
        what: &'static str,
        /// The text as given, cut at 80 bytes.
        got: String,
    },
    /// A name is not one of the known ones.
    #[error("unknown {what} {got:?}; known: {known}")]
    UnknownName {
        /// What kind of name.
        what: &'static str,
        /// The name as given.
        got: String,
        /// The valid names, separated by commas.
        known: &'static str,
    },
    /// A number is outside its range.
    #[error("{what} must be {expected}, got {got}")]
    OutOfRange {
        /// Which number.
        what: &'static str,
        /// The valid range in words.
        expected: &'static str,
        /// The value as given.
        got: String,
    },
    /// A capture's record cannot be used.
    #[error("capture: {field} {detail}")]
    Capture {
        /// The field, as it is called in the record.
        field: String,
        /// What is wrong with it, and what would be right.
        detail: String,
    },
    /// A chunk object cannot be read.
    #[error("chunk object: {0}")]
    Object(#[from] object::Error),
}
