//! Tensor operations that the library lacks: ragged causal attention over scattered rows, rotation, placing of stored KV,
//! quantization.
//!
//! Safe functions: shapes and types are checked first, and every failure of the library is an [`Error`]. This crate
//! knows nothing of models, chunks or requests.

#[cfg(feature = "libtorch")]
pub mod activation;
#[cfg(feature = "libtorch")]
pub mod attention;
#[cfg(feature = "libtorch")]
mod blocks;
mod cpu;
#[cfg(feature = "libtorch")]
pub mod cuda;
#[cfg(feature = "libtorch")]
mod data;
#[cfg(feature = "libtorch")]
mod device;
pub mod memory;
#[cfg(feature = "libtorch")]
pub mod norm;
mod parallel;
pub mod place;
pub mod process;
#[cfg(feature = "libtorch")]
pub mod product;
pub mod quantize;
#[cfg(feature = "libtorch")]
pub mod rope;
#[cfg(test)]
mod testing;

pub use cpu::isa::Isa;

/// Tokens a block of a sequence's KV.
pub const BLOCK: u32 = 64;

/// Why an operation was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument does not fit.
    #[error("{op}: {what}")]
    Argument {
        /// The operation.
        op: &'static str,
        /// What does not fit, with the values.
        what: String,
    },
    /// A number that must be finite is not.
    #[error("{op}: number {index} is {value}, not finite")]
    NonFinite {
        /// The operation.
        op: &'static str,
        /// Which number.
        index: usize,
        /// What it is.
        value: f32,
    },
    /// There is no CUDA driver, or it does not start.
    #[error("no CUDA driver: {what}; install NVIDIA's driver, or use --device cpu")]
    NoDriver {
        /// What is missing.
        what: String,
    },
    /// There is no such device.
    #[error("no such CUDA device: {what}; name another with --device cuda:N, or use --device cpu")]
    NoDevice {
        /// Which, and what there is.
        what: String,
    },
    /// A device that is too old.
    #[error("{name} has compute capability {major}.{minor}, the kernels need 8.0; use another device or --device cpu")]
    Capability {
        /// The device.
        name: String,
        /// Its compute capability.
        major: i32,
        /// After the point.
        minor: i32,
    },
    /// libtorch's CUDA library is missing or of another build.
    #[error("{path}: {what}; set KVSPLICE_LIBTORCH_CUDA to the torch/lib folder of torch 2.11.0, or use --device cpu")]
    CudaLibrary {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// There are no kernels for this device, and nothing to compile them with.
    #[error(
        "no kernels for compute capability {major}.{minor} are built in, and NVRTC (libnvrtc.so.13) is missing; install nvidia-cuda-nvrtc, or use --device cpu"
    )]
    NoNvrtc {
        /// Compute capability of the device.
        major: i32,
        /// After the point.
        minor: i32,
    },
    /// The device has no memory left for this.
    #[error("out of device memory: {what}")]
    OutOfMemory {
        /// What asked for it.
        what: String,
    },
    /// CUDA failed.
    #[error("CUDA, {op}: {what}")]
    Cuda {
        /// The operation.
        op: &'static str,
        /// What the driver says.
        what: String,
    },
    /// The tensor library failed.
    #[cfg(feature = "libtorch")]
    #[error("tensor library: {0}")]
    Library(tch::TchError),
}

#[cfg(feature = "libtorch")]
impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        // The library has no code for it, only the text.
        match out_of_memory(&error) {
            Some(what) => Error::OutOfMemory { what },
            None => Error::Library(error),
        }
    }
}

/// The first line of an error of the library that says that device memory is exhausted.
#[cfg(feature = "libtorch")]
pub fn out_of_memory(error: &tch::TchError) -> Option<String> {
    let text = error.to_string();
    let line = text.lines().find(|line| line.contains("out of memory"))?;
    Some(line.trim().to_owned())
}

fn argument(op: &'static str, what: impl Into<String>) -> Error {
    Error::Argument { op, what: what.into() }
}
