//! The tree as a plain map of whole prefixes, every rule by exhaustive search; forgets no statistics.

use std::collections::BTreeMap;

use super::super::{BLOCK, Inserted, Offer, Policy};

/// Owner and all ids down to a block.
pub(super) type Payload = (&'static str, Vec<u32>);

#[derive(Clone, Debug, Default)]
pub(super) struct Entry {
    bytes: u64,
    holders: u32,
    priority: f64,
    tick: u64,
}

/// Uses, and the costs a token of those that computed the block.
#[derive(Clone, Debug, Default)]
struct Seen {
    uses: u32,
    costs: Vec<f64>,
}

pub(super) struct Model {
    policy: Policy,
    budget: u64,
    clock: f64,
    tick: u64,
    seen: BTreeMap<Payload, Seen>,
    pub(super) cached: BTreeMap<Payload, Entry>,
}

/// All whole-block prefixes of `ids`, the shortest first.
fn prefixes(salt: &'static str, ids: &[u32], tokens: usize) -> Vec<Payload> {
    (1..=ids.len().min(tokens) / BLOCK).map(|blocks| (salt, ids[..blocks * BLOCK].to_vec())).collect()
}

impl Model {
    pub(super) fn new(policy: Policy, budget: u64) -> Self {
        Self { policy, budget, clock: 0.0, tick: 0, seen: BTreeMap::new(), cached: BTreeMap::new() }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.cached.values().map(|entry| entry.bytes).sum()
    }

    pub(super) fn find(&mut self, salt: &'static str, ids: &[u32], limit: usize) -> Payload {
        self.tick += 1;
        let mut longest = (salt, Vec::new());
        for key in prefixes(salt, ids, limit) {
            let Some(entry) = self.cached.get_mut(&key) else { break };
            entry.holders += 1;
            self.seen.entry(key.clone()).or_default().uses += 1;
            longest = key;
        }
        self.touch(&longest);
        longest
    }

    pub(super) fn release(&mut self, held: &Payload) {
        for key in prefixes(held.0, &held.1, usize::MAX) {
            self.cached.get_mut(&key).unwrap().holders -= 1;
        }
    }

    pub(super) fn insert(&mut self, salt: &'static str, offer: &Offer<'_>, fails_at: usize) -> Result<Inserted, ()> {
        self.tick += 1;
        let bytes = offer.bytes_per_block.max(1);
        let path = prefixes(salt, offer.ids, offer.tokens);
        let mut last = (salt, Vec::new());
        let (mut blocks, mut full, mut failed) = (0, false, false);
        for (index, key) in path.iter().enumerate() {
            let seen = self.seen.entry(key.clone()).or_default();
            let known = self.cached.contains_key(key);
            if index >= offer.reused / BLOCK || seen.uses == 0 {
                seen.uses += 1;
                seen.costs.push(offer.cost.prefill.as_secs_f64() / offer.cost.new_tokens as f64);
            }
            if !known {
                full = full || !self.make_room(bytes, &path);
                if full {
                    continue;
                }
                if index >= fails_at {
                    failed = true;
                    break;
                }
                blocks += 1;
                self.cached.insert(key.clone(), Entry { bytes, tick: self.tick, ..Entry::default() });
            }
            last = key.clone();
        }
        self.touch(&last);
        if failed { Err(()) } else { Ok(Inserted { blocks, tokens: last.1.len() }) }
    }

    fn make_room(&mut self, bytes: u64, path: &[Payload]) -> bool {
        let stays = |key: &Payload, entry: &Entry| entry.holders > 0 || path.contains(key);
        let least: u64 =
            self.cached.iter().filter(|(key, entry)| stays(key, entry)).map(|(_, entry)| entry.bytes).sum();
        if least + bytes > self.budget {
            return false;
        }
        while self.bytes() + bytes > self.budget {
            let has_child = |key: &Payload| {
                self.cached
                    .keys()
                    .any(|other| other.0 == key.0 && other.1.len() > key.1.len() && other.1.starts_with(&key.1))
            };
            let victim = self
                .cached
                .iter()
                .filter(|(key, entry)| !stays(key, entry) && !has_child(key))
                .min_by(|(_, a), (_, b)| a.priority.total_cmp(&b.priority).then(a.tick.cmp(&b.tick)))
                .map(|(key, _)| key.clone())
                .expect("what is not held can go");
            let entry = self.cached.remove(&victim).unwrap();
            self.clock = self.clock.max(entry.priority);
        }
        true
    }

    fn touch(&mut self, longest: &Payload) {
        let mut child = 0.0f64;
        for key in prefixes(longest.0, &longest.1, usize::MAX).iter().rev() {
            let entry = self.cached.get_mut(key).unwrap();
            if self.policy == Policy::Pgdsf {
                let seen = &self.seen[key];
                let mut sum = 0.0;
                seen.costs.iter().for_each(|cost| sum += cost);
                let own = self.clock + f64::from(seen.uses) * sum / seen.costs.len() as f64;
                entry.priority = entry.priority.max(own).max(child);
            }
            entry.tick = self.tick;
            child = entry.priority;
        }
    }
}
