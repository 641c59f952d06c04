//! The decoder's forward pass, one layer at a time, over ragged batches of rows.
//!
//! The same code serves full and sparse prefill, decode, encoding and the auxiliary model: a batch is a list of
//! segments, each a run of rows of one sequence with its slots. It does not know why a row is computed.

use kvsplice_kernels::attention::{Sequence, View};
use kvsplice_kernels::cuda::elementwise;
use kvsplice_kernels::memory::release_unused;
use kvsplice_kernels::norm::rms_norm;
use kvsplice_kernels::rope::{RopeTable, Rotation};
use tch::{Device, Kind, Tensor};

use crate::attention::{TwoPart, attend};
use crate::cache::{KvCache, indices, on_device};
use crate::matrix::{Gates, Matrix, fused};
use crate::weights::{LayerWeights, Weights};
use crate::{Config, Dtype, Error};

/// Rows of one forward call at most. The library's products (bf16) pack the weights anew each time: of 512 rows that is a
/// tenth of the time, of 1024 half as much; beyond that little is gained, and the buffers grow.
pub const SLICE_ROWS: usize = 1024;

/// How many of `rows` come next, if at most `most` may: as few slices as possible, of nearly one size.
pub fn slice_of(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most.max(1)).max(1))
}

/// Pieces `[rows, ..]` one after another.
pub fn joined(mut pieces: Vec<Tensor>) -> Result<Tensor, Error> {
    match pieces.len() {
        1 => Ok(pieces.remove(0)),
        _ => Ok(Tensor::f_cat(&pieces, 0)?),
    }
}

#[derive(Debug)]
struct Layer {
    attention_norm: Tensor,
    /// `[(heads + 2 · kv_heads) · head_dim, hidden]`
    qkv: Matrix,
    qkv_bias: Option<Tensor>,
    qk_norm: Option<[Tensor; 2]>,
    output: Matrix,
    mlp_norm: Tensor,
    gates: Gates,
    down: Matrix,
}

/// The weights of a model in memory.
#[derive(Debug)]
pub struct Decoder {
    config: Config,
    dtype: Dtype,
    device: Device,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Matrix,
    rope: RopeTable,
}

/// Queries, keys and values of a batch, each `[rows, heads or kv_heads, head_dim]`, before rotation.
#[derive(Debug)]
pub struct Qkv {
    /// `[rows, heads, head_dim]`
    pub query: Tensor,
    /// `[rows, kv_heads, head_dim]`
    pub key: Tensor,
    /// `[rows, kv_heads, head_dim]`
    pub value: Tensor,
}

/// Rows of one sequence in a batch.
#[derive(Debug)]
pub struct Segment<'a> {
    /// The sequence's KV; the rows' own is written into it.
    pub cache: &'a mut KvCache,
    /// The rows' slots, strictly ascending.
    pub slots: &'a [u32],
    /// How rows behind the context attend, if not causally.
    pub two_part: Option<&'a TwoPart>,
}

/// What a layer computes of its rows before attention.
#[derive(Debug)]
pub struct Projected {
    /// `[rows, heads, head_dim]`, rotated.
    pub query: Tensor,
    /// `[rows, kv_heads, head_dim]`, before rotation.
    pub key: Tensor,
    /// `[rows, kv_heads, head_dim]`
    pub rotated_key: Tensor,
    /// `[rows, kv_heads, head_dim]`
    pub value: Tensor,
}

/// Which rows of a batch go on after their keys and values are written.
#[derive(Clone, Copy, Debug)]
pub enum Keep<'a> {
    /// Every row.
    All,
    /// These rows of the batch, ascending.
    Rows(&'a [usize]),
}

impl Decoder {
    pub(crate) fn load(
        config: &Config,
        mut weights: Box<dyn Weights>,
        dtype: Dtype,
        device: Device,
    ) -> Result<Self, Error> {
        let kind = dtype.kind();
        let check = |what: &str, tensor: &Tensor, shape: &[u32]| {
            let expected: Vec<i64> = shape.iter().map(|&size| i64::from(size)).collect();
            if tensor.size() == expected {
                Ok(())
            } else {
                Err(Error::Shape { tensor: what.to_owned(), found: tensor.size(), expected })
            }
        };
        let outer = weights.outer(config)?;
        check("embedding", &outer.embedding, &[config.vocabulary, config.hidden])?;
        check("last norm", &outer.norm, &[config.hidden])?;
        let embedding = outer.embedding.f_to_device(device)?.f_to_kind(kind)?;
        let head = match &outer.head {
            // Rows of it are looked up: it stays as it is, rather than in memory twice.
            None => Matrix::Rows(embedding.shallow_clone()),
            Some(head) => {
                check("output matrix", head, &[config.vocabulary, config.hidden])?;
                Matrix::new(head, kind, device)?
            }
        };
        let mut layers = Vec::new();
        for index in 0..config.layers {
            let layer = weights.layer(config, index)?;
            let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
            check("attention norm", &layer.attention_norm, &[config.hidden])?;
            check("MLP norm", &layer.mlp_norm, &[config.hidden])?;
            if let Some([query, key, value]) = &layer.qkv_bias {
                check("query bias", query, &[queries])?;
                check("key bias", key, &[keys])?;
                check("value bias", value, &[keys])?;
            }
            if let Some([query, key]) = &layer.qk_norm {
                check("query norm", query, &[config.head_dim])?;
                check("key norm", key, &[config.head_dim])?;
            }
            check("query", &layer.query, &[queries, config.hidden])?;
            check("key", &layer.key, &[keys, config.hidden])?;
            check("value", &layer.value, &[keys, config.hidden])?;
            check("attention output", &layer.output, &[config.hidden, queries])?;
            check("gate", &layer.gate, &[config.intermediate, config.hidden])?;
            check("up", &layer.up, &[config.intermediate, config.hidden])?;
            check("down", &layer.down, &[config.hidden, config.intermediate])?;
            layers.push(Layer::new(layer, kind, device)?);
            release_unused();
        }
        Ok(Self {
            rope: RopeTable::new(&config.inverse_frequencies(), config.context)?.to_device(device)?,
            config: config.clone(),
            dtype,
            device,
            embedding,
            layers,
            norm: outer.norm.f_to_device(device)?.f_to_kind(kind)?,
            head,
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it computes in.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Where it computes.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Waits until the device has computed what it was given; a CPU always has.
    pub fn synchronize(&self) {
        if let Device::Cuda(index) = self.device {
            tch::Cuda::synchronize(index as i64);
        }
    }

    /// Bytes of weights that one decoded token reads.
    pub fn weight_bytes(&self) -> u64 {
        let weights = self.config.layer_weights() * u64::from(self.config.layers);
        (weights + u64::from(self.config.vocabulary) * u64::from(self.config.hidden)) * self.dtype.bytes() as u64
    }

    /// Rotation to these positions.
    pub fn rotation(&self, positions: &[u32]) -> Result<Rotation, Error> {
        Ok(self.rope.at(positions)?)
    }

    /// A cache for a sequence of this model.
    pub fn cache(&self, tokens: u32) -> Result<KvCache, Error> {
        if tokens > self.config.context {
            return Err(Error::Argument(format!("{tokens} tokens are more than the model's {}", self.config.context)));
        }
        KvCache::new(&self.config, tokens, self.dtype.kind(), self.device)
    }

    /// Token ids → `[rows, hidden]`. Fails on an id outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor, Error> {
        if let Some(id) = ids.iter().find(|&&id| id >= self.config.vocabulary) {
            return Err(Error::Argument(format!("token id {id} is not below {}", self.config.vocabulary)));
        }
        Ok(self.embedding.f_index_select(0, &indices(ids, self.device)?)?)
    }

    /// One layer over a batch of at most [`SLICE_ROWS`] rows (more work, but slower and with larger buffers).
    ///
    /// - `hidden`: `[rows, hidden]`, the rows of all segments one after another.
    /// - `rotation`: of the rows' positions.
    /// - `capture`: receives keys before rotation and values of all rows, `[rows, kv_heads, head_dim]`.
    ///
    /// Every row's K and V is written to its cache first, then the kept rows attend to slots up to their own.
    /// Returns `[kept, hidden]`.
    pub fn layer(
        &self,
        layer: u32,
        hidden: &Tensor,
        rotation: &Rotation,
        segments: &mut [Segment<'_>],
        keep: Keep<'_>,
        capture: Option<&mut Vec<(Tensor, Tensor)>>,
    ) -> Result<Tensor, Error> {
        let query = match capture {
            None if self.scatters(layer, segments) => self.project_into(layer, hidden, rotation, segments)?,
            capture => {
                let Projected { query, key, rotated_key: keys, value } = self.project(layer, hidden, rotation)?;
                let mut first = 0;
                for segment in segments.iter_mut() {
                    let rows = segment.slots.len() as i64;
                    let (keys, values) = (keys.f_narrow(0, first, rows)?, value.f_narrow(0, first, rows)?);
                    segment.cache.write(layer, segment.slots, &keys, &values)?;
                    first += rows;
                }
                if let Some(capture) = capture {
                    capture.push((key, value));
                }
                query
            }
        };
        match keep {
            Keep::All => {
                let attention = self.attend(
                    layer,
                    &query,
                    segments.iter().map(|segment| (&*segment.cache, segment.slots, segment.two_part)),
                )?;
                self.finish(layer, hidden, &attention)
            }
            Keep::Rows([]) => Ok(hidden.f_narrow(0, 0, 0)?),
            Keep::Rows(kept) => {
                let index: Vec<i64> = kept.iter().map(|&row| row as i64).collect();
                let index = on_device(&Tensor::f_from_slice(&index)?, self.device)?;
                let mut slots: Vec<Vec<u32>> = Vec::with_capacity(segments.len());
                let mut first = 0;
                for segment in segments.iter() {
                    let end = first + segment.slots.len();
                    let mine = kept.iter().filter(|&&row| (first..end).contains(&row));
                    slots.push(mine.map(|&row| segment.slots[row - first]).collect());
                    first = end;
                }
                let query = query.f_index_select(0, &index)?;
                let kept_segments = segments
                    .iter()
                    .zip(&slots)
                    .map(|(segment, slots)| (&*segment.cache, slots.as_slice(), segment.two_part));
                let attention = self.attend(layer, &query, kept_segments)?;
                self.finish(layer, &hidden.f_index_select(0, &index)?, &attention)
            }
        }
    }

    /// Whether the device's kernel splits, rotates and writes this layer's projections at once.
    fn scatters(&self, layer: u32, segments: &[Segment<'_>]) -> bool {
        self.layers[layer as usize].qk_norm.is_none() && segments.iter().all(|segment| segment.cache.scatters())
    }

    /// Projects the rows and writes their keys and values in one pass; returns the rotated queries.
    fn project_into(
        &self,
        layer: u32,
        hidden: &Tensor,
        rotation: &Rotation,
        segments: &mut [Segment<'_>],
    ) -> Result<Tensor, Error> {
        let weights = &self.layers[layer as usize];
        let dim = i64::from(self.config.head_dim);
        let normed = self.rms_norm(hidden, &weights.attention_norm)?;
        let all = weights.qkv.product(&normed, None)?.f_view([hidden.size()[0], -1, dim])?;
        let mut queries = Vec::with_capacity(segments.len());
        let mut first = 0;
        for segment in segments.iter_mut() {
            let rows = segment.slots.len();
            let (own, turn) = (all.f_narrow(0, first as i64, rows as i64)?, rotation.narrow(first, rows)?);
            queries.push(segment.cache.scatter(layer, segment.slots, &own, weights.qkv_bias.as_ref(), &turn)?);
            first += rows;
        }
        joined(queries)
    }

    fn attend<'a>(
        &self,
        layer: u32,
        query: &Tensor,
        segments: impl Iterator<Item = (&'a KvCache, &'a [u32], Option<&'a TwoPart>)>,
    ) -> Result<Tensor, Error> {
        let segments: Vec<_> = segments.filter(|(_, slots, _)| !slots.is_empty()).collect();
        if segments.iter().all(|(.., two_part)| two_part.is_none()) {
            let sequence = |(cache, last, _): &(&'a KvCache, &'a [u32], _)| {
                let (keys, values) = cache.layer(layer);
                Sequence { keys, values, table: None, last }
            };
            let sequences: Vec<Sequence<'_>> = segments.iter().map(sequence).collect();
            return Ok(kvsplice_kernels::attention::attend(query, &sequences, View::default())?.0);
        }
        let mut outputs = Vec::new();
        let mut first = 0;
        for (cache, slots, two_part) in segments {
            let rows = slots.len() as i64;
            outputs.push(attend(cache, layer, &query.f_narrow(0, first, rows)?, slots, two_part)?);
            first += rows;
        }
        joined(outputs)
    }

    /// The first half of a layer: queries, keys and values of the rows, rotated to their positions.
    pub fn project(&self, layer: u32, hidden: &Tensor, rotation: &Rotation) -> Result<Projected, Error> {
        let qkv = self.qkv(layer, hidden)?;
        Ok(Projected {
            query: rotation.apply(&qkv.query)?,
            rotated_key: rotation.apply(&qkv.key)?,
            key: qkv.key,
            value: qkv.value,
        })
    }

    /// Norm, projection, bias and head norms: the first half of a layer up to rotation.
    pub fn qkv(&self, layer: u32, hidden: &Tensor) -> Result<Qkv, Error> {
        let weights = &self.layers[layer as usize];
        let rows = hidden.size()[0];
        let dim = i64::from(self.config.head_dim);
        let (heads, kv_heads) = (i64::from(self.config.heads), i64::from(self.config.kv_heads));
        let normed = self.rms_norm(hidden, &weights.attention_norm)?;
        let all = weights.qkv.product(&normed, weights.qkv_bias.as_ref())?.f_view([rows, heads + 2 * kv_heads, dim])?;
        let mut query = all.f_narrow(1, 0, heads)?;
        let mut key = all.f_narrow(1, heads, kv_heads)?;
        if let Some([query_norm, key_norm]) = &weights.qk_norm {
            query = self.rms_norm(&query, query_norm)?;
            key = self.rms_norm(&key, key_norm)?;
        }
        Ok(Qkv { query, key, value: all.f_narrow(1, heads + kv_heads, kv_heads)? })
    }

    /// Output projection, residuals and MLP: the second half of a layer. `attention`: `[rows, heads, head_dim]`.
    pub fn finish(&self, layer: u32, hidden: &Tensor, attention: &Tensor) -> Result<Tensor, Error> {
        let weights = &self.layers[layer as usize];
        let rows = hidden.size()[0];
        let hidden = weights.output.sum(&attention.f_reshape([rows, -1])?, hidden)?;
        let normed = self.rms_norm(&hidden, &weights.mlp_norm)?;
        weights.down.sum(&weights.gates.product(&normed)?, &hidden)
    }

    /// `[rows, hidden]` after the last layer → logits `[rows, vocabulary]`, f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor, Error> {
        let logits = self.head.product(&self.rms_norm(hidden, &self.norm)?, None)?;
        Ok(logits.f_to_kind(Kind::Float)?)
    }

    fn rms_norm(&self, hidden: &Tensor, weight: &Tensor) -> Result<Tensor, Error> {
        if fused(self.dtype.kind(), self.device, weight.size()[0]) && hidden.is_contiguous() {
            return Ok(elementwise::rms_norm(hidden, weight, self.config.norm_eps)?);
        }
        Ok(rms_norm(hidden, weight, self.config.norm_eps)?)
    }
}

impl Layer {
    fn new(weights: LayerWeights, kind: Kind, device: Device) -> Result<Self, Error> {
        let convert = |tensor: &Tensor| tensor.f_to_device(device)?.f_to_kind(kind);
        let matrix = |tensor: &Tensor| Matrix::new(tensor, kind, device);
        Ok(Self {
            attention_norm: convert(&weights.attention_norm)?,
            qkv: matrix(&Tensor::f_cat(&[weights.query, weights.key, weights.value], 0)?)?,
            qkv_bias: match &weights.qkv_bias {
                Some(biases) => Some(convert(&Tensor::f_cat(biases, 0)?)?),
                None => None,
            },
            qk_norm: match &weights.qk_norm {
                Some([query, key]) => Some([convert(query)?, convert(key)?]),
                None => None,
            },
            output: matrix(&weights.output)?,
            mlp_norm: convert(&weights.mlp_norm)?,
            gates: Gates::new(&weights.gate, &weights.up, kind, device)?,
            down: matrix(&weights.down)?,
        })
    }
}
