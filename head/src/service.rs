//! The gRPC service: thin. Each call becomes one function of a stage; errors become statuses here.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use kvsplice_kv::record::DEFAULT_PREFIX;
use kvsplice_proto::{context, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::Error;
use crate::answer::score_answer;
use crate::attention::{attention, spans};
use crate::corpus::blocking;
use crate::delete::delete_documents;
use crate::generate::generate;
use crate::head::Head;
use crate::ingest::ingest;
use crate::register::register;

/// Texts of one Tokenize call, at most.
const MAX_TEXTS: usize = 4096;
/// Chunks in one message of a listing.
const PAGE: usize = 256;

type Answer<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The Head service.
#[derive(Clone)]
pub(crate) struct Service(pub(crate) Arc<Head>);

impl Service {
    /// How long the caller waits: the deadline for calls that this one makes.
    fn deadline<T>(&self, request: &Request<T>) -> Duration {
        let header = request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
        header.and_then(timeout).unwrap_or(Duration::from_secs(self.0.config.deadline_s))
    }
}

/// The `grpc-timeout` header: at most eight digits and a unit.
fn timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value = u64::from(digits.parse::<u32>().ok().filter(|_| digits.len() <= 8)?);
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

#[tonic::async_trait]
impl v1::head_server::Head for Service {
    type GenerateStream = Answer<v1::GenerateEvent>;
    type IngestDocumentsStream = ReceiverStream<Result<v1::IngestEvent, Status>>;
    type RegisterPrefixStream = ReceiverStream<Result<v1::IngestEvent, Status>>;
    type ListChunksStream = Answer<v1::ListChunksResponse>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let deadline = self.deadline(&request);
        let stream = generate(Arc::clone(&self.0), request.into_inner(), deadline).await?;
        Ok(Response::new(Box::pin(stream)))
    }

    async fn score(
        &self,
        request: Request<v1::ScoreAnswerRequest>,
    ) -> Result<Response<v1::ScoreAnswerResponse>, Status> {
        let deadline = self.deadline(&request);
        Ok(Response::new(score_answer(Arc::clone(&self.0), request.into_inner(), deadline).await?))
    }

    async fn attention(
        &self,
        request: Request<v1::AttentionRequest>,
    ) -> Result<Response<v1::AttentionResponse>, Status> {
        let deadline = self.deadline(&request);
        Ok(Response::new(attention(Arc::clone(&self.0), request.into_inner(), deadline).await?))
    }

    async fn tokenize(&self, request: Request<v1::TokenizeRequest>) -> Result<Response<v1::TokenizeResponse>, Status> {
        let (head, texts) = (Arc::clone(&self.0), request.into_inner().texts);
        if texts.len() > MAX_TEXTS {
            let detail = format!("must be at most {MAX_TEXTS}, got {}", texts.len());
            return Err(Error::invalid("texts", detail).into());
        }
        let tokenize = move || -> Result<Vec<v1::TokenizedText>, Error> {
            let tokenized = texts.iter().map(|text| {
                let tokens = head.primary.chunk(text)?;
                let spans = Some(spans(&tokens));
                Ok(v1::TokenizedText { token_ids: tokens.ids, spans })
            });
            tokenized.collect()
        };
        let texts = blocking("tokenize texts", tokenize).await??;
        Ok(Response::new(v1::TokenizeResponse { texts }))
    }

    async fn ingest_documents(
        &self,
        request: Request<Streaming<v1::IngestRequest>>,
    ) -> Result<Response<Self::IngestDocumentsStream>, Status> {
        let (events, receiver) = mpsc::channel(16);
        context::spawn(ingest(Arc::clone(&self.0), request.into_inner(), events));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn register_prefix(
        &self,
        request: Request<v1::RegisterPrefixRequest>,
    ) -> Result<Response<Self::RegisterPrefixStream>, Status> {
        let (events, receiver) = mpsc::channel(16);
        context::spawn(register(Arc::clone(&self.0), request.into_inner(), events));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn list_chunks(
        &self,
        request: Request<v1::ListChunksRequest>,
    ) -> Result<Response<Self::ListChunksStream>, Status> {
        let index = self.0.corpora.get(&request.into_inner().corpus).await?;
        let pages = async_stream::stream! {
            let mut chunks = Vec::new();
            for (document, place, chunk) in index.chunks() {
                chunks.push(v1::ListedChunk {
                    id: chunk.ids.get(DEFAULT_PREFIX).map(ToString::to_string).unwrap_or_default(),
                    document: document.id.clone(),
                    index: u32::try_from(place).unwrap_or(u32::MAX),
                    tokens: u32::try_from(chunk.primary.ids.len()).unwrap_or(u32::MAX),
                    text: chunk.text.clone(),
                });
                if chunks.len() == PAGE {
                    yield Ok(v1::ListChunksResponse { chunks: std::mem::take(&mut chunks) });
                }
            }
            if !chunks.is_empty() {
                yield Ok(v1::ListChunksResponse { chunks });
            }
        };
        Ok(Response::new(Box::pin(pages)))
    }

    async fn delete_documents(
        &self,
        request: Request<v1::DeleteDocumentsRequest>,
    ) -> Result<Response<v1::DeleteDocumentsResponse>, Status> {
        let v1::DeleteDocumentsRequest { corpus, documents } = request.into_inner();
        let removed = delete_documents(&self.0, &corpus, &documents).await?;
        Ok(Response::new(v1::DeleteDocumentsResponse { removed }))
    }

    async fn list_models(&self, _: Request<v1::ListModelsRequest>) -> Result<Response<v1::ListModelsResponse>, Status> {
        let head = &self.0;
        let models = [(&head.primary, &head.config.primary), (&head.auxiliary_text, &head.config.auxiliary)];
        let models = models.map(|(model, spec)| v1::Model {
            name: model.name.clone(),
            digest: model.digest.to_string(),
            layers: model.config.layers,
            kv_heads: model.config.kv_heads,
            head_dim: model.config.head_dim,
            vocabulary: model.config.vocabulary,
            context: model.config.context,
            dtype: spec.dtype().to_string(),
            role: model.role.to_owned(),
        });
        Ok(Response::new(v1::ListModelsResponse { models: models.into() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_header_is_read_and_a_bad_one_ignored() {
        assert_eq!(timeout("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "S", "-1S", "123456789S", "1x", "1é"] {
            assert_eq!(timeout(bad), None, "{bad}");
        }
    }
}
