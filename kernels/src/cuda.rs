//! CUDA: the kernels of `kernels/cuda`, launched through the driver on libtorch's current stream.
//!
//! Nothing here is linked: the driver, NVRTC and libtorch's CUDA library are opened at run time, so one build serves
//! machines with and without a GPU. Shapes, types and devices are checked in safe code before a launch.

mod arguments;
pub(crate) mod attention;
mod compile;
mod driver;
pub mod elementwise;
#[cfg(test)]
mod emulated;
mod library;
pub mod place;
mod staging;
mod tensor;

use std::ffi::c_void;

use crate::Error;

pub use compile::embedded;
pub(crate) use driver::gpu;
pub use driver::{Properties, memory, open};
pub use library::load;

/// Whether the kernels compute tensors of this type on this device.
pub fn computes(kind: tch::Kind, device: tch::Device) -> bool {
    matches!(device, tch::Device::Cuda(_)) && tensor::suffix(kind).is_some()
}

/// Thread blocks and their size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
}

/// What runs kernels: a GPU, or in tests the CPU.
pub(crate) trait Launch {
    /// Starts a kernel on the current stream.
    ///
    /// # Safety
    /// `arguments` must be the struct that the kernel takes, and what it points to must be large enough and of this
    /// device.
    unsafe fn launch<A>(&self, kernel: &str, grid: Grid, shared_bytes: usize, arguments: &A) -> Result<(), Error>;

    /// Copies `bytes` bytes within the device's memory, on the current stream.
    ///
    /// # Safety
    /// Both must be of this device and that large, and must not overlap.
    unsafe fn copy(&self, from: *const c_void, to: *mut c_void, bytes: usize) -> Result<(), Error>;

    /// Copies `parts` to the device, without waiting, and runs `work` on where they are, each at a multiple of 16 bytes.
    /// They stay until what `work` has started on the current stream has ended.
    fn with_staged<R>(
        &self,
        parts: &[&[u8]],
        work: impl FnOnce(&[*const c_void]) -> Result<R, Error>,
    ) -> Result<R, Error>;

    /// Multiprocessors of the device.
    fn multiprocessors(&self) -> usize;
}
