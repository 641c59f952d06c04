//! kvsplice-kv
