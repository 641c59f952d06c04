//! Cuts a context into chunks. One that is too long keeps its head and its tail, as the benchmark cuts the whole prompt.

use super::super::Count;

/// A context as it goes into the prompt.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) chunks: Vec<String>,
    pub(super) truncated: bool,
}

/// Tokens that a context may have, and how it is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Tokens of its start that stay when it is too long.
    pub(super) head: usize,
    /// Tokens of its end that stay.
    pub(super) tail: usize,
    pub(super) chunk_tokens: usize,
    pub(super) overlap: usize,
}

/// At most `room.head` + `room.tail` tokens of `context` in chunks, overlaps counted.
pub(super) fn cut(context: &str, room: Room, count: &dyn Count) -> Cut {
    let Room { mut head, mut tail, chunk_tokens, overlap } = room;
    let most = head + tail;
    let mut chunks = count.cut(context, chunk_tokens, overlap);
    let mut total = tokens(&chunks, count);
    if total <= most {
        return Cut { chunks, truncated: false };
    }
    // The overlaps of the chunks come on top of what the halves leave, so what is over goes away from both, in equal parts.
    loop {
        let kept = ends(context, head, tail, count);
        chunks = if kept.is_empty() { Vec::new() } else { count.cut(&kept, chunk_tokens, overlap) };
        total = tokens(&chunks, count);
        if total <= most || head + tail == 0 {
            return Cut { chunks, truncated: true };
        }
        let part = (total - most).div_ceil(2);
        head = head.saturating_sub(part);
        tail = tail.saturating_sub(part);
    }
}

/// The head and the tail of `context`; all of it where they meet.
fn ends(context: &str, head: usize, tail: usize, count: &dyn Count) -> String {
    let (head, tail) = (first(context, head, count), last(context, tail, count));
    if head.len() + tail.len() >= context.len() { context.to_owned() } else { format!("{head}{tail}") }
}

fn tokens(chunks: &[String], count: &dyn Count) -> usize {
    chunks.iter().map(|chunk| count.tokens(chunk)).sum()
}

/// The longest start of `text` with at most `most` tokens.
fn first<'a>(text: &'a str, most: usize, count: &dyn Count) -> &'a str {
    let ends = boundaries(text);
    let fitting = longest(ends.len() - 1, |length| count.tokens(&text[..ends[length]]) <= most);
    &text[..ends[fitting]]
}

/// The longest end of `text` with at most `most` tokens.
fn last<'a>(text: &'a str, most: usize, count: &dyn Count) -> &'a str {
    let starts = boundaries(text);
    let all = starts.len() - 1;
    let fitting = longest(all, |length| count.tokens(&text[starts[all - length]..]) <= most);
    &text[starts[all - fitting]..]
}

/// Byte positions between the characters, from 0 to the length of `text`.
fn boundaries(text: &str) -> Vec<usize> {
    text.char_indices().map(|(index, _)| index).chain([text.len()]).collect()
}

/// The largest length up to `all` that fits; 0 always does. More characters have hardly ever fewer tokens, and what is
/// returned was counted.
fn longest(all: usize, fits: impl Fn(usize) -> bool) -> usize {
    if fits(all) {
        return all;
    }
    let mut low = 0;
    let mut high = all;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
