//! What Cache-Craft reuses is captured while earlier prompts are answered. Here those are the same chunks in another order,
//! which is all that the prompts of a deployment have in common with each other.

use kvsplice_kv::{Options, Strategy};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::eval::client::Client;
use crate::eval::plan::Plan;
use crate::eval::progress::Progress;
use crate::eval::store::Store;
use crate::eval::tasks::Sample;

/// Captures the chunks of every sample that is not measured yet under some setting.
///
/// # Errors
/// What the server says.
pub(in crate::eval) async fn all(client: &Client, plan: &Plan, store: &Store, silent: bool) -> anyhow::Result<()> {
    let mut open = Vec::new();
    for (number, item) in plan.items.iter().enumerate() {
        for options in &plan.strategies {
            if store.find(item, &options.to_string())?.is_none() {
                open.push((number, &item.sample));
                break;
            }
        }
    }
    let mut progress = Progress::new(silent, 0, open.len());
    let options = Options { capture: true, prefix_cache: false, ..Options::of(Strategy::Craft) };
    let result = async {
        for (number, sample) in open {
            let mut rng = ChaCha8Rng::seed_from_u64(plan.seed);
            rng.set_stream(number as u64);
            let earlier = reordered(sample, &mut rng);
            let captured = client.answer(&earlier, options, 1).await;
            captured.map_err(|error| error.context(format!("capture the chunks of {}", sample.id)))?;
            progress.finished(format_args!("{} captured", sample.id));
        }
        Ok(())
    };
    let result = result.await;
    progress.clear();
    result
}

/// The sample with its chunks in another order, if they have one.
fn reordered(sample: &Sample, rng: &mut ChaCha8Rng) -> Sample {
    let mut earlier = sample.clone();
    earlier.chunks.shuffle(rng);
    if earlier.chunks == sample.chunks && !earlier.chunks.is_empty() {
        earlier.chunks.rotate_left(1);
    }
    earlier
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::score::Metric;

    #[test]
    fn the_order_is_another_one_with_the_same_chunks() {
        for seed in 0..20 {
            for count in 1..5 {
                let chunks: Vec<String> = (0..count).map(|chunk| format!("chunk {chunk}")).collect();
                let sample = Sample {
                    id: "hop-0".to_owned(),
                    task: "hop".to_owned(),
                    system: None,
                    intro: None,
                    chunks: chunks.clone(),
                    question: "?".to_owned(),
                    answer_prefix: String::new(),
                    answers: Vec::new(),
                    gold: String::new(),
                    max_tokens: 1,
                    metric: Metric::Exact,
                    stop_at_newline: true,
                };
                let mut earlier = reordered(&sample, &mut ChaCha8Rng::seed_from_u64(seed)).chunks;
                assert_eq!(earlier == chunks, count == 1, "seed {seed}, {count} chunks");
                earlier.sort();
                assert_eq!(earlier, chunks);
            }
        }
    }
}
