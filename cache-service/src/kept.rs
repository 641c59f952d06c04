//! What must survive a restart beside chunks and records: pins, and what computing a model's KV was measured to cost.
//!
//! `pins/{chunk id}` is there while the chunk is pinned; `costs/{model digest}` holds microseconds a token as text. Both are
//! read at the start. A service that shares the store learns of another's pins then, or before it collects orphans.

use futures::{StreamExt, TryStreamExt, stream};
use kvsplice_kv::{ChunkId, ModelDigest};
use object_store::path::Path;
use tracing::warn;

use crate::Error;
use crate::service::PARALLEL;
use crate::store::Store;

pub(crate) const PINS: &str = "pins";
pub(crate) const COSTS: &str = "costs";
const COST_BYTES: usize = 64;

/// The object that says that a chunk is pinned.
pub(crate) fn pin_path(chunk: &ChunkId) -> Path {
    Path::from_iter([PINS.to_owned(), chunk.to_string()])
}

/// Stores pins.
pub(crate) async fn pin(store: &Store, chunks: &[ChunkId]) -> Result<(), Error> {
    let pin = |chunk: ChunkId| async move { store.replace("store a pin", &pin_path(&chunk), "pinned\n".into()).await };
    let pins: Vec<_> = chunks.iter().copied().map(pin).collect();
    stream::iter(pins).buffered(PARALLEL).try_collect().await
}

/// Removes pins from the store.
pub(crate) async fn unpin(store: &Store, chunks: &[ChunkId]) -> Result<(), Error> {
    let unpin = |chunk: ChunkId| async move { store.delete(&pin_path(&chunk)).await.map(|_| ()) };
    let pins: Vec<_> = chunks.iter().copied().map(unpin).collect();
    stream::iter(pins).buffered(PARALLEL).try_collect().await
}

/// Every stored pin.
pub(crate) async fn pins(store: &Store) -> Result<Vec<ChunkId>, Error> {
    names(store, PINS).await
}

/// Every stored cost, in microseconds a token. One that cannot be read is left out: it is measured again.
pub(crate) async fn costs(store: &Store) -> Result<Vec<(ModelDigest, f64)>, Error> {
    let mut costs = Vec::new();
    for model in names::<ModelDigest>(store, COSTS).await? {
        match store.get(&cost_path(&model), COST_BYTES).await {
            Ok(text) => {
                let text = text.unwrap_or_default();
                let cost = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse::<f64>().ok());
                costs.extend(cost.map(|cost| (model, cost)));
            }
            Err(error) => warn!(%model, %error, "a measured recompute cost cannot be read"),
        }
    }
    Ok(costs)
}

/// Stores a measured cost.
pub(crate) async fn keep_cost(store: &Store, model: &ModelDigest, us_per_token: f64) -> Result<(), Error> {
    store.replace("store a measured cost", &cost_path(model), format!("{us_per_token}\n").into()).await
}

fn cost_path(model: &ModelDigest) -> Path {
    Path::from_iter([COSTS.to_owned(), model.to_string()])
}

/// The names below a folder that are what they should be.
async fn names<T: std::str::FromStr>(store: &Store, folder: &str) -> Result<Vec<T>, Error> {
    let paths = store.list(&Path::from(folder)).await?;
    Ok(paths.iter().filter_map(|path| path.filename()?.parse().ok()).collect())
}
