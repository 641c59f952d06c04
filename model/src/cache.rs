//! The KV of one sequence in the decoder's memory, by slot.
//!
//! Blocks of 64 tokens, one after another: the block table is the identity, so a layer's keys are one contiguous
//! tensor. Keys are rotated to their positions.

use kvsplice_kernels::cuda::computes;
use kvsplice_kernels::cuda::place::scatter_rows;
use kvsplice_kernels::place::{Piece, place};
use kvsplice_kernels::rope::Rotation;
use tch::{Device, Kind, Tensor};

use crate::resident::LayerKv;
use crate::{Config, Error};

/// Tokens a block.
pub const BLOCK: u32 = 64;

/// Head sizes that the fused kernels of a GPU take are multiples of this.
const FUSED_HEAD_DIM_STEP: i64 = 16;

/// Slots or rows as the library indexes with, on `device`; nobody waits for the copy.
pub(crate) fn indices(numbers: &[u32], device: Device) -> Result<Tensor, Error> {
    let numbers: Vec<i64> = numbers.iter().map(|&number| i64::from(number)).collect();
    Ok(on_device(&Tensor::f_from_slice(&numbers)?, device)?)
}

/// A small tensor on `device`, without waiting for what the device still computes.
pub(crate) fn on_device(tensor: &Tensor, device: Device) -> Result<Tensor, tch::TchError> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    tensor.f_to_device_(device, tensor.kind(), true, false)
}

/// Rotated keys and values of every layer.
#[derive(Debug)]
pub struct KvCache {
    /// One `[capacity, kv_heads, head_dim]` a layer.
    keys: Vec<Tensor>,
    /// As `keys`.
    values: Vec<Tensor>,
    capacity: u32,
    kind: Kind,
    device: Device,
}

impl KvCache {
    /// Room for at least `tokens` slots, zeroed.
    pub fn new(config: &Config, tokens: u32, kind: Kind, device: Device) -> Result<Self, Error> {
        let capacity = tokens.div_ceil(BLOCK) * BLOCK;
        let shape = [i64::from(capacity), i64::from(config.kv_heads), i64::from(config.head_dim)];
        let zeros = || -> Result<Vec<Tensor>, Error> {
            (0..config.layers).map(|_| Ok(Tensor::f_zeros(shape, (kind, device))?)).collect()
        };
        Ok(Self { keys: zeros()?, values: zeros()?, capacity, kind, device })
    }

    /// Slots.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Keys and values of a layer, each `[capacity, kv_heads, head_dim]`.
    pub fn layer(&self, layer: u32) -> (&Tensor, &Tensor) {
        (&self.keys[layer as usize], &self.values[layer as usize])
    }

    /// Writes computed rows: `keys` (rotated) and `values`, `[slots, kv_heads, head_dim]`.
    pub fn write(&mut self, layer: u32, slots: &[u32], keys: &Tensor, values: &Tensor) -> Result<(), Error> {
        let (Some(&first), Some(&last)) = (slots.first(), slots.last()) else { return Ok(()) };
        if last >= self.capacity {
            return Err(Error::Argument(format!("slot {last} is beyond the cache's {}", self.capacity)));
        }
        let contiguous = (last - first) as usize + 1 == slots.len();
        let index = if contiguous { None } else { Some(indices(slots, self.device)?) };
        for (cache, rows) in [(&mut self.keys[layer as usize], keys), (&mut self.values[layer as usize], values)] {
            match &index {
                None => cache.f_narrow(0, i64::from(first), slots.len() as i64)?.f_copy_(rows)?,
                Some(index) => drop(cache.f_index_copy_(0, index, rows)?),
            }
        }
        Ok(())
    }

    /// Writes the rows of stored chunks in one pass: keys before rotation (rotated in f32, with one rounding) and values.
    /// `chunks`: each with its first row that is written, in host memory or on this cache's device; encodings may differ.
    /// `slots` (ascending) and `rotation` are of the rows, in their order. Fails, and writes nothing, on what does not fit.
    pub fn place(
        &mut self,
        layer: u32,
        slots: &[u32],
        chunks: &[(&LayerKv, u32)],
        rotation: &Rotation,
    ) -> Result<(), Error> {
        let scales = chunks.iter().map(|(chunk, _)| chunk.scales()).collect::<Result<Vec<_>, _>>()?;
        let pieces = chunks.iter().zip(&scales);
        let pieces: Vec<Piece<'_>> =
            pieces.map(|((chunk, first), scales)| chunk.rows(*first, scales)).collect::<Result<_, _>>()?;
        let (keys, values) = (&mut self.keys[layer as usize], &mut self.values[layer as usize]);
        Ok(place(keys, values, slots, None, &pieces, rotation)?)
    }

    /// Whether the fused kernels of a GPU take this cache's rows.
    pub(crate) fn scatters(&self) -> bool {
        computes(self.kind, self.device) && self.head_dim() % FUSED_HEAD_DIM_STEP == 0
    }

    /// Projected rows `[slots, heads + 2 · kv_heads, head_dim]` in one pass on the device: `bias` is added, keys are rotated
    /// and written with the values; returns the rotated queries.
    pub(crate) fn scatter(
        &mut self,
        layer: u32,
        slots: &[u32],
        projected: &Tensor,
        bias: Option<&Tensor>,
        rotation: &Rotation,
    ) -> Result<Tensor, Error> {
        let (keys, values) = (&mut self.keys[layer as usize], &mut self.values[layer as usize]);
        Ok(scatter_rows(projected, bias, keys, values, slots, rotation)?)
    }

    fn head_dim(&self) -> i64 {
        self.keys.first().and_then(|keys| keys.size().last().copied()).unwrap_or(0)
    }

    /// Rotated keys and values at these slots of a layer, `[slots, kv_heads, head_dim]` each.
    pub fn read(&self, layer: u32, slots: &[u32]) -> Result<(Tensor, Tensor), Error> {
        let index = indices(slots, self.device)?;
        let (keys, values) = self.layer(layer);
        Ok((keys.f_index_select(0, &index)?, values.f_index_select(0, &index)?))
    }

    /// A copy of block `index`, every layer.
    pub fn export(&self, index: usize) -> Result<KvBlock, Error> {
        let first = index as i64 * i64::from(BLOCK);
        let stack = |layers: &[Tensor]| -> Result<Tensor, Error> {
            let blocks: Vec<Tensor> =
                layers.iter().map(|layer| layer.f_narrow(0, first, i64::from(BLOCK))).collect::<Result<_, _>>()?;
            Ok(Tensor::f_stack(&blocks, 0)?)
        };
        Ok(KvBlock { keys: stack(&self.keys)?, values: stack(&self.values)? })
    }

    /// Writes a block that another sequence of this model has exported from the same place.
    pub fn import(&mut self, index: usize, block: &KvBlock) -> Result<(), Error> {
        let first = index as i64 * i64::from(BLOCK);
        for (layers, block) in [(&mut self.keys, &block.keys), (&mut self.values, &block.values)] {
            for (layer, tensor) in layers.iter_mut().enumerate() {
                tensor.f_narrow(0, first, i64::from(BLOCK))?.f_copy_(&block.f_select(0, layer as i64)?)?;
            }
        }
        Ok(())
    }

    /// Copies slots `0..tokens` of every layer from another cache.
    pub fn copy_start(&mut self, from: &Self, tokens: u32) -> Result<(), Error> {
        let tokens = i64::from(tokens);
        for (to, from) in self.keys.iter().zip(&from.keys).chain(self.values.iter().zip(&from.values)) {
            to.f_narrow(0, 0, tokens)?.f_copy_(&from.f_narrow(0, 0, tokens)?)?;
        }
        Ok(())
    }
}

/// [`BLOCK`] tokens of a sequence, outside of its cache.
#[derive(Debug)]
pub struct KvBlock {
    /// `[layers, BLOCK, kv_heads, head_dim]`, rotated.
    keys: Tensor,
    /// As `keys`.
    values: Tensor,
}
