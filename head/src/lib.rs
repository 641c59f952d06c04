//! kvsplice-head
