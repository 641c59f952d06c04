//! What a command measures: samples, strategies, and what is asked of each pair.

use kvsplice_kv::{Options, Strategy};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::tasks::Sample;
use crate::failure::usage;

/// A run: every strategy on every sample.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// `agreement`, `ruler`, `longbench` or `ablation`.
    pub(super) command: &'static str,
    /// Every setting that decides a result, but neither which strategies nor how many samples: those may grow in a folder.
    pub(super) settings: Value,
    pub(super) seed: u64,
    /// The samples, in the order in which they are measured.
    pub(super) items: Vec<Item>,
    /// `full` comes first.
    pub(super) strategies: Vec<Options>,
    pub(super) measures: Measures,
    /// Strategies may reuse what earlier prompts began with.
    pub(super) prefix_cache: bool,
    /// Words of a command line that measures the same samples; the set's words and `--strategies` are still missing.
    pub(super) words: Vec<String>,
    /// The flag that takes a set's name; empty where there is one set.
    pub(super) set_flag: &'static str,
}

/// One sample of one set.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// Sets are reported apart, such as prompts of different lengths; empty where there is one only.
    pub(super) set: String,
    pub(super) sample: Sample,
    /// Hexadecimal digest of the sample.
    pub(super) digest: String,
}

/// What is measured of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Measures {
    /// Log-probabilities of the gold answer against full attention's.
    pub(super) agreement: bool,
    /// The greedy answer, its score and its time.
    pub(super) text: bool,
}

impl Item {
    /// A sample with the digest of everything that it is.
    pub(super) fn new(set: impl Into<String>, sample: Sample) -> anyhow::Result<Self> {
        let digest = Sha256::digest(serde_json::to_vec(&sample)?);
        let digest = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { set: set.into(), sample, digest })
    }
}

impl Plan {
    /// How many (sample, strategy) pairs there are.
    pub(super) fn pairs(&self) -> usize {
        self.items.len() * self.strategies.len()
    }

    /// # Errors
    /// A usage failure when there is nothing to measure, or when a strategy would change what others are measured on.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if self.items.is_empty() {
            return Err(usage("zero samples: nothing to measure; ask for at least one"));
        }
        if let Some(options) = self.strategies.iter().find(|options| options.capture) {
            return Err(usage(format!(
                "{options}: a capture computes the prompt in full and measures nothing; name craft, whose chunks the command \
                 captures in another order before it measures"
            )));
        }
        Ok(())
    }

    /// The options as they are sent: the exact prefix of the same prompt under the strategy before would hide every
    /// difference.
    pub(super) fn sent(&self, options: Options) -> Options {
        let keeps = self.prefix_cache || options.strategy == Strategy::Prefix;
        if keeps { options } else { Options { prefix_cache: false, ..options } }
    }
}
