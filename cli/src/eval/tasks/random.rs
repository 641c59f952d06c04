//! Seeded draws. A sample has a generator of its own, so that it does not change with the number or order of samples.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

/// The generator of `seed` for what `label` names, such as `hop/17`.
pub(super) fn generator(seed: u64, label: &str) -> ChaCha8Rng {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(label).finalize();
    ChaCha8Rng::from_seed(digest.into())
}

/// `amount` distinct numbers below `bound`, in random order; all of them when there are fewer.
pub(super) fn distinct(rng: &mut ChaCha8Rng, bound: usize, amount: usize) -> Vec<usize> {
    rand::seq::index::sample(rng, bound, amount.min(bound)).into_vec()
}

/// One entry of a list that is known not to be empty.
pub(super) fn pick<T: Copy>(rng: &mut ChaCha8Rng, list: &[T]) -> T {
    list[rng.random_range(0..list.len())]
}
