//! The auxiliary model's scores: how much the question's rows attend to each token of each chunk.
//!
//! Source: CacheClip (arXiv 2510.10129), scoring. Each chunk stands alone behind the prefix at chunk-local
//! positions; only the question's rows are computed, once a chunk, all chunks in one batch. No chunk is padded.

use std::ops::Range;
use std::sync::Arc;

use kvsplice_kernels::attention::{Sequence, View, attend};
use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::options::{Depth, Reduce, Softmax};
use tch::{Kind, Tensor};

use crate::attention::logits;
use crate::cache::KvCache;
pub use crate::encode::{ChunkKv, encode};
use crate::{Config, Decoder, Error};

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
    /// KV of the layer in hand. Each chunk has a sequence of its own there: prefix, chunk, question.
    cache: KvCache,
    /// The slots of each sequence.
    sequences: Vec<Range<u32>>,
    stored: Rows,
    question: Rows,
    /// Last slots of the question's rows within their sequence, by sequence.
    last: Vec<Vec<u32>>,
    /// `[question, 1, question]`: −∞ where a row of the question must not look, 0 else.
    future: Tensor,
    prefix: u32,
    layer: u32,
    scored: Range<u32>,
    /// `[tokens]` of each chunk, f32, summed over the scored layers.
    scores: Vec<Tensor>,
}

/// Rows of all sequences.
struct Rows {
    /// Slots in the cache, ascending.
    slots: Vec<u32>,
    /// To the rows' positions.
    rotation: Rotation,
}

impl Rows {
    /// `places` of every sequence: slots, and the position of the first.
    fn new(decoder: &Decoder, places: impl Iterator<Item = (Range<u32>, u32)>) -> Result<Self, Error> {
        let (mut slots, mut positions) = (Vec::new(), Vec::new());
        for (range, position) in places {
            positions.extend(position..position + range.len() as u32);
            slots.extend(range);
        }
        Ok(Self { slots, rotation: decoder.rotation(&positions)? })
    }
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
        let mut sequences: Vec<Range<u32>> = Vec::with_capacity(request.chunk_kv.len());
        for kv in &request.chunk_kv {
            let first = sequences.last().map_or(0, |sequence| sequence.end);
            sequences.push(first..first + prefix + kv.tokens + question);
        }
        let asked = |sequence: &Range<u32>| (sequence.end - question..sequence.end, sequence.len() as u32 - question);
        let slots = sequences.last().map_or(0, |sequence| sequence.end);
        let one_layer = Config { layers: 1, ..config.clone() };
        let empty = |kv: &Arc<ChunkKv>| Tensor::f_zeros([i64::from(kv.tokens)], (Kind::Float, tch::Device::Cpu));
        let square = [i64::from(question), i64::from(question)];
        Ok(Self {
            hidden: decoder.embed(&request.question_ids.repeat(sequences.len()))?,
            cache: KvCache::new(&one_layer, slots, decoder.dtype().kind(), decoder.device())?,
            stored: Rows::new(decoder, sequences.iter().map(|sequence| (sequence.start..sequence.end - question, 0)))?,
            question: Rows::new(decoder, sequences.iter().map(asked))?,
            last: sequences
                .iter()
                .map(|sequence| asked(sequence).1..sequence.len() as u32)
                .map(Vec::from_iter)
                .collect(),
            future: Tensor::f_full(square, f64::NEG_INFINITY, (Kind::Float, tch::Device::Cpu))?
                .f_triu(1)?
                .f_unsqueeze(1)?,
            prefix,
            layer: 0,
            scored: request.layers.indices(config.layers),
            scores: request.chunk_kv.iter().map(empty).collect::<Result<_, _>>()?,
            sequences,
            request,
        })
    }

    /// Computes one layer. Returns whether it was the last one needed.
    pub fn advance(&mut self, decoder: &Decoder) -> Result<bool, Error> {
        let last = self.layer + 1 == self.scored.end;
        let rows = decoder.project(self.layer, &self.hidden, &self.question.rotation)?;
        self.place()?;
        self.cache.write(0, &self.question.slots, &rows.rotated_key, &rows.value)?;
        if self.scored.contains(&self.layer) {
            self.score(&rows.query)?;
        }
        if !last {
            let attention = self.attend(&rows.query)?;
            self.hidden = decoder.finish(self.layer, &self.hidden, &attention)?;
        }
        self.layer += 1;
        Ok(last)
    }

    /// One score a token of each chunk: mean or maximum over the question's rows and over heads, summed over the scored layers.
    /// Call it when [`Scoring::advance`] has said that it is done. Fails when a score is not a number.
    pub fn finish(self) -> Result<Vec<Vec<f32>>, Error> {
        let mut scores = Vec::with_capacity(self.scores.len());
        for tensor in &self.scores {
            let mut numbers = vec![0f32; tensor.numel()];
            tensor.f_contiguous()?.f_copy_data(&mut numbers, tensor.numel())?;
            scores.push(numbers);
        }
        if scores.iter().flatten().any(|score| !score.is_finite()) {
            return Err(Error::NonFinite("auxiliary scores"));
        }
        Ok(scores)
    }

    /// Puts this layer's stored KV where the last layer's was.
    fn place(&mut self) -> Result<(), Error> {
        let layer = |kv: &Arc<ChunkKv>| {
            let missing = || Error::Argument(format!("layer {} of a chunk of {}", self.layer, kv.layout));
            kv.layer(self.layer).ok_or_else(missing)
        };
        let prefix = self.request.prefix_kv.as_ref().map(layer).transpose()?;
        let chunks = self.request.chunk_kv.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
        let pieces: Vec<_> = chunks.iter().flat_map(|chunk| prefix.iter().chain([chunk])).map(|kv| (kv, 0)).collect();
        self.cache.place(0, &self.stored.slots, &pieces, &self.stored.rotation)
    }

    /// `[chunks · question, heads, head_dim]`
    fn attend(&self, query: &Tensor) -> Result<Tensor, Error> {
        let (keys, values) = self.cache.layer(0);
        let cut = |tensor: &Tensor| -> Result<Vec<Tensor>, Error> {
            let own = |slots: &Range<u32>| Ok(tensor.f_narrow(0, slots.start.into(), slots.len() as i64)?);
            self.sequences.iter().map(own).collect()
        };
        let (keys, values) = (cut(keys)?, cut(values)?);
        let sequences = keys.iter().zip(&values).zip(&self.last);
        let sequences: Vec<Sequence<'_>> =
            sequences.map(|((keys, values), last)| Sequence { keys, values, table: None, last }).collect();
        Ok(attend(query, &sequences, View::default())?.0)
    }

    /// Adds this layer's attention of the question's rows to the chunks' tokens.
    fn score(&mut self, query: &Tensor) -> Result<(), Error> {
        let question = self.request.question_ids.len() as i64;
        let prefix = i64::from(self.prefix);
        let mut own = Vec::with_capacity(self.sequences.len());
        for (index, slots) in self.sequences.iter().enumerate() {
            let keys = self.cache.layer(0).0.f_narrow(0, slots.start.into(), slots.len() as i64)?;
            // [question, heads, keys]
            let all = logits(&query.f_narrow(0, index as i64 * question, question)?, &keys)?;
            let tokens = slots.len() as i64 - prefix - question;
            let all = match self.request.softmax {
                Softmax::Joint => all,
                Softmax::Chunk => {
                    drop(all.f_narrow(2, prefix + tokens, question)?.f_add_(&self.future)?);
                    all.f_softmax(-1, Kind::Float)?
                }
            };
            own.push(all.f_narrow(2, prefix, tokens)?);
        }
        if self.request.softmax == Softmax::Joint {
            // One distribution over the tokens of all chunks.
            let joint = Tensor::f_cat(&own, 2)?.f_softmax(-1, Kind::Float)?;
            let sizes: Vec<i64> = own.iter().map(|own| own.size()[2]).collect();
            own = joint.f_split_with_sizes(sizes, 2)?;
        }
        for (sum, attention) in self.scores.iter_mut().zip(own) {
            let reduced = match self.request.reduce {
                Reduce::Mean => attention.f_mean_dim([0, 1].as_slice(), false, Kind::Float)?,
                Reduce::Max => attention.f_amax([0, 1].as_slice(), false)?,
            };
            *sum = sum.f_add(&reduced)?;
        }
        Ok(())
    }
}

/// Scores at one go; see [`Scoring`].
pub fn score(decoder: &Decoder, request: ScoreRequest) -> Result<Vec<Vec<f32>>, Error> {
    let mut scoring = Scoring::new(decoder, request)?;
    while !scoring.advance(decoder)? {}
    scoring.finish()
}
