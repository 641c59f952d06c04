//! The auxiliary model's scores: how much the question's rows attend to each token of each chunk.
//!
//! Source: CacheClip (arXiv 2510.10129), scoring. Each chunk stands alone behind the prefix at chunk-local
//! positions; only the question's rows are computed, once a chunk, all chunks in one batch. Chunks are padded to the
//! longest; the mask hides padding, so padding changes no score.

use std::sync::Arc;

use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::options::{Depth, Reduce, Softmax};
use tch::{Kind, Tensor};

pub use crate::encode::{ChunkKv, encode};
use crate::stored::StoredLayer;
use crate::{Decoder, Error};

/// What to score.
#[derive(Clone, Debug)]
pub struct ScoreRequest {
    /// KV of the prefix alone; `None` for an empty prefix.
    pub prefix_kv: Option<Arc<ChunkKv>>,
    /// KV of each chunk behind the prefix, in prompt order.
    pub chunk_kv: Vec<Arc<ChunkKv>>,
    /// The question with the template's tail; at least one token.
    pub question_ids: Vec<u32>,
    /// Which layers score.
    pub layers: Depth,
    /// Over which keys a score is normalized.
    pub softmax: Softmax,
    /// How the question's rows and the heads become one score.
    pub reduce: Reduce,
}

/// Scoring on its way through the layers.
pub struct Scoring {
    request: ScoreRequest,
    /// `[chunks · question, hidden]`
    hidden: Tensor,
    rotations: Rotations,
    /// `[chunks, 1, group · question, keys]`: 0 where a row may look, −∞ else; keys are prefix, chunk, question.
    mask: Tensor,
    /// Of each chunk token, its row in `[chunks · keys]`.
    places: Tensor,
    layer: u32,
    scored: std::ops::Range<u32>,
    /// `[chunks, longest]`, f32, summed over the scored layers.
    scores: Tensor,
    shape: Shape,
}

/// One layer's stored keys and values.
struct Stored {
    /// `[prefix, kv_heads, head_dim]` each.
    prefix: Option<(Tensor, Tensor)>,
    /// `[tokens of all chunks, kv_heads, head_dim]` each.
    chunks: (Tensor, Tensor),
}

struct Rotations {
    prefix: Option<Rotation>,
    /// Of all chunks' tokens one after another.
    chunks: Rotation,
    /// Of all question rows, chunk by chunk.
    question: Rotation,
}

#[derive(Clone, Copy)]
struct Shape {
    chunks: i64,
    prefix: i64,
    longest: i64,
    question: i64,
    group: i64,
    kv_heads: i64,
    head_dim: i64,
}

impl Scoring {
    /// Starts a pass. Fails on no chunk, an empty question, KV of another layout, or a chunk beyond the context.
    pub fn new(decoder: &Decoder, request: ScoreRequest) -> Result<Self, Error> {
        let config = decoder.config();
        if request.chunk_kv.is_empty() || request.question_ids.is_empty() {
            return Err(Error::Argument("scoring needs at least one chunk and one question token".to_owned()));
        }
        let fits = |kv: &ChunkKv| {
            let layout = kv.layout;
            layout.layers == config.layers
                && layout.kv_heads == config.kv_heads
                && layout.head_dim == config.head_dim
                && kv.layers.len() == config.layers as usize
        };
        if let Some(kv) = request.chunk_kv.iter().chain(&request.prefix_kv).find(|kv| !fits(kv)) {
            return Err(Error::Argument(format!("auxiliary KV has layout {}, the model another one", kv.layout)));
        }
        let prefix = request.prefix_kv.as_ref().map_or(0, |kv| kv.tokens);
        let question = request.question_ids.len() as u32;
        let lengths: Vec<u32> = request.chunk_kv.iter().map(|kv| kv.tokens).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let chunk_positions: Vec<u32> = lengths.iter().flat_map(|&tokens| prefix..prefix + tokens).collect();
        let question_positions: Vec<u32> =
            lengths.iter().flat_map(|&tokens| prefix + tokens..prefix + tokens + question).collect();
        let shape = Shape {
            chunks: lengths.len() as i64,
            prefix: i64::from(prefix),
            longest: i64::from(longest),
            question: i64::from(question),
            group: i64::from(config.heads / config.kv_heads),
            kv_heads: i64::from(config.kv_heads),
            head_dim: i64::from(config.head_dim),
        };
        let prefix_positions: Vec<u32> = (0..prefix).collect();
        Ok(Self {
            hidden: decoder.embed(&request.question_ids.repeat(lengths.len()))?,
            rotations: Rotations {
                prefix: if prefix == 0 { None } else { Some(decoder.rotation(&prefix_positions)?) },
                chunks: decoder.rotation(&chunk_positions)?,
                question: decoder.rotation(&question_positions)?,
            },
            mask: mask(&lengths, shape, decoder.dtype().kind())?,
            places: places(&lengths, shape)?,
            layer: 0,
            scored: request.layers.indices(config.layers),
            scores: Tensor::f_zeros([shape.chunks, shape.longest], (Kind::Float, tch::Device::Cpu))?,
            request,
            shape,
        })
    }

    /// Computes one layer. Returns whether it was the last one needed.
    pub fn advance(&mut self, decoder: &Decoder) -> Result<bool, Error> {
        let last = self.layer + 1 == self.scored.end;
        let scored = self.scored.contains(&self.layer);
        let Shape { chunks, question, group, kv_heads, head_dim, .. } = self.shape;
        let kind = decoder.dtype().kind();
        let qkv = decoder.qkv(self.layer, &self.hidden)?;
        let stored = self.stored()?;
        let keys = self.keys(&stored, &self.rotations.question.apply(&qkv.key)?, kind)?;
        let query = self.rotations.question.apply(&qkv.query)?;
        // [chunks · question, heads, dim] → [chunks, kv_heads, group · question, dim]
        let query = query.f_view([chunks, question, kv_heads, group, head_dim])?.f_permute([0, 2, 3, 1, 4])?;
        let query = query.f_reshape([chunks, kv_heads, group * question, head_dim])?;
        if scored {
            self.score(&query, &keys)?;
        }
        if !last {
            let values = self.values(&stored, &qkv.value, kind)?;
            let mask = Some(&self.mask);
            let output = Tensor::f_scaled_dot_product_attention(&query, &keys, &values, mask, 0.0, false, None, false)?;
            let output = output.f_view([chunks, kv_heads, group, question, head_dim])?.f_permute([0, 3, 1, 2, 4])?;
            let output = output.f_reshape([chunks * question, kv_heads * group, head_dim])?;
            self.hidden = decoder.finish(self.layer, &self.hidden, &output)?;
        }
        self.layer += 1;
        Ok(last)
    }

    /// One score a token of each chunk: mean or maximum over the question's rows and over heads, summed over the scored layers.
    /// Call it when [`Scoring::advance`] has said that it is done. Fails when a score is not a number.
    pub fn finish(self) -> Result<Vec<Vec<f32>>, Error> {
        let mut all = vec![0f32; self.scores.numel()];
        self.scores.f_contiguous()?.f_copy_data(&mut all, self.scores.numel())?;
        let rows = all.chunks(self.shape.longest.max(1) as usize);
        let scores: Vec<Vec<f32>> = rows
            .zip(&self.request.chunk_kv)
            .map(|(row, kv)| row.iter().take(kv.tokens as usize).copied().collect())
            .collect();
        if scores.iter().flatten().any(|score| !score.is_finite()) {
            return Err(Error::NonFinite("auxiliary scores"));
        }
        Ok(scores)
    }

    /// This layer's stored KV: of the prefix, and of all chunks one after another. Keys in f32, values as stored.
    fn stored(&self) -> Result<Stored, Error> {
        let layer = |kv: &Arc<ChunkKv>| {
            let missing = || Error::Argument(format!("layer {} of a chunk of {}", self.layer, kv.layout));
            kv.layer(self.layer).ok_or_else(missing)
        };
        let prefix = match &self.request.prefix_kv {
            Some(kv) => Some(layer(kv)?.tensors()?),
            None => None,
        };
        let chunks = self.request.chunk_kv.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
        let chunks = StoredLayer::join(&chunks)?
            .ok_or_else(|| Error::Argument("scoring needs at least one chunk".to_owned()))?;
        Ok(Stored { prefix, chunks })
    }

    /// `[chunks, kv_heads, prefix + longest + question, head_dim]`, rotated.
    fn keys(&self, stored: &Stored, question: &Tensor, kind: Kind) -> Result<Tensor, Error> {
        let prefix = match (&stored.prefix, &self.rotations.prefix) {
            (Some((keys, _)), Some(rotation)) => Some(rotation.apply(keys)?.f_to_kind(kind)?),
            _ => None,
        };
        let chunks = self.rotations.chunks.apply(&stored.chunks.0)?.f_to_kind(kind)?;
        self.batch(prefix, &chunks, question)
    }

    /// As [`Scoring::keys`], for values.
    fn values(&self, stored: &Stored, question: &Tensor, kind: Kind) -> Result<Tensor, Error> {
        let prefix = match &stored.prefix {
            Some((_, values)) => Some(values.f_to_kind(kind)?),
            None => None,
        };
        self.batch(prefix, &stored.chunks.1.f_to_kind(kind)?, question)
    }

    /// Pads the chunks to the longest and puts the prefix before and the question's rows behind each.
    fn batch(&self, prefix: Option<Tensor>, chunks: &Tensor, question: &Tensor) -> Result<Tensor, Error> {
        let Shape { chunks: count, prefix: prefix_tokens, longest, question: rows, kv_heads, head_dim, .. } =
            self.shape;
        let keys = prefix_tokens + longest + rows;
        let batch = Tensor::f_zeros([count, keys, kv_heads, head_dim], (question.kind(), tch::Device::Cpu))?;
        if let Some(prefix) = prefix {
            batch.f_narrow(1, 0, prefix_tokens)?.f_copy_(&prefix.f_unsqueeze(0)?)?;
        }
        drop(batch.f_view([count * keys, kv_heads, head_dim])?.f_index_copy_(0, &self.places, chunks)?);
        let question = question.f_reshape([count, rows, kv_heads, head_dim])?;
        batch.f_narrow(1, prefix_tokens + longest, rows)?.f_copy_(&question)?;
        Ok(batch.f_transpose(1, 2)?)
    }

    /// Adds this layer's attention of the question's rows to the chunks' tokens.
    fn score(&mut self, query: &Tensor, keys: &Tensor) -> Result<(), Error> {
        let Shape { prefix, longest, head_dim, .. } = self.shape;
        let logits = query.f_matmul(&keys.f_transpose(2, 3)?)?.f_to_kind(Kind::Float)?;
        let logits = logits.f_mul_scalar(1.0 / (head_dim as f64).sqrt())?.f_add(&self.mask)?;
        let attention = match self.request.softmax {
            Softmax::Chunk => logits.f_softmax(-1, Kind::Float)?.f_narrow(3, prefix, longest)?,
            Softmax::Joint => {
                // One distribution over the tokens of all chunks: the chunk axis joins the key axis.
                let own = logits.f_narrow(3, prefix, longest)?;
                let greatest = own.f_amax([0, 3].as_slice(), true)?;
                let weights = own.f_sub(&greatest)?.f_exp()?;
                let total = weights.f_sum_dim_intlist([0, 3].as_slice(), true, Kind::Float)?;
                weights.f_div(&total)?
            }
        };
        let reduced = match self.request.reduce {
            Reduce::Mean => attention.f_mean_dim([1, 2].as_slice(), false, Kind::Float)?,
            Reduce::Max => attention.f_amax([1, 2].as_slice(), false)?,
        };
        self.scores = self.scores.f_add(&reduced)?;
        Ok(())
    }
}

/// Scores at one go; see [`Scoring`].
pub fn score(decoder: &Decoder, request: ScoreRequest) -> Result<Vec<Vec<f32>>, Error> {
    let mut scoring = Scoring::new(decoder, request)?;
    while !scoring.advance(decoder)? {}
    scoring.finish()
}

/// Of each chunk token, its row in a batch of `[chunks · (prefix + longest + question)]`.
fn places(lengths: &[u32], shape: Shape) -> Result<Tensor, Error> {
    let keys = shape.prefix + shape.longest + shape.question;
    let first = |chunk: usize| chunk as i64 * keys + shape.prefix;
    let rows = lengths.iter().enumerate().flat_map(|(chunk, &tokens)| first(chunk)..first(chunk) + i64::from(tokens));
    Ok(Tensor::f_from_slice(&rows.collect::<Vec<i64>>())?)
}

fn mask(lengths: &[u32], shape: Shape, kind: Kind) -> Result<Tensor, Error> {
    let Shape { chunks, prefix, longest, question, group, .. } = shape;
    let int = (Kind::Int64, tch::Device::Cpu);
    let keys = prefix + longest + question;
    let mask = Tensor::f_zeros([chunks, question, keys], (kind, tch::Device::Cpu))?;
    // The question sees itself causally.
    let rows = Tensor::f_arange(question, int)?;
    let future = rows.f_unsqueeze(0)?.f_gt_tensor(&rows.f_unsqueeze(1)?)?;
    drop(mask.f_narrow(2, prefix + longest, question)?.f_masked_fill_(&future, f64::NEG_INFINITY)?);
    // Nobody sees padding.
    let lengths: Vec<i64> = lengths.iter().map(|&tokens| i64::from(tokens)).collect();
    let padding = Tensor::f_arange(longest, int)?
        .f_unsqueeze(0)?
        .f_ge_tensor(&Tensor::f_from_slice(&lengths)?.f_unsqueeze(1)?)?;
    drop(mask.f_narrow(2, prefix, longest)?.f_masked_fill_(&padding.f_unsqueeze(1)?, f64::NEG_INFINITY)?);
    Ok(mask.f_unsqueeze(1)?.f_repeat([1, 1, group, 1])?)
}
