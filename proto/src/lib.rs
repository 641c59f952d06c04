//! kvsplice-proto
