//! A counter of words for tests: a token is a word with the white space before it.

use super::Count;

pub(super) struct Words;

/// Byte ranges of the tokens; they cover the text.
fn spans(text: &str) -> Vec<std::ops::Range<usize>> {
    let mut spans = Vec::new();
    let mut start = 0;
    let mut in_word = false;
    for (index, char) in text.char_indices() {
        if char.is_whitespace() && in_word {
            spans.push(start..index);
            start = index;
        }
        in_word = !char.is_whitespace();
    }
    if start < text.len() {
        spans.push(start..text.len());
    }
    spans
}

impl Count for Words {
    fn tokens(&self, text: &str) -> usize {
        spans(text).len()
    }

    fn cut(&self, text: &str, chunk: usize, overlap: usize) -> Vec<String> {
        assert!(overlap < chunk);
        let spans = spans(text);
        let mut pieces = Vec::new();
        let mut first = 0;
        while first < spans.len() {
            let end = (first + chunk).min(spans.len());
            pieces.push(text[spans[first].start..spans[end - 1].end].to_owned());
            if end == spans.len() {
                break;
            }
            first = end - overlap;
        }
        pieces
    }
}
