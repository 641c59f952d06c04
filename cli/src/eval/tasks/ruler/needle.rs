//! One prompt: needles drawn, put into the haystack, and asked for. Knows no tokens.

use std::collections::HashSet;

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::haystack::{self, Essay};
use super::random::{distinct, generator, pick};
use super::words::{ADJECTIVES, NOUNS};

/// Where needles are hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haystack {
    /// The same five sentences on every line.
    Noise,
    /// Running text.
    Essay,
    /// Lines that are needles themselves.
    Needles,
}

/// What a key or a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Numbers,
    Words,
    Uuids,
}

/// A row of the benchmark's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) haystack: Haystack,
    pub(super) key: Type,
    pub(super) value: Type,
    /// Keys in the text, without those of a haystack of needles; at least `asked`.
    pub(super) keys: usize,
    /// Values of each key.
    pub(super) values: usize,
    /// Keys that the question names.
    pub(super) asked: usize,
}

impl Plan {
    /// Needles that are put in.
    pub(super) fn needles(&self) -> usize {
        self.keys * self.values
    }
}

/// The parts of a prompt in order, and what a right answer holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Draft {
    pub(super) intro: String,
    pub(super) context: String,
    pub(super) question: String,
    pub(super) answer_prefix: String,
    pub(super) answers: Vec<String>,
}

impl Type {
    /// The noun, as it stands in needles.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Numbers => "numbers",
            Self::Words => "words",
            Self::Uuids => "uuids",
        }
    }

    fn singular(self) -> &'static str {
        match self {
            Self::Numbers => "number",
            Self::Words => "word",
            Self::Uuids => "uuid",
        }
    }

    fn draw(self, rng: &mut ChaCha8Rng) -> String {
        match self {
            Self::Numbers => rng.random_range(1_000_000..=9_999_999).to_string(),
            Self::Words => format!("{}-{}", pick(rng, ADJECTIVES), pick(rng, NOUNS)),
            Self::Uuids => uuid::Builder::from_random_bytes(rng.random()).into_uuid().to_string(),
        }
    }
}

/// What is the same in every prompt of a task.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) plan: Plan,
    pub(super) essay: &'a Essay,
    pub(super) seed: u64,
}

/// A prompt with `amount` words or lines of haystack. The seed of `source` alone decides the order of needles, so that it is the same in
/// every prompt; `rng` draws everything else.
pub(super) fn draft(source: Source<'_>, amount: usize, rng: &mut ChaCha8Rng) -> Draft {
    let Source { plan, essay, seed } = source;
    let mut seen = HashSet::new();
    let mut keyed: Vec<(String, Vec<String>)> = Vec::with_capacity(plan.keys);
    for _ in 0..plan.keys {
        let key = unseen(plan.key, &mut seen, rng);
        let values = (0..plan.values).map(|_| unseen(plan.value, &mut seen, rng)).collect();
        keyed.push((key, values));
    }
    let asked = distinct(rng, plan.keys, plan.asked);
    let mut needles = Vec::with_capacity(plan.needles());
    for (key, values) in &keyed {
        needles.extend(values.iter().map(|value| sentence(plan.value, key, value)));
    }
    needles.shuffle(&mut generator(seed, "needle order"));

    let context = match plan.haystack {
        Haystack::Essay => haystack::into_text(&essay.words(amount), &needles, rng),
        Haystack::Noise => haystack::into_lines(vec![haystack::NOISE.to_owned(); amount], &needles, rng),
        Haystack::Needles => {
            let lines = (0..amount).map(|_| {
                let key = unseen(plan.key, &mut seen, rng);
                sentence(plan.value, &key, &unseen(plan.value, &mut seen, rng))
            });
            let lines = lines.collect();
            haystack::into_lines(lines, &needles, rng)
        }
    };
    let keys: Vec<String> = asked.iter().map(|&index| keyed[index].0.clone()).collect();
    let answers: Vec<String> = asked.iter().flat_map(|&index| keyed[index].1.clone()).collect();
    worded(plan.value, &listed(&keys), context, answers)
}

/// A draw that this prompt does not have yet, so that a key has no value but its own. Every type has far more values than a
/// prompt has needles, except words in very long prompts, where a repeat is taken after some tries.
fn unseen(kind: Type, seen: &mut HashSet<String>, rng: &mut ChaCha8Rng) -> String {
    const TRIES: usize = 100;
    let mut drawn = kind.draw(rng);
    for _ in 0..TRIES {
        if seen.insert(drawn.clone()) {
            break;
        }
        drawn = kind.draw(rng);
    }
    drawn
}

/// A needle. The noun is plural also when there is one, as in the benchmark.
pub(super) fn sentence(value_type: Type, key: &str, value: &str) -> String {
    format!("One of the special magic {} for {key} is {value}.", value_type.plural())
}

fn worded(kind: Type, query: &str, context: String, answers: Vec<String>) -> Draft {
    let (one, many) = (kind.singular(), kind.plural());
    if answers.len() == 1 {
        return Draft {
            intro: format!(
                "A special magic {one} is hidden in the text below. Memorize it: you will be quizzed about it.\n"
            ),
            context,
            question: format!("\nWhat is the special magic {one} for {query} mentioned in the text above?"),
            answer_prefix: format!("The special magic {one} for {query} mentioned in the text above is"),
            answers,
        };
    }
    Draft {
        intro: format!(
            "Some special magic {many} are hidden in the text below. Memorize them: you will be quizzed about them.\n"
        ),
        context,
        question: format!("\nWhat are all the special magic {many} for {query} mentioned in the text above?"),
        answer_prefix: format!("The special magic {many} for {query} mentioned in the text above are"),
        answers,
    }
}

/// `a`, or `a, b, and c`.
pub(super) fn listed(items: &[String]) -> String {
    match items.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, before)) => format!("{}, and {last}", before.join(", ")),
        None => String::new(),
    }
}
