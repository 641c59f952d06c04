//! Reads whole chunks of auxiliary KV from the cache service, or from its files where they lie on this host.
//!
//! A chunk of which anything is missing or damaged is none; it is computed instead.

use std::time::Duration;

use bytes::Bytes;
use kvsplice_kv::{KvLayout, Variant};
use kvsplice_model::auxiliary::ChunkKv;
use kvsplice_proto::context;
use kvsplice_proto::load::{self, Loaded, Loader, WantedChunk};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Status;
use tracing::warn;

use crate::auxiliary::Wanted;
use crate::lease::Lease;

/// A load takes less time than this; the lease is given back when it is over.
const LEASE: Duration = Duration::from_secs(120);
/// Layers that may wait to be taken in.
const NEWS: usize = 64;

/// Reads the KV of `wanted` (no repeats); none where it is missing or damaged. Fails when the service cannot be asked.
pub(crate) async fn fetch(
    loader: &Loader,
    wanted: &[Wanted],
    layout: KvLayout,
    variant: Variant,
) -> Result<Vec<Option<ChunkKv>>, Status> {
    let ids: Vec<_> = wanted.iter().map(|chunk| chunk.id).collect();
    // Files are named under a lease only.
    let contained = loader.client().contains(&ids, variant, LEASE).await?;
    let lease = contained.lease.map(|id| Lease::new(id, loader.client()));
    let tokens = |place: usize| wanted.get(place).map_or(0, |chunk| u32::try_from(chunk.ids.len()).unwrap_or(0));
    let found = contained.found.iter().enumerate().filter(|(_, found)| **found);
    let chunk = |(place, _)| WantedChunk { place, id: ids[place], tokens: tokens(place), layers: Vec::new() };
    let chunks = found.map(chunk).collect();
    let lease_id = lease.as_ref().map(|lease| lease.id().to_owned()).unwrap_or_default();
    let mut layers: Vec<Vec<Option<Bytes>>> = vec![vec![None; layout.layers as usize]; wanted.len()];
    let (_nothing_is_skipped, skips) = mpsc::channel(1);
    let (news, mut arrived) = mpsc::channel(NEWS);
    let (load, sink) = (loader.clone(), async move |loaded| news.send(loaded).await.is_ok());
    let wanted_kv = load::Wanted { chunks, layout, variant, lease: lease_id };
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
            // A service that is gone says so for each chunk.
            Loaded::Failed { reason, .. } if reason == told => {}
            Loaded::Failed { chunk, reason, .. } => {
                warn!(chunk, reason, "stored auxiliary KV cannot be used: computing it instead");
                told = reason;
            }
        }
    }
    // What is mapped stays without it.
    drop(lease);
    let whole = |(place, layers): (usize, Vec<Option<Bytes>>)| {
        let layers = layers.into_iter().collect::<Option<Vec<Bytes>>>()?;
        Some(ChunkKv { layout, tokens: tokens(place), layers })
    };
    Ok(layers.into_iter().enumerate().map(whole).collect())
}
