//! Cuts a document into chunks of at most so many primary tokens: at a sentence, then a word, never inside a character.
//!
//! Works through windows of the text, so memory does not grow with the document, and one endless line is cut too.
//! Invariant: chunks are in order, start and end later than the one before, and cover the text without a gap.

use kvsplice_kv::record::Tokens;

use crate::Error;

/// A chunk of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First byte in the document.
    pub(crate) start: usize,
    /// One past the last byte.
    pub(crate) end: usize,
    /// The piece's own tokens (tokenized apart from its neighbors).
    pub(crate) tokens: Tokens,
}

/// Cuts `text` into pieces of at most `max_tokens` tokens, of which neighbors share about `overlap` (less than
/// `max_tokens`). `encode` tokenizes a text of its own.
///
/// # Errors
/// What `encode` returns; nothing of its own.
pub(crate) fn cut(
    text: &str,
    max_tokens: usize,
    overlap: usize,
    encode: impl Fn(&str) -> Result<Tokens, Error>,
) -> Result<Vec<Piece>, Error> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut start = 0;
    while start < text.len() {
        let covered = pieces.last().map_or(0, |piece| piece.end);
        let piece = match next_piece(text, start, covered, max_tokens, &encode)? {
            Some(piece) => piece,
            // The overlap leaves no room for anything new: go on without it.
            None if start < covered => {
                start = covered;
                continue;
            }
            None => one_character(text, start, &encode)?,
        };
        let next = overlap_start(text, &piece, overlap);
        let end = piece.end;
        pieces.push(piece);
        start = if end == text.len() { end } else { next };
    }
    Ok(pieces)
}

/// The piece that starts at `start` and ends after `covered`; none when so many tokens do not reach that far.
fn next_piece(
    text: &str,
    start: usize,
    covered: usize,
    max_tokens: usize,
    encode: &impl Fn(&str) -> Result<Tokens, Error>,
) -> Result<Option<Piece>, Error> {
    let mut window_bytes = max_tokens.saturating_mul(8).max(64);
    let window = loop {
        let end = floor_boundary(text, start.saturating_add(window_bytes));
        let tokens = encode(&text[start..end])?;
        if tokens.ids.len() > max_tokens {
            break tokens;
        }
        if end == text.len() {
            return Ok(Some(Piece { start, end, tokens }));
        }
        window_bytes = window_bytes.saturating_mul(2);
    };
    let mut allowed = max_tokens;
    // A piece tokenized apart may have more tokens than the window has up to its end; then it ends earlier.
    while allowed > 0 {
        let byte_after = |tokens: usize| window.spans.get(tokens).map_or(start, |span| start + span.0 as usize);
        let limit = floor_boundary(text, byte_after(allowed));
        let floor = byte_after(allowed / 2).max(covered);
        if limit <= covered || limit <= start {
            return Ok(None);
        }
        let end = boundary(text, floor, limit);
        let tokens = encode(&text[start..end])?;
        if tokens.ids.len() <= max_tokens {
            return Ok(Some(Piece { start, end, tokens }));
        }
        allowed = allowed.saturating_sub((tokens.ids.len() - max_tokens).max(1));
    }
    Ok(None)
}

/// One character with as many tokens as it takes: the smallest piece there is.
fn one_character(text: &str, start: usize, encode: &impl Fn(&str) -> Result<Tokens, Error>) -> Result<Piece, Error> {
    let end = start + text[start..].chars().next().map_or(1, char::len_utf8);
    Ok(Piece { start, end, tokens: encode(&text[start..end])? })
}

/// The best place to end in `floor < end <= limit`: after the last sentence, else after the last word, else `limit`.
fn boundary(text: &str, floor: usize, limit: usize) -> usize {
    let (mut sentence, mut word) = (None, None);
    let floor = floor_boundary(text, floor);
    // Look back a little, so that a sentence whose mark stands before `floor` is seen too.
    let from = floor_boundary(text, floor.saturating_sub(16));
    let mut ended = false;
    for (offset, character) in text[from..limit].char_indices() {
        let after = from + offset + character.len_utf8();
        if character.is_whitespace() {
            // White space stays with what it follows.
            if after > floor {
                word = Some(after);
                if ended || character == '\n' {
                    sentence = Some(after);
                }
            }
        } else if matches!(character, '。' | '！' | '？') {
            ended = true;
            if after > floor {
                sentence = Some(after);
            }
        } else {
            let closes = matches!(character, '"' | '\'' | ')' | ']' | '”' | '’' | '»');
            ended = matches!(character, '.' | '!' | '?' | '…') || (ended && closes);
        }
    }
    sentence.or(word).unwrap_or(limit)
}

/// Where the next piece starts so that it shares about `overlap` tokens: at a word, inside the piece.
fn overlap_start(text: &str, piece: &Piece, overlap: usize) -> usize {
    if overlap == 0 {
        return piece.end;
    }
    // At most half a piece is shared, so that a piece that ended early at a sentence still makes way.
    let shared = overlap.min(piece.tokens.spans.len() / 2);
    let Some(span) = piece.tokens.spans.get(piece.tokens.spans.len() - shared) else { return piece.end };
    let from = floor_boundary(text, piece.start + span.0 as usize);
    let mut after_space = false;
    for (offset, character) in text[from..piece.end].char_indices() {
        if after_space && !character.is_whitespace() {
            return (from + offset).max(next_character(text, piece.start));
        }
        after_space = character.is_whitespace();
    }
    // No word begins there (one endless word): share the tokens as they are.
    from.max(next_character(text, piece.start)).min(piece.end)
}

fn next_character(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(0, char::len_utf8)
}

/// The greatest character boundary at or below `at`.
fn floor_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Up to four bytes a token, cut at white space; characters of several bytes take a token a byte that share a range.
    fn encode(text: &str) -> Result<Tokens, Error> {
        let mut tokens = Tokens::default();
        let mut start = 0;
        for (at, character) in text.char_indices() {
            let end = at + character.len_utf8();
            if character.len_utf8() > 1 {
                if start < at {
                    tokens.spans.push((start as u32, at as u32));
                }
                tokens.spans.extend(std::iter::repeat_n((at as u32, end as u32), character.len_utf8()));
                start = end;
            } else if end - start == 4 || character.is_whitespace() {
                tokens.spans.push((start as u32, end as u32));
                start = end;
            }
        }
        if start < text.len() {
            tokens.spans.push((start as u32, text.len() as u32));
        }
        tokens.ids = (0..tokens.spans.len() as u32).collect();
        Ok(tokens)
    }

    fn check(text: &str, max_tokens: usize, overlap: usize) -> Vec<Piece> {
        let pieces = cut(text, max_tokens, overlap, encode).unwrap();
        let mut covered = 0;
        for (index, piece) in pieces.iter().enumerate() {
            assert!(piece.start <= covered, "gap before piece {index}");
            assert!(piece.end > covered, "piece {index} adds nothing");
            assert!(index == 0 || piece.start > pieces[index - 1].start);
            assert!(piece.tokens.ids.len() <= max_tokens || text[piece.start..piece.end].chars().count() == 1);
            assert_eq!(encode(&text[piece.start..piece.end]).unwrap(), piece.tokens);
            covered = piece.end;
        }
        assert_eq!(covered, text.len());
        pieces
    }

    #[test]
    fn pieces_end_at_sentences() {
        let text = "The mill grinds rye. The ferry leaves at nine. The tower clock is late. Nobody minds it at all. "
            .repeat(20);
        let pieces = check(&text, 40, 0);
        assert!(pieces.len() > 5);
        for piece in &pieces {
            assert!(text[..piece.end].ends_with(". "), "{:?}", &text[piece.start..piece.end]);
        }
    }

    #[test]
    fn pieces_end_at_words_when_there_is_no_sentence() {
        let text = "rye barley wheat oats spelt millet ".repeat(100);
        for piece in check(&text, 50, 10) {
            assert!(text[..piece.end].ends_with(' '));
            assert!(piece.start == 0 || text[..piece.start].ends_with(' '));
        }
    }

    #[test]
    fn neighbors_share_the_overlap() {
        let text = "rye barley wheat oats spelt millet ".repeat(100);
        let pieces = check(&text, 50, 10);
        for pair in pieces.windows(2) {
            let shared = encode(&text[pair[1].start..pair[0].end]).unwrap().ids.len();
            assert!((6..=10).contains(&shared), "{shared}");
        }
    }

    #[test]
    fn one_line_of_a_hundred_thousand_tokens_is_cut() {
        let pieces = check(&"x".repeat(400_000), 1000, 50);
        assert!(pieces.len() > 100);
    }

    #[test]
    fn a_short_text_is_one_piece_and_no_text_is_none() {
        assert_eq!(check("one. two.", 100, 50).len(), 1);
        assert!(check("", 100, 50).is_empty());
    }

    #[test]
    fn a_character_that_needs_more_tokens_than_allowed_stands_alone() {
        assert_eq!(check("🙂🙂", 3, 1).len(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_text_is_covered_without_a_cut_character(
            words in prop::collection::vec("[a-z]{1,12}|[a-z]{3}\\. |漢字。|🙂|\\n\\n| {1,30}|naïve", 0..300),
            max_tokens in 1usize..60,
            overlap in 0usize..60,
        ) {
            check(&words.concat(), max_tokens, overlap.min(max_tokens - 1));
        }
    }
}
