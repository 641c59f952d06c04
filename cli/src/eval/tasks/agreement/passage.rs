//! Writes the chunks of a story: natural passages of filler with facts in between, each at most so many tokens.
//!
//! Invariant: every fact is told, no two of them in one chunk.

use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::super::Count;
use super::super::random::distinct;
use super::filler::Filler;
use super::story::Story;
use crate::failure::usage;

/// Where the sentences go.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) chunks: usize,
    pub(super) chunk_tokens: usize,
}

/// Chunks are joined as they are, so each ends its line.
const END: &str = "\n";
/// A chunk stays at least this share filler, so that it reads like a passage.
const FACTS_SHARE: f64 = 0.6;

/// The chunks of `story`, at least as many as it has facts.
///
/// # Errors
/// A usage failure if a fact alone is longer than a chunk.
pub(super) fn write(
    story: &Story,
    layout: Layout,
    rng: &mut ChaCha8Rng,
    count: &dyn Count,
) -> anyhow::Result<Vec<String>> {
    let mut told: Vec<Vec<String>> = vec![Vec::new(); layout.chunks];
    let mut places = distinct(rng, layout.chunks, story.facts.len());
    if story.in_order {
        places.sort_unstable();
    }
    for (fact, place) in story.facts.iter().zip(places) {
        if count.tokens(&text(std::slice::from_ref(fact))) > layout.chunk_tokens {
            return Err(usage(format!("chunks of {} tokens are too short for {fact:?}", layout.chunk_tokens)));
        }
        told[place].push(fact.clone());
    }
    share_trails(story, layout, &mut told, count);
    let mut writer = Writer { layout, count, filler: Filler::default() };
    Ok(told.into_iter().map(|facts| writer.passage(facts, rng)).collect())
}

/// Writes one passage after the other; no filler sentence twice.
struct Writer<'a> {
    layout: Layout,
    count: &'a dyn Count,
    filler: Filler,
}

/// Deals the false trails out, chunk after chunk, until they are gone or no chunk has room.
fn share_trails(story: &Story, layout: Layout, told: &mut [Vec<String>], count: &dyn Count) {
    let room = (layout.chunk_tokens as f64 * FACTS_SHARE) as usize;
    let mut used: Vec<usize> = told.iter().map(|facts| count.tokens(&text(facts))).collect();
    for (index, trail) in story.trails.iter().enumerate() {
        let place = index % told.len();
        let tokens = count.tokens(trail);
        if used[place] + tokens <= room {
            used[place] += tokens;
            told[place].push(trail.clone());
        }
    }
}

impl Writer<'_> {
    /// `facts` in random places among as much filler as fits.
    fn passage(&mut self, mut facts: Vec<String>, rng: &mut ChaCha8Rng) -> String {
        facts.shuffle(rng);
        let mut depths: Vec<f64> = facts.iter().map(|_| rng.random()).collect();
        depths.sort_by(f64::total_cmp);
        let facts: Vec<(f64, String)> = depths.into_iter().zip(facts).collect();
        self.filler.begin(rng);
        let mut filler = Vec::new();
        let mut passage = text(&merged(&facts, &filler));
        // A sentence has a token or more, so this ends with the chunk full.
        for _ in 0..self.layout.chunk_tokens {
            filler.push(self.filler.sentence(rng));
            let longer = text(&merged(&facts, &filler));
            if self.count.tokens(&longer) > self.layout.chunk_tokens {
                break;
            }
            passage = longer;
        }
        passage
    }
}

/// `facts`, sorted by their depth in 0..1, at those depths of `filler`.
fn merged(facts: &[(f64, String)], filler: &[String]) -> Vec<String> {
    let mut sentences = Vec::with_capacity(facts.len() + filler.len());
    let mut facts = facts.iter().peekable();
    let gaps = (filler.len() + 1) as f64;
    for (index, sentence) in filler.iter().enumerate() {
        let gap_end = (index + 1) as f64;
        while let Some((_, fact)) = facts.next_if(|(depth, _)| depth * gaps < gap_end) {
            sentences.push(fact.clone());
        }
        sentences.push(sentence.clone());
    }
    sentences.extend(facts.map(|(_, fact)| fact.clone()));
    sentences
}

fn text(sentences: &[String]) -> String {
    format!("{}{END}", sentences.join(" "))
}
