//! Counters of layer lookups by result and reason, and of what went wrong below them, as Stats reports them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! outcomes {
    ($($(#[$doc:meta])* $outcome:ident = $name:literal,)*) => {
        /// What is counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Outcome {
            $($(#[$doc])* $outcome,)*
        }

        impl Outcome {
            const ALL: &[Outcome] = &[$(Outcome::$outcome,)*];

            const fn name(self) -> &'static str {
                match self {
                    $(Outcome::$outcome => $name,)*
                }
            }
        }
    };
}

outcomes! {
    // How the lookup of a layer ended.
    Memory = "hit/memory",
    Disk = "hit/disk",
    Object = "hit/object",
    Missing = "miss/missing",
    Damaged = "miss/damaged",
    Truncated = "miss/truncated",
    Foreign = "miss/foreign",
    Store = "miss/store",
    /// Layers, among those above, that were named in a file and not sent.
    Mapped = "mapped/layer",
    /// Chunks that were named in a file which the caller could not use.
    Unmappable = "mapped/refused",
    /// Files of the disk tier that were removed because they are not as they were written.
    DiskDamaged = "disk/damaged",
    /// Files of the disk tier that were removed because they are not what their name says, or unfinished.
    DiskForeign = "disk/foreign",
    DiskEvicted = "disk/evicted",
    /// Layers that were not written: the queue of writes is full.
    DiskBusy = "disk/busy",
    /// Layers that were not written: all else is protected, or the object is larger than the tier.
    DiskNoRoom = "disk/no-room",
    /// Layers that were not written while writing is turned off.
    DiskOff = "disk/off",
    // Why writing was turned off, or a file could not be read.
    DiskFull = "disk/full",
    DiskReadOnly = "disk/read-only",
    DiskInUse = "disk/in-use",
    DiskError = "disk/error",
    // Calls to the object store that failed.
    StoreFull = "store/full",
    StoreRefused = "store/refused",
    StoreTimeout = "store/timeout",
    StoreError = "store/error",
    /// Reads that brought less than the store announced.
    StoreShort = "store/short",
    // What the store gave that is not as it was written; a second reading may have been right.
    StoreDamaged = "store/damaged",
    StoreTruncated = "store/truncated",
    StoreForeign = "store/foreign",
}

/// One counter an outcome, since the process started.
#[derive(Debug)]
pub(crate) struct Lookups(Vec<AtomicU64>);

impl Default for Lookups {
    fn default() -> Self {
        Self(Outcome::ALL.iter().map(|_| AtomicU64::new(0)).collect())
    }
}

impl Lookups {
    pub(crate) fn count(&self, outcome: Outcome) {
        self.count_many(outcome, 1);
    }

    pub(crate) fn count_many(&self, outcome: Outcome, times: u64) {
        if let Some(counter) = self.0.get(outcome as usize) {
            counter.fetch_add(times, Ordering::Relaxed);
        }
    }

    pub(crate) fn snapshot(&self) -> HashMap<String, u64> {
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Outcome::ALL
            .iter()
            .zip(&self.0)
            .map(|(outcome, counter)| (outcome.name().to_owned(), counted(counter)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_its_own_counter() {
        let lookups = Lookups::default();
        for (times, &outcome) in (0..).zip(Outcome::ALL) {
            lookups.count_many(outcome, times);
        }
        let snapshot = lookups.snapshot();
        assert_eq!(snapshot.len(), Outcome::ALL.len());
        for (times, outcome) in (0..).zip(Outcome::ALL) {
            assert_eq!(snapshot[outcome.name()], times);
        }
    }
}
