//! Prompts around a context: the built-in ones, or those of a file in the benchmark's form.

use std::collections::BTreeMap;
use std::path::Path;

use super::dataset::{self, Dataset};
use crate::failure::data;

const CONTEXT: &str = "{context}";
const INPUT: &str = "{input}";

/// The largest file of prompts, in bytes.
const MAX_BYTES: u64 = 10_000_000;

/// Prompts by dataset that take the place of the built-in ones.
#[derive(Debug, Default)]
pub(super) struct Templates(BTreeMap<String, String>);

/// The text before and after the context.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) before: String,
    pub(super) after: String,
}

impl Templates {
    /// Reads `{"dataset": "… {context} … {input} …"}`. Entries of datasets that are not read here may say anything.
    ///
    /// # Errors
    /// A data failure: no such file, not JSON of this form, or a prompt without its two slots.
    pub(super) fn read(file: &Path) -> anyhow::Result<Self> {
        let place = file.display();
        let size = file.metadata().map_err(|error| data(format!("read {place}: {error}")))?.len();
        if size > MAX_BYTES {
            return Err(data(format!("{place}: {size} bytes are too many for prompts; at most {MAX_BYTES}")));
        }
        let text = std::fs::read_to_string(file).map_err(|error| data(format!("read {place}: {error}")))?;
        let templates: BTreeMap<String, String> = serde_json::from_str(&text).map_err(|error| {
            data(format!("{place}: {error}; it must be {{\"dataset\":\"… {CONTEXT} … {INPUT} …\"}}"))
        })?;
        for dataset in dataset::ALL {
            let Some(template) = templates.get(dataset.name) else { continue };
            if template.matches(CONTEXT).count() != 1 || !template.contains(INPUT) {
                let name = dataset.name;
                return Err(data(format!("{place}: the prompt of {name:?} must hold {CONTEXT} once, and {INPUT}")));
            }
        }
        Ok(Self(templates))
    }

    /// The prompt of `dataset` with `input` in its place.
    pub(super) fn render(&self, dataset: &Dataset, input: &str) -> Prompt {
        let template = self.0.get(dataset.name).map_or(dataset.template, String::as_str);
        let (before, after) = template.split_once(CONTEXT).unwrap_or(("", template));
        Prompt { before: before.replace(INPUT, input), after: after.replace(INPUT, input) }
    }
}
