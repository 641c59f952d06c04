//! Who holds which chunk, how many of its layers are here, and which chunks were asked for before.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::PoolKey;

/// Chunks in one of the two halves of the memory of requests.
const HALF: usize = 1 << 15;

/// The chunks that are held, or of which layers are here.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    kept: HashMap<PoolKey, Kept>,
    /// Rises with each chunk that comes in or is forgotten.
    turn: u64,
    asked: Asked,
}

#[derive(Debug)]
struct Kept {
    /// Layers in both tiers.
    layers: u32,
    /// Requests that hold it.
    holders: u32,
    asked: Instant,
    /// When it came in or was last forgotten.
    since: u64,
}

/// What requests have asked for; the older half is forgotten when the newer one is full.
#[derive(Debug, Default)]
struct Asked {
    newer: HashSet<PoolKey>,
    older: HashSet<PoolKey>,
}

impl Asked {
    /// Notes a request; whether there was one before.
    fn again(&mut self, key: PoolKey) -> bool {
        if self.newer.len() >= HALF {
            self.older = std::mem::take(&mut self.newer);
        }
        !self.newer.insert(key) || self.older.contains(&key)
    }
}

impl Chunks {
    /// A request holds the chunk from now on. Since when what it brings is welcome, and whether another request has asked for
    /// the chunk before.
    pub(super) fn hold(&mut self, key: PoolKey) -> (u64, bool) {
        let now = Instant::now();
        self.turn += 1;
        let kept = self.kept.entry(key).or_insert(Kept { layers: 0, holders: 0, asked: now, since: self.turn });
        kept.holders += 1;
        kept.asked = now;
        (kept.since, self.asked.again(key))
    }

    /// A request that held the chunk is over.
    pub(super) fn release(&mut self, key: &PoolKey) {
        if let Some(kept) = self.kept.get_mut(key) {
            kept.holders = kept.holders.saturating_sub(1);
        }
        self.drop_if_empty(key);
    }

    /// Whether the chunk is held, and was not forgotten `since` its holder took hold of it.
    pub(super) fn admits(&self, key: &PoolKey, since: u64) -> bool {
        self.kept.get(key).is_some_and(|kept| kept.holders > 0 && kept.since == since)
    }

    pub(super) fn is_held(&self, key: &PoolKey) -> bool {
        self.kept.get(key).is_some_and(|kept| kept.holders > 0)
    }

    /// How many chunks are held.
    pub(super) fn held(&self) -> u64 {
        self.kept.values().filter(|kept| kept.holders > 0).count() as u64
    }

    /// One more of its layers is here.
    pub(super) fn gain(&mut self, key: &PoolKey) {
        if let Some(kept) = self.kept.get_mut(key) {
            kept.layers += 1;
        }
    }

    /// One of its layers is gone.
    pub(super) fn lose(&mut self, key: &PoolKey) {
        if let Some(kept) = self.kept.get_mut(key) {
            kept.layers = kept.layers.saturating_sub(1);
        }
        self.drop_if_empty(key);
    }

    /// All of its layers are gone, and what its holders still bring is not welcome.
    pub(super) fn forget(&mut self, key: &PoolKey) {
        self.turn += 1;
        if let Some(kept) = self.kept.get_mut(key) {
            kept.layers = 0;
            kept.since = self.turn;
        }
        self.drop_if_empty(key);
    }

    /// Chunks that nobody holds and nobody has asked for during `time`.
    pub(super) fn unasked(&self, now: Instant, time: Duration) -> Vec<PoolKey> {
        let unasked = |kept: &Kept| kept.holders == 0 && now.saturating_duration_since(kept.asked) >= time;
        self.kept.iter().filter(|(_, kept)| unasked(kept)).map(|(key, _)| *key).collect()
    }

    fn drop_if_empty(&mut self, key: &PoolKey) {
        if self.kept.get(key).is_some_and(|kept| kept.layers == 0 && kept.holders == 0) {
            self.kept.remove(key);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }
}
