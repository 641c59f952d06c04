//! Text with exactly so many tokens: chunks for the primary model, and one question for both models.
//!
//! Invariant: what is returned was tokenized and counted, the way the head does it.

use kvsplice_model::Description;

use crate::failure::usage;

const WORDS: &[&str] = &[
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
];

/// Words that vocabularies cut differently: with them the counts of two models meet.
const RARE: &[&str] = &[
    "lighthouses",
    "tokenizer",
    "harbormaster",
    "cartographer",
    "ferries",
    "glassblower",
    "quay",
    "dataset",
    "foobar",
    "Javascript",
    "observatory",
    "apothecary",
    "stdin",
    "photosynthesis",
    "chrysanthemum",
    "wetlands",
    "millwright",
    "hydrothermal",
    "beekeeper",
    "mitochondria",
    "boolean",
    "sourdough",
    "astronomers",
    "thermodynamics",
    "cyanobacteria",
];

/// A small seeded generator (splitmix64); figures must be repeatable, not secret.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// Any number.
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is at least 1.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn rare(&mut self) -> &'static str {
        RARE.get(self.below(RARE.len())).copied().unwrap_or("quay")
    }

    fn word(&mut self) -> &'static str {
        WORDS.get(self.below(WORDS.len())).copied().unwrap_or("time")
    }
}

/// Texts with exactly `chunk_tokens` tokens each, the last with the rest, `tokens` in all.
pub(super) fn chunks(
    model: &Description,
    tokens: usize,
    chunk_tokens: usize,
    seed: u64,
) -> anyhow::Result<Vec<String>> {
    let mut random = Random(seed);
    let mut chunks = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let length = left.min(chunk_tokens);
        chunks.push(chunk(model, length, &mut random)?);
        left -= length;
    }
    Ok(chunks)
}

fn chunk(model: &Description, tokens: usize, random: &mut Random) -> anyhow::Result<String> {
    let mut words: Vec<&str> = (0..tokens).map(|_| random.word()).collect();
    // Each word is about one token, so this ends after a few rounds.
    for _ in 0..64 {
        let text = sentences(&words);
        let count = model.tokenizer.encode(&text)?.ids.len();
        if count == tokens {
            return Ok(text);
        }
        if count > tokens {
            words.truncate(words.len().saturating_sub(count - tokens).max(1));
        } else {
            words.extend((count..tokens).map(|_| random.word()));
        }
    }
    Err(usage(format!("no text of exactly {tokens} tokens found for {}; try another --chunk-tokens", model.name)))
}

fn sentences(words: &[&str]) -> String {
    let mut text = String::new();
    for (index, word) in words.iter().enumerate() {
        if index > 0 {
            text.push_str(if index % 12 == 0 { ". " } else { " " });
        }
        text.push_str(word);
    }
    text
}

/// A question that, with the template's tail, has exactly `tokens` tokens in both models.
pub(super) fn question(
    primary: &Description,
    auxiliary: &Description,
    system: &str,
    tokens: usize,
    seed: u64,
) -> anyhow::Result<String> {
    let count = |model: &Description, question: &str| -> anyhow::Result<usize> {
        let parts = model.template.split(system, None, question)?;
        Ok(model.tokenizer.encode_special(&parts.question)?.len())
    };
    let mut random = Random(seed);
    for attempt in 0..1024 {
        let mut words = vec!["What"];
        words.extend((0..attempt % 8).map(|_| random.rare()));
        while words.len() < tokens {
            words.push(random.word());
            let text = words.join(" ");
            let (first, second) = (count(primary, &text)?, count(auxiliary, &text)?);
            if first == tokens && second == tokens {
                return Ok(text);
            }
            if first >= tokens || second >= tokens {
                break;
            }
        }
    }
    Err(usage(format!(
        "no question of exactly {tokens} tokens in both {} and {} found; try another --question-tokens",
        primary.name, auxiliary.name
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_words() {
        let words = |seed| {
            let mut random = Random(seed);
            (0..50).map(|_| random.word()).collect::<Vec<_>>()
        };
        assert_eq!(words(1), words(1));
        assert_ne!(words(1), words(2));
        assert!(sentences(&words(3)).contains(". "));
    }
}
