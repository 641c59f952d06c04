//! What the last token of a prompt attends to, in the primary and in the auxiliary model: each sees the whole prompt in
//! its own tokens (the alignment study of CacheClip, arXiv 2510.10129, table 1).

use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::record::Tokens;
use kvsplice_kv::{Options, Strategy};
use kvsplice_proto::v1;

use crate::Error;
use crate::clock::Clock;
use crate::generate::plan;
use crate::head::Head;
use crate::plan::PromptPlan;

/// Layers of one request, at most.
const MAX_LAYERS: usize = 16;

/// Answers an attention request.
pub(crate) async fn attention(
    head: Arc<Head>,
    request: v1::AttentionRequest,
    deadline: Duration,
) -> Result<v1::AttentionResponse, Error> {
    if request.layers.is_empty() || request.layers.len() > MAX_LAYERS {
        let detail = format!("must be 1 to {MAX_LAYERS}, got {}", request.layers.len());
        return Err(Error::invalid("layers", detail));
    }
    let mut clock = Clock::start();
    let full = Options::of(Strategy::Full);
    let both_models = true;
    let plan = plan(&head, request.prompt, full, 0, both_models, &mut clock).await?;
    let primary_layers = indices(&request.layers, head.primary.config.layers)?;
    let auxiliary_layers = indices(&request.layers, head.auxiliary_text.config.layers)?;
    let message = v1::WorkerAttentionRequest {
        model: head.primary.digest.to_string(),
        token_ids: plan.token_ids(),
        layers: primary_layers.clone(),
    };
    let (primary, auxiliary) = tokio::try_join!(
        head.worker.attention(message, deadline),
        head.auxiliary.engine.attention(auxiliary_ids(&plan), auxiliary_layers.clone())
    )?;
    let mut layers = Vec::new();
    let first = plan.primary.prefix.len();
    let primary_tokens: Vec<&Tokens> = plan.chunks.iter().map(|chunk| &chunk.primary).collect();
    for (place, weights) in primary.layers.into_iter().enumerate() {
        let index = primary_layers.get(place).copied().unwrap_or_default();
        layers.push(layer("primary", &request.layers[place], index, &weights.weights, first, &primary_tokens)?);
    }
    let first = plan.auxiliary.prefix.len();
    let auxiliary_tokens: Vec<&Tokens> = plan.chunks.iter().map(|chunk| &chunk.auxiliary).collect();
    for (place, weights) in auxiliary.into_iter().enumerate() {
        let index = auxiliary_layers.get(place).copied().unwrap_or_default();
        layers.push(layer("auxiliary", &request.layers[place], index, &weights, first, &auxiliary_tokens)?);
    }
    Ok(v1::AttentionResponse { layers })
}

fn auxiliary_ids(plan: &PromptPlan) -> Vec<u32> {
    let chunks = plan.chunks.iter().flat_map(|chunk| &chunk.auxiliary.ids);
    plan.auxiliary.prefix.iter().chain(chunks).chain(&plan.auxiliary.question).copied().collect()
}

/// Layer names → indices.
fn indices(names: &[String], layers: u32) -> Result<Vec<u32>, Error> {
    let index = |name: &String| match name.as_str() {
        "first" => Some(0),
        "last" => Some(layers - 1),
        number => match number.parse::<u32>() {
            Ok(index) => (index < layers).then_some(index),
            Err(_) => {
                let share = number.parse::<f32>().ok().filter(|share| (0.0..=1.0).contains(share))?;
                Some(((share * layers as f32) as u32).min(layers - 1))
            }
        },
    };
    let named = |name: &String| {
        let hint = || format!("{name:?} must be first, last, an index below {layers}, or a share of depth such as 0.6");
        index(name).ok_or_else(|| Error::invalid("layers", hint()))
    };
    names.iter().map(named).collect()
}

/// The weights of the chunks' tokens, which start at token `first` of the prompt.
fn layer(
    role: &str,
    name: &str,
    index: u32,
    weights: &[f32],
    first: usize,
    chunks: &[&Tokens],
) -> Result<v1::LayerAttention, Error> {
    let tokens: usize = chunks.iter().map(|tokens| tokens.ids.len()).sum();
    let Some(weights) = weights.get(first..first + tokens) else {
        let detail = format!("{} weights for {tokens} chunk tokens from {first} on", weights.len());
        return Err(Error::Task { task: "attention", detail });
    };
    Ok(v1::LayerAttention {
        role: role.to_owned(),
        layer: name.to_owned(),
        index,
        weights: weights.to_vec(),
        chunks: chunks.iter().map(|tokens| spans(tokens)).collect(),
    })
}

/// Byte ranges on the wire.
pub(crate) fn spans(tokens: &Tokens) -> v1::TokenSpans {
    v1::TokenSpans {
        starts: tokens.spans.iter().map(|span| span.0).collect(),
        ends: tokens.spans.iter().map(|span| span.1).collect(),
    }
}
