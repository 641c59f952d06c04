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
mod support;
