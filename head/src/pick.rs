//! Prepared prompt → rows to recompute, for strategies whose rows the head picks: `clip` by the auxiliary model's
//! scores, `lego` by position. Runs while the worker loads. `blend` and `guided` pick at the worker, from the primary's KV.

use kvsplice_kv::options::Budget;
use kvsplice_kv::select::{ScoredChunk, Selection, primary_scores, select};
use kvsplice_kv::{RowRanges, Strategy};
use kvsplice_model::auxiliary::ScoreRequest;
use kvsplice_proto::{convert, v1};

use crate::Error;
use crate::auxiliary::{Origin, Wanted};
use crate::clock::Clock;
use crate::head::Head;
use crate::plan::OnMiss;
use crate::prepare::Prepared;

/// What was picked, and what it was picked from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picked {
    pub(crate) selection: Selection,
    /// Where the auxiliary KV came from; none when it was not needed.
    pub(crate) origin: Option<Origin>,
    /// One score a primary chunk token; −1 where not selectable.
    pub(crate) scores: Vec<f32>,
    /// One score an auxiliary chunk token, −1 in chunks that were not scored; empty when nothing was.
    pub(crate) aux_scores: Vec<f32>,
}

impl Picked {
    /// The rows message, with which selection is complete.
    pub(crate) fn rows(&self, prompt_tokens: u32) -> v1::Rows {
        v1::Rows { ranges: convert::ranges(&self.selection.rows), complete_below: prompt_tokens }
    }
}

/// Picks the rows.
pub(crate) async fn pick(head: &Head, prepared: &Prepared, dump: bool, clock: &mut Clock) -> Result<Picked, Error> {
    match prepared.effective {
        Strategy::Clip => by_auxiliary(head, prepared, dump, clock).await,
        Strategy::Craft => Ok(Picked { selection: by_capture(prepared), ..Picked::default() }),
        Strategy::Lego => Ok(Picked { selection: first_tokens(prepared), ..Picked::default() }),
        _ => Ok(Picked::default()),
    }
}

/// EPIC's LegoLink (arXiv 2410.15332): the first k tokens of each chunk but the first. Nothing is scored.
fn first_tokens(prepared: &Prepared) -> Selection {
    let plan = &prepared.plan;
    let loaded = (1..plan.chunks.len()).filter(|&index| prepared.fresh[index].is_none());
    let slots = loaded.map(|index| plan.first_slot(index)..plan.first_slot(index + 1));
    let first = slots.clone().map(|slots| slots.start..slots.end.min(slots.start + plan.options.first_tokens));
    Selection { rows: RowRanges::from_ranges(first), candidates: 0, selectable: slots.map(|slots| slots.len()).sum() }
}

/// Cache-Craft (arXiv 2502.15734, Eq. 12 and 14): the tokens that its decisions name.
fn by_capture(prepared: &Prepared) -> Selection {
    let plan = &prepared.plan;
    let loaded = |index: &usize| prepared.fresh[*index].is_none();
    let mut rows = Vec::new();
    for index in (0..plan.chunks.len()).filter(loaded) {
        let Some(decision) = prepared.decisions.get(index) else { continue };
        rows.extend(decision.rows.iter().map(|row| plan.first_slot(index) + row));
    }
    let selectable = (0..plan.chunks.len()).filter(loaded).filter(|&index| !prepared.exact(index));
    Selection {
        rows: RowRanges::from_slots(rows),
        candidates: 0,
        selectable: selectable.map(|index| plan.chunks[index].primary.ids.len()).sum(),
    }
}

/// CacheClip (arXiv 2510.10129). Chunks are scored only if that can change the rows, or if `dump` wants the scores.
async fn by_auxiliary(head: &Head, prepared: &Prepared, dump: bool, clock: &mut Clock) -> Result<Picked, Error> {
    let plan = &prepared.plan;
    let options = &plan.options;
    let selectable: Vec<bool> = (0..plan.chunks.len()).map(|index| is_selectable(prepared, index)).collect();
    let open = options.ratio > 0.0 && options.ratio < 1.0;
    if !selectable.contains(&true) || !(open || dump) {
        let start = clock.ms();
        let chunks = scored_chunks(prepared, &selectable, &[]);
        let selection =
            if options.ratio > 0.0 { select(options, &chunks).map_err(Error::Select)? } else { nothing(&chunks) };
        clock.record("select", start);
        return Ok(Picked { selection, origin: None, scores: primary_scores(&chunks), aux_scores: Vec::new() });
    }
    let start = clock.ms();
    let loaded: Vec<usize> = (0..plan.chunks.len()).filter(|&index| prepared.fresh[index].is_none()).collect();
    let wanted: Vec<Wanted> = loaded
        .iter()
        .map(|&index| &plan.chunks[index])
        .map(|chunk| Wanted { id: chunk.auxiliary_id, ids: chunk.auxiliary.ids.clone() })
        .collect();
    let store = plan.on_miss != OnMiss::Fresh;
    let (chunks, origin) = head.auxiliary.get(&plan.auxiliary.prefix, &wanted, prepared.cache_up, store).await?;
    let request = ScoreRequest {
        prefix_kv: head.auxiliary.prefix(&plan.auxiliary.prefix).await?,
        chunk_kv: chunks,
        question_ids: plan.auxiliary.question.clone(),
        layers: options.aux_layers,
        softmax: options.softmax,
        reduce: options.reduce,
    };
    let scored = head.auxiliary.engine.score(request).await?;
    clock.record("score", start);

    let start = clock.ms();
    let mut scores = vec![Vec::new(); plan.chunks.len()];
    for (&index, scored) in loaded.iter().zip(scored) {
        scores[index] = scored;
    }
    let chunks = scored_chunks(prepared, &selectable, &scores);
    let selection = select(options, &chunks).map_err(Error::Select)?;
    let (primary, auxiliary) = if dump { (primary_scores(&chunks), flatten(&chunks)) } else { Default::default() };
    clock.record("select", start);
    Ok(Picked { selection, origin: Some(origin), scores: primary, aux_scores: auxiliary })
}

/// Fresh chunks are computed anyway. The exact first chunk gains nothing: `charged` leaves it out, and a prompt of that
/// chunk alone selects nothing at all.
fn is_selectable(prepared: &Prepared, index: usize) -> bool {
    let plan = &prepared.plan;
    let left_out = plan.exact(index) && (plan.options.budget == Budget::Charged || plan.chunks.len() == 1);
    prepared.fresh[index].is_none() && !left_out
}

fn nothing(chunks: &[ScoredChunk]) -> Selection {
    let selectable = chunks.iter().filter(|chunk| chunk.selectable).map(|chunk| chunk.primary.len()).sum();
    Selection { rows: RowRanges::default(), candidates: 0, selectable }
}

fn scored_chunks<'a>(prepared: &'a Prepared, selectable: &[bool], scores: &'a [Vec<f32>]) -> Vec<ScoredChunk<'a>> {
    let plan = &prepared.plan;
    plan.chunks
        .iter()
        .enumerate()
        .map(|(index, chunk)| ScoredChunk {
            first_slot: plan.first_slot(index),
            selectable: selectable[index],
            primary: &chunk.primary.spans,
            auxiliary: &chunk.auxiliary.spans,
            scores: scores.get(index).map_or(&[], Vec::as_slice),
        })
        .collect()
}

fn flatten(chunks: &[ScoredChunk]) -> Vec<f32> {
    let mut all = Vec::new();
    for chunk in chunks {
        if chunk.scores.is_empty() {
            all.extend(std::iter::repeat_n(-1.0, chunk.auxiliary.len()));
        } else {
            all.extend_from_slice(chunk.scores);
        }
    }
    all
}
