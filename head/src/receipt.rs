//! The receipt of a request: the head's decisions and stages, merged with what the worker reports.

use kvsplice_kv::receipt::{ChunkReceipt, Models, Source, Span};
use kvsplice_kv::{Receipt, Strategy};
use kvsplice_proto::v1;

use crate::Error;
use crate::clock::Clock;
use crate::head::Head;
use crate::pick::Picked;
use crate::prepare::Prepared;

/// Merges both sides.
pub(crate) fn receipt(
    head: &Head,
    prepared: &Prepared,
    picked: &Picked,
    clock: &Clock,
    done: v1::PrefillDone,
) -> Result<Receipt, Error> {
    let plan = &prepared.plan;
    if done.chunks.len() != plan.chunks.len() {
        let detail = format!("reported on {} of {} chunks", done.chunks.len(), plan.chunks.len());
        return Err(Error::Task { task: "prefill", detail });
    }
    let mut chunks = Vec::with_capacity(done.chunks.len());
    for (index, mut chunk) in done.chunks.into_iter().enumerate() {
        // A fresh chunk has no id on the wire; here it has the id that it would be stored under.
        chunk.id = plan.chunks[index].id.to_string();
        if let (Some(reason), true) = (&prepared.fresh[index], chunk.reason.is_empty()) {
            chunk.reason.clone_from(reason);
        }
        chunks.push(ChunkReceipt::try_from(chunk)?);
    }
    let mut spans: Vec<Span> = clock.spans.iter().cloned().chain(done.spans.into_iter().map(Into::into)).collect();
    spans.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
    let scored = picked.origin.is_some();
    let computed: u32 = chunks.iter().map(|chunk| chunk.rows).sum();
    let ratio_charged = match prepared.effective {
        Strategy::Full => 1.0,
        // Every chunk token is selectable there; those that an earlier prompt left are not computed.
        Strategy::Prefix => share(f64::from(computed), chunks.iter().map(|chunk| chunk.tokens as usize).sum()),
        // A chunk that costs all of itself is computed whole: that is part of what the method recomputes.
        Strategy::Craft => {
            let whole: u32 = chunks.iter().filter(|chunk| chunk.source == Source::Fresh).map(|chunk| chunk.rows).sum();
            share(done.charged_rows + f64::from(whole), (done.selectable + whole) as usize)
        }
        _ => share(done.charged_rows, done.selectable as usize),
    };
    let (mut effective, mut effective_reason) = (prepared.effective, prepared.effective_reason.clone());
    // The cache service may have died after the plan was made; then the worker computes what did not come in context.
    if !matches!(effective, Strategy::Full | Strategy::Prefix)
        && chunks.iter().all(|chunk| chunk.source == Source::Fresh)
    {
        effective = Strategy::Full;
        let reason = chunks.first().map(|chunk| chunk.reason.as_str()).unwrap_or_default();
        effective_reason = format!("every chunk is fresh: {reason}");
    }
    if prepared.capture {
        effective_reason =
            format!("every token is computed, and {} chunks are kept as variants of this context", done.captured);
    }
    let ratio_charged = if effective == Strategy::Full { 1.0 } else { ratio_charged };
    Ok(Receipt {
        request_id: kvsplice_proto::context::request_id().to_string(),
        requested: plan.options,
        effective,
        effective_reason,
        ratio_nominal: match plan.options.strategy {
            Strategy::Full | Strategy::Prefix => 1.0,
            Strategy::Direct | Strategy::Ape => 0.0,
            Strategy::Clip | Strategy::Blend | Strategy::Guided => f64::from(plan.options.ratio),
            Strategy::Lego | Strategy::Craft => share(picked.selection.rows.len() as f64, picked.selection.selectable),
        },
        ratio_charged,
        chunks,
        auxiliary_source: picked.origin.map(|origin| origin.name().to_owned()).unwrap_or_default(),
        tokens: done.tokens.unwrap_or_default().into(),
        spans,
        models: Models { primary: head.primary.digest, auxiliary: scored.then_some(head.auxiliary_text.digest) },
        finish: done.finish,
    })
}

fn share(rows: f64, selectable: usize) -> f64 {
    if selectable == 0 { 0.0 } else { rows / selectable as f64 }
}
