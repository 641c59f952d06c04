//! Text ⇄ token ids on the `tokenizers` crate, from tokenizer.json or from a GGUF file's metadata.
//!
//! Two modes: plain text, where nothing is a control token (documents must not smuggle one in), and literal text,
//! where control tokens are recognized (templates). No special token is ever added.

use std::sync::Arc;

use kvsplice_kv::record::Tokens;
use serde_json::{Value, json};

use crate::Error;

/// A tokenizer in both modes.
#[derive(Debug)]
pub struct Tokenizer {
    literal: tokenizers::Tokenizer,
    plain: tokenizers::Tokenizer,
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Tokenizer(error.to_string())
}

impl Tokenizer {
    /// From the bytes of a tokenizer.json.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let mut literal = tokenizers::Tokenizer::from_bytes(bytes).map_err(failed)?;
        literal.with_padding(None);
        literal.with_truncation(None).map_err(failed)?;
        let mut plain = literal.clone();
        plain.set_encode_special_tokens(true);
        Ok(Self { literal, plain })
    }

    /// The tokenizer.json that this one could have come from.
    #[cfg(test)]
    pub(crate) fn to_json(&self) -> Result<String, Error> {
        self.literal.to_string(false).map_err(failed)
    }

    /// Plain text → ids with byte spans in `text`. Control tokens in the text are just text.
    pub fn encode(&self, text: &str) -> Result<Tokens, Error> {
        let encoding = self.plain.encode(text, false).map_err(failed)?;
        let spans = encoding.get_offsets().iter().map(|&(start, end)| (start as u32, end as u32)).collect();
        Ok(Tokens { ids: encoding.get_ids().to_vec(), spans })
    }

    /// Literal text → ids. Control tokens in the text become their ids.
    pub fn encode_special(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.literal.encode(text, false).map_err(failed)?.get_ids().to_vec())
    }

    /// Ids → text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        self.literal.decode(ids, skip_special).map_err(failed)
    }

    /// The text of one token as the vocabulary has it; `None` for an unknown id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.literal.id_to_token(id)
    }

    /// The state of text that grows token by token.
    pub fn stream(self: &Arc<Self>, skip_special: bool) -> TextStream {
        let tokenizer = Arc::clone(self);
        TextStream { tokenizer, skip_special, ids: Vec::new(), prefix: String::new(), prefix_index: 0 }
    }
}

/// Turns ids into text as they come, holding back incomplete characters.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl TextStream {
    /// The text that became complete with this id; empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> Result<String, Error> {
        let tokenizer = &self.tokenizer.literal;
        let text = tokenizers::tokenizer::step_decode_stream(
            tokenizer,
            vec![id],
            self.skip_special,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        );
        Ok(text.map_err(failed)?.unwrap_or_default())
    }
}

/// A byte-level BPE vocabulary as GGUF files hold it.
pub(crate) struct ByteLevelBpe {
    /// Id → token in byte-level spelling.
    pub(crate) tokens: Vec<String>,
    /// "left right", in order of rank.
    pub(crate) merges: Vec<String>,
    /// Ids of control tokens.
    pub(crate) control: Vec<u32>,
    /// Ids of tokens that are matched whole but are not control tokens.
    pub(crate) user_defined: Vec<u32>,
    /// How text is cut into words.
    pub(crate) pre: String,
}

/// GPT-4-style words; how many digits stand together differs between models.
fn words(digits: &str) -> Value {
    let pattern = format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex})
}

impl ByteLevelBpe {
    /// Builds the tokenizer through the library's own JSON form.
    pub(crate) fn build(self) -> Result<Tokenizer, Error> {
        let (normalizer, first, ignore_merges) = match self.pre.as_str() {
            "qwen2" => (json!({"type": "NFC"}), Some(words(r"\p{N}")), false),
            "llama-bpe" => (Value::Null, Some(words(r"\p{N}{1,3}")), true),
            "smollm" => (Value::Null, Some(json!({"type": "Digits", "individual_digits": true})), false),
            "gpt-2" | "gpt2" | "default" => (Value::Null, None, false),
            other => {
                let known = "qwen2, llama-bpe, smollm, gpt-2";
                return Err(Error::Tokenizer(format!("unknown pre-tokenizer {other:?}; known: {known}")));
            }
        };
        // A split by a pattern of its own replaces GPT-2's; cutting digits apart does not.
        let own_pattern = first.as_ref().is_some_and(|step| step["type"] == "Split");
        let steps: Vec<Value> = first.into_iter().chain([byte_level(!own_pattern)]).collect();
        let added = |ids: &[u32], special: bool| -> Vec<Value> {
            let named = ids.iter().filter_map(|&id| Some((id, self.tokens.get(id as usize)?)));
            named
                .map(|(id, token)| {
                    json!({"id": id, "content": token, "special": special, "single_word": false, "lstrip": false,
                           "rstrip": false, "normalized": false})
                })
                .collect()
        };
        let mut added_tokens = added(&self.control, true);
        added_tokens.extend(added(&self.user_defined, false));
        added_tokens.sort_by_key(|token| token["id"].as_u64());
        let vocabulary: serde_json::Map<String, Value> =
            self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": added_tokens,
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": null,
            "decoder": byte_level(true),
            "model": {"type": "BPE", "vocab": vocabulary, "merges": self.merges, "ignore_merges": ignore_merges},
        });
        let bytes = serde_json::to_vec(&tokenizer).map_err(|error| Error::Tokenizer(error.to_string()))?;
        Tokenizer::from_json(&bytes)
    }
}
