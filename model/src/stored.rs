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
            encoding: encoding(layout.encoding),
            tokens: *tokens as usize,
            rows: first as usize..*tokens as usize,
            keys: part(Part::Keys),
            values: part(Part::Values),
            key_scales: &scales.keys,
            value_scales: &scales.values,
        })
    }
}

/// Scales out of a stored layer, which need not be aligned there.
#[derive(Default)]
pub(crate) struct Scales {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// How the kernels name an encoding.
pub(crate) fn encoding(encoding: Encoding) -> place::Encoding {
    match format(encoding) {
        Ok(format) => place::Encoding::Quantized(format),
        Err(Kind::Float) => place::Encoding::F32,
        Err(_) => place::Encoding::Bf16,
    }
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
    use crate::Config;
    use crate::cache::KvCache;
    use crate::resident::LayerKv;
    use kvsplice_kernels::rope::RopeTable;

    /// What a cache holds once the chunks are placed without a rotation, `[tokens, kv_heads, head_dim]` each.
    fn placed(chunks: &[&StoredLayer]) -> Result<(Tensor, Tensor), Error> {
        let tokens = chunks.iter().map(|chunk| chunk.tokens).sum::<u32>();
        let config = Config { layers: 1, kv_heads: 2, head_dim: 16, ..Config::tiny(64) };
        let mut cache = KvCache::new(&config, tokens, Kind::Float, Device::Cpu)?;
        let still = RopeTable::new(&[1.0; 8], 1)?.at(&vec![0; tokens as usize])?;
        let layers: Vec<_> = chunks.iter().map(|&chunk| LayerKv::Host(chunk.clone())).collect();
        let pieces: Vec<_> = layers.iter().map(|layer| (layer, 0)).collect();
        cache.place(0, &Vec::from_iter(0..tokens), &pieces, &still)?;
        let (keys, values) = cache.layer(0);
        Ok((keys.narrow(0, 0, tokens.into()), values.narrow(0, 0, tokens.into())))
    }

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
                let (got_keys, got_values) = placed(&[&stored]).unwrap();
                assert!(error(&got_keys, &keys) <= bound, "{encoding}: keys {}", error(&got_keys, &keys));
                assert!(error(&got_values, &values) <= bound, "{encoding}: values {}", error(&got_values, &values));
            }
        }
    }

    #[test]
    fn chunks_of_several_encodings_lie_one_after_another() {
        let chunks: Vec<StoredLayer> = Encoding::ALL.iter().map(|&encoding| stored(encoding, 70).2).collect();
        let (keys, values) = placed(&chunks.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!((keys.size(), values.size()), (vec![5 * 70, 2, 16], vec![5 * 70, 2, 16]));
        for (index, chunk) in chunks.iter().enumerate() {
            let (own_keys, own_values) = placed(&[chunk]).unwrap();
            assert!(keys.narrow(0, index as i64 * 70, 70).equal(&own_keys));
            assert!(values.narrow(0, index as i64 * 70, 70).equal(&own_values));
        }
    }

    #[test]
    fn bytes_that_do_not_fit_are_refused() {
        let (keys, values, stored) = stored(Encoding::Int8, 70);
        assert!(placed(&[&StoredLayer { tokens: 71, ..stored.clone() }]).is_err());
        assert!(placed(&[&StoredLayer { bytes: stored.bytes.slice(1..), ..stored.clone() }]).is_err());
        assert!(StoredLayer::encode(stored.layout, &keys, &values.narrow(0, 0, 69)).is_err());
        let infinite = keys.fill(f64::INFINITY);
        assert!(StoredLayer::encode(stored.layout, &infinite, &values).is_err());
    }
}
