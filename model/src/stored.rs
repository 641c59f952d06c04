//! One layer of a chunk as it is stored: bytes ⇄ numbers.
//!
//! It knows encodings; what slots the rows go to, and rotation, are the cache's business.

use bytes::Bytes;
use kvsplice_kernels::place::{self, Stored};
use kvsplice_kernels::quantize::{self, Format, Shape};
use kvsplice_kv::{Encoding, KvLayout, Part};
use tch::{Kind, Tensor};

use crate::Error;

const _: () = assert!(quantize::GROUP == kvsplice_kv::SCALE_GROUP as usize);

/// One layer of a chunk as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLayer {
    /// Shape and encoding.
    pub layout: KvLayout,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// The layer's parts, one after another; see [`Part`].
    pub bytes: Bytes,
}

impl StoredLayer {
    /// Encodes keys before rotation and values, each `[tokens, kv_heads, head_dim]`, any float type. Fails on another
    /// shape, and where numbers are not finite and the encoding has scales.
    pub fn encode(layout: KvLayout, keys: &Tensor, values: &Tensor) -> Result<Self, Error> {
        let tokens = keys.size().first().copied().unwrap_or(0);
        let shape = [tokens, i64::from(layout.kv_heads), i64::from(layout.head_dim)];
        if keys.size() != shape || values.size() != shape {
            let (keys, values) = (keys.size(), values.size());
            return Err(Error::Argument(format!("keys {keys:?} and values {values:?} do not fit {layout}")));
        }
        let tokens = tokens as u32;
        let mut bytes = vec![0; layout.layer_bytes(tokens)];
        for (tensor, part, scales) in [(keys, Part::Keys, Part::KeyScales), (values, Part::Values, Part::ValueScales)] {
            let place = layout.part_range(part, tokens);
            match format(layout.encoding) {
                Err(kind) => copy(&tensor.f_to_kind(kind)?, &mut bytes[place])?,
                Ok(format) => {
                    let shape = quantized(&layout, tokens);
                    let mut numbers = vec![0f32; tensor.numel()];
                    tensor.f_to_kind(Kind::Float)?.f_contiguous()?.f_copy_data(&mut numbers, tensor.numel())?;
                    let scale_place = layout.part_range(scales, tokens);
                    let mut scale_numbers = vec![0f32; scale_place.len() / 4];
                    let encode = if part == Part::Keys { quantize::encode_keys } else { quantize::encode_values };
                    encode(format, &numbers, shape, &mut bytes[place], &mut scale_numbers)?;
                    bytes[scale_place].copy_from_slice(&quantize::write_scales(&scale_numbers));
                }
            }
        }
        Ok(Self { layout, tokens, bytes: bytes.into() })
    }

    /// Scales of keys and of values; none unless the encoding has them. Fails when the bytes do not fit the layout, and on
    /// a scale that no encoder writes.
    pub(crate) fn scales(&self) -> Result<Scales, Error> {
        let Self { layout, tokens, bytes } = self;
        if bytes.len() != layout.layer_bytes(*tokens) {
            let found = bytes.len();
            return Err(Error::Argument(format!("a stored layer of {found} bytes is not {tokens} tokens of {layout}")));
        }
        let scales = |part| quantize::read_scales(&bytes[layout.part_range(part, *tokens)]);
        Ok(Scales { keys: scales(Part::KeyScales)?, values: scales(Part::ValueScales)? })
    }

    /// Rows from `first` on, with the scales that [`StoredLayer::scales`] gave.
    pub(crate) fn rows<'a>(&'a self, first: u32, scales: &'a Scales) -> Result<Stored<'a>, Error> {
        let Self { layout, tokens, bytes } = self;
        if first > *tokens {
            return Err(Error::Argument(format!("token {first} of a chunk of {tokens}")));
        }
        let part = |part| {
            let range = layout.part_range(part, *tokens);
            &bytes[range.start + first as usize * layout.row_bytes(part)..range.end]
        };
        Ok(Stored {
            encoding: match format(layout.encoding) {
                Ok(format) => place::Encoding::Quantized(format),
                Err(Kind::Float) => place::Encoding::F32,
                Err(_) => place::Encoding::Bf16,
            },
            tokens: *tokens as usize,
            rows: first as usize..*tokens as usize,
            keys: part(Part::Keys),
            values: part(Part::Values),
            key_scales: &scales.keys,
            value_scales: &scales.values,
        })
    }

    /// Keys in f32 (to be rotated) and values, each `[tokens, kv_heads, head_dim]`. Fails when the bytes do not fit the
    /// layout.
    pub(crate) fn tensors(&self) -> Result<(Tensor, Tensor), Error> {
        let Self { layout, tokens, .. } = self;
        let shape = [i64::from(*tokens), i64::from(layout.kv_heads), i64::from(layout.head_dim)];
        let scales = self.scales()?;
        let stored = self.rows(0, &scales)?;
        match format(layout.encoding) {
            Err(kind) => {
                let keys = Tensor::f_from_data_size(stored.keys, &shape, kind)?.f_to_kind(Kind::Float)?;
                Ok((keys, Tensor::f_from_data_size(stored.values, &shape, kind)?))
            }
            Ok(format) => {
                let mut numbers = vec![0f32; stored.rows.len() * layout.kv_heads as usize * layout.head_dim as usize];
                let whole = quantized(layout, *tokens);
                quantize::decode_keys(format, stored.keys, &scales.keys, whole, stored.rows.clone(), &mut numbers)?;
                let keys = Tensor::f_from_slice(&numbers)?.f_view(shape)?;
                quantize::decode_values(format, stored.values, &scales.values, whole, stored.rows, &mut numbers)?;
                Ok((keys, Tensor::f_from_slice(&numbers)?.f_view(shape)?))
            }
        }
    }

    /// Several chunks one after another, as [`StoredLayer::tensors`] gives them; `None` for no chunk. Encodings may differ.
    pub(crate) fn join<'a>(chunks: impl IntoIterator<Item = &'a Self>) -> Result<Option<(Tensor, Tensor)>, Error> {
        let mut pieces = chunks.into_iter().map(Self::tensors).collect::<Result<Vec<_>, _>>()?;
        if pieces.len() <= 1 {
            return Ok(pieces.pop());
        }
        let first = pieces.first().map(|(_, values)| values.kind());
        let one_kind = pieces.iter().all(|(_, values)| Some(values.kind()) == first);
        let (keys, mut values): (Vec<Tensor>, Vec<Tensor>) = pieces.into_iter().unzip();
        if !one_kind {
            values = values.iter().map(|values| values.f_to_kind(Kind::Float)).collect::<Result<_, _>>()?;
        }
        Ok(Some((Tensor::f_cat(&keys, 0)?, Tensor::f_cat(&values, 0)?)))
    }
}

/// Scales out of a stored layer, which need not be aligned there.
pub(crate) struct Scales {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// How the kernels name a quantized encoding; the library's type for any other.
fn format(encoding: Encoding) -> Result<Format, Kind> {
    match encoding {
        Encoding::F32 => Err(Kind::Float),
        Encoding::Bf16 => Err(Kind::BFloat16),
        Encoding::Int8 => Ok(Format::Int8),
        Encoding::Fp8 => Ok(Format::Fp8),
        Encoding::Int4 => Ok(Format::Int4),
    }
}

fn quantized(layout: &KvLayout, tokens: u32) -> Shape {
    Shape { tokens: tokens as usize, kv_heads: layout.kv_heads as usize, head_dim: layout.head_dim as usize }
}

fn copy(tensor: &Tensor, to: &mut [u8]) -> Result<(), Error> {
    let tensor = tensor.f_contiguous()?;
    Ok(tensor.f_copy_data_u8(to, tensor.numel())?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn random(tokens: i64, seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn([tokens, 2, 16], (Kind::Float, Device::Cpu))
    }

    fn stored(encoding: Encoding, tokens: i64) -> (Tensor, Tensor, StoredLayer) {
        let layout = KvLayout { layers: 1, kv_heads: 2, head_dim: 16, encoding };
        let (keys, values) = (random(tokens, 1), random(tokens, 2));
        let stored = StoredLayer::encode(layout, &keys, &values).unwrap();
        (keys, values, stored)
    }

    fn error(got: &Tensor, expected: &Tensor) -> f64 {
        (got.to_kind(Kind::Float) - expected).abs().max().double_value(&[])
    }

    #[test]
    fn what_is_encoded_is_read_back_within_the_encodings_step() {
        // Numbers of a normal distribution stay below 5; a step is at most that over the greatest code, or 2⁻⁴ of a number.
        let bounds = [
            (Encoding::F32, 0.0),
            (Encoding::Bf16, 0.02),
            (Encoding::Int8, 0.02),
            (Encoding::Fp8, 0.3),
            (Encoding::Int4, 0.36),
        ];
        for (encoding, bound) in bounds {
            for tokens in [1, 63, 64, 65, 200] {
                let (keys, values, stored) = stored(encoding, tokens);
                let (got_keys, got_values) = stored.tensors().unwrap();
                assert!(error(&got_keys, &keys) <= bound, "{encoding}: keys {}", error(&got_keys, &keys));
                assert!(error(&got_values, &values) <= bound, "{encoding}: values {}", error(&got_values, &values));
            }
        }
    }

    #[test]
    fn chunks_of_several_encodings_join() {
        let chunks: Vec<StoredLayer> = Encoding::ALL.iter().map(|&encoding| stored(encoding, 70).2).collect();
        let (keys, values) = StoredLayer::join(&chunks).unwrap().unwrap();
        assert_eq!((keys.size(), values.size()), (vec![5 * 70, 2, 16], vec![5 * 70, 2, 16]));
        for (index, chunk) in chunks.iter().enumerate() {
            let (own_keys, own_values) = chunk.tensors().unwrap();
            assert!(keys.narrow(0, index as i64 * 70, 70).equal(&own_keys));
            assert!(values.narrow(0, index as i64 * 70, 70).equal(&own_values.to_kind(Kind::Float)));
        }
        assert!(StoredLayer::join([]).unwrap().is_none());
    }

    #[test]
    fn bytes_that_do_not_fit_are_refused() {
        let (keys, values, stored) = stored(Encoding::Int8, 70);
        assert!(StoredLayer { tokens: 71, ..stored.clone() }.tensors().is_err());
        assert!(StoredLayer { bytes: stored.bytes.slice(1..), ..stored.clone() }.tensors().is_err());
        assert!(StoredLayer::encode(stored.layout, &keys, &values.narrow(0, 0, 69)).is_err());
        let infinite = keys.fill(f64::INFINITY);
        assert!(StoredLayer::encode(stored.layout, &infinite, &values).is_err());
    }
}
