//! What keeping a block is worth: the statistics of RAGCache's PGDSF (arXiv 2404.12457, §5.1).
//!
//! Priority(n) = Clock + Frequency(n) · mean of Cost_i/NewSize_i over the requests i that needed n while it was not
//! cached. Cost is what a request's prefill took, measured, not a profiled estimate. Statistics outlive an eviction, in
//! a bounded history, because that mean spans several lives of a block.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Which block goes first when the tree is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The one that was not used for the longest time.
    Lru,
    /// The one that saves the least prefill time: rarely used, or cheap to compute (RAGCache, arXiv 2404.12457).
    #[default]
    Pgdsf,
}

impl FromStr for Policy {
    type Err = kvsplice_kv::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "lru" => Ok(Policy::Lru),
            "pgdsf" => Ok(Policy::Pgdsf),
            _ => Err(kvsplice_kv::Error::UnknownName { what: "policy", got: name.to_owned(), known: "lru, pgdsf" }),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Policy::Lru => "lru",
            Policy::Pgdsf => "pgdsf",
        })
    }
}

/// What a request's prefill took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Time on the compute thread.
    pub(crate) prefill: Duration,
    /// Tokens computed in it.
    pub(crate) new_tokens: usize,
}

/// Uses of a block, and what it took to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Worth {
    /// Requests that needed it.
    frequency: u32,
    /// Requests among them that computed it.
    computed: u32,
    /// Sum over these of seconds a computed token.
    seconds_per_token: f64,
}

impl Worth {
    /// A request reused the block.
    pub(super) fn used(&mut self) {
        self.frequency = self.frequency.saturating_add(1);
    }

    /// A request needed the block and computed it.
    pub(super) fn computed(&mut self, cost: Cost) {
        self.used();
        self.computed = self.computed.saturating_add(1);
        self.seconds_per_token += cost.prefill.as_secs_f64() / cost.new_tokens.max(1) as f64;
    }

    /// Frequency times mean cost; finite and not negative.
    pub(super) fn value(&self) -> f64 {
        f64::from(self.frequency) * self.seconds_per_token / f64::from(self.computed.max(1))
    }
}

/// Statistics of blocks that are not cached, the latest `limit/2` to `limit` of them.
#[derive(Debug)]
pub(super) struct History {
    limit: usize,
    young: HashMap<u64, Worth>,
    /// Forgotten as a whole when `young` is full and takes its place.
    old: HashMap<u64, Worth>,
}

impl History {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, young: HashMap::new(), old: HashMap::new() }
    }

    pub(super) fn put(&mut self, key: u64, worth: Worth) {
        if self.limit == 0 {
            return;
        }
        if self.young.len() >= self.limit.div_ceil(2) {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(key, worth);
    }

    pub(super) fn take(&mut self, key: u64) -> Option<Worth> {
        self.young.remove(&key).or_else(|| self.old.remove(&key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_frequency_times_the_mean_cost_of_a_token() {
        let mut worth = Worth::default();
        worth.computed(Cost { prefill: Duration::from_secs(6), new_tokens: 3 });
        worth.used();
        worth.computed(Cost { prefill: Duration::from_secs(4), new_tokens: 1 });
        assert_eq!(worth.value(), 3.0 * (2.0 + 4.0) / 2.0);
    }

    #[test]
    fn no_cost_gives_a_value_that_is_no_number() {
        let mut worth = Worth::default();
        assert_eq!(worth.value(), 0.0);
        worth.computed(Cost { prefill: Duration::MAX, new_tokens: 0 });
        worth.computed(Cost { prefill: Duration::ZERO, new_tokens: usize::MAX });
        assert!(worth.value().is_finite() && worth.value() > 0.0);
    }

    #[test]
    fn a_full_history_forgets_the_oldest_half() {
        let mut history = History::new(4);
        let mut worth = Worth::default();
        worth.used();
        (0..5).for_each(|key| history.put(key, worth));
        let known: Vec<bool> = (0..5).map(|key| history.take(key).is_some()).collect();
        assert_eq!(known, [false, false, true, true, true]);
        assert_eq!(history.take(4), None);
    }

    #[test]
    fn a_policy_reads_back_and_an_unknown_one_is_named() {
        for policy in [Policy::Lru, Policy::Pgdsf] {
            assert_eq!(policy.to_string().parse::<Policy>().unwrap(), policy);
        }
        let error = "fifo".parse::<Policy>().unwrap_err().to_string();
        assert!(error.contains("fifo") && error.contains("lru, pgdsf"), "{error}");
    }
}
