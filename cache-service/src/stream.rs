//! One GetChunks stream: lower layers first, every chunk on its own, bounded in bytes.
//!
//! Each chunk has at most one read under way, so its layers go out in order; what is loaded waits in one queue ordered by
//! layer. A slow or failing chunk holds up only itself. When the caller is slow, reads stop at the bound; when it goes away,
//! everything of the stream is dropped.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{AbortHandle, Abortable, BoxFuture};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, Stream, StreamExt};
use kvsplice_kv::{ChunkId, RowRanges, Variant};
use kvsplice_proto::v1::get_chunks_request::Message;
use kvsplice_proto::v1::{Frame, GetChunksRequest, Want};
use kvsplice_proto::{convert, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;
use tracing::debug;

use crate::fetch::{Fetcher, Loaded, Miss};
use crate::frame::{self, Frames};
use crate::mapping::{Mapped, Sums};
use crate::protect::Holding;
use crate::tier::{Object, ObjectKey};
use crate::{Error, heads, service};

/// Frames on their way to the transport.
pub(crate) const FRAMES: usize = 4;
/// Bytes being read or waiting to be sent, a stream.
const STREAM_BYTES: usize = 32 << 20;
/// Bytes of one read, if more than one layer is read at once.
const READ_BYTES: usize = 4 << 20;
/// Bytes being read of later layers, beside one read, while a chunk's first layer is still being read: it needs the processors
/// and the disk more.
const LATER_BYTES: usize = 1 << 20;
/// Reads under way, a stream.
const READS: usize = 64;
/// What a read is taken for before the chunk's layout is known.
const UNKNOWN_BYTES: usize = 1 << 20;
/// A stream whose caller takes nothing for so long is ended.
const STALL: Duration = Duration::from_secs(60);

/// A checked [`Want`].
pub(crate) struct Wanted {
    /// Place in the request and key; the first place of each chunk.
    chunks: Vec<(u32, ObjectKey)>,
    /// How many places the request has.
    places: u32,
    /// Ascending; empty for all.
    layers: Vec<u32>,
    /// KV heads, ascending; empty for all.
    heads: Arc<[u32]>,
    /// Whether the caller may be able to map files.
    mapped: bool,
    unmappable: bool,
}

impl TryFrom<Want> for Wanted {
    type Error = Error;

    fn try_from(want: Want) -> Result<Self, Error> {
        service::check_count("want.chunks", want.chunks.len())?;
        service::check_count("want.layers", want.layers.len())?;
        service::check_count("want.kv_heads", want.kv_heads.len())?;
        let variant: Variant = convert::variant("want.variant", &want.variant)?;
        let mut seen: HashSet<ChunkId> = HashSet::new();
        let mut chunks = Vec::new();
        for (place, text) in (0u32..).zip(&want.chunks) {
            let chunk = convert::chunk_id("want.chunks", text)?;
            if seen.insert(chunk) {
                chunks.push((place, ObjectKey { chunk, variant }));
            }
        }
        let mut layers = want.layers;
        layers.sort_unstable();
        layers.dedup();
        let mut heads = want.kv_heads;
        heads.sort_unstable();
        heads.dedup();
        // Some heads of a file are no layer whose checksum is known.
        let mapped = want.mapped && !want.unmappable && heads.is_empty();
        let places = want.chunks.len() as u32;
        Ok(Self { chunks, places, layers, heads: heads.into(), mapped, unmappable: want.unmappable })
    }
}

impl Wanted {
    /// The chunks, each once.
    pub(crate) fn ids(&self) -> impl Iterator<Item = ChunkId> + '_ {
        self.chunks.iter().map(|(_, key)| key.chunk)
    }
}

/// Where one chunk stands.
struct Chunk {
    place: u32,
    key: ObjectKey,
    object: Option<Arc<Object>>,
    /// What is still to be loaded, ascending; taken from the header if all are wanted.
    layers: Vec<u32>,
    /// How many of `layers` are loaded.
    done: usize,
    /// Layers that the next read may cover: one, then two, four, … so that the first is quick and the rest are few.
    batch: usize,
    read: Option<AbortHandle>,
    dropped: bool,
    /// Whether the tiers know that it is asked for.
    asked: bool,
    file: InFile,
    /// Rows that are not sent of layers from this one on.
    skip: (u32, RowRanges),
}

/// Whether a chunk is sent, or its file named.
#[derive(Clone)]
enum InFile {
    /// It will be tried.
    Maybe,
    Yes(Arc<Mapped>),
    No,
}

/// What was read of a chunk.
enum Found {
    Layers(Arc<Object>, Vec<Loaded>),
    /// Layers that the caller reads from a file.
    Named(Sums),
    /// There is no file that can be named: the layers are to be sent.
    NoFile,
}

type ReadResult = Result<Found, Miss>;

/// What one read brings.
struct Step {
    /// Index into the stream's chunks.
    index: usize,
    /// What the read was taken for.
    bytes: usize,
    /// Whether it is the chunk's first.
    first: bool,
    /// None when the caller dropped the chunk meanwhile.
    result: Option<ReadResult>,
}

enum Ready {
    Layer(Loaded, usize),
    Named(Sums),
    Error(Miss),
}

struct Sender {
    fetcher: Arc<Fetcher>,
    chunks: Vec<Chunk>,
    all_layers: bool,
    heads: Arc<[u32]>,
    /// (next layer, index), lowest first.
    waiting: BinaryHeap<Reverse<(u32, usize)>>,
    reading: FuturesUnordered<BoxFuture<'static, Step>>,
    reading_bytes: usize,
    /// Those of chunks of which a layer is there already, and how many reads are chunks' first.
    later_bytes: usize,
    first_reads: usize,
    /// (layer, index) → what to send, lowest first.
    ready: BTreeMap<(u32, usize), Ready>,
    ready_bytes: usize,
    /// The layer that is being sent, its index and bytes.
    sending: Option<(usize, usize, Peekable<Frames>)>,
}

/// Sends what is wanted until all is sent, the caller is gone, or it takes nothing for [`STALL`]. `held` protects the chunks
/// for as long as the caller has not said everything: it may still be about to open a file that was named.
pub(crate) async fn send(
    fetcher: Arc<Fetcher>,
    wanted: Wanted,
    held: Option<Holding>,
    requests: impl Stream<Item = Result<GetChunksRequest, Status>> + Send,
    out: mpsc::Sender<Result<Frame, Status>>,
) {
    let mut requests = std::pin::pin!(requests);
    send_all(fetcher, wanted, requests.as_mut(), out).await;
    if let Some(held) = held {
        let said_everything = async { while let Some(Ok(_)) = requests.next().await {} };
        // What is held ends here, with the caller or with its time.
        let _either = tokio::time::timeout_at(held.ends.into(), said_everything).await;
    }
}

async fn send_all(
    fetcher: Arc<Fetcher>,
    wanted: Wanted,
    mut requests: std::pin::Pin<&mut (impl Stream<Item = Result<GetChunksRequest, Status>> + Send)>,
    out: mpsc::Sender<Result<Frame, Status>>,
) {
    let places = wanted.places;
    if wanted.unmappable {
        fetcher.unmappable(wanted.chunks.iter().map(|(_, key)| *key));
    }
    let mut sender = Sender::new(fetcher, wanted);
    let mut listening = true;
    let mut last_taken = Instant::now();
    loop {
        sender.start_reads();
        let next = sender.next_frame();
        if next.is_none() && sender.reading.is_empty() {
            return;
        }
        let has_frame = next.is_some();
        tokio::select! {
            permit = out.reserve(), if has_frame => {
                let Ok(permit) = permit else { return };
                if let Some(frame) = sender.take_frame() {
                    permit.send(Ok(frame));
                }
                last_taken = Instant::now();
            }
            Some(step) = sender.reading.next(), if !sender.reading.is_empty() => sender.finish_read(step),
            message = requests.next(), if listening => match message.map(|message| message.map(|m| m.message)) {
                None => listening = false,
                Some(Err(_gone)) => return,
                Some(Ok(Some(Message::Skip(skip)))) if skip.chunk < places => {
                    if let Err(error) = sender.skip_rows(&skip) {
                        let _ = out.send_timeout(Err(error.into()), STALL).await;
                        return;
                    }
                }
                Some(Ok(Some(Message::Drop(v1::Drop { chunk })))) if chunk < places => sender.drop_chunk(chunk),
                Some(Ok(_)) => {
                    let status = Status::invalid_argument("after Want, send Skip or Drop with a place in Want.chunks");
                    let _ = out.send_timeout(Err(status), STALL).await;
                    return;
                }
            },
            () = out.closed() => return,
            () = tokio::time::sleep_until(last_taken + STALL), if has_frame => {
                debug!("the caller takes no more frames: the stream ends");
                return;
            }
        }
        if !has_frame {
            last_taken = Instant::now();
        }
    }
}

impl Sender {
    fn new(fetcher: Arc<Fetcher>, wanted: Wanted) -> Self {
        let all_layers = wanted.layers.is_empty();
        let first = wanted.layers.first().copied().unwrap_or(0);
        let chunk = |(place, key)| Chunk {
            place,
            key,
            object: None,
            layers: wanted.layers.clone(),
            done: 0,
            batch: 1,
            read: None,
            dropped: false,
            asked: false,
            file: if wanted.mapped { InFile::Maybe } else { InFile::No },
            skip: (0, RowRanges::default()),
        };
        let chunks: Vec<Chunk> = wanted.chunks.into_iter().map(chunk).collect();
        let waiting = (0..chunks.len()).map(|index| Reverse((first, index))).collect();
        Self {
            fetcher,
            chunks,
            all_layers,
            heads: wanted.heads,
            waiting,
            reading: FuturesUnordered::new(),
            reading_bytes: 0,
            later_bytes: 0,
            first_reads: 0,
            ready: BTreeMap::new(),
            ready_bytes: 0,
            sending: None,
        }
    }

    /// Starts reads, lowest layer first, as far as the bounds allow; one is always allowed.
    fn start_reads(&mut self) {
        while self.reading.len() < READS {
            let Some(&Reverse((_, index))) = self.waiting.peek() else { return };
            let Some(chunk) = self.chunks.get_mut(index) else { return };
            if chunk.dropped {
                self.waiting.pop();
                continue;
            }
            let bytes = chunk.next_bytes();
            let held = self.reading_bytes + self.ready_bytes;
            if held > 0 && held + bytes > STREAM_BYTES {
                return;
            }
            let first = chunk.done == 0;
            if !first && self.first_reads > 0 && self.later_bytes > 0 && self.later_bytes + bytes > LATER_BYTES {
                return;
            }
            self.waiting.pop();
            let (handle, registration) = AbortHandle::new_pair();
            chunk.read = Some(handle);
            let read = chunk.read(self.fetcher.clone(), self.heads.clone());
            let step =
                Abortable::new(read, registration).map(move |result| Step { index, bytes, first, result: result.ok() });
            self.reading.push(step.boxed());
            self.reading_bytes += bytes;
            if first {
                self.first_reads += 1;
            } else {
                self.later_bytes += bytes;
            }
        }
    }

    fn finish_read(&mut self, step: Step) {
        self.reading_bytes -= step.bytes;
        if step.first {
            self.first_reads -= 1;
        } else {
            self.later_bytes -= step.bytes;
        }
        let Some(chunk) = self.chunks.get_mut(step.index) else { return };
        chunk.read = None;
        let Some(result) = step.result.filter(|_| !chunk.dropped) else { return };
        let next = chunk.layers.get(chunk.done).copied().unwrap_or(0);
        let (object, loaded) = match result {
            Ok(Found::Layers(object, loaded)) => (object, loaded),
            Ok(Found::Named(sums)) => {
                let (count, object) = (sums.crc32c.len(), sums.mapped.object.clone());
                chunk.file = InFile::Yes(sums.mapped.clone());
                self.ready.insert((sums.first, step.index), Ready::Named(sums));
                return self.go_on(step.index, object, count);
            }
            Ok(Found::NoFile) => {
                chunk.file = InFile::No;
                chunk.object = None;
                self.waiting.push(Reverse((next, step.index)));
                return;
            }
            Err(miss) => {
                self.fetcher.count_miss(&chunk.key, &miss);
                self.ready.insert((next, step.index), Ready::Error(miss));
                return;
            }
        };
        self.go_on(step.index, object, loaded.len());
        for layer in loaded {
            let bytes = layer.bytes.len();
            self.ready_bytes += bytes;
            self.ready.insert((layer.layer, step.index), Ready::Layer(layer, bytes));
        }
    }

    /// Notes that `count` more layers of a chunk are at hand, and queues it for the next ones.
    fn go_on(&mut self, index: usize, object: Arc<Object>, count: usize) {
        let Some(chunk) = self.chunks.get_mut(index) else { return };
        if self.all_layers && chunk.layers.is_empty() {
            chunk.layers = (0..object.header.layout.layers).collect();
        }
        chunk.object = Some(object);
        chunk.done += count;
        if count >= chunk.batch {
            chunk.batch *= 2;
        }
        if let Some(&layer) = chunk.layers.get(chunk.done) {
            self.waiting.push(Reverse((layer, index)));
        }
    }

    /// Makes sure that the next frame to send, if there is one, is at hand.
    fn next_frame(&mut self) -> Option<()> {
        if let Some((_, bytes, frames)) = &mut self.sending {
            if frames.peek().is_some() {
                return Some(());
            }
            self.ready_bytes -= *bytes;
            self.sending = None;
        }
        loop {
            let (&(_, index), ready) = self.ready.first_key_value()?;
            if matches!(ready, Ready::Error(_) | Ready::Named(_)) {
                return Some(());
            }
            let ((layer, _), Ready::Layer(loaded, bytes)) = self.ready.pop_first()? else { return None };
            let chunk = self.chunks.get(index).and_then(|chunk| Some((chunk, chunk.object.as_ref()?)));
            let Some((chunk, object)) = chunk else {
                debug!(layer, "a layer without its chunk");
                self.ready_bytes -= bytes;
                continue;
            };
            // Its bytes stay counted until the last frame is taken.
            let nothing = RowRanges::default();
            let (from_layer, rows) = &chunk.skip;
            let skip = if layer < *from_layer { &nothing } else { rows };
            let header = &object.header;
            // It was checked when the layer was read.
            let layout = heads::layout(&header.layout, &self.heads).unwrap_or(header.layout);
            let frames = Frames::new(chunk.place, loaded, &layout, header.tokens, skip).peekable();
            self.sending = Some((index, bytes, frames));
            return Some(());
        }
    }

    fn take_frame(&mut self) -> Option<Frame> {
        if let Some((_, _, frames)) = &mut self.sending {
            return frames.next();
        }
        let ((layer, index), ready) = self.ready.pop_first()?;
        let place = self.chunks.get(index)?.place;
        match ready {
            Ready::Error(miss) => Some(frame::error(place, layer, miss.to_string())),
            Ready::Named(sums) => Some(sums.frame(place)),
            Ready::Layer(..) => None,
        }
    }

    /// Leaves rows out of layers that are not being sent yet. They are read all the same: a layer is verified as a whole.
    fn skip_rows(&mut self, skip: &v1::Skip) -> Result<(), Error> {
        service::check_count("skip.rows", skip.rows.len())?;
        let rows = convert::rows(&skip.rows)?;
        if let Some(chunk) = self.chunks.iter_mut().find(|chunk| chunk.place == skip.chunk) {
            chunk.skip = (skip.from_layer, rows);
        }
        Ok(())
    }

    /// Sends nothing more of the chunk at `place`. A repeat stands under its first place; dropping another changes nothing.
    fn drop_chunk(&mut self, place: u32) {
        let Some(index) = self.chunks.iter().position(|chunk| chunk.place == place) else { return };
        let Some(chunk) = self.chunks.get_mut(index) else { return };
        chunk.dropped = true;
        if let Some(read) = chunk.read.take() {
            read.abort();
        }
        let ready_bytes = &mut self.ready_bytes;
        self.ready.retain(|(_, owner), ready| {
            if *owner != index {
                return true;
            }
            if let Ready::Layer(_, bytes) = ready {
                *ready_bytes -= *bytes;
            }
            false
        });
        if let Some((owner, bytes, _)) = &self.sending
            && *owner == index
        {
            self.ready_bytes -= *bytes;
            self.sending = None;
        }
    }
}

/// Cuts the wanted heads out of layers; off the async threads, for it copies them.
async fn pick_heads(object: Arc<Object>, loaded: Vec<Loaded>, heads: Arc<[u32]>) -> Result<Vec<Loaded>, Miss> {
    let pick = move |loaded: Loaded| {
        let bytes = heads::pick(&loaded.bytes, &object.header.layout, object.header.tokens, &heads);
        Loaded { bytes, sums: Arc::default(), ..loaded }
    };
    let work = move || loaded.into_iter().map(pick).collect();
    tokio::task::spawn_blocking(work).await.map_err(|error| Miss::Store(format!("cut heads out of a layer: {error}")))
}

impl Chunk {
    /// The layers that the next read may cover: without a gap, and of at most [`READ_BYTES`] unless it is one.
    fn next_layers(&self) -> Vec<u32> {
        let Some(rest) = self.layers.get(self.done..).filter(|rest| !rest.is_empty()) else {
            return vec![0];
        };
        let Some(object) = &self.object else {
            return rest.iter().take(1).copied().collect();
        };
        let most = (READ_BYTES / object.header.layer_bytes().max(1)).clamp(1, self.batch);
        let first = rest.first().copied().unwrap_or(0);
        let no_gap = |&(layer, expected): &(u32, u32)| layer == expected;
        rest.iter().copied().zip(first..).take(most).take_while(no_gap).map(|(layer, _)| layer).collect()
    }

    /// Reads the next layers, or finds out in which file the caller can.
    fn read(&mut self, fetcher: Arc<Fetcher>, heads: Arc<[u32]>) -> impl Future<Output = ReadResult> + Send + 'static {
        let (key, file, object, layers) = (self.key, self.file.clone(), self.object.clone(), self.next_layers());
        let rest = match &file {
            InFile::No => Vec::new(),
            _ => self.layers.get(self.done..).unwrap_or(&[]).to_vec(),
        };
        let asked = std::mem::replace(&mut self.asked, true);
        async move {
            if !asked {
                fetcher.ask(&key);
            }
            let mapped = match file {
                InFile::Maybe => Some(fetcher.mapped(&key).await),
                InFile::Yes(mapped) => Some(Some(mapped)),
                InFile::No => None,
            };
            if let Some(mapped) = mapped {
                let Some(mapped) = mapped else { return Ok(Found::NoFile) };
                let rest = if rest.is_empty() { (0..mapped.object.header.layout.layers).collect() } else { rest };
                return Ok(fetcher.sums(&mapped, &rest, &layers).await.map_or(Found::NoFile, Found::Named));
            }
            let object = match object {
                Some(object) => object,
                None => fetcher.object(&key).await?,
            };
            heads::layout(&object.header.layout, &heads)?;
            let loaded = fetcher.layers(&object, &layers).await?;
            let loaded = if heads.is_empty() { loaded } else { pick_heads(object.clone(), loaded, heads).await? };
            Ok(Found::Layers(object, loaded))
        }
    }

    fn next_bytes(&self) -> usize {
        match &self.object {
            Some(object) => object.header.layer_bytes() * self.next_layers().len(),
            None => UNKNOWN_BYTES,
        }
    }
}
