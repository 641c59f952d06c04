//! The numbers of a tensor as a slice.
//!
//! One thread of a process makes all calls of the library, and slices live within one call: nobody else reads or writes
//! the numbers meanwhile.

use tch::{Device, Kind, Tensor};

use crate::{Error, argument};

/// A type of number and the library's name for it.
pub(crate) trait Element: Copy {
    const KIND: Kind;
}

impl Element for f32 {
    const KIND: Kind = Kind::Float;
}

impl Element for half::bf16 {
    const KIND: Kind = Kind::BFloat16;
}

impl Element for u8 {
    const KIND: Kind = Kind::Uint8;
}

fn check<T: Element>(op: &'static str, tensor: &Tensor, contiguous: bool) -> Result<(), Error> {
    if tensor.device() != Device::Cpu || tensor.kind() != T::KIND || !contiguous {
        let (device, kind, strides) = (tensor.device(), tensor.kind(), tensor.stride());
        let what = format!(
            "needs a contiguous {:?} tensor on the CPU, got {kind:?} {:?} with strides {strides:?} on {device:?}",
            T::KIND,
            tensor.size()
        );
        return Err(argument(op, what));
    }
    Ok(())
}

/// The numbers of a contiguous tensor on the CPU.
pub(crate) fn numbers<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<&'a [T], Error> {
    check::<T>(op, tensor, tensor.is_contiguous())?;
    // SAFETY: contiguous, of this type and on the CPU, so `numel` numbers lie from `data_ptr` on; the tensor is borrowed
    // as long as the slice, and nothing writes to it meanwhile, see above.
    Ok(unsafe { slice(tensor.data_ptr().cast(), tensor.numel()) })
}

/// The bytes of numbers, as this machine has them.
pub(crate) fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: every f32 is four bytes, and bytes need no alignment; the slice is borrowed as long.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Bytes, or numbers, as the f32 that have their bits on this machine. Fails unless they begin at a multiple of 4 bytes and fill it.
pub(crate) fn words<'a, T: Element>(op: &'static str, numbers: &'a [T]) -> Result<&'a [f32], Error> {
    // SAFETY: numbers have no padding, and every pattern of bits is an f32.
    match unsafe { numbers.align_to::<f32>() } {
        (&[], words, &[]) => Ok(words),
        _ => {
            let (count, bits) = (numbers.len(), 8 * size_of::<T>());
            Err(argument(op, format!("{count} numbers of {bits} bits at {:p} are no aligned f32", numbers.as_ptr())))
        }
    }
}

/// The numbers of `[rows, heads, head_dim]`, whose rows may lie apart but are each contiguous, and how far apart.
pub(crate) fn rows<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<(&'a [T], usize), Error> {
    let (rows, heads, dim) = tensor.size3()?;
    let width = heads * dim;
    let strides = tensor.stride();
    let stride = strides.first().copied().unwrap_or(0);
    let within = strides.get(2) == Some(&1) && (heads == 1 || strides.get(1) == Some(&dim));
    check::<T>(op, tensor, (within && stride >= width) || tensor.is_contiguous())?;
    if tensor.numel() == 0 {
        return Ok((&[], width as usize));
    }
    // One row may have any stride.
    let stride = if rows == 1 { width } else { stride };
    let count = (rows - 1) * stride + width;
    // SAFETY: on the CPU and of this type; the last row starts (rows - 1) · stride numbers behind the first and has `width`
    // numbers; as above.
    Ok(unsafe { (slice(tensor.data_ptr().cast(), count as usize), stride as usize) })
}

/// As [`numbers`], to be written.
pub(crate) fn numbers_mut<'a, T: Element>(op: &'static str, tensor: &'a mut Tensor) -> Result<&'a mut [T], Error> {
    check::<T>(op, tensor, tensor.is_contiguous())?;
    let (data, count) = (tensor.data_ptr().cast::<T>(), tensor.numel());
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `numbers`; the tensor is borrowed mutably, and callers take no other slice of numbers that it may
    // share with another tensor.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, count) })
}

/// The numbers of two tensors, to be written. Fails when they share some.
pub(crate) fn numbers_mut_pair<'a, T: Element>(
    op: &'static str,
    first: &'a mut Tensor,
    second: &'a mut Tensor,
) -> Result<(&'a mut [T], &'a mut [T]), Error> {
    let range = |tensor: &Tensor| {
        let start = tensor.data_ptr() as usize;
        start..start + tensor.numel() * size_of::<T>()
    };
    let (one, other) = (range(first), range(second));
    if one.start < other.end && other.start < one.end {
        return Err(argument(op, "the two tensors to be written share memory"));
    }
    Ok((numbers_mut(op, first)?, numbers_mut(op, second)?))
}

/// # Safety
/// `count` numbers must lie from `data` on and stay unchanged for `'a`.
unsafe fn slice<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, count) }
}
