//! Checks of tensors that go to a kernel, and small lists of integers on their way to the device.

use std::ffi::c_void;

use tch::{Device, Kind, Tensor};

use crate::{Error, argument};

/// The suffix of the kernels that compute in `kind`; `None` if there are none.
pub(super) fn suffix(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::BFloat16 => Some("bf16"),
        Kind::Half => Some("f16"),
        _ => None,
    }
}

/// The suffix of the kernels for these tensors, which must be contiguous, of one 16-bit type and on one device.
pub(super) fn check(op: &'static str, tensors: &[&Tensor]) -> Result<&'static str, Error> {
    let Some(first) = tensors.first() else { return Err(argument(op, "no tensor")) };
    let (device, kind) = (first.device(), first.kind());
    for tensor in tensors {
        if tensor.device() != device || tensor.kind() != kind {
            let (other_kind, other_device) = (tensor.kind(), tensor.device());
            let what = format!("{kind:?} on {device:?} and {other_kind:?} on {other_device:?} do not go together");
            return Err(argument(op, what));
        }
        check_layout(op, tensor)?;
    }
    suffix(kind).ok_or_else(|| argument(op, format!("computes in bf16 or f16, not in {kind:?}")))
}

/// Checks a tensor of another type than the rest.
pub(super) fn check_as(op: &'static str, tensor: &Tensor, kind: Kind, device: Device) -> Result<(), Error> {
    if tensor.kind() != kind || tensor.device() != device {
        let (found, on) = (tensor.kind(), tensor.device());
        return Err(argument(op, format!("needs {kind:?} on {device:?}, got {found:?} on {on:?}")));
    }
    check_layout(op, tensor)
}

/// Kernels read 16 bytes at a time.
fn check_layout(op: &'static str, tensor: &Tensor) -> Result<(), Error> {
    if !tensor.is_contiguous() {
        return Err(argument(
            op,
            format!("tensor {:?} with strides {:?} is not contiguous", tensor.size(), tensor.stride()),
        ));
    }
    if tensor.numel() > 0 && !(tensor.data_ptr() as usize).is_multiple_of(16) {
        return Err(argument(op, "tensor does not begin at a multiple of 16 bytes"));
    }
    Ok(())
}

/// A number that a kernel counts in 32 bits.
pub(super) fn number(op: &'static str, what: &str, value: usize) -> Result<i32, Error> {
    i32::try_from(value).map_err(|_| argument(op, format!("{what}: {value} is beyond 32 bits")))
}

/// Slots or block ids as a kernel reads them, on `device`. The copy runs on the current stream and nobody waits for it:
/// the driver has taken small pageable memory over when the call returns.
pub(super) fn upload(op: &'static str, numbers: impl Iterator<Item = u32>, device: Device) -> Result<Tensor, Error> {
    let numbers: Vec<i32> =
        numbers.map(|value| number(op, "slot or block", value as usize)).collect::<Result<_, _>>()?;
    send(&Tensor::f_from_slice(&numbers)?, device)
}

/// A tensor on `device`, without waiting.
pub(super) fn send(tensor: &Tensor, device: Device) -> Result<Tensor, Error> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_to_device_(device, tensor.kind(), true, false)?)
}

/// Where a tensor's numbers begin; null for an empty one.
pub(super) fn pointer(tensor: &Tensor) -> *mut c_void {
    tensor.data_ptr()
}

/// As [`pointer`]; null for none.
pub(super) fn pointer_or_null(tensor: Option<&Tensor>) -> *mut c_void {
    tensor.map_or(std::ptr::null_mut(), pointer)
}
