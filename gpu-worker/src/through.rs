//! A prompt whose rows are computed → its first token or its scores, what is kept of it, and the account of its rows.

use std::time::Duration;

use kvsplice_model::sampling::Sampler;
use kvsplice_model::{Decoder, Error};

use crate::beginning::Beginning;
use crate::capture::Captured;
use crate::decode::{Scores, Sequence, score};
use crate::prefill::{Finished, numbers};
use crate::receipt::Computed;
use crate::request::Request;
use crate::tree::Cost;

/// The result of a prefill.
pub(crate) struct Through {
    pub(crate) computed: Computed,
    /// Of the targets, if there are any.
    pub(crate) scores: Option<Scores>,
    /// The first token's; empty with targets.
    pub(crate) logits: Vec<f32>,
    /// Goes on from the first token unless no token is wanted.
    pub(crate) sequence: Option<Box<Sequence>>,
    /// Chunks to keep as variants of this context.
    pub(crate) captured: Vec<Captured>,
}

/// Draws or scores, and keeps the prompt's exact beginning. `elapsed`: the computing time of all rows.
pub(crate) fn finish(
    decoder: &Decoder,
    request: &Request,
    beginning: &Beginning,
    finished: Finished,
    elapsed: Duration,
) -> Result<Through, Error> {
    let Finished { hidden, cache, outcome, capture, prompt } = finished;
    let layers = decoder.config().layers;
    let cost = Cost { prefill: elapsed, new_tokens: outcome.rows.len() };
    beginning.keep(request, &outcome.rows, &cache, cost)?;
    let captured = match capture {
        Some(capture) => capture.finish(decoder.config(), request.variant.encoding)?,
        None => Vec::new(),
    };
    let computed = Computed {
        charged_rows: outcome.projected as f64 / f64::from(layers),
        selectable: prompt.selectable_tokens(),
        rows: outcome.rows,
        scores: outcome.scores,
    };
    let mut through = Through { computed, scores: None, logits: Vec::new(), sequence: None, captured };
    if !request.targets.is_empty() {
        through.scores = Some(score(decoder, &hidden, &request.targets, request.distributions)?);
    } else {
        through.logits = numbers(&decoder.logits(&hidden)?)?;
        if request.sampling.max_tokens > 0 {
            let mut sampler = Sampler::new(request.sampling.clone());
            let token = sampler.next(&through.logits)?;
            let slot = request.tokens();
            let position = prompt.position(slot);
            through.sequence =
                Some(Box::new(Sequence { cache, sampler, token, slot, position, two_part: prompt.two_part }));
        }
    }
    Ok(through)
}
