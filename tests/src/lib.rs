//! kvsplice-tests
