//! How far a strategy's distributions along the gold answer are from full attention's. Pure arithmetic, in f64.

use super::client::Scored;
use super::store::Agreement;

/// Compares `other` with `full`, both along the same gold tokens.
///
/// # Errors
/// When the two do not have the same tokens and vocabulary, or a number is not finite.
pub(super) fn agreement(full: &Scored, other: &Scored) -> anyhow::Result<Agreement> {
    anyhow::ensure!(
        full.token_ids == other.token_ids && full.distributions.len() == other.distributions.len(),
        "the strategies scored other tokens: {:?} and {:?}",
        full.token_ids,
        other.token_ids
    );
    let tokens = other.token_ids.len();
    let row_bytes = full.distributions.len() / tokens.max(1);
    anyhow::ensure!(row_bytes > 0, "the server sent no distributions");
    let rows = full.distributions.chunks_exact(row_bytes).zip(other.distributions.chunks_exact(row_bytes));
    let kl: f64 = rows.map(|(full, other)| divergence(full, other)).sum();
    let share = |same: usize| same as f64 / tokens.max(1) as f64;
    let equal = |left: &[u32], right: &[u32]| left.iter().zip(right).filter(|(left, right)| left == right).count();
    let gold: f64 = other.logprobs.iter().map(|&logprob| f64::from(logprob)).sum();
    let agreement = Agreement {
        kl: kl / tokens.max(1) as f64,
        argmax: share(equal(&full.argmax_ids, &other.argmax_ids)),
        right: other.argmax_ids == other.token_ids,
        gold_logprob: gold / tokens.max(1) as f64,
        gold_tokens: tokens as u64,
    };
    anyhow::ensure!(
        agreement.kl.is_finite() && agreement.gold_logprob.is_finite(),
        "log-probabilities are not finite: KL {}, gold {}",
        agreement.kl,
        agreement.gold_logprob
    );
    Ok(agreement)
}

/// KL(p ‖ q) = Σ p·(ln p − ln q) of two rows of natural logarithms; never below 0, which rounding alone would give.
fn divergence(p: &[u8], q: &[u8]) -> f64 {
    let mut sum = 0.0;
    for (p, q) in p.as_chunks::<4>().0.iter().zip(q.as_chunks::<4>().0) {
        let (log_p, log_q) = (f64::from(f32::from_le_bytes(*p)), f64::from(f32::from_le_bytes(*q)));
        let p = log_p.exp();
        if p > 0.0 {
            sum += p * (log_p - log_q);
        }
    }
    sum.max(0.0)
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::{ModelDigest, Options, Receipt, Strategy};

    use super::*;

    fn scored(token_ids: &[u32], rows: &[&[f64]]) -> Scored {
        let logs = rows.iter().flat_map(|row| row.iter().map(|p| p.ln() as f32));
        let argmax = |row: &&[f64]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
        Scored {
            token_ids: token_ids.to_vec(),
            argmax_ids: rows.iter().map(argmax).collect(),
            logprobs: token_ids.iter().zip(rows).map(|(&id, row)| row[id as usize].ln() as f32).collect(),
            distributions: logs.flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into(),
            receipt: Receipt {
                request_id: String::new(),
                requested: Options::default(),
                effective: Strategy::Full,
                effective_reason: String::new(),
                ratio_nominal: 0.0,
                ratio_charged: 0.0,
                chunks: Vec::new(),
                auxiliary_source: String::new(),
                tokens: kvsplice_kv::receipt::TokenCounts::default(),
                spans: Vec::new(),
                models: kvsplice_kv::receipt::Models {
                    primary: "00".repeat(32).parse::<ModelDigest>().unwrap(),
                    auxiliary: None,
                },
                finish: String::new(),
            },
        }
    }

    #[test]
    fn divergence_and_agreement_are_those_of_a_worked_example() {
        let full = scored(&[0, 1], &[&[0.5, 0.25, 0.25], &[0.1, 0.8, 0.1]]);
        let other = scored(&[0, 1], &[&[0.25, 0.5, 0.25], &[0.1, 0.8, 0.1]]);
        let agreement = super::agreement(&full, &other).unwrap();
        // First token: 0.5·ln 2 + 0.25·ln 0.5 = 0.25·ln 2. Second: 0.
        assert!((agreement.kl - 0.125 * 2f64.ln()).abs() < 1e-6, "{}", agreement.kl);
        assert_eq!((agreement.argmax, agreement.right, agreement.gold_tokens), (0.5, false, 2));
        assert!((agreement.gold_logprob - (0.25f64.ln() + 0.8f64.ln()) / 2.0).abs() < 1e-6);
        let same = super::agreement(&full, &full).unwrap();
        assert_eq!((same.kl, same.argmax, same.right), (0.0, 1.0, true));
    }

    #[test]
    fn an_impossible_token_counts_only_where_full_attention_wants_it() {
        let certain = scored(&[0], &[&[1.0, 0.0]]);
        let unsure = scored(&[0], &[&[0.5, 0.5]]);
        assert!((super::agreement(&certain, &unsure).unwrap().kl - 2f64.ln()).abs() < 1e-6);
        assert!(super::agreement(&unsure, &certain).is_err(), "an infinite divergence is an error");
        assert!(super::agreement(&unsure, &scored(&[1], &[&[0.5, 0.5]])).is_err());
    }
}
