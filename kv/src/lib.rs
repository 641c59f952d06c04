//! What every role agrees on, without a tensor: identities, layouts, the chunk object, rows, options, the receipt, and
//! what goes first when memory is full.
//!
//! This crate does no I/O and holds no model. Invariant: two values that compare equal here mean the same bytes everywhere.
#![forbid(unsafe_code)]

pub mod craft;
pub mod eviction;
pub mod id;
pub mod layout;
pub mod object;
pub mod options;
pub mod receipt;
pub mod record;
pub mod rows;
pub mod select;

pub use craft::Capture;
pub use id::{ChunkId, ChunkKey, ModelDigest};
pub use layout::{Encoding, KvLayout, Part, Provenance, SCALE_GROUP, Variant};
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
    /// An option's value cannot be read.
    #[error("{name}: {reason}")]
    Option {
        /// The option.
        name: &'static str,
        /// What is wrong with the value, with the valid ones.
        reason: String,
    },
    /// An option that is unknown, or that the strategy does not use.
    #[error("option {name}: {reason}")]
    Options {
        /// The option as given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Scores that rows would be picked by cannot be used.
    #[error("scores of chunk {chunk}: {detail}")]
    Scores {
        /// Place of the chunk in the prompt.
        chunk: usize,
        /// What is wrong.
        detail: String,
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
