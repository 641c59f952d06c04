//! What was done for a request, in the terms of the receipt.

use kvsplice_kv::RowRanges;
use kvsplice_kv::receipt::Source;
use kvsplice_proto::{convert, v1};

use crate::request::{Kind, Part, Request};

/// Where one part's KV came from.
#[derive(Clone, Debug)]
pub(crate) struct PartOutcome {
    pub(crate) source: Source,
    pub(crate) reason: String,
    pub(crate) bytes: u64,
}

/// The stages of a request on its clock, in milliseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    pub(crate) received: f64,
    /// When the first layer of rows began.
    pub(crate) rows_start: Option<f64>,
    pub(crate) rows_end: Option<f64>,
    pub(crate) load_end: Option<f64>,
    pub(crate) first_token: Option<f64>,
    /// When the rows to compute were known.
    pub(crate) rows_known: Option<f64>,
}

/// What was computed for a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Computed {
    /// Every slot that was computed in context.
    pub(crate) rows: RowRanges,
    /// Selectable rows that were projected, mean over layers.
    pub(crate) charged_rows: f64,
    /// Tokens that could be selected.
    pub(crate) selectable: usize,
    /// One a chunk token, where the worker selected.
    pub(crate) scores: Vec<f32>,
}

/// The chunk receipts and token counts of a finished request.
pub(crate) fn done(
    request: &Request,
    outcomes: &[PartOutcome],
    computed: &Computed,
    beginning: u32,
    timeline: &Timeline,
    finish: &str,
    output: u32,
) -> v1::PrefillDone {
    let rows = &computed.rows;
    let mut tokens = v1::TokenCounts { output, ..v1::TokenCounts::default() };
    let mut chunks = Vec::new();
    let targets = request.targets.len() as u32;
    for (part, outcome) in request.parts.iter().zip(outcomes) {
        let mut length = part.slots.len() as u32;
        let mut computed = rows.count_in(part.slots.clone()) as u32;
        if part.kind == Kind::Question {
            length -= targets;
            computed -= targets;
        }
        match part.kind {
            Kind::Prefix => tokens.prefix += length,
            Kind::Chunk => tokens.chunk += length,
            Kind::Question => tokens.question += length,
        }
        tokens.recomputed += computed;
        let reused = length - computed;
        let covered = beginning.clamp(part.slots.start, part.slots.end) - part.slots.start;
        let exact = if part.exact { reused } else { reused.min(covered) };
        tokens.reused_exact += exact;
        tokens.reused_approximate += reused - exact;
        if part.kind == Kind::Chunk {
            chunks.push(chunk(part, outcome, length, computed));
        }
    }
    let chunk_parts = request.parts.iter().filter(|part| part.kind == Kind::Chunk);
    let chunk_slots = RowRanges::from_ranges(chunk_parts.map(|part| part.slots.clone()));
    v1::PrefillDone {
        finish: finish.to_owned(),
        chunks,
        tokens: Some(tokens),
        spans: spans(request, timeline),
        rows: convert::ranges(&rows.intersection(&chunk_slots)),
        charged_rows: computed.charged_rows,
        selectable: computed.selectable as u32,
        scores: if request.want_scores { computed.scores.clone() } else { Vec::new() },
        captured: 0,
    }
}

fn chunk(part: &Part, outcome: &PartOutcome, tokens: u32, rows: u32) -> v1::ChunkReceipt {
    v1::ChunkReceipt {
        id: part.id().map(|id| id.to_string()).unwrap_or_default(),
        tokens,
        rows,
        source: outcome.source.name().to_owned(),
        reason: outcome.reason.clone(),
        bytes: outcome.bytes,
    }
}

fn spans(request: &Request, timeline: &Timeline) -> Vec<v1::Span> {
    let span = |stage: &str, start_ms: f64, end_ms: f64| v1::Span { stage: stage.to_owned(), start_ms, end_ms };
    let mut spans = Vec::new();
    if let Some(end) = timeline.load_end {
        spans.push(span("load", timeline.received, end));
    }
    if let (Some(known), Some(start)) = (timeline.rows_known, timeline.rows_start) {
        spans.push(span("queue", known, start));
    }
    if let (Some(start), Some(end)) = (timeline.rows_start, timeline.rows_end) {
        spans.push(span("rows.1", start, end));
        if let Some(first) = timeline.first_token {
            spans.push(span("first_token", end, first));
            spans.push(span("decode", first, request.now_ms()));
        }
    }
    spans
}
