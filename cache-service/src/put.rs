//! PutChunk: checks the header and every layer while they arrive, and only then makes the object visible.
//!
//! Create if absent: the first writer wins, and an object that cannot be read any more is replaced. Small objects are
//! written in one call that fails if there is one; large ones in parts, never whole in memory. What was written also enters
//! the tiers, as far as their admission lets it.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt};
use kvsplice_kv::object::{self, FIRST_READ_BYTES, Header};
use kvsplice_proto::convert;
use kvsplice_proto::v1::put_chunk_request::Message;
use kvsplice_proto::v1::{PutChunkRequest, PutChunkStart};
use object_store::PutPayload;
use object_store::path::Path;
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;
use tracing::{debug, warn};

use crate::fetch::{Fetcher, Miss};
use crate::store::{UPLOAD_BYTES, Upload, object_path};
use crate::tier::{Layer, Object, ObjectKey, Origin, Removal};
use crate::{Error, frame, kept};

/// Objects up to this size are written in one call.
const SMALL_BYTES: usize = 32 << 20;
/// Largest layer: it is held in memory until it is verified.
const MAX_LAYER_BYTES: usize = 256 << 20;
/// Bytes of all uploads in memory at once.
const MAX_UPLOAD_BYTES: usize = 1 << 30;
/// Permits of the semaphore are of this size.
const PERMIT_BYTES: usize = 1 << 10;

/// Bounds the memory that uploads take.
pub(crate) struct Uploads(Semaphore);

impl Uploads {
    pub(crate) fn new() -> Self {
        Self(Semaphore::new(MAX_UPLOAD_BYTES / PERMIT_BYTES))
    }

    async fn room_for(&self, bytes: usize) -> Result<SemaphorePermit<'_>, Status> {
        let permits = bytes.min(MAX_UPLOAD_BYTES).div_ceil(PERMIT_BYTES) as u32;
        self.0.acquire_many(permits).await.map_err(|_closed| Status::unavailable("shutting down"))
    }
}

/// Stores one object; false if there was one already.
pub(crate) async fn put(
    fetcher: Arc<Fetcher>,
    uploads: Arc<Uploads>,
    messages: impl Stream<Item = Result<PutChunkRequest, Status>> + Send + Unpin,
) -> Result<bool, Status> {
    let mut body = Body { messages, pending: Bytes::new(), left: 0 };
    let (key, size, us_per_token) = body.start().await?;
    let path = object_path(&key);
    let refused = |source| Status::from(Error::Refused { chunk: key.chunk.to_string(), source });

    let (header_bytes, header) = body.header(size).await?;
    let header = header.map_err(refused)?;
    header.check_id(key.chunk).map_err(refused)?;
    header.check_variant(key.variant).map_err(refused)?;
    if header.object_bytes() as u64 != size {
        let detail = format!("must be {} for this header, is {size}", header.object_bytes());
        return Err(Error::Request { field: "start.size", detail }.into());
    }
    if header.layer_bytes() > MAX_LAYER_BYTES {
        let detail = format!("{} bytes a layer, at most {MAX_LAYER_BYTES} can be stored", header.layer_bytes());
        return Err(Error::Request { field: "object", detail }.into());
    }
    let replace = match fetcher.read_object(&key).await {
        Ok(_) => {
            body.drain().await?;
            return Ok(false);
        }
        Err(Miss::Missing) => false,
        Err(Miss::Store(detail)) => return Err(Status::unavailable(detail)),
        Err(miss) => {
            warn!(chunk = %key.chunk, reason = %miss, "an unreadable chunk object is replaced");
            true
        }
    };
    fetcher.memory.forget_header(&key);
    let epoch = fetcher.disk.epoch();
    let model = header.key.model;
    let object = Arc::new(Object { key, header, origin: Origin::Store(None) });
    let incoming = Incoming { fetcher: &fetcher, object, path, header_bytes, replace, epoch };
    let created = if size as usize <= SMALL_BYTES {
        let _room = uploads.room_for(size as usize).await?;
        incoming.small(&mut body).await?
    } else {
        let _room = uploads.room_for(2 * incoming.object.header.layer_bytes() + UPLOAD_BYTES).await?;
        incoming.large(&mut body).await?
    };
    if let Some(cost) = fetcher.costs.measure(model, us_per_token)
        && let Err(error) = kept::keep_cost(&fetcher.store, &model, cost).await
    {
        warn!(%model, %error, "a measured recompute cost is not stored; it is measured again after a restart");
    }
    debug!(chunk = %key.chunk, bytes = size, created, "stored a chunk");
    Ok(created)
}

/// An object whose header has been accepted.
struct Incoming<'a> {
    fetcher: &'a Fetcher,
    object: Arc<Object>,
    path: Path,
    header_bytes: Bytes,
    replace: bool,
    /// The disk tier's, from before the object was written.
    epoch: u64,
}

impl Incoming<'_> {
    async fn small<M>(&self, body: &mut Body<M>) -> Result<bool, Status>
    where
        M: Stream<Item = Result<PutChunkRequest, Status>> + Send + Unpin,
    {
        let mut layers = Vec::new();
        for layer in 0..self.object.header.layout.layers {
            layers.push((layer, self.next_layer(body, layer).await?));
        }
        body.end().await?;
        let pieces =
            std::iter::once(self.header_bytes.clone()).chain(layers.iter().map(|(_, layer)| layer.bytes.clone()));
        let payload: PutPayload = pieces.collect();
        let store = &self.fetcher.store;
        if self.replace {
            store.replace("put a chunk", &self.path, payload).await?;
        } else if !store.create("put a chunk", &self.path, payload).await? {
            return Ok(false);
        }
        self.fetcher.keep(&self.object, layers, self.epoch);
        Ok(true)
    }

    async fn large<M>(&self, body: &mut Body<M>) -> Result<bool, Status>
    where
        M: Stream<Item = Result<PutChunkRequest, Status>> + Send + Unpin,
    {
        let mut upload = self.fetcher.store.upload(&self.path).await?;
        match self.write_parts(body, &mut upload).await {
            Ok(()) => upload.finish().await?,
            Err(status) => {
                self.fetcher.remove(Removal::of(self.object.key)).await;
                if let Err(error) = upload.abort().await {
                    warn!(chunk = %self.object.key.chunk, %error, "parts of an upload may be left behind");
                }
                return Err(status);
            }
        }
        Ok(true)
    }

    async fn write_parts<M>(&self, body: &mut Body<M>, upload: &mut Upload<'_>) -> Result<(), Status>
    where
        M: Stream<Item = Result<PutChunkRequest, Status>> + Send + Unpin,
    {
        upload.write(self.header_bytes.clone()).await?;
        for number in 0..self.object.header.layout.layers {
            let layer = self.next_layer(body, number).await?;
            upload.write(layer.bytes.clone()).await?;
            // Not visible yet, but a layer of a tier is only served to a header with the same digest.
            self.fetcher.keep(&self.object, vec![(number, layer)], self.epoch);
        }
        body.end().await
    }

    async fn next_layer<M>(&self, body: &mut Body<M>, layer: u32) -> Result<Layer, Status>
    where
        M: Stream<Item = Result<PutChunkRequest, Status>> + Send + Unpin,
    {
        let bytes = body.take(self.object.header.layer_bytes()).await?.freeze();
        let object = self.object.clone();
        let work = move || {
            let header = &object.header;
            header.verify_layer(layer, &bytes).map(|()| (frame::sums(&header.layout, header.tokens, &bytes).0, bytes))
        };
        let verified = tokio::task::spawn_blocking(work)
            .await
            .map_err(|error| Status::internal(format!("verify layer {layer}: {error}")))?;
        let (sums, bytes) =
            verified.map_err(|source| Error::Refused { chunk: self.object.key.chunk.to_string(), source })?;
        let (_, digest) = self.object.layer(layer).ok_or_else(|| Status::internal("a layer too many"))?;
        Ok(Layer { digest, bytes, sums })
    }
}

/// The bytes of an object as they arrive.
struct Body<M> {
    messages: M,
    /// Arrived and not yet taken.
    pending: Bytes,
    /// Bytes of the object that are still to be taken.
    left: u64,
}

impl<M: Stream<Item = Result<PutChunkRequest, Status>> + Send + Unpin> Body<M> {
    async fn start(&mut self) -> Result<(ObjectKey, u64, f64), Status> {
        let first = self.messages.next().await.transpose()?.and_then(|message| message.message);
        let Some(Message::Start(PutChunkStart { chunk, variant, size, encode_us_per_token })) = first else {
            let detail = "must be the first message".to_owned();
            return Err(Error::Request { field: "start", detail }.into());
        };
        let chunk = convert::chunk_id("start.chunk", &chunk)?;
        let variant = convert::variant("start.variant", &variant)?;
        if !encode_us_per_token.is_finite() || encode_us_per_token < 0.0 {
            let detail = format!("must be 0 or more microseconds, got {encode_us_per_token}");
            return Err(Error::Request { field: "start.encode_us_per_token", detail }.into());
        }
        self.left = size;
        Ok((ObjectKey { chunk, variant }, size, encode_us_per_token))
    }

    /// The header's bytes, and what they say.
    async fn header(&mut self, size: u64) -> Result<(Bytes, Result<Header, object::Error>), Status> {
        let first = size.min(FIRST_READ_BYTES as u64) as usize;
        let mut bytes = self.take(first).await?;
        let mut header = Header::parse(&bytes);
        if let Err(object::Error::Truncated { need, .. }) = header
            && need > bytes.len()
            && need as u64 <= size
        {
            let rest = self.take(need - bytes.len()).await?;
            bytes.extend_from_slice(&rest);
            header = Header::parse(&bytes);
        }
        Ok((bytes.freeze(), header))
    }

    /// The next `count` bytes, in memory of their own.
    async fn take(&mut self, count: usize) -> Result<BytesMut, Status> {
        let left = self.left.checked_sub(count as u64);
        self.left = left.ok_or_else(|| Status::internal("more bytes asked for than announced"))?;
        let mut bytes = BytesMut::with_capacity(count);
        while bytes.len() < count {
            if self.pending.is_empty() {
                self.pending = self.next().await?.ok_or_else(|| Error::Request {
                    field: "data",
                    detail: format!("ends {} bytes early", self.left + (count - bytes.len()) as u64),
                })?;
                continue;
            }
            let piece = self.pending.split_to(self.pending.len().min(count - bytes.len()));
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        match self.messages.next().await.transpose()? {
            None => Ok(None),
            Some(PutChunkRequest { message: Some(Message::Data(bytes)) }) => Ok(Some(bytes)),
            Some(_) => {
                let detail = "comes once; every later message holds data".to_owned();
                Err(Error::Request { field: "start", detail }.into())
            }
        }
    }

    /// The object must be complete, and nothing may follow.
    async fn end(&mut self) -> Result<(), Status> {
        let mut extra = self.pending.len();
        while extra == 0 {
            match self.next().await? {
                None => return Ok(()),
                Some(bytes) => extra = bytes.len(),
            }
        }
        Err(Error::Request { field: "data", detail: format!("goes on after the announced size, by {extra} bytes") }
            .into())
    }

    /// Reads on without looking, so that the caller sees the answer and not a broken stream.
    async fn drain(&mut self) -> Result<(), Status> {
        while self.messages.next().await.transpose()?.is_some() {}
        Ok(())
    }
}
