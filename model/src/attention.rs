//! How rows of one sequence attend: causally, in two parts, or with an account of what they look at.
//!
//! Rows see slots up to a last one each, as [`ragged_causal`] takes them. All weights and merges are f32.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use kvsplice_kernels::attention::{ragged_causal, ragged_causal_sums};
use kvsplice_kernels::rope::Rotation;
use tch::{Kind, Tensor};

use crate::cache::{KvCache, indices};
use crate::decoder::{SLICE_ROWS, joined, slice_of};
use crate::{Compute, Decoder, Error};

/// Two-part attention of the rows behind the context (APE, arXiv 2502.05431; with recomputed rows: PSR, arXiv
/// 2603.20218). The context's keys are all seen, with softmax scale 1/(√head_dim · temperature); the keys before and behind
/// it causally, with the ordinary scale. The parts merge by softmax([exponent · lse_context, lse_others]).
#[derive(Clone, Debug, PartialEq)]
pub struct TwoPart {
    /// Slots of all chunks.
    pub context: Range<u32>,
    /// T.
    pub temperature: f32,
    /// S, or S·T.
    pub exponent: f32,
}

/// Attention of `query` `[rows, heads, head_dim]` (rotated) in `layer`; row i sees slots `0..=last[i]`, ascending. With
/// `two_part`, rows whose last slot is behind the context attend in two parts. Returns `[rows, heads, head_dim]`.
pub fn attend(
    cache: &KvCache,
    layer: u32,
    query: &Tensor,
    last: &[u32],
    two_part: Option<&TwoPart>,
) -> Result<Tensor, Error> {
    let (keys, values) = cache.layer(layer);
    let split = split(last, two_part);
    let (Some(two_part), true) = (two_part, split < last.len()) else {
        return Ok(ragged_causal(query, keys, values, last)?);
    };
    let behind = Parts::new(
        cache,
        layer,
        &query.f_narrow(0, split as i64, (last.len() - split) as i64)?,
        &last[split..],
        two_part,
        &[],
    )?;
    if split == 0 {
        return behind.merge();
    }
    let before = ragged_causal(&query.f_narrow(0, 0, split as i64)?, keys, values, &last[..split])?;
    Ok(Tensor::f_cat(&[before, behind.merge()?], 0)?)
}

/// As [`attend`], and the attention mass on each chunk, mean over heads: `[rows, chunks]`. Chunk j is
/// `starts[j]..starts[j + 1]`. With `two_part`, every row must be behind the context, which is all the chunks.
pub fn attend_masses(
    cache: &KvCache,
    layer: u32,
    query: &Tensor,
    last: &[u32],
    two_part: Option<&TwoPart>,
    starts: &[u32],
) -> Result<(Tensor, Tensor), Error> {
    let (keys, values) = cache.layer(layer);
    let chunks = starts.len() as i64 - 1;
    if let Some(two_part) = two_part {
        let ends: Vec<u32> = starts.iter().map(|start| start.saturating_sub(two_part.context.start)).collect();
        let parts = Parts::new(cache, layer, query, last, two_part, &ends)?;
        let [weight, ..] = parts.weights()?;
        let within = differences(&parts.sums.f_sub(&parts.context.1)?.f_exp()?, chunks)?;
        let masses = within.f_mul(&weight)?.f_mean_dim([1].as_slice(), false, Kind::Float)?;
        return Ok((parts.merge()?, masses));
    }
    let mut ends = starts.to_vec();
    ends.push(cache.capacity());
    let (output, sums) = ragged_causal_sums(query, keys, values, last, &ends)?;
    let total = sums.f_narrow(2, chunks + 1, 1)?;
    let masses = differences(&sums.f_sub(&total)?.f_exp()?, chunks)?;
    Ok((output, masses.f_mean_dim([1].as_slice(), false, Kind::Float)?))
}

/// `[.., .., i + 1] − [.., .., i]` for the first `count` places.
fn differences(cumulative: &Tensor, count: i64) -> Result<Tensor, Error> {
    Ok(cumulative.f_narrow(2, 1, count)?.f_sub(&cumulative.f_narrow(2, 0, count)?)?)
}

/// The softmax weights of `query` `[rows, heads, head_dim]` over the first `keys` slots: `[rows, heads, keys]`, f32. Row i
/// sees slots `0..=last[i]`; others weigh 0. For few rows: the weights are materialized.
pub fn weights(cache: &KvCache, layer: u32, query: &Tensor, last: &[u32], keys: u32) -> Result<Tensor, Error> {
    let logits = logits(query, &cache.layer(layer).0.f_narrow(0, 0, i64::from(keys))?)?;
    let device = query.device();
    let hidden = Tensor::f_arange(i64::from(keys), (Kind::Int64, device))?
        .f_unsqueeze(0)?
        .f_gt_tensor(&indices(last, device)?.f_unsqueeze(1)?)?;
    Ok(logits.f_masked_fill(&hidden.f_unsqueeze(1)?, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?)
}

/// query · key / √head_dim: `[rows, heads, head_dim]` and `[keys, kv_heads, head_dim]` → `[rows, heads, keys]`, f32.
pub fn logits(query: &Tensor, keys: &Tensor) -> Result<Tensor, Error> {
    let (rows, heads, dim) = query.size3()?;
    let (count, kv_heads, _) = keys.size3()?;
    let group = heads / kv_heads;
    let query = query.f_to_kind(Kind::Float)?.f_view([rows, kv_heads, group, dim])?.f_permute([1, 0, 2, 3])?;
    let query = query.f_reshape([kv_heads, rows * group, dim])?;
    let products = query.f_matmul(&keys.f_to_kind(Kind::Float)?.f_permute([1, 2, 0])?)?;
    let products = products.f_view([kv_heads, rows, group, count])?.f_permute([1, 0, 2, 3])?;
    Ok(products.f_reshape([rows, heads, count])?.f_mul_scalar(1.0 / (dim as f64).sqrt())?)
}

/// How many of the rows come before the context's end.
fn split(last: &[u32], two_part: Option<&TwoPart>) -> usize {
    two_part.map_or(last.len(), |two_part| last.partition_point(|&slot| slot < two_part.context.end))
}

/// The three runs of keys of a two-part row: context, before it, behind it; each `([rows, heads, head_dim], lse
/// [rows, heads, 1])`.
struct Parts {
    context: (Tensor, Tensor),
    before: Option<(Tensor, Tensor)>,
    behind: (Tensor, Tensor),
    /// `[rows, heads, ends]`: log-sum-exps within the context up to each end.
    sums: Tensor,
    exponent: f64,
    kind: Kind,
}

impl Parts {
    /// `ends`: slots within the context.
    fn new(
        cache: &KvCache,
        layer: u32,
        query: &Tensor,
        last: &[u32],
        two_part: &TwoPart,
        ends: &[u32],
    ) -> Result<Self, Error> {
        let TwoPart { context, temperature, exponent } = two_part;
        let (keys, values) = cache.layer(layer);
        let kind = query.kind();
        let query = query.f_to_kind(Kind::Float)?;
        let (first, end) = (i64::from(context.start), i64::from(context.end));
        let length = context.end.saturating_sub(context.start);
        if length == 0 || last.iter().any(|&slot| slot < context.end) {
            let what = format!("two-part attention needs rows behind the context {context:?}");
            return Err(Error::Argument(what));
        }
        // Queries are f32, so that the parts merge without another rounding; on the CPU the kernel takes keys as they are.
        let cut = |tensor: &Tensor, start: i64, tokens: i64| {
            let part = tensor.f_narrow(0, start, tokens)?;
            if part.device() == tch::Device::Cpu { Ok(part) } else { part.f_to_kind(Kind::Float) }
        };
        let run = |query: &Tensor, start: i64, tokens: i64, last: &[u32], ends: &[u32]| {
            let (keys, values) = (cut(keys, start, tokens)?, cut(values, start, tokens)?);
            ragged_causal_sums(query, &keys, &values, last, ends)
        };
        let all = |tokens: u32| vec![tokens - 1; last.len()];
        let mut all_ends = ends.to_vec();
        all_ends.push(length);
        let sharp = query.f_div_scalar(f64::from(*temperature))?;
        let (output, sums) = run(&sharp, first, i64::from(length), &all(length), &all_ends)?;
        let total = sums.f_narrow(2, ends.len() as i64, 1)?;
        let before = match context.start {
            0 => None,
            tokens => Some(run(&query, 0, i64::from(tokens), &all(tokens), &[tokens])?),
        };
        let own: Vec<u32> = last.iter().map(|slot| slot - context.end).collect();
        let visible = own.last().map_or(0, |slot| slot + 1);
        let behind = run(&query, end, i64::from(visible), &own, &[visible])?;
        Ok(Self { context: (output, total), before, behind, sums, exponent: f64::from(*exponent), kind })
    }

    /// Softmax weights of context, before and behind: `[rows, heads, 1]` each.
    fn weights(&self) -> Result<[Tensor; 3], Error> {
        let context = self.context.1.f_mul_scalar(self.exponent)?;
        let before = match &self.before {
            Some((_, lse)) => lse.shallow_clone(),
            None => context.f_full_like(f64::NEG_INFINITY)?,
        };
        let weights = Tensor::f_cat(&[&context, &before, &self.behind.1], 2)?.f_softmax(-1, Kind::Float)?;
        Ok([weights.f_narrow(2, 0, 1)?, weights.f_narrow(2, 1, 1)?, weights.f_narrow(2, 2, 1)?])
    }

    fn merge(&self) -> Result<Tensor, Error> {
        let [context, before, behind] = self.weights()?;
        let mut output = self.context.0.f_mul(&context)?.f_add(&self.behind.0.f_mul(&behind)?)?;
        if let Some((part, _)) = &self.before {
            output = output.f_add(&part.f_mul(&before)?)?;
        }
        Ok(output.f_to_kind(self.kind)?)
    }
}

/// A full causal pass over a prompt that keeps what its last token attends to.
struct LastAttention {
    cache: KvCache,
    slots: Vec<u32>,
    rotation: Rotation,
    hidden: Tensor,
    layer: u32,
    wanted: Vec<u32>,
    found: Vec<Vec<f32>>,
}

impl LastAttention {
    fn new(decoder: &Decoder, ids: &[u32], layers: &[u32]) -> Result<Self, Error> {
        let count = decoder.config().layers;
        if ids.is_empty() || layers.iter().any(|&layer| layer >= count) {
            return Err(Error::Argument(format!("{} tokens and layers {layers:?} of {count}", ids.len())));
        }
        let slots: Vec<u32> = (0..ids.len() as u32).collect();
        Ok(Self {
            cache: decoder.cache(slots.len() as u32)?,
            rotation: decoder.rotation(&slots)?,
            hidden: decoder.embed(ids)?,
            slots,
            layer: 0,
            wanted: layers.to_vec(),
            found: vec![Vec::new(); layers.len()],
        })
    }

    /// Computes one layer. Returns whether everything wanted is there.
    fn advance(&mut self, decoder: &Decoder) -> Result<bool, Error> {
        let done = self.wanted.iter().all(|&layer| layer <= self.layer);
        let mut outputs = Vec::new();
        let mut looked = None;
        let slice = slice_of(self.slots.len(), SLICE_ROWS);
        for (index, slots) in self.slots.chunks(slice).enumerate() {
            let first = index * slice;
            let hidden = self.hidden.f_narrow(0, first as i64, slots.len() as i64)?;
            let rotation = self.rotation.narrow(first, slots.len())?;
            let rows = decoder.project(self.layer, &hidden, &rotation)?;
            self.cache.write(self.layer, slots, &rows.rotated_key, &rows.value)?;
            if first + slots.len() == self.slots.len() && self.wanted.contains(&self.layer) {
                looked = Some(rows.query.f_narrow(0, slots.len() as i64 - 1, 1)?);
            }
            if !done {
                let attention = attend(&self.cache, self.layer, &rows.query, slots, None)?;
                outputs.push(decoder.finish(self.layer, &hidden, &attention)?);
            }
        }
        if let Some(query) = looked {
            self.look(&query)?;
        }
        if !done {
            self.hidden = joined(outputs)?;
        }
        self.layer += 1;
        Ok(done)
    }

    fn look(&mut self, query: &Tensor) -> Result<(), Error> {
        let tokens = self.slots.len() as u32;
        let weights = weights(&self.cache, self.layer, query, &[tokens - 1], tokens)?;
        let mean = weights.f_mean_dim([0, 1].as_slice(), false, Kind::Float)?.f_contiguous()?;
        let mut numbers = vec![0f32; tokens as usize];
        mean.f_copy_data(&mut numbers, tokens as usize)?;
        for (wanted, found) in self.wanted.iter().zip(&mut self.found) {
            if *wanted == self.layer {
                found.clone_from(&numbers);
            }
        }
        Ok(())
    }
}

/// What the last of `ids` attends to in each of `layers`, mean over heads: one weight a token, in the order of `layers`.
/// One layer a job of the compute thread: other work goes in between.
///
/// Fails on no token, on a layer that the model lacks, and on a prompt longer than its context.
pub async fn last_attention(
    compute: &Compute,
    decoder: &Arc<Mutex<Decoder>>,
    ids: Vec<u32>,
    layers: Vec<u32>,
) -> Result<Vec<Vec<f32>>, Error> {
    let locked = Arc::clone(decoder);
    let start = move || LastAttention::new(&locked.lock().unwrap_or_else(PoisonError::into_inner), &ids, &layers);
    let mut pass = compute.run(start).await??;
    loop {
        let locked = Arc::clone(decoder);
        let advance = move || {
            let done = pass.advance(&locked.lock().unwrap_or_else(PoisonError::into_inner))?;
            Ok::<_, Error>((pass, done))
        };
        let (advanced, done) = compute.run(advance).await??;
        if done {
            return Ok(advanced.found);
        }
        pass = advanced;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    use crate::Config;

    fn random(shape: &[i64], seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn(shape, (Kind::Float, Device::Cpu))
    }

    /// A cache of 100 random slots, and queries of the last `rows` of them.
    fn sequence(rows: i64) -> (KvCache, Tensor, Vec<u32>) {
        let config = Config::tiny(64);
        let mut cache = KvCache::new(&config, 100, Kind::Float, Device::Cpu).unwrap();
        let shape = [100, i64::from(config.kv_heads), i64::from(config.head_dim)];
        let slots: Vec<u32> = (0..100).collect();
        cache.write(0, &slots, &random(&shape, 1), &random(&shape, 2)).unwrap();
        let query = random(&[rows, i64::from(config.heads), i64::from(config.head_dim)], 3);
        (cache, query, slots[100 - rows as usize..].to_vec())
    }

    #[test]
    fn two_parts_with_neutral_settings_equal_one() {
        let (cache, query, last) = sequence(30);
        let plain = attend(&cache, 0, &query, &last, None).unwrap();
        for context in [10..70, 0..70, 20..90] {
            // Rows before the context's end attend as usual.
            let two_part = TwoPart { context: context.clone(), temperature: 1.0, exponent: 1.0 };
            let merged = attend(&cache, 0, &query, &last, Some(&two_part)).unwrap();
            assert!((&merged - &plain).abs().max().double_value(&[]) < 1e-5, "{context:?}");
        }
    }

    #[test]
    fn a_smaller_exponent_takes_mass_from_the_context() {
        let (cache, query, last) = sequence(20);
        let starts = [10, 30, 60];
        let masses = |exponent, temperature| {
            let two_part = TwoPart { context: 10..60, temperature, exponent };
            attend_masses(&cache, 0, &query, &last, Some(&two_part), &starts).unwrap().1
        };
        let plain = attend_masses(&cache, 0, &query, &last, None, &starts).unwrap().1;
        assert!((masses(1.0, 1.0) - &plain).abs().max().double_value(&[]) < 1e-5);
        assert!(masses(0.5, 1.0).sum(Kind::Float).double_value(&[]) < plain.sum(Kind::Float).double_value(&[]));
    }

    #[test]
    fn masses_are_sums_of_weights() {
        let (cache, query, last) = sequence(25);
        let starts = [5, 40, 41, 90];
        let masses = attend_masses(&cache, 0, &query, &last, None, &starts).unwrap().1;
        let weights = weights(&cache, 0, &query, &last, 100).unwrap().mean_dim([1i64].as_slice(), false, Kind::Float);
        for (place, pair) in starts.windows(2).enumerate() {
            let sum = weights.narrow(1, i64::from(pair[0]), i64::from(pair[1] - pair[0]));
            let sum = sum.sum_dim_intlist([1i64].as_slice(), false, Kind::Float);
            let got = masses.select(1, place as i64);
            assert!((got - sum).abs().max().double_value(&[]) < 1e-5, "chunk {place}");
        }
    }

    #[test]
    fn a_row_before_the_context_has_no_two_parts() {
        let (cache, query, last) = sequence(10);
        let two_part = TwoPart { context: 10..95, temperature: 0.5, exponent: 0.5 };
        let plain = attend(&cache, 0, &query, &last, None).unwrap();
        let mixed = attend(&cache, 0, &query, &last, Some(&two_part)).unwrap();
        let differs = |row: i64| (mixed.select(0, row) - plain.select(0, row)).abs().max().double_value(&[]) > 1e-4;
        assert!(!differs(4) && differs(5));
        assert!(attend_masses(&cache, 0, &query, &last, Some(&two_part), &[10, 95]).is_err());
    }
}
