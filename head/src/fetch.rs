//! Reads whole chunks of auxiliary KV from the cache service, or from its files where they lie on this host.
//!
//! A chunk of which anything is missing or damaged is none; it is computed instead.

use std::time::Duration;

use bytes::Bytes;
use kvsplice_kv::{KvLayout, RowRanges, Variant};
use kvsplice_model::auxiliary::ChunkKv;
use kvsplice_proto::context;
use kvsplice_proto::load::{self, Loaded, Loader, WantedChunk};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::{debug, warn};

use crate::auxiliary::Wanted;

/// A load takes less time than this. Files are named under a lease only; this one ends with the load.
const PROTECT: Duration = Duration::from_secs(120);
/// Layers that may wait to be taken in.
const NEWS: usize = 64;

/// Reads the KV of `wanted` (no repeats); none where it is missing or damaged, or the service cannot be asked.
pub(crate) async fn fetch(
    loader: &Loader,
    wanted: &[Wanted],
    layout: KvLayout,
    variant: Variant,
) -> Vec<Option<ChunkKv>> {
    let tokens = |place: usize| wanted.get(place).map_or(0, |chunk| u32::try_from(chunk.ids.len()).unwrap_or(0));
    let chunk = |(place, chunk): (usize, &Wanted)| WantedChunk {
        place,
        id: chunk.id,
        tokens: tokens(place),
        layers: Vec::new(),
        have: RowRanges::default(),
    };
    let chunks = wanted.iter().enumerate().map(chunk).collect();
    let mut layers: Vec<Vec<Option<Bytes>>> = vec![vec![None; layout.layers as usize]; wanted.len()];
    let (_nothing_is_skipped, skips) = mpsc::channel(1);
    let (news, mut arrived) = mpsc::channel(NEWS);
    let (load, sink) = (loader.clone(), async move |loaded| news.send(loaded).await.is_ok());
    let wanted_kv = load::Wanted { chunks, layout, variant, lease: String::new(), protect: PROTECT };
    // Ends with this call, however it ends.
    let mut task = JoinSet::new();
    task.spawn(context::in_request(async move { load.load(wanted_kv, skips, sink).await }));
    let mut told = String::new();
    while let Some(loaded) = arrived.recv().await {
        match loaded {
            Loaded::Layer { chunk, layer, data, .. } => {
                if let Some(place) = layers.get_mut(chunk).and_then(|layers| layers.get_mut(layer as usize)) {
                    *place = Some(data);
                }
            }
            Loaded::Failed { chunk, reason, .. } if reason.starts_with("missing") => {
                debug!(chunk, "auxiliary KV is not stored");
            }
            // A service that is gone says so for each chunk.
            Loaded::Failed { reason, .. } if reason == told => {}
            Loaded::Failed { chunk, reason, .. } => {
                warn!(chunk, reason, "stored auxiliary KV cannot be used: computing it instead");
                told = reason;
            }
        }
    }
    let whole = |(place, layers): (usize, Vec<Option<Bytes>>)| {
        let layers = layers.into_iter().collect::<Option<Vec<Bytes>>>()?;
        Some(ChunkKv { layout, tokens: tokens(place), layers })
    };
    layers.into_iter().enumerate().map(whole).collect()
}
