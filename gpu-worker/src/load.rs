//! Fetches chunk KV from the cache service, layer by layer, and puts frames together.
//!
//! Input: the chunks of one request. Output: one [`Loaded`] a (chunk, layer), or one failure a chunk. It verifies each
//! frame's checksum; whether a layer is the right one was verified when it entered the cache service's tier.

use std::collections::HashMap;

use bytes::Bytes;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{ChunkId, KvLayout, Variant};
use kvsplice_model::cache::StoredLayer;
use kvsplice_proto::cache::{CacheClient, intact};
use kvsplice_proto::{convert, v1};
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

/// News of a chunk, by the place that [`WantedChunk`] gives it.
#[derive(Debug)]
pub(crate) enum Loaded {
    /// One layer, whole.
    Layer { chunk: usize, layer: u32, stored: StoredLayer, source: Source },
    /// Nothing more will come of this chunk.
    Failed { chunk: usize, reason: String, service_down: bool },
}

/// Fetches everything, handing news to `sink` until it returns false.
pub(crate) async fn load(cache: CacheClient, wanted: Wanted, mut sink: impl AsyncFnMut(Loaded) -> bool) {
    let mut open: Vec<Option<u32>> = vec![Some(0); wanted.chunks.len()];
    let (reason, service_down) = match fetch(&cache, &wanted, &mut open, &mut sink).await {
        Ok(()) => ("store: the stream ended early".to_owned(), false),
        Err(status) => {
            let down =
                matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::DeadlineExceeded);
            (format!("store: {}", status.message()), down)
        }
    };
    for (chunk, layers) in open.iter().enumerate() {
        let chunk = wanted.chunks[chunk].place;
        if layers.is_some() && !sink(Loaded::Failed { chunk, reason: reason.clone(), service_down }).await {
            return;
        }
    }
}

/// A layer that is still arriving.
struct Partial {
    bytes: Vec<u8>,
    /// Rows of K and of V that have come.
    rows: [u32; 2],
}

async fn fetch(
    cache: &CacheClient,
    wanted: &Wanted,
    open: &mut [Option<u32>],
    sink: &mut impl AsyncFnMut(Loaded) -> bool,
) -> Result<(), tonic::Status> {
    let want = v1::Want {
        chunks: wanted.chunks.iter().map(|chunk| chunk.id.to_string()).collect(),
        variant: wanted.variant.to_string(),
        lease: wanted.lease.clone(),
        ..v1::Want::default()
    };
    let (_requests, mut frames) = cache.get_chunks(want).await?;
    let mut partial: HashMap<(usize, u32), Partial> = HashMap::new();
    while open.iter().any(Option::is_some) {
        let Some(frame) = frames.message().await? else { return Ok(()) };
        let chunk = frame.chunk as usize;
        let Some(Some(done)) = open.get_mut(chunk) else { continue };
        let place = wanted.chunks[chunk].place;
        if !frame.error.is_empty() {
            open[chunk] = None;
            if !sink(Loaded::Failed { chunk: place, reason: frame.error, service_down: false }).await {
                return Ok(());
            }
            continue;
        }
        let layer = frame.layer;
        let complete = match accept(&mut partial, wanted, &frame) {
            Ok(complete) => complete,
            Err(reason) => {
                open[chunk] = None;
                if !sink(Loaded::Failed { chunk: place, reason, service_down: false }).await {
                    return Ok(());
                }
                continue;
            }
        };
        let Some(bytes) = complete else { continue };
        *done += 1;
        if *done == wanted.layout.layers {
            open[chunk] = None;
        }
        let stored = StoredLayer::split(wanted.layout.encoding, &bytes);
        let source = convert::source(&frame.source).unwrap_or(Source::Object);
        if !sink(Loaded::Layer { chunk: place, layer, stored, source }).await {
            return Ok(());
        }
    }
    Ok(())
}

/// Adds a frame to its layer; returns the layer's bytes (K, then V) when it is whole.
fn accept(
    partial: &mut HashMap<(usize, u32), Partial>,
    wanted: &Wanted,
    frame: &v1::Frame,
) -> Result<Option<Bytes>, String> {
    let chunk = frame.chunk as usize;
    let tokens = wanted.chunks[chunk].tokens;
    let row_bytes = wanted.layout.row_bytes();
    let half = tokens as usize * row_bytes;
    let fits = frame.layer < wanted.layout.layers
        && frame.first_row.checked_add(frame.rows).is_some_and(|end| end <= tokens)
        && frame.data.len() == frame.rows as usize * row_bytes;
    if !fits {
        return Err(format!("foreign: a frame of {} rows and {} bytes does not fit", frame.rows, frame.data.len()));
    }
    if !intact(frame) {
        return Err(format!("damaged: layer {} arrived with a wrong checksum", frame.layer));
    }
    let key = (chunk, frame.layer);
    let layer = partial.entry(key).or_insert_with(|| Partial { bytes: vec![0; 2 * half], rows: [0; 2] });
    let part = usize::from(frame.part() == v1::frame::Part::Values);
    let first = part * half + frame.first_row as usize * row_bytes;
    layer.bytes[first..first + frame.data.len()].copy_from_slice(&frame.data);
    layer.rows[part] += frame.rows;
    if layer.rows.iter().all(|&rows| rows >= tokens) {
        return Ok(partial.remove(&key).map(|layer| Bytes::from(layer.bytes)));
    }
    Ok(None)
}
