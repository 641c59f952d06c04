//! Prompt plan → what the worker is told first: which parts it loads, which it computes, and why.
//!
//! Decides before layer 0 and nowhere else. With the cache service down every chunk is fresh; when every chunk is fresh
//! the strategy is `full`, and the receipt says so.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::{ChunkId, Options, Sampling, Strategy, Variant};
use kvsplice_proto::v1;
use kvsplice_proto::v1::part::Kind;

use crate::Error;
use crate::auxiliary::Wanted;
use crate::clock::Clock;
use crate::craft::{Chunk, Decision};
use crate::encode::{self, Batch};
use crate::head::Head;
use crate::lease::{self, Lease};
use crate::plan::{OnMiss, PromptPlan};

/// The longest lease that the cache service gives.
const MAX_LEASE: Duration = Duration::from_secs(600);

/// A plan with every decision that does not need scores.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    pub(crate) plan: PromptPlan,
    /// Why each chunk is fresh; none when its KV is loaded or repaired.
    pub(crate) fresh: Vec<Option<String>>,
    pub(crate) effective: Strategy,
    /// Why `effective` is not what was asked; empty else.
    pub(crate) effective_reason: String,
    /// The prefix is computed, not loaded.
    pub(crate) prefix_fresh: bool,
    /// Whether the cache service has each chunk, and the prefix, as encoded; all false when it was not asked.
    pub(crate) confirmed: Vec<bool>,
    pub(crate) prefix_confirmed: bool,
    /// On what the cache service has; none when nothing of it is used.
    pub(crate) lease: Option<Arc<Lease>>,
    /// One a chunk under `craft`, empty else.
    pub(crate) decisions: Vec<Decision>,
    /// The chunks are kept as variants of this context.
    pub(crate) capture: bool,
    /// Whether the cache service answered.
    pub(crate) cache_up: bool,
}

/// What the cache service has of a prompt.
struct Residency {
    prefix: bool,
    chunks: Vec<bool>,
    lease: Option<Arc<Lease>>,
}

/// Looks up what is cached, stores what the request wants stored, and decides.
pub(crate) async fn prepare(
    head: &Head,
    plan: PromptPlan,
    deadline: Duration,
    clock: &mut Clock,
) -> Result<Prepared, Error> {
    head.worker.check().await?;
    let chunks = plan.chunks.len();
    match plan.options.strategy {
        Strategy::Full => return Ok(all_fresh(plan, "strategy full", true)),
        Strategy::Prefix => return Ok(all_fresh(plan, "strategy prefix", true)),
        _ => {}
    }
    if let Some(reason) = plan.all_fresh.clone() {
        return Ok(all_fresh(plan, &reason, true));
    }
    let mut residency = match look_up(head, &plan, deadline).await {
        Ok(residency) => residency,
        Err(error) => {
            tracing::warn!(%error, "every chunk runs fresh");
            return Ok(all_fresh(plan, &error.to_string(), false));
        }
    };
    if plan.on_miss == OnMiss::Store && !residency.chunks.iter().all(|&found| found) {
        let start = clock.ms();
        store(head, &plan).await?;
        residency = look_up(head, &plan, deadline).await?;
        clock.record("store", start);
    }
    let mut fresh = vec![None; chunks];
    if plan.on_miss == OnMiss::Fresh {
        for (reason, _) in fresh.iter_mut().zip(&residency.chunks).filter(|(_, found)| !**found) {
            *reason = Some("not cached; --store keeps it".to_owned());
        }
    }
    let missing = fresh.iter().filter(|reason| reason.is_some()).count();
    if missing == chunks {
        return Ok(all_fresh(plan, "not cached; --store keeps it", true));
    }
    if missing > 0 && plan.options.strategy == Strategy::Ape {
        // Chunks side by side have no place for one that is computed in the context of those before it.
        let reason = format!("ape needs every chunk cached, and {missing} of {chunks} are not; --store keeps them");
        return Ok(all_fresh(plan, &reason, true));
    }
    let mut decisions = Vec::new();
    if plan.options.strategy == Strategy::Craft {
        let start = clock.ms();
        if !plan.options.capture {
            decisions = decide(head, &plan, deadline).await?;
        }
        clock.record("select", start);
        if plan.options.capture || decisions.iter().any(|decision| decision.capture) {
            return Ok(Prepared { capture: true, ..all_fresh(plan, "captured in this context", true) });
        }
        for (reason, decision) in fresh.iter_mut().zip(&decisions).filter(|(_, decision)| decision.fresh) {
            reason.get_or_insert_with(|| format!("no stored variant is cheaper (CFO {:.2})", decision.cfo));
        }
        if fresh.iter().all(Option::is_some) {
            return Ok(all_fresh(plan, "no stored variant of any chunk is cheaper", true));
        }
    }
    let prefix_fresh = plan.primary.prefix.is_empty()
        || plan.encoding.quantized()
        || (plan.on_miss == OnMiss::Fresh && !residency.prefix);
    let effective = plan.options.strategy;
    Ok(Prepared {
        plan,
        fresh,
        effective,
        effective_reason: String::new(),
        prefix_fresh,
        confirmed: residency.chunks,
        prefix_confirmed: residency.prefix,
        lease: residency.lease,
        decisions,
        capture: false,
        cache_up: true,
    })
}

fn all_fresh(plan: PromptPlan, reason: &str, cache_up: bool) -> Prepared {
    let exact = matches!(plan.options.strategy, Strategy::Full | Strategy::Prefix);
    Prepared {
        fresh: vec![Some(reason.to_owned()); plan.chunks.len()],
        effective: if exact { plan.options.strategy } else { Strategy::Full },
        effective_reason: if exact { String::new() } else { format!("every chunk is fresh: {reason}") },
        prefix_fresh: true,
        confirmed: vec![false; plan.chunks.len()],
        prefix_confirmed: false,
        lease: None,
        decisions: Vec::new(),
        capture: false,
        cache_up,
        plan,
    }
}

/// What Cache-Craft loads and recomputes of each chunk.
async fn decide(head: &Head, plan: &PromptPlan, deadline: Duration) -> Result<Vec<Decision>, Error> {
    let chunks: Vec<Chunk> =
        plan.chunks.iter().map(|chunk| Chunk { id: chunk.id, tokens: chunk.primary.ids.len() as u32 }).collect();
    head.captures.decide(&chunks, plan.encoding, f64::from(plan.options.alpha), deadline).await
}

async fn look_up(head: &Head, plan: &PromptPlan, deadline: Duration) -> Result<Residency, Error> {
    // Each once: a chunk that stands in several places is there or not.
    let mut places: HashMap<ChunkId, usize> = HashMap::new();
    let mut ids: Vec<ChunkId> = Vec::with_capacity(plan.chunks.len() + 1);
    for id in plan.chunks.iter().map(|chunk| chunk.id).chain([plan.prefix_id]) {
        places.entry(id).or_insert_with(|| {
            ids.push(id);
            ids.len() - 1
        });
    }
    let contained = head
        .cache
        .lease(&ids, Variant::clean(plan.encoding), deadline.min(MAX_LEASE), lease::LAPSES)
        .await
        .map_err(Error::cache("look up chunks"))?;
    let lease = contained.lease.map(|id| Arc::new(Lease::new(id, head.cache.clone())));
    let found = |id: &ChunkId| places.get(id).and_then(|&place| contained.found.get(place)).copied().unwrap_or(false);
    let chunks = plan.chunks.iter().map(|chunk| found(&chunk.id)).collect();
    Ok(Residency { prefix: found(&plan.prefix_id), chunks, lease })
}

/// Encodes both models' KV of the plan's chunks, as far as it is not there.
async fn store(head: &Head, plan: &PromptPlan) -> Result<(), Error> {
    let wanted = |id, ids: &[u32]| Wanted { id, ids: ids.to_vec() };
    if !plan.primary.prefix.is_empty() {
        encode::prefix(head, plan.prefix_id, &plan.primary.prefix, plan.encoding).await?;
    }
    let indexed = || plan.chunks.iter().enumerate();
    let auxiliary = plan.chunks.iter().map(|chunk| wanted(chunk.auxiliary_id, &chunk.auxiliary.ids)).collect();
    let of_primary = |behind: bool| -> Vec<Wanted> {
        let chunks = indexed().filter(|(index, _)| plan.behind_prefix(*index) == behind);
        chunks.map(|(_, chunk)| wanted(chunk.id, &chunk.primary.ids)).collect()
    };
    let batch = |primary_prefix: &[u32], primary, auxiliary| Batch {
        primary_prefix: primary_prefix.to_vec(),
        primary,
        auxiliary_prefix: plan.auxiliary.prefix.clone(),
        auxiliary,
        encoding: plan.encoding,
    };
    encode::batch(head, batch(&plan.primary.prefix, of_primary(true), auxiliary)).await?;
    let alone = of_primary(false);
    if !alone.is_empty() {
        encode::batch(head, batch(&[], alone, Vec::new())).await?;
    }
    Ok(())
}

impl Prepared {
    /// The worker's first message.
    pub(crate) fn start(
        &self,
        head: &Head,
        sampling: &Sampling,
        elapsed_ms: f64,
        want_logits: bool,
    ) -> v1::PrefillStart {
        v1::PrefillStart {
            model: head.primary.digest.to_string(),
            owner: head.config.owner.clone(),
            parts: self.parts(),
            sampling: Some(sampling.clone().into()),
            variant: Variant::clean(self.plan.encoding).to_string(),
            lease: self.lease.as_ref().map(|lease| lease.id().to_owned()).unwrap_or_default(),
            elapsed_ms,
            want_logits,
            options: Some(self.options().into()),
            want_scores: want_logits,
            capture: self.capture,
        }
    }

    /// Whether the KV of chunk `index` equals what full attention computes at its place. A captured chunk does behind the
    /// same chunks in the same order, if these are exact too.
    pub(crate) fn exact(&self, index: usize) -> bool {
        if self.fresh[index].is_some() || self.plan.encoding.quantized() {
            return false;
        }
        if self.decisions.is_empty() {
            return self.plan.exact(index);
        }
        let unchanged = |place: usize, decision: &Decision| {
            let before = self.plan.chunks[..place].iter().map(|chunk| chunk.id);
            !decision.fresh && decision.cfo == 0.0 && before.eq(decision.stale.prefix.iter().copied())
        };
        self.decisions.iter().take(index + 1).enumerate().all(|(place, decision)| unchanged(place, decision))
    }

    /// The options that are carried out.
    fn options(&self) -> Options {
        if self.effective == self.plan.options.strategy { self.plan.options } else { Options::of(self.effective) }
    }

    fn parts(&self) -> Vec<v1::Part> {
        let plan = &self.plan;
        let prefix_tokens = plan.first_slot(0);
        let prefix = v1::Part {
            kind: Kind::Prefix.into(),
            token_ids: plan.primary.prefix.clone(),
            first_slot: 0,
            chunk: if self.prefix_fresh { String::new() } else { plan.prefix_id.to_string() },
            behind_prefix: false,
            first_position: 0,
            fresh_reason: String::new(),
            exact: true,
            variant: String::new(),
            confirmed: self.prefix_confirmed,
        };
        let mut parts = if plan.primary.prefix.is_empty() { Vec::new() } else { vec![prefix] };
        for (index, (chunk, fresh)) in plan.chunks.iter().zip(&self.fresh).enumerate() {
            let first_slot = plan.first_slot(index);
            let as_encoded = if plan.behind_prefix(index) { prefix_tokens } else { 0 };
            let variant = self.decisions.get(index).map(Decision::variant);
            // Captures were looked up some time ago.
            let clean = variant.is_none_or(|variant| variant == Variant::clean(plan.encoding));
            let stays = fresh.is_none() && (!plan.options.renumber || self.effective == Strategy::Ape);
            parts.push(v1::Part {
                kind: Kind::Chunk.into(),
                token_ids: chunk.primary.ids.clone(),
                first_slot,
                chunk: if fresh.is_some() { String::new() } else { chunk.id.to_string() },
                behind_prefix: plan.behind_prefix(index),
                first_position: if stays { as_encoded } else { first_slot },
                fresh_reason: fresh.clone().unwrap_or_default(),
                exact: self.exact(index),
                variant: variant.map(|variant| variant.to_string()).unwrap_or_default(),
                confirmed: clean && self.confirmed.get(index).is_some_and(|&found| found),
            });
        }
        let question_slot = plan.first_slot(plan.chunks.len());
        let longest = plan.chunks.iter().map(|chunk| chunk.primary.ids.len()).max().unwrap_or(0);
        parts.push(v1::Part {
            kind: Kind::Question.into(),
            token_ids: plan.primary.question.clone(),
            first_slot: question_slot,
            chunk: String::new(),
            behind_prefix: false,
            first_position: match self.effective {
                // Behind the longest chunk: all stand at the same positions.
                Strategy::Ape => prefix_tokens + longest as u32,
                _ => question_slot,
            },
            fresh_reason: String::new(),
            exact: false,
            variant: String::new(),
            confirmed: false,
        });
        parts
    }
}
