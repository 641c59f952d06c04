//! What was done for a request, in the terms of the receipt.

use kvsplice_kv::RowRanges;
use kvsplice_kv::receipt::Source;
use kvsplice_proto::v1;

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

/// The chunk receipts and token counts of a finished request. `rows`: every slot that was computed in context.
pub(crate) fn done(
    request: &Request,
    outcomes: &[PartOutcome],
    rows: &RowRanges,
    timeline: &Timeline,
    finish: &str,
    output: u32,
) -> v1::PrefillDone {
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
        if part.exact {
            tokens.reused_exact += length - computed;
        } else {
            tokens.reused_approximate += length - computed;
        }
        if part.kind == Kind::Chunk {
            chunks.push(chunk(part, outcome, length, computed));
        }
    }
    v1::PrefillDone { finish: finish.to_owned(), chunks, tokens: Some(tokens), spans: spans(request, timeline) }
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
