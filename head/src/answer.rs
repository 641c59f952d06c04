//! Log-probabilities of a given answer after a prompt: the same plan and rows as `generate`, one unary call.

use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::Sampling;
use kvsplice_proto::{convert, v1};

use crate::Error;
use crate::clock::Clock;
use crate::corpus::blocking;
use crate::generate::{account, plan};
use crate::head::Head;
use crate::pick::pick;
use crate::prepare::prepare;
use crate::receipt::receipt;

/// Answer tokens whose whole distributions fit one message.
const MAX_DISTRIBUTIONS: usize = 64;

/// Scores an answer.
pub(crate) async fn score_answer(
    head: Arc<Head>,
    request: v1::ScoreAnswerRequest,
    deadline: Duration,
) -> Result<v1::ScoreAnswerResponse, Error> {
    let mut clock = Clock::start();
    let options = convert::options(request.options)?;
    let (primary, answer) = (head.primary.clone(), request.answer.clone());
    let token_ids = blocking("tokenize the answer", move || primary.chunk(&answer)).await??.ids;
    if token_ids.is_empty() {
        return Err(Error::invalid("answer", "must have at least one token"));
    }
    if request.distributions && token_ids.len() > MAX_DISTRIBUTIONS {
        let detail =
            format!("must have at most {MAX_DISTRIBUTIONS} tokens with distributions, got {}", token_ids.len());
        return Err(Error::invalid("answer", detail));
    }
    let output = u32::try_from(token_ids.len()).unwrap_or(u32::MAX);
    let plan = plan(&head, request.prompt, options, output, false, &mut clock).await?;
    let prepared = prepare(&head, plan, deadline, &mut clock).await?;
    let picked = pick(&head, &prepared, false, &mut clock).await?;
    let message = v1::ScoreRequest {
        start: Some(prepared.start(&head, &Sampling::default(), clock.ms(), false)),
        rows: Some(picked.rows(prepared.plan.prompt_tokens)),
        target_ids: token_ids.clone(),
        distributions: request.distributions,
    };
    let answer = head.worker.score(message, deadline).await?;
    if answer.logprobs.len() != token_ids.len() || answer.argmax_ids.len() != token_ids.len() {
        let detail = format!("the worker scored {} of {} tokens", answer.logprobs.len(), token_ids.len());
        return Err(Error::Task { task: "score answer", detail });
    }
    let done = convert::required("done", answer.done)?;
    let receipt = receipt(&head, &prepared, &picked, &clock, done)?;
    account(&head, &prepared);
    Ok(v1::ScoreAnswerResponse {
        token_ids,
        logprobs: answer.logprobs,
        argmax_ids: answer.argmax_ids,
        receipt: Some(receipt.into()),
        distributions: answer.distributions,
    })
}
