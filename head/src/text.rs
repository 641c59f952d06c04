//! A model's view of text: tokenizer, template and identity, without weights.
//!
//! Invariant: text of a caller never becomes a control token, except in raw prompts, which are taken literally.

use std::ops::Deref;

use kvsplice_kv::record::Tokens;
use kvsplice_kv::{Encoding, KvLayout};
use kvsplice_model::Description;

use crate::Error;

/// What the head knows of one model.
#[derive(Clone)]
pub(crate) struct TextModel {
    /// `primary` or `auxiliary`.
    pub(crate) role: &'static str,
    pub(crate) description: Description,
}

impl Deref for TextModel {
    type Target = Description;

    fn deref(&self) -> &Description {
        &self.description
    }
}

/// Token ids before and after the chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) prefix: Vec<u32>,
    pub(crate) question: Vec<u32>,
}

impl TextModel {
    /// The layout of this model's KV.
    pub(crate) fn layout(&self, encoding: Encoding) -> KvLayout {
        kvsplice_model::encode::layout(&self.config, encoding)
    }

    /// Renders the chat template around the chunks.
    pub(crate) fn render(&self, system: &str, question: &str) -> Result<Frame, Error> {
        self.refuse_control_tokens("system prompt", system)?;
        self.refuse_control_tokens("question", question)?;
        let parts = self.template.split(system, question)?;
        self.literal(&parts.prefix, &parts.question)
    }

    /// Takes both texts as they are; control tokens are recognized.
    pub(crate) fn literal(&self, prefix: &str, question: &str) -> Result<Frame, Error> {
        Ok(Frame { prefix: self.tokenizer.encode_special(prefix)?, question: self.tokenizer.encode_special(question)? })
    }

    /// A chunk's tokens; control tokens are plain text here.
    pub(crate) fn chunk(&self, text: &str) -> Result<Tokens, Error> {
        Ok(self.tokenizer.encode(text)?)
    }

    /// Both ways to tokenize agree on text without control tokens.
    fn refuse_control_tokens(&self, what: &str, text: &str) -> Result<(), Error> {
        let special = self.tokenizer.encode_special(text)?;
        let plain = self.tokenizer.encode(text)?.ids;
        if special == plain {
            return Ok(());
        }
        let differs = special.iter().zip(&plain).position(|(special, plain)| special != plain);
        let token = special.get(differs.unwrap_or(plain.len().min(special.len()))).copied();
        let name = self.tokenizer.decode(token.as_slice(), false)?;
        Err(Error::invalid(what, format!("contains the control token {name:?} of the {} model; remove it", self.role)))
    }
}
