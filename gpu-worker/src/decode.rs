//! Decoding: one new row for each running request, all in one batch.

use kvsplice_model::attention::TwoPart;
use kvsplice_model::cache::KvCache;
use kvsplice_model::decoder::{Keep, Segment};
use kvsplice_model::sampling::Sampler;
use kvsplice_model::{Decoder, Error};
use tch::{Kind, Tensor};

use crate::prefill::numbers;

/// A sequence that grows token by token.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) cache: KvCache,
    pub(crate) sampler: Sampler,
    /// The token to feed next.
    pub(crate) token: u32,
    /// Its slot.
    pub(crate) slot: u32,
    /// Its position: the slot, unless the prompt's question stands elsewhere.
    pub(crate) position: u32,
    pub(crate) two_part: Option<TwoPart>,
}

/// Feeds each sequence its token and draws the next one. A sequence whose logits are not numbers fails alone.
pub(crate) fn step(decoder: &Decoder, sequences: &mut [Sequence]) -> Result<Vec<Result<u32, Error>>, Error> {
    let tokens: Vec<u32> = sequences.iter().map(|sequence| sequence.token).collect();
    let slots: Vec<u32> = sequences.iter().map(|sequence| sequence.slot).collect();
    let positions: Vec<u32> = sequences.iter().map(|sequence| sequence.position).collect();
    let rotation = decoder.rotation(&positions)?;
    let mut hidden = decoder.embed(&tokens)?;
    for layer in 0..decoder.config().layers {
        let mut segments: Vec<Segment<'_>> = sequences
            .iter_mut()
            .zip(&slots)
            .map(|(sequence, slot)| Segment {
                cache: &mut sequence.cache,
                slots: std::slice::from_ref(slot),
                two_part: sequence.two_part.as_ref(),
            })
            .collect();
        hidden = decoder.layer(layer, &hidden, &rotation, &mut segments, Keep::All, None)?;
    }
    let logits = decoder.logits(&hidden)?;
    let mut drawn = Vec::with_capacity(sequences.len());
    for (row, sequence) in sequences.iter_mut().enumerate() {
        let next = sequence.sampler.next(&numbers(&logits.f_select(0, row as i64)?)?);
        if let Ok(token) = next {
            sequence.token = token;
            sequence.slot += 1;
            sequence.position += 1;
        }
        drawn.push(next);
    }
    Ok(drawn)
}

/// What Score answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scores {
    /// One a target, natural logarithm.
    pub(crate) logprobs: Vec<f32>,
    /// The most likely token at each place.
    pub(crate) argmax_ids: Vec<u32>,
    /// `[targets, vocabulary]`, natural logarithms; empty unless wanted.
    pub(crate) distributions: Vec<f32>,
}

/// Scores `targets` by hidden states `[targets, hidden]`.
pub(crate) fn score(decoder: &Decoder, hidden: &Tensor, targets: &[u32], distributions: bool) -> Result<Scores, Error> {
    let mut scores = Scores::default();
    for (row, &target) in targets.iter().enumerate() {
        let logits = decoder.logits(&hidden.f_narrow(0, row as i64, 1)?)?;
        let logprobs = numbers(&logits.f_log_softmax(-1, Kind::Double)?.f_to_kind(Kind::Float)?)?;
        if logprobs.iter().any(|logprob| logprob.is_nan()) {
            return Err(Error::NonFinite("logits"));
        }
        scores.logprobs.push(logprobs.get(target as usize).copied().unwrap_or(f32::NEG_INFINITY));
        scores.argmax_ids.push(kvsplice_model::sampling::argmax(&logprobs));
        if distributions {
            scores.distributions.extend(logprobs);
        }
    }
    Ok(scores)
}
