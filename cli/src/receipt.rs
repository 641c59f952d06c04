//! A receipt for people and as JSON.

use kvsplice_kv::Receipt;
use serde_json::{Map, Value};

use crate::generate::Answer;

/// What the time to the first token was spent on, in milliseconds. Stages overlap: loading runs beside scoring.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stages {
    /// Scoring and selecting.
    pub(crate) score_ms: f64,
    /// Loading cached KV.
    pub(crate) load_ms: f64,
    /// From the start of the first block of rows to the end of the last.
    pub(crate) recompute_ms: f64,
}

impl Stages {
    /// Reads the spans of a receipt.
    pub(crate) fn of(receipt: &Receipt) -> Self {
        let length = |stage: &str| receipt.span(stage).map_or(0.0, |span| span.end_ms - span.start_ms);
        let rows = || receipt.spans.iter().filter(|span| span.stage.starts_with("rows"));
        let start = rows().map(|span| span.start_ms).fold(f64::INFINITY, f64::min);
        let end = rows().map(|span| span.end_ms).fold(start, f64::max);
        Self {
            score_ms: length("score") + length("select"),
            load_ms: length("load"),
            recompute_ms: if start.is_finite() { end - start } else { 0.0 },
        }
    }
}

/// The number as a user wrote it: 0.2, not 0.20000000298.
pub(crate) fn as_typed(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// The receipt as JSON; of the options, those that the strategy uses, under their wire names.
pub(crate) fn json(receipt: &Receipt) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(receipt)?;
    let options = receipt.requested;
    let mut requested = Map::new();
    requested.insert("strategy".to_owned(), options.strategy.name().into());
    for (name, text) in options.entries() {
        // Numbers and booleans as such, as the user wrote them: 0.2, not 0.20000000298.
        let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
        requested.insert(name.to_owned(), value);
    }
    value["requested"] = Value::Object(requested);
    Ok(value)
}

/// Two or three lines that say what was done. Approximate reuse is called by its name.
pub(crate) fn summary(answer: &Answer) -> String {
    let receipt = &answer.receipt;
    let stages = Stages::of(receipt);
    let tokens = receipt.tokens;
    let mut text = format!(
        "{}: first token after {:.0} ms (score {:.0}, load {:.0}, recompute {:.0}); {} tokens recomputed, {} reused \
         approximately, {} exactly",
        receipt.requested,
        answer.first_token.as_secs_f64() * 1e3,
        stages.score_ms,
        stages.load_ms,
        stages.recompute_ms,
        tokens.recomputed,
        tokens.reused_approximate,
        tokens.reused_exact,
    );
    if !receipt.effective_reason.is_empty() {
        text.push_str(&format!("\ncarried out as {}: {}", receipt.effective, receipt.effective_reason));
    }
    for chunk in receipt.chunks.iter().filter(|chunk| !chunk.reason.is_empty()) {
        text.push_str(&format!("\nchunk {} {}: {}", chunk.id.short(), chunk.source.name(), chunk.reason));
    }
    text
}
