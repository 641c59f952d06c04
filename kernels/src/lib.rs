//! kvsplice-kernels
