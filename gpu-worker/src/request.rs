//! A request as the engine needs it: every number of the message checked once, here.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvsplice_kv::{ChunkId, ChunkKey, Options, RowRanges, Sampling, Variant};
use kvsplice_model::Model;
use kvsplice_proto::{convert, v1};

use crate::Error;

/// What a part of the prompt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Prefix,
    Chunk,
    Question,
}

/// A piece of the prompt.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    pub(crate) ids: Vec<u32>,
    pub(crate) slots: Range<u32>,
    /// Position of the first token, for rotation.
    pub(crate) first_position: u32,
    /// The KV to load; `None` to compute every token in context.
    pub(crate) key: Option<ChunkKey>,
    /// The KV stands behind the prompt's prefix.
    pub(crate) behind_prefix: bool,
    /// Why the part is computed in context.
    pub(crate) fresh_reason: String,
    /// Reused KV equals what full attention computes.
    pub(crate) exact: bool,
    /// The variant to load.
    pub(crate) variant: Variant,
    /// The cache service had it when the head looked: a copy of this worker's own may be used.
    pub(crate) confirmed: bool,
}

impl Part {
    pub(crate) fn id(&self) -> Option<ChunkId> {
        self.key.as_ref().map(ChunkKey::id)
    }
}

/// A prompt to answer.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) parts: Vec<Part>,
    pub(crate) options: Options,
    pub(crate) sampling: Sampling,
    /// What repairs are stored as.
    pub(crate) variant: Variant,
    /// Namespace that owns the chunks.
    pub(crate) owner: String,
    pub(crate) lease: String,
    /// Zero of the request's clock.
    pub(crate) clock: Instant,
    pub(crate) want_logits: bool,
    pub(crate) want_scores: bool,
    /// The whole distribution at each target is wanted.
    pub(crate) distributions: bool,
    /// The chunks are kept as variants of this context.
    pub(crate) capture: bool,
    /// Tokens to score after the prompt; they are the end of the last part. Empty to generate.
    pub(crate) targets: Vec<u32>,
}

impl Request {
    /// Checks a message against the model. `targets` are appended to the question; `distributions` are wanted at each.
    pub(crate) fn new(
        start: v1::PrefillStart,
        targets: Vec<u32>,
        distributions: bool,
        model: &Model,
    ) -> Result<Self, Error> {
        let expected = convert::model_digest("model", &start.model)?;
        if expected != model.digest {
            return Err(Error::OtherModel { expected, found: model.digest });
        }
        let elapsed = Duration::try_from_secs_f64(start.elapsed_ms / 1e3)
            .map_err(|_| Error::Request(format!("elapsed_ms must be a time, got {}", start.elapsed_ms)))?;
        let sampling = convert::sampling(start.sampling)?;
        let variant = convert::variant("variant", &start.variant)?;
        let options = convert::options(start.options)?;
        let mut parts = parts(start.parts, model, &start.owner, variant)?;
        if start.capture && parts.iter().any(|part| part.key.is_some()) {
            return Err(Error::Request("a prompt is captured only when no part is loaded".to_owned()));
        }
        if let Some(question) = parts.last_mut() {
            question.ids.extend(&targets);
            question.slots.end += targets.len() as u32;
        }
        let request = Self {
            parts,
            options,
            sampling,
            variant,
            owner: start.owner,
            lease: start.lease,
            clock: Instant::now().checked_sub(elapsed).unwrap_or_else(Instant::now),
            want_logits: start.want_logits,
            want_scores: start.want_scores,
            distributions,
            capture: start.capture,
            targets,
        };
        request.check_length(model)?;
        Ok(request)
    }

    fn check_length(&self, model: &Model) -> Result<(), Error> {
        let prompt: u64 = self.parts.iter().map(|part| part.ids.len() as u64).sum();
        let output = if self.targets.is_empty() { u64::from(self.sampling.max_tokens) } else { 0 };
        let positions = self.parts.iter().map(|part| u64::from(part.first_position) + part.ids.len() as u64);
        let furthest = positions.max().unwrap_or(0).max(prompt);
        if furthest + output > u64::from(model.config.context) {
            return Err(Error::TooLong { prompt, output, context: model.config.context });
        }
        if let Some(id) = self.parts.iter().flat_map(|part| &part.ids).find(|&&id| id >= model.config.vocabulary) {
            return Err(Error::Request(format!("token id {id} is not below {}", model.config.vocabulary)));
        }
        Ok(())
    }

    /// Tokens of the prompt.
    pub(crate) fn tokens(&self) -> u32 {
        self.parts.last().map_or(0, |part| part.slots.end)
    }

    /// Slots that the sequence may come to use.
    pub(crate) fn slots_needed(&self) -> u32 {
        if self.targets.is_empty() { self.tokens() + self.sampling.max_tokens } else { self.tokens() }
    }

    /// Ids of the prompt's prefix.
    pub(crate) fn prefix_ids(&self) -> &[u32] {
        match self.parts.first() {
            Some(part) if part.kind == Kind::Prefix => &part.ids,
            _ => &[],
        }
    }

    /// The key of the chunk at part `index` behind the prompt's prefix.
    pub(crate) fn chunk_key(&self, index: usize, model: &Model) -> ChunkKey {
        ChunkKey::new(model.digest, self.prefix_ids(), &self.parts[index].ids, &self.owner)
    }

    /// Checks that rows lie in chunks.
    pub(crate) fn check_rows(&self, rows: &RowRanges) -> Result<(), Error> {
        let chunks = self.parts.iter().filter(|part| part.kind == Kind::Chunk);
        let inside: usize = chunks.map(|part| rows.count_in(part.slots.clone())).sum();
        if inside == rows.len() {
            Ok(())
        } else {
            Err(Error::Request(format!("{} of {} rows are not in a chunk", rows.len() - inside, rows.len())))
        }
    }

    /// Milliseconds on the request's clock.
    pub(crate) fn now_ms(&self) -> f64 {
        self.clock.elapsed().as_secs_f64() * 1e3
    }
}

fn parts(messages: Vec<v1::Part>, model: &Model, owner: &str, variant: Variant) -> Result<Vec<Part>, Error> {
    let last = messages.len().saturating_sub(1);
    let mut parts: Vec<Part> = Vec::with_capacity(messages.len());
    let mut slot = 0u32;
    for (index, message) in messages.into_iter().enumerate() {
        let kind = match v1::part::Kind::try_from(message.kind) {
            Ok(v1::part::Kind::Prefix) => Kind::Prefix,
            Ok(v1::part::Kind::Chunk) => Kind::Chunk,
            Ok(v1::part::Kind::Question) => Kind::Question,
            Err(_) => return Err(Error::Request(format!("part {index} has an unknown kind {}", message.kind))),
        };
        let in_order = (kind == Kind::Prefix) == (index == 0 && kind == Kind::Prefix)
            && (kind == Kind::Question) == (index == last);
        if !in_order || message.token_ids.is_empty() || message.first_slot != slot {
            return Err(Error::Request(format!(
                "part {index} ({kind:?}, {} tokens, first slot {}) does not fit: parts are an optional prefix, chunks and \
                 a question, none empty, and this one starts at slot {slot}",
                message.token_ids.len(),
                message.first_slot
            )));
        }
        let tokens =
            u32::try_from(message.token_ids.len()).map_err(|_| Error::Request("part is too long".to_owned()))?;
        let end = slot.checked_add(tokens).ok_or_else(|| Error::Request("prompt is too long".to_owned()))?;
        let key = if message.chunk.is_empty() {
            None
        } else {
            let prefix: &[u32] = match parts.first() {
                Some(first) if message.behind_prefix && first.kind == Kind::Prefix => &first.ids,
                _ => &[],
            };
            let key = ChunkKey::new(model.digest, prefix, &message.token_ids, owner);
            let given = convert::chunk_id("chunk", &message.chunk)?;
            if given != key.id() {
                return Err(Error::OtherChunk { given, expected: key.id() });
            }
            Some(key)
        };
        if kind == Kind::Question && key.is_some() {
            return Err(Error::Request("the question has no cached KV".to_owned()));
        }
        parts.push(Part {
            kind,
            slots: slot..end,
            ids: message.token_ids,
            first_position: message.first_position,
            key,
            behind_prefix: message.behind_prefix,
            fresh_reason: message.fresh_reason,
            exact: message.exact,
            confirmed: message.confirmed,
            variant: match message.variant.as_str() {
                "" => variant,
                other => convert::variant("part variant", other)?,
            },
        });
        slot = end;
    }
    if parts.is_empty() {
        return Err(Error::Request("a prompt needs at least a question".to_owned()));
    }
    Ok(parts)
}
