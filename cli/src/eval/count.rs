//! Counts and cuts text in tokens of the head's primary model, which alone knows its tokenizer.
//!
//! The generators that count are not async: they run on a blocking thread, and each question is one call. Invariant: a call
//! that fails is remembered and its count estimated, so a generator always ends; [`Counter::check`] then tells the failure.

use std::cell::RefCell;
use std::collections::HashMap;

use kvsplice_proto::v1;
use tokio::runtime::Handle;

use super::client::Client;
use super::tasks::Count;

/// Longer texts hardly repeat.
const REMEMBERED_BYTES: usize = 512;
/// What a token has on average, when nobody can tell.
const BYTES_A_TOKEN: usize = 4;

/// Runs `generate` on a blocking thread with a counter, and gives what it made, unless counting failed.
pub(super) async fn counting<T: Send + 'static>(
    client: &Client,
    generate: impl FnOnce(&Counter) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (client, stop) = (client.clone(), client.stop.clone());
    let runtime = Handle::current();
    let generating = tokio::task::spawn_blocking(move || {
        let counter = Counter { client, runtime, known: RefCell::default(), failure: RefCell::default() };
        let made = generate(&counter);
        counter.check()?;
        made
    });
    tokio::select! {
        made = generating => made?,
        () = stop.cancelled() => Err(crate::failure::interrupted()),
    }
}

/// Counts over `Tokenize`.
pub(super) struct Counter {
    client: Client,
    runtime: Handle,
    known: RefCell<HashMap<String, usize>>,
    /// The first failure.
    failure: RefCell<Option<anyhow::Error>>,
}

impl Counter {
    /// The first call that failed, once.
    fn check(&self) -> anyhow::Result<()> {
        self.failure.borrow_mut().take().map_or(Ok(()), Err)
    }

    /// Where the tokens of `text` begin, in bytes.
    fn starts(&self, text: &str) -> Vec<usize> {
        if self.failure.borrow().is_none() {
            match self.runtime.block_on(self.client.tokenize(vec![text.to_owned()])) {
                Ok(texts) => return starts(texts),
                Err(error) => *self.failure.borrow_mut() = Some(error),
            }
        }
        (0..text.len()).step_by(BYTES_A_TOKEN).collect()
    }
}

fn starts(texts: Vec<v1::TokenizedText>) -> Vec<usize> {
    let spans = texts.into_iter().next().and_then(|text| text.spans).unwrap_or_default();
    spans.starts.iter().map(|&start| start as usize).collect()
}

impl Count for Counter {
    fn tokens(&self, text: &str) -> usize {
        if let Some(&tokens) = self.known.borrow().get(text) {
            return tokens;
        }
        let tokens = self.starts(text).len();
        if text.len() <= REMEMBERED_BYTES {
            self.known.borrow_mut().insert(text.to_owned(), tokens);
        }
        tokens
    }

    fn cut(&self, text: &str, chunk: usize, overlap: usize) -> Vec<String> {
        cut(text, chunk, overlap, |text| self.starts(text))
    }
}

/// Cuts `text` at the tokens that `starts` finds in it, inside no character. A piece that has more tokens on its own than in
/// the text (tokenizers see what comes before) gets shorter until it fits.
fn cut(text: &str, chunk: usize, overlap: usize, starts: impl Fn(&str) -> Vec<usize>) -> Vec<String> {
    let bounds = bounds(text, &starts(text));
    let tokens = bounds.len() - 1;
    let piece = |first: usize, end: usize| &text[bounds[first]..bounds[end]];
    let mut pieces = Vec::new();
    let (mut first, mut covered) = (0, 0);
    while bounds[covered] < text.len() {
        let mut end = (first + chunk.max(1)).min(tokens);
        // At least one more character than the piece before, however many tokens that takes.
        let least = (covered + 1..=tokens).find(|&end| bounds[end] > bounds[covered]).unwrap_or(tokens);
        end = end.max(least);
        loop {
            let excess = starts(piece(first, end)).len().saturating_sub(chunk);
            if excess == 0 {
                break;
            }
            if end > least {
                end = end.saturating_sub(excess).max(least);
            } else if first < covered {
                // Rather share less than be too long.
                first = (first + excess).min(covered);
            } else {
                break;
            }
        }
        pieces.push(piece(first, end).to_owned());
        covered = end;
        first = end.saturating_sub(overlap).max(first + 1);
    }
    pieces
}

/// Ascending byte positions between tokens: 0, one after each token but the last, and the length of the text. All of them lie
/// between characters, so tokens that share a character share a position.
fn bounds(text: &str, starts: &[usize]) -> Vec<usize> {
    let mut bounds = vec![0];
    let mut last = 0;
    for &start in starts.iter().skip(1) {
        last = text.floor_char_boundary(start).max(last);
        bounds.push(last);
    }
    if !starts.is_empty() || !text.is_empty() {
        bounds.push(text.len());
    }
    bounds
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// A token is two bytes; characters may be torn.
    fn pairs(text: &str) -> Vec<usize> {
        (0..text.len()).step_by(2).collect()
    }

    /// Joins pieces that share the longest possible text.
    fn joined(text: &str, pieces: &[String]) -> String {
        let mut whole = String::new();
        for piece in pieces {
            let fits =
                |at: &usize| piece.starts_with(&text[*at..whole.len()]) && text[*at..].starts_with(piece.as_str());
            let at = (0..=whole.len()).rev().filter(|at| text.is_char_boundary(*at)).find(fits).unwrap();
            whole.truncate(at);
            whole.push_str(piece);
        }
        whole
    }

    #[test]
    fn pieces_without_overlap_give_the_text_back() {
        for text in ["", " ", "a", "ab  cd\n\n e ", "naïve 你好，世界 \u{1f600}\u{1f600} end  "] {
            for chunk in 1..9 {
                let pieces = cut(text, chunk, 0, pairs);
                assert_eq!(pieces.concat(), text, "{chunk}");
                assert!(pieces.iter().all(|piece| !piece.is_empty()), "{pieces:?}");
                // Where tokens tear characters, the least piece has up to three tokens.
                assert!(pieces.iter().all(|piece| pairs(piece).len() <= chunk.max(3)), "{chunk}: {pieces:?}");
            }
        }
    }

    #[test]
    fn neighbors_share_the_overlap_and_no_piece_is_too_long() {
        assert_eq!(cut("0123456789", 3, 1, pairs), ["012345", "456789"]);
        assert_eq!(cut("0123456789", 2, 1, pairs), ["0123", "2345", "4567", "6789"]);
        assert_eq!(cut("01234", 8, 7, pairs), ["01234"]);
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let letters: Vec<char> = "abcdefg hij\nñé你好 \u{1f600}".chars().collect();
        for _ in 0..200 {
            let length = rng.random_range(0..120);
            let text: String = (0..length).map(|_| letters[rng.random_range(0..letters.len())]).collect();
            let chunk = rng.random_range(3..20);
            let overlap = rng.random_range(0..chunk);
            let pieces = cut(&text, chunk, overlap, pairs);
            assert_eq!(joined(&text, &pieces), text, "{chunk} {overlap}");
            assert!(pieces.iter().all(|piece| pairs(piece).len() <= chunk), "{chunk} {overlap} {pieces:?}");
        }
    }

    #[test]
    fn a_piece_that_has_more_tokens_on_its_own_gets_shorter() {
        // A text that begins inside a word has a token more for it.
        let words = |text: &str| {
            let mut starts: Vec<usize> = (0..text.len()).step_by(2).collect();
            if text.starts_with('4') {
                starts.push(text.len());
            }
            starts
        };
        assert_eq!(cut("0123456789", 2, 0, words), ["0123", "45", "6789"]);
    }
}
