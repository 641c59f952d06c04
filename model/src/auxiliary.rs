//! The auxiliary model's scores: how much the question's rows attend to each token of each chunk.
//!
//! Source: CacheClip (arXiv 2510.10129), scoring. Each chunk stands alone behind the prefix at chunk-local
//! positions; only the question's rows are computed, once a chunk, all chunks in one batch. No chunk is padded.

use std::ops::Range;
use std::sync::Arc;

use kvsplice_kernels::attention::{Reduce, Sequence, View, attend, key_masses};
use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::options::{self, Depth, Softmax};
use tch::Tensor;

use crate::cache::KvCache;
pub use crate::encode::{ChunkKv, encode};
use crate::resident::LayerKv;
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
    pub reduce: options::Reduce,
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
    /// The chunk's slots within its sequence, by sequence.
    chunks: Vec<Range<u32>>,
    layer: u32,
    scored: Range<u32>,
    /// One a token of every chunk, summed over the scored layers.
    scores: Vec<f32>,
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
    /// Starts a pass. Fails on no chunk, an empty chunk or question, KV of another layout, or a chunk beyond the context.
    pub fn new(decoder: &Decoder, request: ScoreRequest) -> Result<Self, Error> {
        let config = decoder.config();
        let empty = request.chunk_kv.iter().any(|kv| kv.tokens == 0);
        if request.chunk_kv.is_empty() || empty || request.question_ids.is_empty() {
            let what = "scoring needs at least one chunk, a token in each, and one question token";
            return Err(Error::Argument(what.to_owned()));
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
            chunks: request.chunk_kv.iter().map(|kv| prefix..prefix + kv.tokens).collect(),
            layer: 0,
            scored: request.layers.indices(config.layers),
            scores: vec![0.0; request.chunk_kv.iter().map(|kv| kv.tokens as usize).sum()],
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
        if self.scored.contains(&self.layer) || !last {
            let attention = self.look(&rows.query)?;
            if !last {
                self.hidden = decoder.finish(self.layer, &self.hidden, &attention)?;
            }
        }
        self.layer += 1;
        Ok(last)
    }

    /// One score a token of each chunk: mean or maximum over the question's rows and over heads, summed over the scored layers.
    /// Call it when [`Scoring::advance`] has said that it is done. Fails when a score is not a number.
    pub fn finish(self) -> Result<Vec<Vec<f32>>, Error> {
        if self.scores.iter().any(|score| !score.is_finite()) {
            return Err(Error::NonFinite("auxiliary scores"));
        }
        let mut rest = self.scores.as_slice();
        let mut scores = Vec::with_capacity(self.chunks.len());
        for chunk in &self.chunks {
            let (own, behind) = rest.split_at(chunk.len());
            scores.push(own.to_vec());
            rest = behind;
        }
        Ok(scores)
    }

    /// Puts this layer's stored KV where the last layer's was.
    fn place(&mut self) -> Result<(), Error> {
        let layer = |kv: &Arc<ChunkKv>| {
            let missing = || Error::Argument(format!("layer {} of a chunk of {}", self.layer, kv.layout));
            kv.layer(self.layer).map(LayerKv::Host).ok_or_else(missing)
        };
        let prefix = self.request.prefix_kv.as_ref().map(layer).transpose()?;
        let chunks = self.request.chunk_kv.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
        let pieces: Vec<_> = chunks.iter().flat_map(|chunk| prefix.iter().chain([chunk])).map(|kv| (kv, 0)).collect();
        self.cache.place(0, &self.stored.slots, &pieces, &self.stored.rotation)
    }

    /// Attention of the question's rows, `[chunks · question, heads, head_dim]`; in a scored layer, adds what they look at.
    fn look(&mut self, query: &Tensor) -> Result<Tensor, Error> {
        let (keys, values) = self.cache.layer(0);
        let cut = |tensor: &Tensor| -> Result<Vec<Tensor>, Error> {
            let own = |slots: &Range<u32>| Ok(tensor.f_narrow(0, slots.start.into(), slots.len() as i64)?);
            self.sequences.iter().map(own).collect()
        };
        let (keys, values) = (cut(keys)?, cut(values)?);
        let sequences: Vec<Sequence<'_>> = keys
            .iter()
            .zip(&values)
            .zip(&self.last)
            .map(|((keys, values), last)| Sequence { keys, values, table: None, last })
            .collect();
        if !self.scored.contains(&self.layer) {
            return Ok(attend(query, &sequences, View::default())?.0);
        }
        // Behind every key.
        let ends = [self.sequences.iter().map(|slots| slots.len() as u32).max().unwrap_or(0)];
        let (attention, mut sums) = attend(query, &sequences, View { ends: &ends, ..View::default() })?;
        if self.request.softmax == Softmax::Joint {
            sums = self.joint(query, &sequences)?;
        }
        let reduce = match self.request.reduce {
            options::Reduce::Mean => Reduce::Mean,
            options::Reduce::Max => Reduce::Max,
        };
        let masses = key_masses(query, &sequences, &self.chunks, &sums, reduce)?;
        self.scores.iter_mut().zip(masses).for_each(|(score, mass)| *score += mass);
        Ok(attention)
    }

    /// Log-sum-exps of one distribution over the tokens of all chunks, `[chunks · question, heads]`.
    fn joint(&self, query: &Tensor, sequences: &[Sequence<'_>]) -> Result<Tensor, Error> {
        let (rows, heads, _) = query.size3()?;
        let all: Vec<Vec<u32>> =
            self.chunks.iter().zip(&self.last).map(|(chunk, last)| vec![chunk.end - 1; last.len()]).collect();
        let sequences: Vec<Sequence<'_>> =
            sequences.iter().zip(&all).map(|(sequence, last)| Sequence { last, ..*sequence }).collect();
        let ends = [self.chunks.iter().map(|chunk| chunk.end).max().unwrap_or(0)];
        let from = self.chunks.first().map_or(0, |chunk| chunk.start);
        let (_, sums) = attend(query, &sequences, View { from, ends: &ends, ..View::default() })?;
        let by_chunk = sums.f_view([self.chunks.len() as i64, -1, heads])?;
        let joint = by_chunk.f_logsumexp([0].as_slice(), true)?.f_expand_as(&by_chunk)?;
        Ok(joint.f_reshape([rows, heads])?)
    }
}

/// Scores at one go; see [`Scoring`].
pub fn score(decoder: &Decoder, request: ScoreRequest) -> Result<Vec<Vec<f32>>, Error> {
    let mut scoring = Scoring::new(decoder, request)?;
    while !scoring.advance(decoder)? {}
    scoring.finish()
}
