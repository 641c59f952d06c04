//! What a tier or a worker's pool holds, in the order in which it goes: one byte limit, two orders.
//!
//! `lru` drops what was asked for longest ago. `value` is the clock of RAGCache (arXiv 2404.12457, section 5.1) without its
//! prefix tree, hence the greedy dual of Cao and Irani with frequency: priority = clock + frequency × recompute cost ÷ bytes,
//! set on each request, and the clock rises to the priority of what is evicted. Protected entries are passed over. The
//! limit is never exceeded: a newcomer for which no room can be made is not held.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Which entry of a full tier goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Eviction {
    /// The one asked for longest ago.
    Lru,
    /// The one whose recompute cost × frequency ÷ bytes is lowest, aged by a clock. The default: on Zipf traces it hits more
    /// bytes and saves more recompute time at every size (`kvsplice bench cache`).
    #[default]
    Value,
}

/// Protected entries that were passed over are looked at again after this time.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The entries of one tier.
#[derive(Debug)]
pub struct Book<K, V> {
    eviction: Eviction,
    limit_bytes: u64,
    bytes: u64,
    /// Priority of what was last evicted by value.
    clock: f64,
    /// Rises with each request.
    turn: u64,
    entries: HashMap<K, Entry<V>>,
    /// Lowest first.
    order: BTreeMap<Rank, K>,
    /// Protected entries that stood in the way of an eviction: else each eviction would pass over them again.
    parked: Vec<K>,
    parked_at: Instant,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    bytes: u64,
    cost_us: f64,
    frequency: u32,
    /// None while parked.
    rank: Option<Rank>,
}

/// The bits of a float that is not negative order as the float does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    priority_bits: u64,
    turn: u64,
}

impl<K: Copy + Eq + Hash, V> Book<K, V> {
    /// An empty book of at most `limit_bytes`.
    pub fn new(eviction: Eviction, limit_bytes: u64) -> Self {
        Self {
            eviction,
            limit_bytes,
            bytes: 0,
            clock: 0.0,
            turn: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            parked: Vec::new(),
            parked_at: Instant::now(),
        }
    }

    /// Bytes held.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The most bytes that may be held.
    pub const fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Entries held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of `key`; not a request.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// The value of `key`, to be changed; not a request.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    /// Every entry, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, entry)| (key, &entry.value))
    }

    /// Notes a request of `key`.
    pub fn touch(&mut self, key: &K) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.frequency = entry.frequency.saturating_add(1);
        if let Some(rank) = entry.rank {
            self.order.remove(&rank);
        }
        self.rank(*key);
    }

    /// Puts `key` at its place in the order; its former rank must be out of it.
    fn rank(&mut self, key: K) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let priority = match self.eviction {
            Eviction::Lru => 0.0,
            Eviction::Value => self.clock + f64::from(entry.frequency) * entry.cost_us / entry.bytes.max(1) as f64,
        };
        self.turn += 1;
        let rank = Rank { priority_bits: priority.max(0.0).to_bits(), turn: self.turn };
        entry.rank = Some(rank);
        self.order.insert(rank, key);
    }

    /// Puts what was passed over back into the order: for one who knows that some of it is protected no more.
    pub fn look_again(&mut self) {
        for key in std::mem::take(&mut self.parked) {
            if self.entries.get(&key).is_some_and(|entry| entry.rank.is_none()) {
                self.rank(key);
            }
        }
    }

    /// Evicts until `bytes` more can be held, and says whether they can. What `protected` covers stays.
    pub fn make_room(&mut self, bytes: u64, protected: impl Fn(&K) -> bool) -> (Vec<(K, V)>, bool) {
        let mut evicted = Vec::new();
        if bytes > self.limit_bytes {
            return (evicted, false);
        }
        if !self.parked.is_empty() && self.parked_at.elapsed() >= LOOK_AGAIN {
            self.look_again();
        }
        while self.bytes > self.limit_bytes - bytes {
            let Some((rank, key)) = self.order.pop_first() else { return (evicted, false) };
            if protected(&key) {
                if self.parked.is_empty() {
                    self.parked_at = Instant::now();
                }
                self.parked.push(key);
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.rank = None;
                }
                continue;
            }
            self.clock = self.clock.max(f64::from_bits(rank.priority_bits));
            if let Some(entry) = self.entries.remove(&key) {
                self.bytes -= entry.bytes;
                evicted.push((key, entry.value));
            }
        }
        (evicted, true)
    }

    /// Holds `value` if [`Book::make_room`] has made room for it. `cost_us`: microseconds that computing it anew takes; only
    /// the ratio of two entries' costs decides, so that any other unit will do that all entries share.
    pub fn insert(&mut self, key: K, value: V, bytes: u64, cost_us: f64) {
        self.remove(&key);
        if bytes > self.limit_bytes - self.bytes {
            return;
        }
        self.bytes += bytes;
        let cost_us = if cost_us.is_finite() { cost_us.max(0.0) } else { 0.0 };
        self.entries.insert(key, Entry { value, bytes, cost_us, frequency: 1, rank: None });
        self.rank(key);
    }

    /// Drops an entry.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        if let Some(rank) = entry.rank {
            self.order.remove(&rank);
        }
        Some(entry.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(book: &mut Book<u32, ()>, key: u32, bytes: u64, cost_us: f64) -> Vec<u32> {
        let (evicted, _) = book.make_room(bytes, |_| false);
        book.insert(key, (), bytes, cost_us);
        evicted.into_iter().map(|(key, ())| key).collect()
    }

    #[test]
    fn lru_drops_what_was_asked_for_longest_ago() {
        let mut book = Book::new(Eviction::Lru, 30);
        for key in [1, 2, 3] {
            assert_eq!(add(&mut book, key, 10, 1.0), [0u32; 0]);
        }
        book.touch(&1);
        assert_eq!(add(&mut book, 4, 20, 1.0), [2, 3]);
        assert_eq!((book.bytes(), book.len()), (30, 2));
    }

    #[test]
    fn value_keeps_what_is_dear_small_and_often_asked_for() {
        let mut book = Book::new(Eviction::Value, 40);
        add(&mut book, 1, 10, 1.0);
        add(&mut book, 2, 10, 9.0);
        add(&mut book, 3, 20, 9.0);
        for _ in 0..4 {
            book.touch(&1);
        }
        // Worth 0.5, 0.9 and 0.45 a byte.
        assert_eq!(add(&mut book, 4, 10, 9.0), [3]);
        assert_eq!(add(&mut book, 5, 20, 9.0), [1]);
    }

    #[test]
    fn the_clock_ages_what_was_once_asked_for_often() {
        let mut book = Book::new(Eviction::Value, 20);
        add(&mut book, 0, 10, 1.0);
        for _ in 0..5 {
            book.touch(&0);
        }
        let gone = (1..100).find(|&key| add(&mut book, key, 10, 1.0) == [0]);
        assert!((6..=8).contains(&gone.expect("it goes at last")), "{gone:?}");
    }

    #[test]
    fn protected_entries_are_passed_over_and_come_back() {
        let mut book = Book::new(Eviction::Lru, 30);
        for key in [1, 2, 3] {
            add(&mut book, key, 10, 1.0);
        }
        let (evicted, room) = book.make_room(10, |key| *key == 1);
        assert_eq!((evicted, room), (vec![(2, ())], true));
        let (evicted, room) = book.make_room(30, |key| *key == 1);
        assert_eq!((evicted, room), (vec![(3, ())], false));
        book.insert(4, (), 30, 1.0);
        assert_eq!((book.len(), book.bytes()), (1, 10), "no room, not held");
        book.touch(&1);
        assert_eq!(add(&mut book, 5, 30, 1.0), [1], "a request puts it back into the order");
    }

    #[test]
    fn no_cost_breaks_the_order() {
        let mut book = Book::new(Eviction::Value, 30);
        for (key, cost) in [(1, f64::NAN), (2, f64::INFINITY), (3, -5.0)] {
            add(&mut book, key, 10, cost);
        }
        assert_eq!(add(&mut book, 4, 30, 1.0), [1, 2, 3]);
        assert_eq!(add(&mut book, 5, 31, 1.0), [0u32; 0], "larger than the tier");
        assert_eq!(book.len(), 1);
    }
}
