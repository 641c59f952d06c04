//! kvsplice-gpu-worker
