//! From logits to the next token.

use kvsplice_kv::Sampling;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::Error;

/// Draws tokens as a [`Sampling`] says. The same seed and logits give the same tokens.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// A sampler for one request.
    pub fn new(sampling: Sampling) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        Self { sampling, rng }
    }

    /// The next token. Ties go to the smaller id. Fails when a logit is not a number.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32, Error> {
        if logits.is_empty() || logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(Error::NonFinite("logits"));
        }
        if self.sampling.temperature == 0.0 {
            return Ok(argmax(logits));
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let descending = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let k = match self.sampling.top_k as usize {
            0 => order.len(),
            k => k.min(order.len()),
        };
        if k < order.len() {
            order.select_nth_unstable_by(k - 1, descending);
            order.truncate(k);
        }
        order.sort_unstable_by(descending);
        let greatest = logits[order[0] as usize];
        let weight = |id: u32| (f64::from(logits[id as usize] - greatest) / f64::from(self.sampling.temperature)).exp();
        let weights: Vec<f64> = order.iter().map(|&id| weight(id)).collect();
        let total: f64 = weights.iter().sum();
        let mut nucleus = 0.0;
        let mut kept = 0;
        for weight in &weights {
            nucleus += weight;
            kept += 1;
            if nucleus >= f64::from(self.sampling.top_p) * total {
                break;
            }
        }
        let mut point = self.rng.random::<f64>() * nucleus;
        for (&id, weight) in order[..kept].iter().zip(&weights) {
            point -= weight;
            if point < 0.0 {
                return Ok(id);
            }
        }
        Ok(order[kept - 1])
    }
}

/// The id of the greatest logit; the smaller id on a tie.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(sampling: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling);
        (0..count).map(|_| sampler.next(logits).unwrap()).collect()
    }

    #[test]
    fn greedy_takes_the_greatest_and_the_smaller_id_on_a_tie() {
        assert_eq!(draws(Sampling::default(), &[0.0, 3.0, 3.0, 1.0], 2), [1, 1]);
    }

    #[test]
    fn a_seed_repeats_and_another_one_differs() {
        let logits: Vec<f32> = (0..50).map(|id| (id as f32 * 0.7).sin()).collect();
        let with = |seed| draws(Sampling { temperature: 1.0, seed, ..Sampling::default() }, &logits, 40);
        assert_eq!(with(1), with(1));
        assert_ne!(with(1), with(2));
    }

    #[test]
    fn top_k_and_top_p_leave_only_the_likely_tokens() {
        let logits = [0.0, 4.0, 3.9, -1.0];
        let top_k = Sampling { temperature: 5.0, top_k: 2, ..Sampling::default() };
        assert!(draws(top_k, &logits, 200).iter().all(|id| [1, 2].contains(id)));
        let top_p = Sampling { temperature: 1.0, top_p: 0.4, ..Sampling::default() };
        assert!(draws(top_p, &logits, 200).iter().all(|&id| id == 1));
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let ids = draws(Sampling { temperature: 1.0, ..Sampling::default() }, &[1f32.ln(), 3f32.ln()], 4000);
        let share = ids.iter().filter(|&&id| id == 1).count() as f64 / 4000.0;
        assert!((share - 0.75).abs() < 0.03, "{share}");
    }

    #[test]
    fn logits_that_are_not_numbers_are_an_error() {
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(Sampler::new(Sampling::default()).next(&[0.0, bad]).is_err());
        }
        assert!(Sampler::new(Sampling::default()).next(&[]).is_err());
    }
}
