//! One layer of a chunk in a device's memory, and pieces to be placed from there or from the host.
//!
//! One u8 tensor holds the four parts. It is written before anybody else has it and never after, so that clones may share
//! it; on a GPU the order of libtorch's stream makes it whole before a kernel reads it, and keeps it until the last one has.

use std::ffi::c_void;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::{Encoding, OP, Stored};
use crate::quantize::{Shape, key_scales, value_scales};
use crate::{Error, argument, cuda, data};

/// Parts begin at multiples of this, so that rows are read in whole lines.
const ALIGNMENT: usize = 256;
/// Kernels read so many bytes at a time.
const READ_BYTES: usize = 16;
/// The library gives device memory in multiples of this.
const UNIT: usize = 512;

/// A whole layer of a chunk on a device.
#[derive(Debug)]
pub struct Resident {
    encoding: Encoding,
    shape: Shape,
    /// Keys, values, scales of keys and of values, as in [`Stored`]: where each is in `memory`.
    parts: [Range<usize>; 4],
    /// `[bytes]`, u8.
    memory: Tensor,
}

/// Some rows of one chunk in one layer, wherever they are.
#[derive(Clone, Debug)]
pub enum Piece<'a> {
    /// In host memory.
    Host(Stored<'a>),
    /// On the device that they are placed on.
    Resident {
        /// The chunk's layer.
        layer: &'a Resident,
        /// Which of its rows.
        rows: Range<usize>,
    },
}

impl<'a> From<Stored<'a>> for Piece<'a> {
    fn from(stored: Stored<'a>) -> Self {
        Piece::Host(stored)
    }
}

impl<'a> Stored<'a> {
    /// Keys, values, the chunk's scales of keys, and the rows' scales of values, of a layer whose lengths are checked.
    pub(crate) fn parts(&self, kv_heads: usize) -> [&'a [u8]; 4] {
        let value_scales = match self.value_scales {
            [] => &[][..],
            scales => &scales[self.rows.start * kv_heads..self.rows.end * kv_heads],
        };
        [self.keys, self.values, data::bytes_of(self.key_scales), data::bytes_of(value_scales)]
    }
}

/// Where each part is, and the bytes of all. Saturates where no memory could hold them.
fn places(encoding: Encoding, shape: Shape) -> ([Range<usize>; 4], usize) {
    let numbers = shape.tokens.saturating_mul(encoding.bytes(shape.width()));
    let scales = match encoding {
        Encoding::F32 | Encoding::Bf16 => [0, 0],
        Encoding::Quantized(_) => [key_scales(shape), value_scales(shape)].map(|count| count.saturating_mul(4)),
    };
    let mut end = 0usize;
    let parts = [numbers, numbers, scales[0], scales[1]].map(|bytes| {
        let start = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        end = start.saturating_add(bytes);
        start..end
    });
    (parts, end.checked_next_multiple_of(UNIT).unwrap_or(usize::MAX))
}

impl Resident {
    /// Bytes that such a layer takes on a device.
    pub fn bytes(encoding: Encoding, shape: Shape) -> usize {
        places(encoding, shape).1
    }

    /// Copies a chunk's layer, all of its rows, to `device`: through pinned memory to a GPU, whose kernels find it in the
    /// order of libtorch's stream. Fails on lengths that do not fit and when the device has no memory left.
    pub fn new(whole: &Stored<'_>, kv_heads: usize, head_dim: usize, device: Device) -> Result<Self, Error> {
        whole.check(kv_heads, head_dim)?;
        if whole.rows != (0..whole.tokens) {
            let what = format!("rows {:?} of a chunk of {} tokens are not the whole layer", whole.rows, whole.tokens);
            return Err(argument(OP, what));
        }
        let shape = Shape { tokens: whole.tokens, kv_heads, head_dim };
        let (parts, bytes) = places(whole.encoding, shape);
        let memory = match device {
            Device::Cuda(index) => {
                let memory = Tensor::f_empty([bytes as i64], (Kind::Uint8, device))?;
                cuda::place::keep(&*cuda::gpu(index)?, whole, kv_heads, &memory, &parts)?;
                memory
            }
            _ => {
                let mut memory = Tensor::f_zeros([bytes as i64], (Kind::Uint8, device))?;
                let to = data::numbers_mut::<u8>(OP, &mut memory)?;
                for (part, from) in parts.iter().zip(whole.parts(kv_heads)) {
                    to[part.clone()].copy_from_slice(from);
                }
                memory
            }
        };
        Self::of(whole.encoding, shape, memory)
    }

    /// A layer whose parts are in `memory`. Fails unless that is u8, contiguous, aligned and large enough.
    pub(crate) fn of(encoding: Encoding, shape: Shape, memory: Tensor) -> Result<Self, Error> {
        let (parts, bytes) = places(encoding, shape);
        let start = memory.data_ptr() as usize;
        let fits = memory.kind() == Kind::Uint8 && memory.is_contiguous() && memory.numel() >= bytes;
        if !fits || !start.is_multiple_of(READ_BYTES) {
            let what = format!(
                "{:?} {:?} at {start:#x} is not {bytes} contiguous u8 at a multiple of {READ_BYTES} bytes",
                memory.kind(),
                memory.size()
            );
            return Err(argument(OP, what));
        }
        Ok(Self { encoding, shape, parts, memory })
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.memory.device()
    }

    /// Itself, or a copy on another device.
    pub(crate) fn to_device(&self, device: Device) -> Result<Self, Error> {
        Self::of(self.encoding, self.shape, self.memory.f_to_device(device)?)
    }

    #[cfg(test)]
    pub(crate) fn parts(&self) -> &[Range<usize>; 4] {
        &self.parts
    }

    #[cfg(test)]
    pub(crate) fn memory(&self) -> &Tensor {
        &self.memory
    }

    fn check(&self, rows: &Range<usize>, kv_heads: usize, head_dim: usize, device: Device) -> Result<(), Error> {
        let Shape { tokens, kv_heads: heads, head_dim: dim } = self.shape;
        if rows.start > rows.end || rows.end > tokens {
            return Err(argument(OP, format!("rows {rows:?} of a resident chunk of {tokens} tokens")));
        }
        if (heads, dim) != (kv_heads, head_dim) {
            let what = format!("a resident layer of [{tokens}, {heads}, {dim}] for [_, {kv_heads}, {head_dim}]");
            return Err(argument(OP, what));
        }
        if self.device() != device {
            return Err(argument(OP, format!("a resident layer on {:?} for keys on {device:?}", self.device())));
        }
        Ok(())
    }

    /// Where some rows' parts begin: keys, values, the chunk's scales of keys, the rows' scales of values. The rows must be
    /// within the chunk.
    pub(crate) fn pointers(&self, rows: &Range<usize>) -> [*const c_void; 4] {
        let row_bytes = self.encoding.bytes(self.shape.width());
        let start = self.memory.data_ptr().cast::<u8>().cast_const();
        let at = |part: &Range<usize>, behind: usize| start.wrapping_add(part.start + behind).cast();
        let [keys, values, key_scales, value_scales] = &self.parts;
        let scale_bytes = self.shape.kv_heads * size_of::<f32>();
        [
            at(keys, rows.start * row_bytes),
            at(values, rows.start * row_bytes),
            at(key_scales, 0),
            // An encoding without scales has none to begin at a row's.
            at(value_scales, if value_scales.is_empty() { 0 } else { rows.start * scale_bytes }),
        ]
    }

    /// Rows of a layer on the CPU. The rows must be within the chunk.
    fn on_cpu(&self, rows: &Range<usize>) -> Result<Stored<'_>, Error> {
        let bytes = data::numbers::<u8>(OP, &self.memory)?;
        let [keys, values, key_scales, value_scales] = &self.parts;
        let row_bytes = self.encoding.bytes(self.shape.width());
        let of_rows = |part: &Range<usize>| &bytes[part.clone()][rows.start * row_bytes..rows.end * row_bytes];
        Ok(Stored {
            encoding: self.encoding,
            tokens: self.shape.tokens,
            rows: rows.clone(),
            keys: of_rows(keys),
            values: of_rows(values),
            key_scales: data::words(OP, &bytes[key_scales.clone()])?,
            value_scales: data::words(OP, &bytes[value_scales.clone()])?,
        })
    }
}

impl Clone for Resident {
    /// Shares the memory.
    fn clone(&self) -> Self {
        let Self { encoding, shape, ref parts, ref memory } = *self;
        Self { encoding, shape, parts: parts.clone(), memory: memory.shallow_clone() }
    }
}

impl<'a> Piece<'a> {
    /// Which rows of the chunk.
    pub(crate) fn rows(&self) -> Range<usize> {
        match self {
            Piece::Host(stored) => stored.rows.clone(),
            Piece::Resident { rows, .. } => rows.clone(),
        }
    }

    pub(crate) fn encoding(&self) -> Encoding {
        match self {
            Piece::Host(stored) => stored.encoding,
            Piece::Resident { layer, .. } => layer.encoding,
        }
    }

    pub(crate) fn check(&self, kv_heads: usize, head_dim: usize, device: Device) -> Result<(), Error> {
        match self {
            Piece::Host(stored) => stored.check(kv_heads, head_dim),
            Piece::Resident { layer, rows } => layer.check(rows, kv_heads, head_dim, device),
        }
    }

    /// The rows where the CPU reads them; those of a GPU are refused.
    pub(crate) fn on_cpu(&self) -> Result<Stored<'a>, Error> {
        match self {
            Piece::Host(stored) => Ok(stored.clone()),
            Piece::Resident { layer, rows } => layer.on_cpu(rows),
        }
    }
}

#[cfg(test)]
mod tests;
