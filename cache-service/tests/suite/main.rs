//! The cache service through its real gRPC interface, on real and on faulty stores.
#![forbid(unsafe_code)]

mod conformance;
mod disk;
mod faults;
mod files;
mod fuzz;
mod kept;
mod lifecycle;
mod mapped;
mod s3;
mod storm;
/// The store of the whole system's storms: one file, for a crate's tests may not use that of another.
#[path = "../../../tests/src/storm.rs"]
#[expect(unreachable_pub, reason = "it is public where it lives")]
mod storm_store;
mod support;
