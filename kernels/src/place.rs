//! Place-and-rotate: stored chunk KV → rotated keys, and values, at their slots of a sequence.
//!
//! Every encoding is decoded on the way. Rotation is f32 with one rounding. Bytes are what an object or a frame holds:
//! they need no alignment, and their lengths are checked here. A layer that is asked for again and again may lie on the
//! device instead (`resident`).

#[cfg(feature = "libtorch")]
mod resident;

use std::ops::Range;

use crate::quantize::{Format, Shape, key_scales, value_scales};
use crate::{Error, argument};

/// How numbers of a chunk's KV are stored, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// Codes and scales.
    Quantized(Format),
}

impl Encoding {
    /// Bytes of `numbers` numbers, an even count for int4.
    pub(crate) const fn bytes(self, numbers: usize) -> usize {
        match self {
            Encoding::F32 => numbers.saturating_mul(4),
            Encoding::Bf16 => numbers.saturating_mul(2),
            Encoding::Quantized(format) => format.bytes(numbers),
        }
    }
}

/// Some rows of one chunk in one layer, as they are stored.
#[derive(Clone, Debug)]
pub struct Stored<'a> {
    /// How numbers are stored.
    pub encoding: Encoding,
    /// Tokens of the whole chunk: what the scales are for.
    pub tokens: usize,
    /// Which of its rows these are.
    pub rows: Range<usize>,
    /// K of these rows before rotation, `[rows, kv_heads, head_dim]`.
    pub keys: &'a [u8],
    /// V of these rows, of the same shape.
    pub values: &'a [u8],
    /// The whole chunk's scales of K, `[ceil(tokens / GROUP), kv_heads, head_dim]`; none unless quantized.
    pub key_scales: &'a [f32],
    /// The whole chunk's scales of V, `[tokens, kv_heads]`; none unless quantized.
    pub value_scales: &'a [f32],
}

const OP: &str = "place";

impl Stored<'_> {
    pub(crate) fn check(&self, kv_heads: usize, head_dim: usize) -> Result<(), Error> {
        let Range { start, end } = self.rows;
        if start > end || end > self.tokens {
            return Err(argument(OP, format!("rows {start}..{end} of a chunk of {} tokens", self.tokens)));
        }
        let (scales, shape) = match self.encoding {
            Encoding::F32 | Encoding::Bf16 => ((0, 0), None),
            Encoding::Quantized(format) => {
                let shape = Shape { tokens: self.tokens, kv_heads, head_dim };
                ((key_scales(shape), value_scales(shape)), Some((format, shape)))
            }
        };
        if let Some((Format::Int4, shape)) = shape
            && !shape.head_dim.is_multiple_of(2)
        {
            return Err(argument(OP, format!("int4 packs two numbers of a head; head size {head_dim} is odd")));
        }
        let bytes = self.rows.len().saturating_mul(self.encoding.bytes(kv_heads.saturating_mul(head_dim)));
        let found = (self.keys.len(), self.values.len(), self.key_scales.len(), self.value_scales.len());
        if found != (bytes, bytes, scales.0, scales.1) {
            let what = format!(
                "{} bytes of keys, {} of values, {} and {} scales for rows {start}..{end} of [{}, {kv_heads}, {head_dim}] \
                 as {:?}, expected {bytes}, {bytes}, {} and {}",
                found.0, found.1, found.2, found.3, self.tokens, self.encoding, scales.0, scales.1
            );
            return Err(argument(OP, what));
        }
        Ok(())
    }
}

/// Rows of the destination for `slots`, through a block table if there is one. Fails on slots that do not ascend
/// strictly, that are beyond the table or the capacity, and on a block that the table names twice.
pub(crate) fn places(slots: &[u32], table: Option<&[u32]>, capacity: usize) -> Result<Vec<u32>, Error> {
    if let Some(pair) = slots.windows(2).find(|pair| pair[0] >= pair[1]) {
        return Err(argument(OP, format!("slots must ascend, found {} before {}", pair[0], pair[1])));
    }
    let mut places = slots.to_vec();
    if let Some(table) = table {
        let mut used: Vec<u32> = Vec::new();
        let mut last = None;
        for place in &mut places {
            let (index, within) = ((*place / crate::BLOCK) as usize, *place % crate::BLOCK);
            let Some(&block) = table.get(index) else {
                return Err(argument(OP, format!("slot {place} is beyond a table of {} blocks", table.len())));
            };
            if last != Some(index) {
                used.push(block);
                last = Some(index);
            }
            // A block that saturates is beyond any capacity.
            *place = block.saturating_mul(crate::BLOCK).saturating_add(within);
        }
        used.sort_unstable();
        if let Some(pair) = used.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(argument(OP, format!("block {} is twice in the table", pair[0])));
        }
    }
    match places.iter().zip(slots).find(|(place, _)| **place as usize >= capacity) {
        Some((_, slot)) => Err(argument(OP, format!("slot {slot} is beyond the capacity {capacity}"))),
        None => Ok(places),
    }
}

#[cfg(feature = "libtorch")]
pub use resident::{Piece, Resident};
#[cfg(feature = "libtorch")]
pub use tensors::place;

#[cfg(feature = "libtorch")]
mod tensors {
    use tch::{Device, Kind, Tensor};

    use super::{Error, OP, Piece, Resident, Stored, argument, places};
    use crate::blocks::Rows;
    use crate::cpu::number::Number;
    use crate::cpu::place::Destination;
    use crate::cuda::place::Target;
    use crate::rope::Rotation;
    use crate::{Isa, cpu, cuda, data};

    /// Places rows, parallel over the pool.
    ///
    /// - `keys`, `values`: the sequence's memory, `[capacity, kv_heads, head_dim]` or, in blocks of 64 tokens,
    ///   `[blocks, 64, kv_heads, head_dim]`; both alike, contiguous; f32 or bf16 on the CPU, bf16 or f16 on CUDA.
    /// - `slots`: one a row of all pieces together, strictly ascending.
    /// - `table`: the block of each 64 slots; without one, slot s is row s.
    /// - `pieces`: in host memory or on the device of `keys`, mixed as they come.
    /// - `rotation`: of the rows' positions.
    ///
    /// Fails, and writes nothing, on shapes, types, devices and lengths that do not fit, on slots that do not ascend or are
    /// beyond the capacity, and on a table with a block twice.
    pub fn place(
        keys: &mut Tensor,
        values: &mut Tensor,
        slots: &[u32],
        table: Option<&[u32]>,
        pieces: &[Piece<'_>],
        rotation: &Rotation,
    ) -> Result<(), Error> {
        let (capacity, kv_heads, head_dim) = match keys.size()[..] {
            [capacity, kv_heads, head_dim] => (capacity, kv_heads, head_dim),
            [blocks, block, kv_heads, head_dim] if block == i64::from(crate::BLOCK) => {
                (blocks * block, kv_heads, head_dim)
            }
            _ => return Err(argument(OP, format!("keys {:?} are neither rows nor blocks of rows", keys.size()))),
        };
        if keys.size() != values.size() || keys.kind() != values.kind() || kv_heads < 1 || head_dim < 1 {
            let (keys, values) = ((keys.size(), keys.kind()), (values.size(), values.kind()));
            return Err(argument(OP, format!("keys {keys:?} and values {values:?} do not fit")));
        }
        let (kv_heads, head_dim) = (kv_heads as usize, head_dim as usize);
        let mut rows = 0usize;
        for piece in pieces {
            piece.check(kv_heads, head_dim, keys.device())?;
            rows += piece.rows().len();
        }
        if rows != slots.len() || rotation.rows() != rows || 2 * rotation.half() != head_dim {
            let what = format!(
                "{rows} stored rows, {} slots and a rotation of {} rows by {} pairs do not fit head size {head_dim}",
                slots.len(),
                rotation.rows(),
                rotation.half()
            );
            return Err(argument(OP, what));
        }
        let places = places(slots, table, capacity as usize)?;
        if let Device::Cuda(index) = keys.device() {
            if !cuda::computes(keys.kind(), keys.device()) || head_dim as i64 % cuda::place::HEAD_DIM_STEP != 0 {
                return through_cpu(keys, values, &places, pieces, rotation);
            }
            let (cosines, sines) = rotation.tables();
            let rows = Rows { last: slots, table };
            return cuda::place::place(&*cuda::gpu(index)?, pieces, &Target { keys, values, rows, cosines, sines });
        }
        let pieces: Vec<Stored<'_>> = pieces.iter().map(Piece::on_cpu).collect::<Result<_, _>>()?;
        match keys.kind() {
            Kind::BFloat16 => of_kind::<half::bf16>(keys, values, &places, &pieces, rotation, kv_heads, head_dim),
            _ => of_kind::<f32>(keys, values, &places, &pieces, rotation, kv_heads, head_dim),
        }
    }

    /// Types and head sizes that no kernel of the device takes: placed on the CPU, then copied.
    fn through_cpu(
        keys: &mut Tensor,
        values: &mut Tensor,
        places: &[u32],
        pieces: &[Piece<'_>],
        rotation: &Rotation,
    ) -> Result<(), Error> {
        let shape = keys.size();
        let Some(&[kv_heads, head_dim]) = shape.last_chunk() else {
            return Err(argument(OP, format!("keys {shape:?}")));
        };
        let rows = || Tensor::f_zeros([places.len() as i64, kv_heads, head_dim], (Kind::Float, Device::Cpu));
        let (mut placed_keys, mut placed_values) = (rows()?, rows()?);
        let slots: Vec<u32> = (0..places.len() as u32).collect();
        let here = |piece: &Piece<'_>| match piece {
            Piece::Host(_) => Ok(None),
            Piece::Resident { layer, .. } => layer.to_device(Device::Cpu).map(Some),
        };
        let here: Vec<Option<Resident>> = pieces.iter().map(here).collect::<Result<_, Error>>()?;
        let pieces = pieces.iter().zip(&here).map(|(piece, here)| match here {
            Some(layer) => Piece::Resident { layer, rows: piece.rows() },
            None => piece.clone(),
        });
        let (pieces, rotation) = (Vec::from_iter(pieces), rotation.to_device(Device::Cpu)?);
        place(&mut placed_keys, &mut placed_values, &slots, None, &pieces, &rotation)?;
        let index: Vec<i64> = places.iter().map(|&place| i64::from(place)).collect();
        let index = Tensor::f_from_slice(&index)?.f_to_device(keys.device())?;
        for (to, from) in [(keys, placed_keys), (values, placed_values)] {
            let from = from.f_to_device(to.device())?.f_to_kind(to.kind())?;
            let _ = to.f_view([-1, kv_heads, head_dim])?.f_index_copy_(0, &index, &from)?;
        }
        Ok(())
    }

    fn of_kind<T: Number + data::Element>(
        keys: &mut Tensor,
        values: &mut Tensor,
        places: &[u32],
        pieces: &[Stored<'_>],
        rotation: &Rotation,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<(), Error> {
        let (keys, values) = data::numbers_mut_pair::<T>(OP, keys, values)?;
        let destination = Destination { keys, values, kv_heads, head_dim };
        cpu::place::place(Isa::best(), destination, places, pieces, rotation.angles()?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
