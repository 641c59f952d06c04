//! CPU kernels on slices, with run-time dispatch: AVX-512, AVX2 with FMA, portable.

pub(crate) mod activation;
pub(crate) mod attention;
mod by_lane;
pub(crate) mod isa;
pub(crate) mod masses;
pub(crate) mod norm;
pub(crate) mod number;
pub(crate) mod panels;
pub(crate) mod place;
pub(crate) mod product;
pub(crate) mod read;
pub(crate) mod rope;
mod tile;
mod vectors;
