//! From token ids to the text a caller sees: whole characters only, ended before the first stop string.

use std::sync::Arc;

use kvsplice_model::tokenizer::TextStream;
use kvsplice_model::{Error, Tokenizer};

/// Text of one answer as it grows.
#[derive(Debug)]
pub(crate) struct Text {
    stream: TextStream,
    stop: Vec<String>,
    /// Complete text that may still turn out to begin a stop string.
    held: String,
}

/// What a token added.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Added {
    /// Text that is final now.
    pub(crate) text: String,
    /// A stop string was met; nothing may follow.
    pub(crate) stopped: bool,
}

impl Text {
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, stop: Vec<String>) -> Self {
        Self { stream: tokenizer.stream(true), stop, held: String::new() }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, id: u32) -> Result<Added, Error> {
        let text = self.stream.push(id)?;
        Ok(self.add(&text))
    }

    fn add(&mut self, text: &str) -> Added {
        self.held.push_str(text);
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return Added { text: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Added { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// Text that was held back, when output ends for another reason than a stop string.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of `text` that begin `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest)
        .rev()
        .find(|&bytes| {
            text.is_char_boundary(text.len() - bytes)
                && stop.as_bytes().starts_with(&text.as_bytes()[text.len() - bytes..])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(stop: &[&str]) -> Text {
        let byte_level =
            br#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,
            "decoder":null,"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#;
        let tokenizer = Arc::new(Tokenizer::from_json(byte_level).unwrap());
        Text::new(&tokenizer, stop.iter().map(|stop| (*stop).to_owned()).collect())
    }

    #[test]
    fn a_stop_string_over_several_tokens_never_shows() {
        let mut text = text(&["END.", "\n\n"]);
        let mut shown = String::new();
        for piece in ["one E", "N", "x EN", "D", ". two"] {
            let added = text.add(piece);
            shown.push_str(&added.text);
            assert!(!shown.contains("END."));
            if added.stopped {
                assert_eq!(shown, "one ENx ");
                return;
            }
        }
        panic!("the stop string was not seen");
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        let mut text = text(&["END"]);
        assert_eq!(text.add("an EN").text, "an ");
        assert_eq!(text.finish(), "EN");
    }

    #[test]
    fn characters_are_never_cut() {
        let mut text = text(&["é!"]);
        assert_eq!(text.add("caf").text, "caf");
        assert_eq!(text.add("é").text, "");
        assert_eq!(text.add("?").text, "é?");
    }
}
