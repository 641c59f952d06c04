//! The wire: generated messages and services, their conversion to domain types, and clients.
#![forbid(unsafe_code)]

/// Generated from `proto/kvsplice/v1/*.proto`.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("kvsplice.v1");
}
