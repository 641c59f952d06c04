//! What the head is told at its start. Every field has a default; `validate` checks each once.

use kvsplice_kv::Encoding;
use kvsplice_model::Spec;
use serde::{Deserialize, Serialize};

use crate::Error;

/// The head's settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model that answers. The head reads its tokenizer, template and digest; the worker computes with it.
    pub primary: Spec,
    /// The model that scores chunk tokens, in this process.
    pub auxiliary: Spec,
    /// `HOST:PORT` of the worker.
    pub worker: String,
    /// `HOST:PORT` of the cache service.
    pub cache: String,
    /// Namespace that owns the corpora and chunks that this head serves.
    pub owner: String,
    /// System prompt of inline requests and of new corpora, unless they bring their own.
    pub system_prompt: String,
    /// How KV of the primary model is stored: `bf16`; `int8`, `fp8` or `int4` to load less, at some loss; `f32` for tests of
    /// exactness. A corpus keeps the one that it was begun with.
    pub encoding: Encoding,
    /// How KV of the auxiliary model is stored.
    pub auxiliary_encoding: Encoding,
    /// Bytes of auxiliary KV held in memory.
    pub auxiliary_kv_bytes: u64,
    /// Map auxiliary KV that the cache service has in files of this host, instead of having it sent.
    pub map_files: bool,
    /// `craft`: captured variants kept of one chunk; the least used goes first.
    pub craft_variants: usize,
    /// `craft`: chunks that have captured variants; the least used goes first.
    pub craft_chunks: usize,
    /// `craft`: a chunk without a captured variant is captured at this many uses; 0 captures only what a request asks for.
    pub craft_capture_after: u32,
    /// Requests in flight; more are refused with RESOURCE_EXHAUSTED.
    pub max_in_flight: usize,
    /// Deadline of a request that brings none, in seconds.
    pub deadline_s: u64,
    /// Deadline of one short call to the cache service or of a worker's status, in seconds.
    pub call_deadline_s: u64,
    /// Deadline of encoding one batch of chunks, in seconds.
    pub encode_deadline_s: u64,
    /// Time for running requests after the shutdown signal, in seconds.
    pub grace_s: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            primary: Spec { model: "qwen2.5-coder-0.5b-instruct".into(), ..Spec::default() },
            auxiliary: Spec { model: "smollm2-135m-instruct".into(), ..Spec::default() },
            worker: "127.0.0.1:7401".into(),
            cache: "127.0.0.1:7402".into(),
            owner: "default".into(),
            system_prompt: "You answer from the given passages only.".into(),
            encoding: Encoding::Bf16,
            auxiliary_encoding: Encoding::Bf16,
            auxiliary_kv_bytes: 2 << 30,
            map_files: true,
            craft_variants: 4,
            craft_chunks: 10_000,
            craft_capture_after: 0,
            max_in_flight: 64,
            deadline_s: 300,
            call_deadline_s: 5,
            encode_deadline_s: 900,
            grace_s: 30,
        }
    }
}

impl Config {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Config`] naming the first bad field.
    pub fn validate(&self) -> Result<(), Error> {
        let bad = |field, detail: String| Err(Error::Config { field, detail });
        if !crate::record::is_segment(&self.owner) {
            return bad("owner", format!("must be 1 to 128 letters, digits or -_.@, got {:?}", self.owner));
        }
        if self.system_prompt.trim().is_empty() {
            return bad("system_prompt", "must not be empty".into());
        }
        for (field, spec) in [("primary", &self.primary), ("auxiliary", &self.auxiliary)] {
            if let Err(error) = spec.validate() {
                return bad(field, error.to_string());
            }
        }
        let positive = [
            ("craft_variants", self.craft_variants as u64),
            ("craft_chunks", self.craft_chunks as u64),
            ("max_in_flight", self.max_in_flight as u64),
            ("deadline_s", self.deadline_s),
            ("call_deadline_s", self.call_deadline_s),
            ("encode_deadline_s", self.encode_deadline_s),
        ];
        for (field, value) in positive {
            if value == 0 || value > 1 << 20 {
                return bad(field, format!("must be in 1..=1048576, got {value}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_a_bad_field_is_named() {
        assert!(Config::default().validate().is_ok());
        for (config, name) in [
            (Config { owner: "a/b".into(), ..Config::default() }, "owner"),
            (Config { deadline_s: 0, ..Config::default() }, "deadline_s"),
            (Config { craft_variants: 0, ..Config::default() }, "craft_variants"),
            (Config { system_prompt: " ".into(), ..Config::default() }, "system_prompt"),
        ] {
            assert!(config.validate().unwrap_err().to_string().contains(name));
        }
    }

    #[test]
    fn an_unknown_key_is_refused() {
        assert!(serde_json::from_str::<Config>(r#"{"wroker": "a:1"}"#).is_err());
    }
}
