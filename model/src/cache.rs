//! The KV of one sequence in the decoder's memory, by slot.
//!
//! Blocks of 64 tokens, one after another: the block table is the identity, so a layer's keys are one contiguous
//! tensor. Keys are rotated to their positions.

use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::Encoding;
use tch::{Device, Kind, Tensor};

use crate::{Config, Error};

/// Tokens a block.
pub const BLOCK: u32 = 64;

/// Rotated keys and values of every layer.
#[derive(Debug)]
pub struct KvCache {
    /// One `[capacity, kv_heads, head_dim]` a layer.
    keys: Vec<Tensor>,
    /// As `keys`.
    values: Vec<Tensor>,
    capacity: u32,
    kind: Kind,
}

impl KvCache {
    /// Room for at least `tokens` slots, zeroed.
    pub fn new(config: &Config, tokens: u32, kind: Kind) -> Result<Self, Error> {
        let capacity = tokens.div_ceil(BLOCK) * BLOCK;
        let shape = [i64::from(capacity), i64::from(config.kv_heads), i64::from(config.head_dim)];
        let zeros = || -> Result<Vec<Tensor>, Error> {
            (0..config.layers).map(|_| Ok(Tensor::f_zeros(shape, (kind, Device::Cpu))?)).collect()
        };
        Ok(Self { keys: zeros()?, values: zeros()?, capacity, kind })
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
        let index = if contiguous {
            None
        } else {
            Some(Tensor::f_from_slice(&slots.iter().map(|&slot| i64::from(slot)).collect::<Vec<_>>())?)
        };
        for (cache, rows) in [(&mut self.keys[layer as usize], keys), (&mut self.values[layer as usize], values)] {
            match &index {
                None => cache.f_narrow(0, i64::from(first), slots.len() as i64)?.f_copy_(rows)?,
                Some(index) => drop(cache.f_index_copy_(0, index, rows)?),
            }
        }
        Ok(())
    }

    /// Writes stored rows: keys before rotation (rotated here, in f32, with one rounding) and values. `slots` and
    /// `rotation` are of the rows, in their order.
    pub fn place(&mut self, layer: u32, slots: &[u32], stored: &StoredLayer, rotation: &Rotation) -> Result<(), Error> {
        let shape = &self.keys[layer as usize].size()[1..];
        let (keys, values) = stored.tensors(shape[0], shape[1])?;
        if keys.size()[0] != slots.len() as i64 {
            return Err(Error::Argument(format!("{} stored rows do not fit {} slots", keys.size()[0], slots.len())));
        }
        let rotated = rotation.apply(&keys)?.f_to_kind(self.kind)?;
        self.write(layer, slots, &rotated, &values.f_to_kind(self.kind)?)
    }

    /// Rotated keys and values at these slots of a layer, `[slots, kv_heads, head_dim]` each.
    pub fn read(&self, layer: u32, slots: &[u32]) -> Result<(Tensor, Tensor), Error> {
        let index = Tensor::f_from_slice(&slots.iter().map(|&slot| i64::from(slot)).collect::<Vec<_>>())?;
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

/// One layer of a chunk as it is stored: K bytes, then V bytes.
#[derive(Clone, Debug)]
pub struct StoredLayer {
    /// How numbers are stored.
    pub encoding: Encoding,
    /// K `[tokens, kv_heads, head_dim]` before rotation.
    pub keys: bytes::Bytes,
    /// V `[tokens, kv_heads, head_dim]`.
    pub values: bytes::Bytes,
}

impl StoredLayer {
    /// From one buffer that holds K, then V.
    pub fn split(encoding: Encoding, layer: &bytes::Bytes) -> Self {
        let half = layer.len() / 2;
        Self { encoding, keys: layer.slice(..half), values: layer.slice(half..) }
    }

    /// Without the first `rows` of `tokens` rows.
    pub fn skip(&self, rows: usize, tokens: usize) -> Self {
        let rest = |bytes: &bytes::Bytes| {
            let row = bytes.len().checked_div(tokens).unwrap_or(0);
            bytes.slice((rows * row).min(bytes.len())..)
        };
        Self { encoding: self.encoding, keys: rest(&self.keys), values: rest(&self.values) }
    }

    /// Several chunks' rows one after another; `None` for no chunk. One large operation is faster than many small ones.
    /// Fails on mixed encodings.
    pub fn join<'a>(layers: impl IntoIterator<Item = &'a Self>) -> Result<Option<Self>, Error> {
        let mut joined: Option<(Encoding, Vec<u8>, Vec<u8>)> = None;
        for layer in layers {
            let (encoding, keys, values) = joined.get_or_insert((layer.encoding, Vec::new(), Vec::new()));
            if *encoding != layer.encoding {
                return Err(Error::Argument(format!("chunks are stored as {encoding} and as {}", layer.encoding)));
            }
            keys.extend_from_slice(&layer.keys);
            values.extend_from_slice(&layer.values);
        }
        Ok(joined.map(|(encoding, keys, values)| Self { encoding, keys: keys.into(), values: values.into() }))
    }

    /// Keys in f32 (to be rotated) and values as stored, each `[tokens, kv_heads, head_dim]`.
    pub(crate) fn tensors(&self, kv_heads: i64, head_dim: i64) -> Result<(Tensor, Tensor), Error> {
        let kind = kind_of(self.encoding);
        let row = kv_heads as usize * head_dim as usize * self.encoding.bytes();
        if self.keys.len() != self.values.len() || !self.keys.len().is_multiple_of(row) {
            let (keys, values) = (self.keys.len(), self.values.len());
            return Err(Error::Argument(format!(
                "stored layer of {keys} and {values} bytes does not fit rows of {row}"
            )));
        }
        let shape = [(self.keys.len() / row) as i64, kv_heads, head_dim];
        let keys = Tensor::f_from_data_size(&self.keys, &shape, kind)?.f_to_kind(Kind::Float)?;
        Ok((keys, Tensor::f_from_data_size(&self.values, &shape, kind)?))
    }
}

/// The library's type for an encoding.
pub(crate) fn kind_of(encoding: Encoding) -> Kind {
    match encoding {
        Encoding::F32 => Kind::Float,
        Encoding::Bf16 => Kind::BFloat16,
    }
}
