//! Decoding: one new row for each running request, all in one batch.

use kvsplice_model::cache::KvCache;
use kvsplice_model::decoder::{Keep, Segment};
use kvsplice_model::sampling::Sampler;
use kvsplice_model::{Decoder, Error};
use tch::Tensor;

/// A sequence that grows token by token.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) cache: KvCache,
    pub(crate) sampler: Sampler,
    /// The token to feed next.
    pub(crate) token: u32,
    /// Its slot; new tokens have their slot as position.
    pub(crate) slot: u32,
}

/// Feeds each sequence its token and draws the next one. A sequence whose logits are not numbers fails alone.
pub(crate) fn step(decoder: &Decoder, sequences: &mut [Sequence]) -> Result<Vec<Result<u32, Error>>, Error> {
    let tokens: Vec<u32> = sequences.iter().map(|sequence| sequence.token).collect();
    let slots: Vec<u32> = sequences.iter().map(|sequence| sequence.slot).collect();
    let rotation = decoder.rotation(&slots)?;
    let mut hidden = decoder.embed(&tokens)?;
    for layer in 0..decoder.config().layers {
        let caches = sequences.iter_mut().map(|sequence| &mut sequence.cache);
        let mut segments: Vec<Segment<'_>> =
            caches.zip(&slots).map(|(cache, slot)| Segment { cache, slots: std::slice::from_ref(slot) }).collect();
        hidden = decoder.layer(layer, &hidden, &rotation, &mut segments, Keep::All, None)?;
    }
    let logits = decoder.logits(&hidden)?;
    let mut drawn = Vec::with_capacity(sequences.len());
    for (row, sequence) in sequences.iter_mut().enumerate() {
        let next = sequence.sampler.next(&numbers(&logits.f_select(0, row as i64)?)?);
        if let Ok(token) = next {
            sequence.token = token;
            sequence.slot += 1;
        }
        drawn.push(next);
    }
    Ok(drawn)
}

/// A vector of f32 out of the library.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f32>, Error> {
    let mut numbers = vec![0f32; tensor.numel()];
    tensor.f_contiguous()?.f_copy_data(&mut numbers, tensor.numel())?;
    Ok(numbers)
}

/// Log-probabilities of `targets` and the most likely tokens, from hidden states `[targets, hidden]`.
pub(crate) fn score(decoder: &Decoder, hidden: &Tensor, targets: &[u32]) -> Result<(Vec<f32>, Vec<u32>), Error> {
    let (mut logprobs, mut argmax) = (Vec::new(), Vec::new());
    for (row, &target) in targets.iter().enumerate() {
        let logits = numbers(&decoder.logits(&hidden.f_narrow(0, row as i64, 1)?)?)?;
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::NonFinite("logits"));
        }
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = logits.iter().map(|logit| f64::from(logit - greatest).exp()).sum();
        let target = logits.get(target as usize).copied().unwrap_or(f32::NEG_INFINITY);
        logprobs.push((f64::from(target - greatest) - total.ln()) as f32);
        argmax.push(kvsplice_model::sampling::argmax(&logits));
    }
    Ok((logprobs, argmax))
}
