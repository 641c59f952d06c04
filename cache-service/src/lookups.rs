//! Counters of layer lookups by result and reason, as Stats reports them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a lookup of one layer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Memory,
    Object,
    Missing,
    Damaged,
    Truncated,
    Foreign,
    Store,
}

impl Outcome {
    const ALL: [Outcome; 7] = [
        Outcome::Memory,
        Outcome::Object,
        Outcome::Missing,
        Outcome::Damaged,
        Outcome::Truncated,
        Outcome::Foreign,
        Outcome::Store,
    ];

    const fn name(self) -> &'static str {
        match self {
            Outcome::Memory => "hit/memory",
            Outcome::Object => "hit/object",
            Outcome::Missing => "miss/missing",
            Outcome::Damaged => "miss/damaged",
            Outcome::Truncated => "miss/truncated",
            Outcome::Foreign => "miss/foreign",
            Outcome::Store => "miss/store",
        }
    }
}

/// One counter an outcome, since the process started.
#[derive(Debug, Default)]
pub(crate) struct Lookups([AtomicU64; Outcome::ALL.len()]);

impl Lookups {
    pub(crate) fn count(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> HashMap<String, u64> {
        let counted = |outcome: Outcome| self.0[outcome as usize].load(Ordering::Relaxed);
        Outcome::ALL.iter().map(|&outcome| (outcome.name().to_owned(), counted(outcome))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_its_own_counter() {
        let lookups = Lookups::default();
        for (times, outcome) in Outcome::ALL.into_iter().enumerate() {
            (0..times).for_each(|_| lookups.count(outcome));
        }
        let snapshot = lookups.snapshot();
        for (times, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(snapshot[outcome.name()], times as u64);
        }
    }
}
