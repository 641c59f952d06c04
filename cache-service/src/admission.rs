//! Which chunks enter the tiers: all that are read, or those that are asked for twice.
//!
//! Requests are remembered for some 100,000 chunks, so that a scan of a large corpus, or its ingest, does not push out
//! what is in use. Pinned chunks always enter.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::protect::Protection;
use crate::tier::ObjectKey;

/// What enters the memory and the disk tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Admission {
    /// Everything that is read or written.
    #[default]
    Always,
    /// What is asked for a second time, or pinned.
    Second,
}

/// Chunks in one of the two halves of the memory of requests.
const HALF: usize = 1 << 16;

/// Decides what enters the tiers.
#[derive(Debug)]
pub(crate) struct Gate {
    admission: Admission,
    protection: Arc<Protection>,
    asked: Mutex<Asked>,
}

/// How often each chunk was asked for; the older half is forgotten when the newer one is full.
#[derive(Debug, Default)]
struct Asked {
    newer: HashMap<ObjectKey, u32>,
    older: HashMap<ObjectKey, u32>,
}

impl Gate {
    pub(crate) fn new(admission: Admission, protection: Arc<Protection>) -> Self {
        Self { admission, protection, asked: Mutex::default() }
    }

    /// Notes that a stream asks for a chunk.
    pub(crate) fn ask(&self, key: &ObjectKey) {
        if self.admission == Admission::Always {
            return;
        }
        // A panic while the lock was held cannot leave the counts wrong in a way that matters.
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.newer.len() >= HALF {
            asked.older = std::mem::take(&mut asked.newer);
        }
        let before = asked.older.remove(key).unwrap_or(0);
        let count = asked.newer.entry(*key).or_insert(before);
        *count = count.saturating_add(1);
    }

    /// Whether a chunk may enter.
    pub(crate) fn admits(&self, key: &ObjectKey) -> bool {
        if self.admission == Admission::Always || self.protection.pinned(&key.chunk) {
            return true;
        }
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.newer.get(key).or_else(|| asked.older.get(key)).is_some_and(|count| *count >= 2)
    }
}

#[cfg(test)]
mod tests {
    use kvsplice_kv::{ChunkId, Encoding, Variant};

    use super::*;

    fn key(number: u32) -> ObjectKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        ObjectKey { chunk: ChunkId::from_bytes(bytes), variant: Variant::clean(Encoding::Bf16) }
    }

    #[test]
    fn the_second_request_or_a_pin_lets_a_chunk_in() {
        let protection = Arc::new(Protection::new());
        let gate = Gate::new(Admission::Second, protection.clone());
        assert!(!gate.admits(&key(1)));
        gate.ask(&key(1));
        assert!(!gate.admits(&key(1)));
        gate.ask(&key(1));
        assert!(gate.admits(&key(1)) && !gate.admits(&key(2)));
        protection.pin(&[key(2).chunk]).unwrap();
        assert!(gate.admits(&key(2)));
        assert!(Gate::new(Admission::Always, protection).admits(&key(3)));
    }

    #[test]
    fn old_requests_are_forgotten_and_memory_is_bounded() {
        let gate = Gate::new(Admission::Second, Arc::new(Protection::new()));
        gate.ask(&key(0));
        for number in 1..=(2 * HALF as u32 + 1) {
            gate.ask(&key(number));
        }
        gate.ask(&key(0));
        assert!(!gate.admits(&key(0)), "the first request is forgotten");
        gate.ask(&key(2 * HALF as u32));
        assert!(gate.admits(&key(2 * HALF as u32)));
        let asked = gate.asked.lock().unwrap();
        assert!(asked.newer.len() + asked.older.len() <= 2 * HALF);
    }
}
