//! The text that needles are hidden in, and the places where they go.

use std::path::Path;

use rand_chacha::ChaCha8Rng;
use unicode_segmentation::UnicodeSegmentation;

use super::random::distinct;
use crate::failure::data;

/// One line of the haystack that says nothing.
pub(super) const NOISE: &str =
    "Green is the grass. Blue is the sky. Yellow is the sun. Off we set. There we go and back we come.";

/// The essay that ships with the program.
const SHIPPED: &str = include_str!("../../../../../demo/essay.txt");

/// Fewer words would be the same few sentences over and over.
const MIN_WORDS: usize = 500;
/// The longest file of an essay, in bytes.
const MAX_BYTES: u64 = 50_000_000;

/// Depths, in percent, are this many, evenly spaced and rounded.
const DEPTHS: usize = 40;

/// Words of running text.
#[derive(Clone, Debug)]
pub(crate) struct Essay {
    words: Vec<String>,
}

impl Essay {
    /// The shipped one.
    pub(super) fn shipped() -> anyhow::Result<Self> {
        Self::new(SHIPPED, "the shipped essay")
    }

    /// The one in `file`; white space is collapsed.
    pub(super) fn read(file: &Path) -> anyhow::Result<Self> {
        let place = file.display().to_string();
        let size = file.metadata().map_err(|error| data(format!("read {place}: {error}")))?.len();
        if size > MAX_BYTES {
            return Err(data(format!("{place}: {size} bytes are too many for a haystack; at most {MAX_BYTES}")));
        }
        let bytes = std::fs::read(file).map_err(|error| data(format!("read {place}: {error}")))?;
        let text = String::from_utf8(bytes).map_err(|error| {
            data(format!("{place}: not UTF-8 at byte {}; convert the file first", error.utf8_error().valid_up_to()))
        })?;
        Self::new(&text, &place)
    }

    fn new(text: &str, place: &str) -> anyhow::Result<Self> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        if words.len() < MIN_WORDS {
            let found = words.len();
            return Err(data(format!(
                "{place}: {found} words are too few for a haystack; it needs {MIN_WORDS} or more"
            )));
        }
        Ok(Self { words })
    }

    /// The first `amount` words, from the start again if there are fewer.
    pub(super) fn words(&self, amount: usize) -> String {
        let words: Vec<&str> = self.words.iter().map(String::as_str).cycle().take(amount).collect();
        words.join(" ")
    }
}

/// `lines` with the needles between them, joined by newlines. Each needle goes before another line; a needle too many for
/// the lines is left out.
pub(super) fn into_lines(mut lines: Vec<String>, needles: &[String], rng: &mut ChaCha8Rng) -> String {
    let mut places = distinct(rng, lines.len(), needles.len());
    // From the last place on, so that the earlier ones stay what they are.
    places.sort_unstable_by(|left, right| right.cmp(left));
    for (place, needle) in places.into_iter().zip(needles) {
        lines.insert(place, needle.clone());
    }
    lines.join("\n")
}

/// `text` with one needle at each of as many distinct depths, between two sentences (Unicode's sentence bounds, UAX 29),
/// joined by single spaces. At most 40 needles.
pub(super) fn into_text(text: &str, needles: &[String], rng: &mut ChaCha8Rng) -> String {
    let sentences: Vec<&str> = text.split_sentence_bounds().map(str::trim).collect();
    let mut depths: Vec<usize> = distinct(rng, DEPTHS, needles.len()).into_iter().map(percent).collect();
    depths.sort_unstable();
    let mut parts: Vec<&str> = Vec::with_capacity(sentences.len() + needles.len());
    let mut rest = 0;
    for (depth, needle) in depths.into_iter().zip(needles) {
        let cut = sentences.len() * depth / 100;
        parts.extend(&sentences[rest..cut]);
        parts.push(needle);
        rest = cut;
    }
    parts.extend(&sentences[rest..]);
    parts.join(" ")
}

/// Depth number `index` of [`DEPTHS`] from 0 to 100, rounded; no half occurs.
pub(super) fn percent(index: usize) -> usize {
    let last = DEPTHS - 1;
    (index * 200 + last) / (2 * last)
}
