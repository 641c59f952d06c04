//! Fetches chunk KV from the cache service, layer by layer, and puts frames together.
//!
//! Input: the chunks of one request. Output: one [`Loaded`] a (chunk, layer), or one failure a chunk. It verifies each
//! frame's checksum; whether a layer is the right one was verified when it entered the cache service's tier. Rows that will
//! be recomputed are skipped once they are known: they may come or not, and are zeros where they have not.

use std::collections::HashMap;

use bytes::Bytes;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{ChunkId, KvLayout, Part, RowRanges, Variant};
use kvsplice_model::stored::StoredLayer;
use kvsplice_proto::cache::{CacheClient, intact};
use kvsplice_proto::v1::get_chunks_request::Message;
use kvsplice_proto::{convert, v1};
use tokio::sync::{mpsc, oneshot};
use tonic::Code;

/// A chunk to fetch.
pub(crate) struct WantedChunk {
    /// Under which there will be news.
    pub(crate) place: usize,
    pub(crate) id: ChunkId,
    pub(crate) tokens: u32,
}

/// What to fetch.
pub(crate) struct Wanted {
    /// Distinct ones.
    pub(crate) chunks: Vec<WantedChunk>,
    pub(crate) layout: KvLayout,
    pub(crate) variant: Variant,
    pub(crate) lease: String,
}

/// Rows of chunks that need not come, by the place that [`WantedChunk`] gives each. Said once, or never.
pub(crate) type Skips = HashMap<usize, RowRanges>;

/// News of a chunk, by the place that [`WantedChunk`] gives it.
#[derive(Debug)]
pub(crate) enum Loaded {
    /// One layer, whole but for skipped rows. `bytes`: how many have come of this chunk since its last news.
    Layer { chunk: usize, layer: u32, stored: StoredLayer, source: Source, bytes: u64 },
    /// Nothing more will come of this chunk.
    Failed { chunk: usize, reason: String, service_down: bool },
}

/// Fetches everything, handing news to `sink` until it returns false.
pub(crate) async fn load(
    cache: CacheClient,
    wanted: Wanted,
    skips: oneshot::Receiver<Skips>,
    mut sink: impl AsyncFnMut(Loaded) -> bool,
) {
    let chunk = |chunk: &WantedChunk| {
        let needed = RowRanges::from_range(0..chunk.tokens);
        Some(Open { needed, partial: HashMap::new(), done: vec![false; wanted.layout.layers as usize], bytes: 0 })
    };
    let mut open: Vec<Option<Open>> = wanted.chunks.iter().map(chunk).collect();
    let (reason, service_down) = match fetch(&cache, &wanted, skips, &mut open, &mut sink).await {
        Ok(()) => ("store: the stream ended early".to_owned(), false),
        Err(status) => {
            let down =
                matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded);
            (format!("store: {}", status.message()), down)
        }
    };
    for (chunk, state) in wanted.chunks.iter().zip(&open) {
        let chunk = chunk.place;
        if state.is_some() && !sink(Loaded::Failed { chunk, reason: reason.clone(), service_down }).await {
            return;
        }
    }
}

/// A chunk of which something is still to come.
struct Open {
    /// Rows without which a layer is not whole.
    needed: RowRanges,
    partial: HashMap<u32, Partial>,
    /// By layer, whether it has been handed on.
    done: Vec<bool>,
    /// Bytes that have come since the last news.
    bytes: u64,
}

/// A layer that is still arriving.
struct Partial {
    /// As the layer is stored; zeros where nothing has come.
    bytes: Vec<u8>,
    /// Rows that have come, by part.
    rows: [RowRanges; 4],
}

async fn fetch(
    cache: &CacheClient,
    wanted: &Wanted,
    mut skips: oneshot::Receiver<Skips>,
    open: &mut [Option<Open>],
    sink: &mut impl AsyncFnMut(Loaded) -> bool,
) -> Result<(), tonic::Status> {
    let want = v1::Want {
        chunks: wanted.chunks.iter().map(|chunk| chunk.id.to_string()).collect(),
        variant: wanted.variant.to_string(),
        lease: wanted.lease.clone(),
        ..v1::Want::default()
    };
    let (requests, mut frames) = cache.get_chunks(want).await?;
    let mut listening = true;
    while open.iter().any(Option::is_some) {
        let frame = tokio::select! {
            biased;
            said = &mut skips, if listening => {
                listening = false;
                if let Ok(skips) = said {
                    skip(&requests, wanted, &skips, open).await;
                }
                continue;
            }
            frame = frames.message() => frame?,
        };
        let Some(frame) = frame else { return Ok(()) };
        let index = frame.chunk as usize;
        let Some(Some(chunk)) = open.get_mut(index) else { continue };
        let place = wanted.chunks[index].place;
        let accepted = match frame.error.as_str() {
            "" => accept(chunk, wanted.chunks[index].tokens, &wanted.layout, &frame),
            error => Err(error.to_owned()),
        };
        let whole = match accepted {
            Ok(whole) => whole,
            Err(reason) => {
                open[index] = None;
                if !sink(Loaded::Failed { chunk: place, reason, service_down: false }).await {
                    return Ok(());
                }
                continue;
            }
        };
        let Some(whole) = whole else { continue };
        let bytes = std::mem::take(&mut chunk.bytes);
        if chunk.done.iter().all(|&done| done) {
            open[index] = None;
        }
        let stored = StoredLayer { layout: wanted.layout, tokens: wanted.chunks[index].tokens, bytes: whole };
        let source = convert::source(&frame.source).unwrap_or(Source::Object);
        if !sink(Loaded::Layer { chunk: place, layer: frame.layer, stored, source, bytes }).await {
            return Ok(());
        }
    }
    Ok(())
}

/// Asks for rows to be left out, and waits for them no more. A layer that is on its way comes whole.
async fn skip(
    requests: &mpsc::Sender<v1::GetChunksRequest>,
    wanted: &Wanted,
    skips: &Skips,
    open: &mut [Option<Open>],
) {
    for ((index, chunk), state) in (0u32..).zip(&wanted.chunks).zip(open) {
        let (Some(state), Some(rows)) = (state, skips.get(&chunk.place)) else { continue };
        let needed = RowRanges::from_slots((0..chunk.tokens).filter(|&row| !rows.contains(row)));
        let skip = v1::Skip { chunk: index, rows: convert::ranges(rows), from_layer: 0 };
        let message = v1::GetChunksRequest { message: Some(Message::Skip(skip)) };
        // A stream that is gone says so where it is read.
        if requests.send(message).await.is_err() {
            return;
        }
        state.needed = needed;
    }
}

/// Adds a frame to its layer; returns the layer's bytes once every row that is needed has come.
fn accept(chunk: &mut Open, tokens: u32, layout: &KvLayout, frame: &v1::Frame) -> Result<Option<Bytes>, String> {
    let misfit = || format!("foreign: a frame of {} rows and {} bytes does not fit", frame.rows, frame.data.len());
    let part = convert::part(frame).map_err(|error| format!("foreign: {error}"))?;
    let row_bytes = layout.row_bytes(part);
    let place = layout.part_range(part, tokens);
    let end = frame.first_row.checked_add(frame.rows).ok_or_else(misfit)?;
    let rows = match frame.gathered.as_slice() {
        [] => RowRanges::from_range(frame.first_row..end),
        gathered => convert::rows(gathered).map_err(|error| format!("foreign: {error}"))?,
    };
    let inside = rows.ranges().last().is_none_or(|last| last.end as usize * row_bytes <= place.len());
    let counts = rows.len() == frame.rows as usize && frame.data.len() == rows.len() * row_bytes;
    let Some(done) = chunk.done.get_mut(frame.layer as usize).filter(|_| inside && counts) else {
        return Err(misfit());
    };
    if !intact(frame) {
        return Err(format!("damaged: layer {} arrived with a wrong checksum", frame.layer));
    }
    chunk.bytes += frame.data.len() as u64;
    if *done {
        // Skipped rows of a layer that was on its way.
        return Ok(None);
    }
    let layer = chunk
        .partial
        .entry(frame.layer)
        .or_insert_with(|| Partial { bytes: vec![0; layout.layer_bytes(tokens)], rows: Default::default() });
    let mut data = frame.data.as_ref();
    for range in rows.ranges() {
        let (piece, rest) = data.split_at(range.len() * row_bytes);
        let first = place.start + range.start as usize * row_bytes;
        layer.bytes[first..first + piece.len()].copy_from_slice(piece);
        data = rest;
    }
    layer.rows[part.index()] = layer.rows[part.index()].union(&rows);
    let needed = chunk.needed.len();
    let whole = |part: &Part| {
        let rows = &layer.rows[part.index()];
        if part.by_token() {
            rows.intersection(&chunk.needed).len() == needed
        } else {
            needed == 0 || rows.len() == part.rows(tokens) as usize
        }
    };
    if layout.parts().iter().all(whole) {
        *done = true;
        return Ok(chunk.partial.remove(&frame.layer).map(|layer| Bytes::from(layer.bytes)));
    }
    Ok(None)
}
