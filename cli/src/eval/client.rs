//! What `eval` asks a head: models, tokens, log-probabilities, answers. Public API only; every call has a deadline and ends
//! when the user stops the command.

use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::{Options, Receipt};
use kvsplice_proto::{client, v1};
use tokio_util::bytes::Bytes;
use tokio_util::sync::CancellationToken;
use tonic::{Response, Status};

use super::tasks::Sample;
use crate::failure::{interrupted, refused};
use crate::generate::{Answer, generate};
use crate::session::Session;

/// A head, asked on behalf of one command.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) session: Arc<Session>,
    pub(super) timeout: Duration,
    pub(super) stop: CancellationToken,
}

/// Log-probabilities of a gold answer.
pub(super) struct Scored {
    pub(super) token_ids: Vec<u32>,
    pub(super) argmax_ids: Vec<u32>,
    /// Natural logarithms, one a token.
    pub(super) logprobs: Vec<f32>,
    /// Natural logarithms [tokens, vocabulary], f32 little-endian.
    pub(super) distributions: Bytes,
    pub(super) receipt: Receipt,
}

impl Client {
    /// The models that answer and score.
    pub(super) async fn models(&self) -> anyhow::Result<Vec<v1::Model>> {
        let mut head = self.session.head();
        let request = client::request(v1::ListModelsRequest {}, self.timeout);
        Ok(self.call(head.list_models(request)).await?.models)
    }

    /// Tokens of each text.
    pub(super) async fn tokenize(&self, texts: Vec<String>) -> anyhow::Result<Vec<v1::TokenizedText>> {
        let mut head = self.session.head();
        let request = client::request(v1::TokenizeRequest { texts }, self.timeout);
        Ok(self.call(head.tokenize(request)).await?.texts)
    }

    /// Log-probabilities of the sample's gold answer, with the whole distribution at each of its tokens.
    pub(super) async fn score(&self, sample: &Sample, options: Options) -> anyhow::Result<Scored> {
        let request = v1::ScoreAnswerRequest {
            prompt: Some(prompt(sample)),
            options: Some(options.into()),
            answer: sample.gold.clone(),
            distributions: true,
        };
        let mut head = self.session.head();
        let scored = self.call(head.score(client::request(request, self.timeout))).await?;
        let receipt = scored.receipt.ok_or_else(|| anyhow::anyhow!("the scores have no receipt"))?.try_into()?;
        let tokens = scored.token_ids.len();
        let bytes = scored.distributions.len();
        anyhow::ensure!(
            tokens > 0
                && scored.logprobs.len() == tokens
                && scored.argmax_ids.len() == tokens
                && bytes.is_multiple_of(4 * tokens),
            "the server scored {tokens} tokens with {} log-probabilities and {bytes} bytes of distributions",
            scored.logprobs.len()
        );
        Ok(Scored {
            token_ids: scored.token_ids,
            argmax_ids: scored.argmax_ids,
            logprobs: scored.logprobs,
            distributions: scored.distributions,
            receipt,
        })
    }

    /// The greedy answer to the sample, at most `max_tokens` long.
    pub(super) async fn answer(&self, sample: &Sample, options: Options, max_tokens: u32) -> anyhow::Result<Answer> {
        // Behind a given beginning, what comes after the first line counts for nothing.
        let stop =
            if sample.stop_at_newline && !sample.answer_prefix.is_empty() { vec!["\n".to_owned()] } else { Vec::new() };
        let request = v1::GenerateRequest {
            prompt: Some(prompt(sample)),
            options: Some(options.into()),
            sampling: Some(v1::Sampling {
                max_tokens: Some(max_tokens),
                temperature: Some(0.0),
                stop,
                ..Default::default()
            }),
            dump: false,
        };
        generate(&self.session, request, self.timeout, &self.stop, |_| Ok(())).await
    }

    /// What the chat template adds around chunks and question, in tokens. `intro`: the user turn begins with a text of its
    /// own instead of the head's labels.
    pub(super) async fn overhead(&self, intro: bool) -> anyhow::Result<usize> {
        let (chunk, question) = ("A.\n", "Why?");
        let inline =
            v1::InlineSource { chunks: vec![chunk.to_owned()], intro: intro.then(String::new), ..Default::default() };
        let prompt = v1::Prompt {
            source: Some(v1::prompt::Source::Inline(inline)),
            question: question.to_owned(),
            ..Default::default()
        };
        let request = v1::GenerateRequest {
            prompt: Some(prompt),
            options: Some(Options::of(kvsplice_kv::Strategy::Full).into()),
            sampling: Some(v1::Sampling { max_tokens: Some(1), ..Default::default() }),
            dump: false,
        };
        let answer = generate(&self.session, request, self.timeout, &self.stop, |_| Ok(())).await?;
        let texts = self.tokenize(vec![question.to_owned()]).await?;
        let asked: usize = texts.iter().map(|text| text.token_ids.len()).sum();
        let tokens = answer.receipt.tokens;
        Ok((tokens.prefix as usize + tokens.question as usize).saturating_sub(asked))
    }

    /// Waits for an answer, the deadline or the user.
    async fn call<T>(&self, call: impl Future<Output = Result<Response<T>, Status>>) -> anyhow::Result<T> {
        let server = &self.session.server;
        tokio::select! {
            () = self.stop.cancelled() => Err(interrupted()),
            answer = tokio::time::timeout(self.timeout, call) => match answer {
                Ok(answer) => Ok(answer.map_err(|status| refused(status, server))?.into_inner()),
                Err(_) => Err(refused(Status::deadline_exceeded("the answer took too long"), server)),
            },
        }
    }
}

/// The sample as a prompt; its chunks are stored by the first request that reuses them.
fn prompt(sample: &Sample) -> v1::Prompt {
    let inline = v1::InlineSource {
        chunks: sample.chunks.clone(),
        store: true,
        system_prompt: sample.system.clone().unwrap_or_default(),
        intro: sample.intro.clone(),
    };
    v1::Prompt {
        source: Some(v1::prompt::Source::Inline(inline)),
        question: sample.question.clone(),
        answer_prefix: sample.answer_prefix.clone(),
    }
}
