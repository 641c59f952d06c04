//! kvsplice-model
