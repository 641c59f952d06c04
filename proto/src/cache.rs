//! A typed client of the cache service. Each call has a deadline; ids, variants and frames are checked here, so callers see
//! domain types only. It keeps no state: what is cached is the service's business.

use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use kvsplice_kv::{ChunkId, Variant};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::client::request;
use crate::frames::{self, Frames};
use crate::server::{FRAME_BYTES, MESSAGE_BYTES};
use crate::v1;
use crate::v1::cache_client::CacheClient as Generated;
use crate::v1::get_chunks_request::Message as GetMessage;
use crate::v1::put_chunk_request::Message as PutMessage;

/// Messages that a caller of [`CacheClient::get_chunks`] may have under way.
const REQUESTS: usize = 16;

/// A cheap handle to one cache service.
#[derive(Clone, Debug)]
pub struct CacheClient {
    inner: Generated<Channel>,
    channel: Channel,
    deadline: Duration,
}

/// Which chunks exist, and the lease on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contained {
    /// One a requested chunk, in order.
    pub found: Vec<bool>,
    /// The lease's id, if one was asked for.
    pub lease: Option<String>,
    /// When the lease ends, in milliseconds since the Unix epoch; 0 without one.
    pub expires_ms: u64,
}

impl CacheClient {
    /// A client whose calls, streams included, take at most `deadline`.
    pub fn new(channel: Channel, deadline: Duration) -> Self {
        let inner = Generated::new(channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MESSAGE_BYTES);
        Self { inner, channel, deadline }
    }

    /// The same client with another deadline.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { inner: self.inner.clone(), channel: self.channel.clone(), deadline }
    }

    /// Which of `chunks` exist; those are protected from eviction for `lease`, if that is not zero (at most 10 minutes).
    pub async fn contains(&self, chunks: &[ChunkId], variant: Variant, lease: Duration) -> Result<Contained, Status> {
        self.lease(chunks, variant, lease, Duration::ZERO).await
    }

    /// Like [`CacheClient::contains`], under a lease that lapses when it is not renewed for `renew`; zero for one that needs not be.
    pub async fn lease(
        &self,
        chunks: &[ChunkId],
        variant: Variant,
        lease: Duration,
        renew: Duration,
    ) -> Result<Contained, Status> {
        let [lease_ms, renew_ms] = [lease, renew].map(|time| u32::try_from(time.as_millis()).unwrap_or(u32::MAX));
        let message = v1::ContainsRequest {
            chunks: chunks.iter().map(ChunkId::to_string).collect(),
            variant: variant.to_string(),
            lease_ms,
            renew_ms,
        };
        let answer = self.inner.clone().contains(request(message, self.deadline)).await?.into_inner();
        if answer.found.len() != chunks.len() {
            let message = format!("asked for {} chunks, the cache answered for {}", chunks.len(), answer.found.len());
            return Err(Status::internal(message));
        }
        let lease = Some(answer.lease).filter(|lease| !lease.is_empty());
        Ok(Contained { found: answer.found, lease, expires_ms: answer.lease_expires_ms })
    }

    /// Opens a stream of chunk KV. Send Skip and Drop through the sender; dropping the stream ends the reads. A frame with an
    /// `error` ends its chunk; check every other one with [`intact`].
    pub async fn get_chunks(&self, want: v1::Want) -> Result<(mpsc::Sender<v1::GetChunksRequest>, Frames), Status> {
        let (sender, receiver) = mpsc::channel(REQUESTS);
        let first = v1::GetChunksRequest { message: Some(GetMessage::Want(want)) };
        let messages = tokio_stream::once(first).chain(ReceiverStream::new(receiver));
        let frames = frames::call(self.channel.clone(), request(messages, self.deadline)).await?;
        Ok((sender, frames))
    }

    /// Stores a chunk object as [`kvsplice_kv::object::write`] makes it. False when it was there already.
    pub async fn put_chunk(&self, chunk: ChunkId, variant: Variant, object: Bytes) -> Result<bool, Status> {
        self.put_computed_chunk(chunk, variant, object, 0.0).await
    }

    /// Like [`CacheClient::put_chunk`], and says how many microseconds a token computing it took; 0 for unknown.
    pub async fn put_computed_chunk(
        &self,
        chunk: ChunkId,
        variant: Variant,
        object: Bytes,
        encode_us_per_token: f64,
    ) -> Result<bool, Status> {
        let start = PutMessage::Start(v1::PutChunkStart {
            chunk: chunk.to_string(),
            variant: variant.to_string(),
            size: object.len() as u64,
            encode_us_per_token,
        });
        let pieces = (0..object.len()).step_by(FRAME_BYTES).map(move |first| {
            let end = object.len().min(first + FRAME_BYTES);
            PutMessage::Data(object.slice(first..end))
        });
        let messages =
            std::iter::once(start).chain(pieces).map(|message| v1::PutChunkRequest { message: Some(message) });
        let answer = self.inner.clone().put_chunk(request(stream::iter(messages), self.deadline)).await?;
        Ok(answer.into_inner().created)
    }

    /// Creates or replaces a record of at most 16 MiB.
    pub async fn put_record(&self, key: &str, value: Vec<u8>) -> Result<(), Status> {
        let message = v1::PutRecordRequest { key: key.to_owned(), value };
        self.inner.clone().put_record(request(message, self.deadline)).await?;
        Ok(())
    }

    /// Reads a record; none when there is none.
    pub async fn get_record(&self, key: &str) -> Result<Option<Bytes>, Status> {
        let message = v1::GetRecordRequest { key: key.to_owned() };
        match self.inner.clone().get_record(request(message, self.deadline)).await {
            Ok(answer) => Ok(Some(Bytes::from(answer.into_inner().value))),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// The keys below a prefix of whole segments, ascending; every key for the empty prefix.
    pub async fn list_records(&self, prefix: &str) -> Result<Vec<String>, Status> {
        let message = v1::ListRecordsRequest { prefix: prefix.to_owned() };
        let mut pages = self.inner.clone().list_records(request(message, self.deadline)).await?.into_inner();
        let mut keys = Vec::new();
        while let Some(page) = pages.message().await? {
            keys.extend(page.keys);
        }
        Ok(keys)
    }

    /// Removes chunks (every variant) and records; returns the paths of what was removed.
    pub async fn delete(&self, chunks: &[ChunkId], records: &[String]) -> Result<Vec<String>, Status> {
        let chunks = chunks.iter().map(ChunkId::to_string).collect();
        self.remove(v1::DeleteRequest { chunks, records: records.to_vec(), variants: Vec::new() }).await
    }

    /// Removes single variants of chunks and records; returns the paths of what was removed.
    pub async fn delete_variants(
        &self,
        variants: &[(ChunkId, Variant)],
        records: &[String],
    ) -> Result<Vec<String>, Status> {
        let named = |(chunk, variant): &(ChunkId, Variant)| v1::ChunkVariant {
            chunk: chunk.to_string(),
            variant: variant.to_string(),
        };
        let variants = variants.iter().map(named).collect();
        self.remove(v1::DeleteRequest { chunks: Vec::new(), records: records.to_vec(), variants }).await
    }

    async fn remove(&self, message: v1::DeleteRequest) -> Result<Vec<String>, Status> {
        Ok(self.inner.clone().delete(request(message, self.deadline)).await?.into_inner().removed)
    }

    /// Protects chunks from eviction until unpinned.
    pub async fn pin(&self, chunks: &[ChunkId]) -> Result<(), Status> {
        self.set_pins(chunks, false).await
    }

    /// Takes pins away.
    pub async fn unpin(&self, chunks: &[ChunkId]) -> Result<(), Status> {
        self.set_pins(chunks, true).await
    }

    async fn set_pins(&self, chunks: &[ChunkId], unpin: bool) -> Result<(), Status> {
        let message = v1::PinRequest { chunks: chunks.iter().map(ChunkId::to_string).collect(), unpin };
        self.inner.clone().pin(request(message, self.deadline)).await?;
        Ok(())
    }

    /// Ends a lease before its time.
    pub async fn release(&self, lease: String) -> Result<(), Status> {
        self.inner.clone().release(request(v1::ReleaseRequest { lease }, self.deadline)).await?;
        Ok(())
    }

    /// Keeps a lease that lapses from lapsing.
    pub async fn renew(&self, lease: String) -> Result<(), Status> {
        self.inner.clone().renew(request(v1::RenewRequest { lease }, self.deadline)).await?;
        Ok(())
    }

    /// Removes chunk KV that no document names and that is older than `min_age`; with `dry_run` only says what.
    pub async fn collect_orphans(
        &self,
        dry_run: bool,
        min_age: Duration,
    ) -> Result<v1::CollectOrphansResponse, Status> {
        let message = v1::CollectOrphansRequest { dry_run, min_age_s: Some(min_age.as_secs()) };
        Ok(self.inner.clone().collect_orphans(request(message, self.deadline)).await?.into_inner())
    }

    /// Reads every variant of `chunks` whole from the object store and says which objects cannot be used.
    pub async fn verify(&self, chunks: &[ChunkId]) -> Result<v1::VerifyResponse, Status> {
        let message = v1::VerifyRequest { chunks: chunks.iter().map(ChunkId::to_string).collect() };
        Ok(self.inner.clone().verify(request(message, self.deadline)).await?.into_inner())
    }

    /// Counters and sizes of each tier.
    pub async fn stats(&self) -> Result<v1::StatsResponse, Status> {
        Ok(self.inner.clone().stats(request(v1::StatsRequest {}, self.deadline)).await?.into_inner())
    }
}

/// Microseconds a token that computing so many took, as [`CacheClient::put_computed_chunk`] tells the cache service, which goes
/// by it when it evicts.
pub fn us_per_token(spent: Duration, tokens: u64) -> f64 {
    spent.as_secs_f64() * 1e6 / tokens.max(1) as f64
}

/// Whether a frame's data arrived as it was sent.
pub fn intact(frame: &v1::Frame) -> bool {
    crc32c::crc32c(&frame.data) == frame.crc32c
}
