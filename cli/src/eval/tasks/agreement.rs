//! Prompts written for this project, to tell strategies apart: two hops with and without a named bridge, one number alone and
//! among others, several numbers of one key in order, and the order of events (the kinds of a study with small models).
//!
//! The facts that decide an answer lie in different chunks, among facts of the same form about others.
//! Invariant: `seed`, kind and number alone decide a prompt (with the sizes and the token counts), not what else is generated.

mod filler;
mod passage;
mod story;
mod world;

use super::{Count, Sample, random};
use crate::failure::usage;

/// What a prompt asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The town of the owner of a thing; the answer's start names the owner.
    Hop,
    /// The same without the name.
    Hop2,
    /// The only number in the text.
    Needle,
    /// One number among others.
    Multikey,
    /// Three numbers of one person, in order.
    Multivalue,
    /// Which event came first, or all three in order.
    Ordering,
}

impl Kind {
    /// Every kind.
    pub(crate) const ALL: [Self; 6] =
        [Self::Hop, Self::Hop2, Self::Needle, Self::Multikey, Self::Multivalue, Self::Ordering];

    /// The name on the command line and in a sample.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hop => "hop",
            Self::Hop2 => "hop2",
            Self::Needle => "needle",
            Self::Multikey => "multikey",
            Self::Multivalue => "multivalue",
            Self::Ordering => "ordering",
        }
    }

    /// The kinds that `names` names; `all` or nothing gives every one.
    ///
    /// # Errors
    /// A usage failure that lists the valid names.
    pub(crate) fn read(names: &[String]) -> anyhow::Result<Vec<Self>> {
        if names.is_empty() || names.iter().any(|name| name == "all") {
            return Ok(Self::ALL.to_vec());
        }
        let mut kinds = Vec::new();
        for name in names {
            let Some(&kind) = Self::ALL.iter().find(|kind| kind.name() == name) else {
                let valid = Self::ALL.map(Self::name).join(", ");
                return Err(usage(format!("unknown task {name:?}; valid are {valid} and all")));
            };
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        Ok(kinds)
    }
}

/// What is generated. Lengths are tokens of the primary model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup<'a> {
    /// Taken in turn.
    pub(crate) kinds: &'a [Kind],
    /// Prompts in all.
    pub(crate) samples: usize,
    pub(crate) seed: u64,
    /// The whole prompt, at most.
    pub(crate) tokens: usize,
    /// Each chunk, at most.
    pub(crate) chunk_tokens: usize,
    /// What the chat template adds around chunks and question.
    pub(crate) overhead: usize,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self { kinds: &Kind::ALL, samples: 48, seed: 42, tokens: 1300, chunk_tokens: 200, overhead: 40 }
    }
}

/// A fact, a false trail and some filler need this much.
const MIN_CHUNK_TOKENS: usize = 64;
/// One false trail for so many tokens of the prompt: with more, small models go wrong even under full attention, and
/// then there is no answer to agree on.
const TOKENS_A_TRAIL: usize = 160;
/// More would need more names than there are.
const MAX_TRAILS: usize = 1000;

/// The prompts, the kinds in turn.
///
/// # Errors
/// A usage failure: no samples, no kinds, or sizes too small for the facts.
pub(crate) fn generate(setup: &Setup<'_>, count: &dyn Count) -> anyhow::Result<Vec<Sample>> {
    let Setup { kinds, samples, chunk_tokens, .. } = *setup;
    if samples == 0 || kinds.is_empty() {
        return Err(usage("zero samples: nothing to measure; ask for at least one sample of one task"));
    }
    if chunk_tokens < MIN_CHUNK_TOKENS {
        return Err(usage(format!(
            "chunks of {chunk_tokens} tokens are too short for the tasks; take {MIN_CHUNK_TOKENS} or more"
        )));
    }
    let numbered = (0..samples).map(|index| (kinds[index % kinds.len()], index / kinds.len()));
    numbered.map(|(kind, number)| sample(kind, number, setup, count)).collect()
}

fn sample(kind: Kind, number: usize, setup: &Setup<'_>, count: &dyn Count) -> anyhow::Result<Sample> {
    let id = format!("{}-{number}", kind.name());
    let mut rng = random::generator(setup.seed, &id);
    let trails = (setup.tokens / TOKENS_A_TRAIL).clamp(4, MAX_TRAILS);
    let story = story::tell(kind, &mut rng, trails);
    let around = setup.overhead + count.tokens(&story.question) + count.tokens(&story.answer_prefix);
    let chunks = setup.tokens.saturating_sub(around) / setup.chunk_tokens;
    let least = story.facts.len().max(2);
    if chunks < least {
        let needed = around + least * setup.chunk_tokens;
        let tokens = setup.tokens;
        return Err(usage(format!(
            "{tokens} tokens are too few for {id}, which needs {needed} in chunks of {}; take more or shorter chunks",
            setup.chunk_tokens
        )));
    }
    let layout = passage::Layout { chunks, chunk_tokens: setup.chunk_tokens };
    let chunks = passage::write(&story, layout, &mut rng, count)?;
    Ok(Sample {
        id,
        task: kind.name().to_owned(),
        system: None,
        intro: None,
        chunks,
        question: story.question,
        answer_prefix: story.answer_prefix,
        answers: story.answers,
        gold: story.gold,
        max_tokens: story.max_tokens,
        metric: story.metric,
        stop_at_newline: true,
    })
}

#[cfg(test)]
mod tests;
