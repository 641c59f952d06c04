//! The wire: generated messages and services, their conversion to domain types, one way to serve, and clients.
//!
//! Invariant: input from the network is checked once, in [`convert`]; behind it only domain types travel.
#![deny(unsafe_code)]

pub mod cache;
pub mod client;
pub mod context;
pub mod convert;
pub mod frames;
mod layers;
pub mod load;
pub mod mmap;
pub mod server;

/// Generated from `proto/kvsplice/v1/*.proto`.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("kvsplice.v1");

    /// Every message and service above, encoded for reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kvsplice.bin"));
}
