//! The devices: what they are, their loaded kernels, launches on libtorch's current stream.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::DriverError;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::compile::{SOURCES, code};
use super::staging::{Staging, with_staged};
use super::{Grid, Launch, library};
use crate::Error;

/// The oldest compute capability with the instructions of the kernels.
const OLDEST: (i32, i32) = (8, 0);

unsafe extern "C" {
    /// The current stream of libtorch on a device; false if libtorch has none.
    fn kvsplice_cuda_stream(device: i32, stream: *mut *mut c_void) -> bool;
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// As the driver names it.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Bytes of memory in all.
    pub memory_bytes: usize,
    /// Multiprocessors.
    pub multiprocessors: usize,
}

/// A device with the kernels loaded.
pub(crate) struct Gpu {
    index: usize,
    context: sys::CUcontext,
    functions: BTreeMap<&'static str, sys::CUfunction>,
    properties: Properties,
    staging: Mutex<Staging>,
}

// SAFETY: a context and its functions are handles that any thread may use; the driver locks inside.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Opened devices. One table a process, as the driver has one primary context a device and process.
static GPUS: Mutex<BTreeMap<usize, Arc<Gpu>>> = Mutex::new(BTreeMap::new());

/// Every kernel and the source that has it.
const KERNELS: [(&str, &[&str]); 3] = [
    (
        "attention",
        &[
            "attend_bf16_64",
            "attend_bf16_128",
            "attend_f16_64",
            "attend_f16_128",
            "attend_narrow_bf16_64",
            "attend_narrow_bf16_128",
            "attend_narrow_f16_64",
            "attend_narrow_f16_128",
            "attend_sums_bf16_64",
            "attend_sums_bf16_128",
            "attend_sums_f16_64",
            "attend_sums_f16_128",
            "merge_bf16",
            "merge_f16",
        ],
    ),
    ("elementwise", &["norm_bf16", "norm_f16", "gate_bf16", "gate_f16"]),
    ("place", &["place_bf16", "place_f16", "scatter_bf16", "scatter_f16"]),
];

/// Opens device `index`: driver, capability, libtorch's CUDA library, kernels. Must come before any other use of CUDA;
/// opened again, it only answers. Fails with the reason and what to do.
pub fn open(index: usize) -> Result<Properties, Error> {
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(gpu) = gpus.get(&index) {
        return Ok(gpu.properties.clone());
    }
    let properties = ask(index)?;
    library::load(None)?;
    let known = tch::Cuda::device_count();
    if !tch::Cuda::is_available() || index as i64 >= known {
        let what = format!(
            "libtorch finds {known} devices where the driver has device {index}; see CUDA_VISIBLE_DEVICES and the driver's version"
        );
        return Err(Error::NoDevice { what });
    }
    let gpu = load_kernels(index, properties)?;
    let properties = gpu.properties.clone();
    gpus.insert(index, Arc::new(gpu));
    Ok(properties)
}

/// An opened device.
pub(crate) fn gpu(index: usize) -> Result<Arc<Gpu>, Error> {
    let gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = gpus.get(&index).cloned();
    opened.ok_or_else(|| Error::NoDevice { what: format!("device {index} is not opened") })
}

/// Free and all bytes of an opened device.
pub fn memory(index: usize) -> Result<(usize, usize), Error> {
    gpu(index)?.enter()?;
    result::mem_get_info().map_err(failed("memory"))
}

fn failed(op: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::OutOfMemory { what: format!("{op}: {error}") },
        _ => Error::Cuda { op, what: error.to_string() },
    }
}

/// Asks the driver; libtorch is not needed for this.
fn ask(index: usize) -> Result<Properties, Error> {
    // SAFETY: opening the driver's library runs its initializers, which touch nothing of ours.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver { what: "libcuda.so.1 is not on this machine".to_owned() });
    }
    result::init().map_err(|error| Error::NoDriver { what: error.to_string() })?;
    let count = result::device::get_count().map_err(failed("count devices"))?;
    let Some(ordinal) = i32::try_from(index).ok().filter(|&ordinal| ordinal < count) else {
        return Err(Error::NoDevice { what: format!("device {index} of {count}") });
    };
    let device = result::device::get(ordinal).map_err(failed("get device"))?;
    let name = result::device::get_name(device).map_err(failed("name device"))?;
    // SAFETY: the device is the one just found.
    let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let attribute = |which| attribute(which).map_err(failed("ask device"));
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if (major, minor) < OLDEST {
        return Err(Error::Capability { name, major, minor });
    }
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as usize;
    // SAFETY: as above.
    let memory_bytes = unsafe { result::device::total_mem(device) }.map_err(failed("ask device"))?;
    Ok(Properties { name, capability: (major, minor), memory_bytes, multiprocessors })
}

/// The kernels stay loaded for good.
fn load_kernels(index: usize, properties: Properties) -> Result<Gpu, Error> {
    let (major, minor) = properties.capability;
    let device = result::device::get(index as i32).map_err(failed("get device"))?;
    // SAFETY: the device exists; the context is libtorch's own (the primary one) and is never released by us.
    let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed("context"))?;
    // SAFETY: the context is the one just retained.
    unsafe { result::ctx::set_current(context) }.map_err(failed("context"))?;
    let staging = Mutex::new(Staging::new().map_err(failed("staging"))?);
    let mut gpu = Gpu { index, context, functions: BTreeMap::new(), properties, staging };
    for (source, text) in SOURCES {
        let image = code(source, text, major, minor)?;
        // SAFETY: the image is a cubin of ours or NVRTC's; the driver copies it, and checks its architecture.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed("load kernels"))?;
        let kernels = KERNELS.iter().find(|(name, _)| *name == source).map_or(&[][..], |(_, kernels)| kernels);
        for &kernel in kernels {
            let name =
                CString::new(kernel).map_err(|error| Error::Cuda { op: "load kernels", what: error.to_string() })?;
            // SAFETY: the module is loaded.
            let function = unsafe { result::module::get_function(module, name) }.map_err(failed("load kernels"))?;
            gpu.functions.insert(kernel, function);
        }
    }
    Ok(gpu)
}

impl Gpu {
    /// Makes the device's context the current one of this thread.
    fn enter(&self) -> Result<(), Error> {
        // SAFETY: the primary context lives as long as the process.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("context"))
    }

    fn stream(&self) -> Result<sys::CUstream, Error> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the function writes one pointer.
        if !unsafe { kvsplice_cuda_stream(self.index as i32, &mut stream) } {
            return Err(Error::Cuda { op: "stream", what: format!("libtorch has none for device {}", self.index) });
        }
        Ok(stream.cast())
    }
}

impl Launch for Gpu {
    unsafe fn launch<A>(&self, kernel: &str, grid: Grid, shared_bytes: usize, arguments: &A) -> Result<(), Error> {
        let Some(&function) = self.functions.get(kernel) else {
            return Err(Error::Cuda { op: "launch", what: format!("no kernel {kernel}") });
        };
        self.enter()?;
        let ([x, y, z], threads) = (grid.blocks, (grid.threads, 1, 1));
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        // SAFETY: the function is of the current context; the driver copies the argument during the call, and its type
        // is the caller's promise.
        let launched = unsafe {
            result::launch_kernel(function, (x, y, z), threads, shared_bytes as u32, self.stream()?, &mut parameters)
        };
        launched.map_err(failed("launch"))
    }

    unsafe fn copy(&self, from: *const c_void, to: *mut c_void, bytes: usize) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the caller's promise; the driver's addresses are pointers' numbers.
        let copied = unsafe { result::memcpy_dtod_async(to as u64, from as u64, bytes, self.stream()?) };
        copied.map_err(failed("copy"))
    }

    fn with_staged<R>(
        &self,
        parts: &[&[u8]],
        work: impl FnOnce(&[*const c_void]) -> Result<R, Error>,
    ) -> Result<R, Error> {
        if parts.is_empty() {
            // The staging memory keeps its turn: nobody waits for a copy that is not needed.
            return work(&[]);
        }
        self.enter()?;
        let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        with_staged(staging, parts, self.stream()?, failed("staging"), work)
    }

    fn multiprocessors(&self) -> usize {
        self.properties.multiprocessors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU this opens it; without one, the refusal must say what to do.
    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        match open(0) {
            Ok(properties) => assert!(properties.capability >= OLDEST),
            Err(error) => assert!(error.to_string().contains("--device cpu"), "{error}"),
        }
        assert!(gpu(4096).is_err());
    }

    #[test]
    fn every_kernel_of_the_sources_is_listed() {
        let listed: usize = KERNELS.iter().map(|(_, kernels)| kernels.len()).sum();
        let mut named = 0;
        for (source, text) in SOURCES {
            let kernels = KERNELS.iter().find(|(name, _)| *name == source).unwrap().1;
            for kernel in kernels {
                let whole_word = text.contains(&format!("({kernel},")) || text.contains(&format!(" {kernel}("));
                assert!(whole_word, "{kernel} is not in {source}.cu");
                named += 1;
            }
        }
        assert_eq!(named, listed);
    }
}
