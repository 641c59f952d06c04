//! Fetches chunk KV from the cache service, layer by layer, and puts frames together (`assembly`).
//!
//! Input: the chunks of one request. Output: one [`Loaded`] a (chunk, layer), or one failure a chunk. It verifies each
//! frame's checksum; whether a layer is the right one was verified when it entered the cache service's tier. Layers that the
//! service names in a file of this host are mapped and checked instead (`files`); what cannot be mapped is asked for again.
//! Rows that will be recomputed are skipped once they are known: they may come or not, and are zeros where they have not.

mod assembly;
mod files;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{BoxStream, SelectAll};
use futures::{StreamExt, future};
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{ChunkId, KvLayout, RowRanges, Variant};
use tokio::sync::mpsc;
use tonic::{Code, Status};

use self::assembly::Assembly;
use self::files::{Checked, Checks, Files};
use crate::cache::CacheClient;
use crate::v1::get_chunks_request::Message;
use crate::{client, convert, v1};

/// Sets of missing layers that chunks are asked for by; each takes a stream. Chunks with other sets are asked for whole.
const SETS: usize = 4;

/// A chunk to fetch.
#[derive(Clone, Debug)]
pub struct WantedChunk {
    /// Under which there will be news.
    pub place: usize,
    /// Which chunk.
    pub id: ChunkId,
    /// Its tokens.
    pub tokens: u32,
    /// The layers to fetch, ascending; empty for all.
    pub layers: Vec<u32>,
    /// Rows that the caller has of each of them: they need not come.
    pub have: RowRanges,
}

/// What to fetch.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Distinct ones.
    pub chunks: Vec<WantedChunk>,
    /// The shape of their KV.
    pub layout: KvLayout,
    /// The form in which it is stored.
    pub variant: Variant,
    /// The lease that covers them; may be empty.
    pub lease: String,
    /// How long the load itself protects them at most, as a lease does, for want of one; zero for not at all.
    pub protect: Duration,
}

/// Rows of chunks that need not come, by the place that [`WantedChunk`] gives each. Of a chunk without other rows nothing
/// more comes at all, no news either.
pub type Skips = HashMap<usize, RowRanges>;

/// How a layer has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// Over the wire, every row of it.
    Whole,
    /// Over the wire; zeros stand for these rows, which were skipped.
    Gapped(RowRanges),
    /// In a file of this host, which the system's page cache keeps.
    Mapped,
}

/// News of a chunk, by the place that [`WantedChunk`] gives it.
#[derive(Debug)]
pub enum Loaded {
    /// One layer, whole but for skipped rows.
    Layer {
        /// The chunk's place.
        chunk: usize,
        /// Which layer.
        layer: u32,
        /// Its KV: the layer's parts, one after another, as they are stored.
        data: Bytes,
        /// Whether all of it has come, and which way.
        form: Form,
        /// The tier that held it.
        source: Source,
        /// How many bytes have come over the wire of this chunk since its last news; none of what is mapped.
        bytes: u64,
    },
    /// Nothing more will come of this chunk.
    Failed {
        /// The chunk's place.
        chunk: usize,
        /// Why; starts with one stable word and a colon.
        reason: String,
        /// The cache service cannot be reached at all.
        service_down: bool,
    },
}

/// The way to one cache service: connections that chunks are spread over, and whether files may be mapped. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Loader {
    connections: Arc<[CacheClient]>,
    files: Option<Arc<Files>>,
}

impl Loader {
    /// `connections` (at least one) to the service at `address`, whose calls take `deadline` at most. `map_files`: layers
    /// that lie in files of this host are mapped, not sent. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`client::Error`] for a bad address.
    pub fn new(address: &str, connections: u32, map_files: bool, deadline: Duration) -> Result<Self, client::Error> {
        let connect = |_| Ok(CacheClient::new(client::channel(address)?, deadline));
        let connections: Vec<CacheClient> =
            (0..connections.max(1)).map(connect).collect::<Result<_, client::Error>>()?;
        Ok(Self { connections: connections.into(), files: map_files.then(Arc::default) })
    }

    /// Loads over the one connection of `client`.
    pub fn over(client: CacheClient, map_files: bool) -> Self {
        Self { connections: [client].into(), files: map_files.then(Arc::default) }
    }

    /// A client over the first of the connections.
    pub fn client(&self) -> CacheClient {
        self.connections[0].clone()
    }

    /// Fetches everything, handing news to `sink` until it returns false.
    pub async fn load(&self, wanted: Wanted, skips: mpsc::Receiver<Skips>, mut sink: impl AsyncFnMut(Loaded) -> bool) {
        let open = |chunk: &WantedChunk| {
            Some(Open { layers: Assembly::new(wanted.layout, chunk.tokens, &chunk.layers), begun: false, sent: false })
        };
        let open = wanted.chunks.iter().map(open).collect();
        let mut fetch = Fetch {
            loader: self,
            wanted: &wanted,
            open,
            streams: SelectAll::new(),
            handles: Vec::new(),
            checks: Checks::default(),
            skips: None,
            again: Vec::new(),
        };
        let (reason, service_down) = match fetch.run(skips, &mut sink).await {
            Ok(()) => ("store: the stream ended early".to_owned(), false),
            Err(status) => {
                let codes = [Code::Unavailable, Code::Unknown, Code::Cancelled, Code::DeadlineExceeded];
                (format!("store: {}", status.message()), codes.contains(&status.code()))
            }
        };
        for (chunk, state) in wanted.chunks.iter().zip(&fetch.open) {
            let chunk = chunk.place;
            if state.is_some() && !sink(Loaded::Failed { chunk, reason: reason.clone(), service_down }).await {
                return;
            }
        }
    }
}

/// A chunk of which something is still to come.
struct Open {
    layers: Assembly,
    /// Something of it has come.
    begun: bool,
    /// Its file cannot be used: it is to be sent.
    sent: bool,
}

/// Chunks of one stream, and the layers that are asked for of each; empty for all.
struct Share<'a> {
    layers: &'a [u32],
    chunks: Vec<usize>,
}

/// One stream of chunks.
struct Handle {
    requests: mpsc::Sender<v1::GetChunksRequest>,
    /// The chunks that it carries, in its order.
    chunks: Vec<usize>,
}

/// One request's chunks on their way.
struct Fetch<'a> {
    loader: &'a Loader,
    wanted: &'a Wanted,
    /// Those of which something is still to come.
    open: Vec<Option<Open>>,
    /// Frames, with the number of the stream that they come from.
    streams: SelectAll<BoxStream<'static, (usize, Result<v1::Frame, Status>)>>,
    handles: Vec<Handle>,
    checks: Checks,
    skips: Option<Skips>,
    /// Chunks whose file cannot be used.
    again: Vec<usize>,
}

impl<'a> Fetch<'a> {
    async fn run(
        &mut self,
        mut skips: mpsc::Receiver<Skips>,
        sink: &mut impl AsyncFnMut(Loaded) -> bool,
    ) -> Result<(), Status> {
        let mapped = self.loader.files.as_ref().is_some_and(|files| files.usable());
        let all: Vec<usize> = (0..self.wanted.chunks.len()).collect();
        self.begin(&all, mapped, false).await?;
        let (mut listening, mut flowing) = (true, true);
        while self.open.iter().any(Option::is_some) {
            let expected = flowing && self.open.iter().flatten().any(|chunk| !chunk.begun);
            self.checks.start(|index| matches!(self.open.get(index), Some(Some(_))), expected);
            if !flowing && self.checks.idle() {
                return Ok(());
            }
            let news = tokio::select! {
                biased;
                said = skips.recv(), if listening => {
                    listening = said.is_some();
                    if let Some(skips) = said {
                        self.skips = Some(skips);
                        self.skip(0..self.handles.len()).await;
                    }
                    continue;
                }
                Some(checked) = self.checks.next(), if !self.checks.idle() => {
                    let news = self.take_checked(checked);
                    self.ask_again().await?;
                    // A stream may be new.
                    flowing = true;
                    news
                }
                frame = self.streams.next(), if flowing => match frame {
                    Some((stream, frame)) => self.take_frame(stream, frame?),
                    None => {
                        flowing = false;
                        Vec::new()
                    }
                },
            };
            for news in news {
                if !sink(news).await {
                    return Ok(());
                }
            }
            self.ask_again().await?;
        }
        Ok(())
    }

    /// Spreads chunks over streams: those of which the same layers are wanted, over the connections.
    fn shares(&self, chunks: &[usize]) -> Vec<Share<'a>> {
        let mut sets: Vec<Share<'a>> = Vec::new();
        for &index in chunks {
            let Some(chunk) = self.wanted.chunks.get(index) else { continue };
            let known = sets.iter().any(|set| set.layers == chunk.layers.as_slice());
            let layers: &[u32] = if known || sets.len() < SETS { &chunk.layers } else { &[] };
            match sets.iter_mut().find(|set| set.layers == layers) {
                Some(set) => set.chunks.push(index),
                None => sets.push(Share { layers, chunks: vec![index] }),
            }
        }
        let count = self.loader.connections.len();
        let spread = |Share { layers, chunks }: Share<'a>| {
            let share = move |first: usize| {
                let chunks = chunks.iter().skip(first).step_by(count).copied().collect();
                Share { layers, chunks }
            };
            (0..count).map(share).filter(|share| !share.chunks.is_empty()).collect::<Vec<_>>()
        };
        sets.into_iter().flat_map(spread).collect()
    }

    /// Opens a stream for each share of the chunks.
    async fn begin(&mut self, chunks: &[usize], mapped: bool, unmappable: bool) -> Result<(), Status> {
        let open = |(share, client): (Share<'_>, &CacheClient)| {
            let id = |index: &usize| self.wanted.chunks.get(*index).map(|chunk| chunk.id.to_string());
            let want = v1::Want {
                chunks: share.chunks.iter().filter_map(id).collect(),
                variant: self.wanted.variant.to_string(),
                layers: share.layers.to_vec(),
                lease: self.wanted.lease.clone(),
                lease_ms: u32::try_from(self.wanted.protect.as_millis()).unwrap_or(u32::MAX),
                mapped,
                unmappable,
                ..v1::Want::default()
            };
            let client = client.clone();
            async move { Ok::<_, Status>((share.chunks, client.get_chunks(want).await?)) }
        };
        let connections = self.loader.connections.iter().cycle();
        let opened = future::try_join_all(self.shares(chunks).into_iter().zip(connections).map(open)).await?;
        let first = self.handles.len();
        for (chunks, (requests, frames)) in opened {
            let number = self.handles.len();
            self.handles.push(Handle { requests, chunks });
            self.streams.push(frames.map(move |frame| (number, frame)).boxed());
        }
        self.skip(first..self.handles.len()).await;
        Ok(())
    }

    /// Asks for chunks whose file cannot be used once more, to be sent.
    async fn ask_again(&mut self) -> Result<(), Status> {
        let again = std::mem::take(&mut self.again);
        if again.is_empty() { Ok(()) } else { self.begin(&again, false, true).await }
    }

    /// Asks these streams to leave rows out, and waits for them no more. A layer that is on its way comes whole.
    async fn skip(&mut self, streams: std::ops::Range<usize>) {
        let nothing = Skips::new();
        let skips = self.skips.as_ref().unwrap_or(&nothing);
        let mut dropped = Vec::new();
        for handle in self.handles.get(streams).unwrap_or(&[]) {
            for (place, &index) in (0u32..).zip(&handle.chunks) {
                let (Some(chunk), Some(Some(state))) = (self.wanted.chunks.get(index), self.open.get_mut(index)) else {
                    continue;
                };
                let skipped = skips.get(&chunk.place);
                if skipped.is_some_and(|rows| rows.len() == chunk.tokens as usize) {
                    dropped.push(index);
                    continue;
                }
                // With one row comes the word that the layer is there.
                let most = RowRanges::from_range(0..chunk.tokens.saturating_sub(1));
                let rows = skipped.map_or_else(|| chunk.have.clone(), |rows| rows.union(&chunk.have));
                let rows = if rows.len() == chunk.tokens as usize { rows.intersection(&most) } else { rows };
                if rows.is_empty() {
                    continue;
                }
                state.layers.skip(&rows);
                let skip = v1::Skip { chunk: place, rows: convert::ranges(&rows), from_layer: 0 };
                let message = v1::GetChunksRequest { message: Some(Message::Skip(skip)) };
                // A stream that is gone says so where it is read.
                if handle.requests.send(message).await.is_err() {
                    break;
                }
            }
        }
        for index in dropped {
            self.checks.drop_chunk(index);
            self.drop_from_streams(index);
            if let Some(open) = self.open.get_mut(index) {
                *open = None;
            }
        }
    }

    /// What a frame brings.
    fn take_frame(&mut self, stream: usize, frame: v1::Frame) -> Vec<Loaded> {
        let place = self.handles.get(stream).and_then(|handle| handle.chunks.get(frame.chunk as usize));
        let Some(&index) = place else { return Vec::new() };
        let Some(Some(chunk)) = self.open.get_mut(index) else { return Vec::new() };
        chunk.begun = true;
        if let Some(mapping) = &frame.mapping {
            if chunk.sent {
                return Vec::new();
            }
            if let Err(reason) = self.checks.add(index, &chunk.layers, &frame, mapping) {
                return self.fail(index, reason);
            }
            return Vec::new();
        }
        let accepted = match frame.error.as_str() {
            "" => chunk.layers.accept(&frame),
            error => Err(error.to_owned()),
        };
        match accepted {
            Ok(None) => Vec::new(),
            Ok(Some(layer)) => {
                let form = if layer.lacks.is_empty() { Form::Whole } else { Form::Gapped(layer.lacks) };
                let source = convert::source(&frame.source).unwrap_or(Source::Object);
                self.layer(index, frame.layer, layer.bytes, form, source).into_iter().collect()
            }
            Err(reason) => self.fail(index, reason),
        }
    }

    /// What checks of mapped layers bring.
    fn take_checked(&mut self, checked: Vec<Checked>) -> Vec<Loaded> {
        let mut news = Vec::new();
        for Checked { chunk: index, layer, source, result } in checked {
            let Some(Some(chunk)) = self.open.get_mut(index) else { continue };
            match result {
                Ok(bytes) => {
                    if chunk.layers.settle(layer) {
                        news.extend(self.layer(index, layer, bytes, Form::Mapped, source));
                    }
                }
                Err(error) if !chunk.sent => {
                    chunk.sent = true;
                    let id = self.wanted.chunks.get(index).map(|chunk| chunk.id.short()).unwrap_or_default();
                    if let Some(files) = &self.loader.files {
                        files.note(&id, &error);
                    }
                    self.checks.drop_chunk(index);
                    self.drop_from_streams(index);
                    self.again.push(index);
                }
                Err(_) => {}
            }
        }
        news
    }

    fn drop_from_streams(&self, index: usize) {
        for handle in &self.handles {
            let place = (0u32..).zip(&handle.chunks).find(|(_, chunk)| **chunk == index);
            if let Some((chunk, _)) = place {
                // Only saves work: what still comes is passed over.
                let message = Some(Message::Drop(v1::Drop { chunk }));
                drop(handle.requests.try_send(v1::GetChunksRequest { message }));
            }
        }
    }

    /// A layer of which everything needed has come.
    fn layer(&mut self, index: usize, layer: u32, data: Bytes, form: Form, source: Source) -> Option<Loaded> {
        let wanted = self.wanted.chunks.get(index)?;
        let open = self.open.get_mut(index)?;
        let chunk = open.as_mut()?;
        let bytes = chunk.layers.take_bytes();
        if chunk.layers.is_done() {
            *open = None;
        }
        Some(Loaded::Layer { chunk: wanted.place, layer, data, form, source, bytes })
    }

    fn fail(&mut self, index: usize, reason: String) -> Vec<Loaded> {
        if let Some(open) = self.open.get_mut(index) {
            *open = None;
        }
        self.checks.drop_chunk(index);
        let failed = |chunk: &WantedChunk| Loaded::Failed { chunk: chunk.place, reason, service_down: false };
        self.wanted.chunks.get(index).map(failed).into_iter().collect()
    }
}
