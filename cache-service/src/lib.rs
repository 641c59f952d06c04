//! kvsplice-cache-service
