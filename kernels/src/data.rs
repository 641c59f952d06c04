//! The numbers of a tensor as a slice.

use tch::{Device, Kind, Tensor};

use crate::{Error, argument};

fn check(op: &'static str, tensor: &Tensor) -> Result<(), Error> {
    if tensor.device() != Device::Cpu || tensor.kind() != Kind::Float || !tensor.is_contiguous() {
        let (device, kind) = (tensor.device(), tensor.kind());
        return Err(argument(op, format!("needs a contiguous f32 tensor on the CPU, got {kind:?} on {device:?}")));
    }
    Ok(())
}

/// The numbers of a contiguous f32 tensor on the CPU.
pub(crate) fn floats<'a>(op: &'static str, tensor: &'a Tensor) -> Result<&'a [f32], Error> {
    check(op, tensor)?;
    // SAFETY: contiguous, f32 and on the CPU, so `numel` numbers lie from `data_ptr` on; the tensor is borrowed as long
    // as the slice, and nothing writes to it meanwhile: one thread makes all calls of the library.
    Ok(unsafe { slice(tensor.data_ptr().cast(), tensor.numel()) })
}

/// As [`floats`], to be written.
pub(crate) fn floats_mut<'a>(op: &'static str, tensor: &'a mut Tensor) -> Result<&'a mut [f32], Error> {
    check(op, tensor)?;
    let (data, count) = (tensor.data_ptr().cast::<f32>(), tensor.numel());
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `floats`; the tensor is borrowed mutably, and it is a fresh one that shares its numbers with nobody.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, count) })
}

/// # Safety
/// `count` numbers must lie from `data` on and stay unchanged for `'a`.
unsafe fn slice<'a>(data: *const f32, count: usize) -> &'a [f32] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, count) }
}
