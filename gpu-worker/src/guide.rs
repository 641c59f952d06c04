//! `guided`: the question's own rows, run over the cached KV before anything is recomputed, pick the rows.
//!
//! Sources: attention of the question's rows in middle layers, over the stale KV of all chunks (ProphetKV, arXiv
//! 2602.02579; InfoFlow, arXiv 2603.05353); or the question alone, whose last layer's queries meet the chunks' last-layer
//! keys (FusionRAG, arXiv 2601.12904). Rows of fresh chunks are computed beside the question's: they have no other KV.

use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::options::{Guide as Seen, Reduce};
use kvsplice_model::attention::{attend, logits, weights};
use kvsplice_model::cache::KvCache;
use kvsplice_model::{Decoder, Error};
use tch::{Kind, Tensor};

use crate::prefill::numbers;
use crate::prompt::{Prompt, Selection};

/// The question's rows on their way.
pub(crate) struct Guide {
    slots: Vec<u32>,
    /// How many of the rows are not the question's.
    others: usize,
    rotation: Rotation,
    hidden: Tensor,
    layer: u32,
    scored: std::ops::Range<u32>,
    alone: bool,
    /// `[chunk tokens]`, f32, summed over layers.
    scores: Tensor,
}

impl Guide {
    /// `rows`: the slots of question and fresh chunks.
    pub(crate) fn new(decoder: &Decoder, prompt: &Prompt, rows: &[u32]) -> Result<Self, Error> {
        let alone = prompt.options.guide == Seen::Question;
        let question = prompt.question_start();
        let slots: Vec<u32> = rows.iter().copied().filter(|&slot| !alone || slot >= question).collect();
        let layers = decoder.config().layers;
        let tokens = question - prompt.chunk_starts[0];
        Ok(Self {
            others: slots.partition_point(|&slot| slot < question),
            rotation: decoder.rotation(&prompt.positions_of(&slots))?,
            hidden: decoder.embed(&prompt.ids_of(&slots))?,
            layer: 0,
            scored: if alone { layers - 1..layers } else { prompt.options.guide_layers.indices(layers) },
            alone,
            scores: Tensor::f_zeros([i64::from(tokens)], (Kind::Float, decoder.device()))?,
            slots,
        })
    }

    /// The layer whose stored KV the next step needs.
    pub(crate) fn wants(&self) -> Option<u32> {
        (!self.alone || self.scored.contains(&self.layer)).then_some(self.layer)
    }

    /// Computes one layer; returns the selection after the last one needed.
    pub(crate) fn advance(
        &mut self,
        decoder: &Decoder,
        prompt: &Prompt,
        cache: &mut KvCache,
    ) -> Result<Option<Selection>, Error> {
        let rows = decoder.project(self.layer, &self.hidden, &self.rotation)?;
        cache.write(self.layer, &self.slots, &rows.rotated_key, &rows.value)?;
        if self.scored.contains(&self.layer) {
            self.score(prompt, cache, &rows.query)?;
        }
        if self.layer + 1 == self.scored.end {
            return Ok(Some(prompt.select(&prompt.options, numbers(&self.scores)?)?));
        }
        let attention = if self.alone {
            self.attend_alone(prompt, cache, &rows.query)?
        } else {
            attend(cache, self.layer, &rows.query, &self.slots, None)?
        };
        self.hidden = decoder.finish(self.layer, &self.hidden, &attention)?;
        self.layer += 1;
        Ok(None)
    }

    /// The question sees itself only.
    fn attend_alone(&self, prompt: &Prompt, cache: &KvCache, query: &Tensor) -> Result<Tensor, Error> {
        let (keys, values) = cache.layer(self.layer);
        let first = i64::from(prompt.question_start());
        let own = |tensor: &Tensor| tensor.f_narrow(0, first, self.slots.len() as i64);
        let last: Vec<u32> = (0..self.slots.len() as u32).collect();
        Ok(kvsplice_kernels::attention::ragged_causal(query, &own(keys)?, &own(values)?, &last)?)
    }

    fn score(&mut self, prompt: &Prompt, cache: &KvCache, query: &Tensor) -> Result<(), Error> {
        let (first, question) = (prompt.chunk_starts[0], prompt.question_start());
        let rows = self.slots.len() - self.others;
        let query = query.f_narrow(0, self.others as i64, rows as i64)?;
        let tokens = i64::from(question - first);
        let weights = if self.alone {
            let keys = cache.layer(self.layer).0.f_narrow(0, i64::from(first), tokens)?;
            logits(&query, &keys)?.f_softmax(-1, Kind::Float)?
        } else {
            let all = weights(cache, self.layer, &query, &self.slots[self.others..], prompt.tokens())?;
            all.f_narrow(2, i64::from(first), tokens)?
        };
        let reduced = match prompt.options.reduce {
            Reduce::Mean => weights.f_mean_dim([0, 1].as_slice(), false, Kind::Float)?,
            Reduce::Max => weights.f_amax([0, 1].as_slice(), false)?,
        };
        self.scores = self.scores.f_add(&reduced)?;
        Ok(())
    }
}
