//! CPU kernels on slices, with run-time dispatch: AVX-512, AVX2 with FMA, portable.

pub(crate) mod attention;
pub(crate) mod isa;
mod tile;
