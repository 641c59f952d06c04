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

/// What the chat template is filled with.
#[derive(Clone, Debug)]
pub(crate) struct Template {
    pub(crate) system: String,
    /// The user turn before the chunks; `None` for the default one, with its labels.
    pub(crate) intro: Option<String>,
    pub(crate) question: String,
    /// Follows the template's tail.
    pub(crate) answer_prefix: String,
}

impl Template {
    /// Any question under this system prompt: for what stands before the chunks, which no question changes.
    pub(crate) fn any_question(system: &str) -> Self {
        Self { system: system.to_owned(), intro: None, question: "?".to_owned(), answer_prefix: String::new() }
    }
}

impl TextModel {
    /// The layout of this model's KV.
    pub(crate) fn layout(&self, encoding: Encoding) -> KvLayout {
        kvsplice_model::encode::layout(&self.config, encoding)
    }

    /// Renders the chat template around the chunks.
    pub(crate) fn render(&self, template: &Template) -> Result<Frame, Error> {
        let Template { system, intro, question, answer_prefix } = template;
        self.refuse_control_tokens("system prompt", system)?;
        self.refuse_control_tokens("intro", intro.as_deref().unwrap_or_default())?;
        self.refuse_control_tokens("question", question)?;
        self.refuse_control_tokens("answer prefix", answer_prefix)?;
        let parts = self.template.split(system, intro.as_deref(), question)?;
        self.literal(&parts.prefix, &(parts.question + answer_prefix))
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
