//! How many words or lines of haystack fit a prompt: a binary search on a trial prompt, then each prompt shrinks by the step
//! until it fits, because its own draw may be longer (RULER's public generator).

use super::needle::{Draft, Haystack, Plan, Source, draft};
use super::{OUTPUT_TOKENS, Setup, Task, random};
use crate::eval::tasks::Count;
use crate::failure::usage;

/// Below this length the step of a haystack of lines would be most of the prompt, so it is a fifth.
const SHORT: usize = 4096;

/// Fits prompts of one task to a length.
pub(super) struct Fit<'a> {
    pub(super) task: Task,
    pub(super) plan: Plan,
    pub(super) setup: &'a Setup<'a>,
    pub(super) count: &'a dyn Count,
}

impl Fit<'_> {
    /// Words or lines by which a prompt shrinks, and the fewest tried.
    pub(super) fn step(&self) -> usize {
        let step = if self.plan.haystack == Haystack::Essay { 500 } else { 25 };
        if self.setup.length < SHORT { step / 5 } else { step }
    }

    /// The most words or lines with which the trial prompt fits, at least one step.
    ///
    /// # Errors
    /// A usage failure if one step is too long.
    pub(super) fn largest(&self) -> anyhow::Result<usize> {
        let step = self.step();
        let fits = |amount| self.fits(&self.trial(amount));
        if !fits(step) {
            let needed = self.tokens(&self.trial(step));
            let (name, length) = (self.task.name(), self.setup.length);
            return Err(usage(format!(
                "a length of {length} tokens is too short for {name}, which needs about {needed}"
            )));
        }
        // Each word or line has a token or more, so this ends.
        let mut low = step;
        let mut high = step * 2;
        while fits(high) {
            low = high;
            high *= 2;
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if fits(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(low)
    }

    /// Prompt number `index` with at most `largest` words or lines.
    ///
    /// # Errors
    /// A usage failure if it does not fit even with one.
    pub(super) fn draft(&self, index: usize, largest: usize) -> anyhow::Result<Draft> {
        let step = self.step();
        let mut amount = largest;
        loop {
            let draft = self.drawn(&index.to_string(), amount);
            if self.fits(&draft) {
                return Ok(draft);
            }
            amount = if amount > step { amount - step } else { amount / 2 };
            if amount < self.plan.needles() {
                let (name, length) = (self.task.name(), self.setup.length);
                return Err(usage(format!("a length of {length} tokens is too short for {name}; take a longer one")));
            }
        }
    }

    fn trial(&self, amount: usize) -> Draft {
        self.drawn("trial", amount)
    }

    /// The same needles for the same `label`, whatever the amount.
    fn drawn(&self, label: &str, amount: usize) -> Draft {
        let Setup { seed, essay, length, .. } = *self.setup;
        let label = format!("{}-{length}-{label}", self.task.name());
        draft(Source { plan: self.plan, essay, seed }, amount, &mut random::generator(seed, &label))
    }

    fn fits(&self, draft: &Draft) -> bool {
        self.tokens(draft) <= self.setup.length
    }

    /// Prompt and output tokens of `draft`.
    fn tokens(&self, draft: &Draft) -> usize {
        let Draft { intro, context, question, answer_prefix, .. } = draft;
        let text = self.count.tokens(&format!("{intro}{context}{question}"));
        self.setup.overhead + text + self.count.tokens(answer_prefix) + OUTPUT_TOKENS as usize
    }
}
