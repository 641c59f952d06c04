//! What comes over the wire is put together with what was here, and kept on the host.

use std::collections::HashMap;

use bytes::BytesMut;
use kvsplice_kv::RowRanges;
use kvsplice_proto::load::{Form, Loaded};

use super::hold::Held;
use super::{Entry, Pool, Wish};

/// Puts what a request loads into the pool. Does not hold chunks: what comes after the request is over is not kept.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(super) pool: Pool,
    pub(super) chunks: Vec<Held>,
    pub(super) gapped: HashMap<(usize, u32), Entry>,
}

impl Keeper {
    /// Puts what has come over the wire together with what was here, keeps it, and forgets a chunk that the cache service
    /// cannot give.
    pub(crate) fn take_in(&self, news: Loaded) -> Loaded {
        let place = match &news {
            Loaded::Layer { chunk, .. } | Loaded::Failed { chunk, .. } => *chunk,
        };
        let Some(held) = self.chunks.iter().find(|held| held.wish.place == place) else { return news };
        let wish = &held.wish;
        let (layer, data, form, source, bytes) = match news {
            Loaded::Layer { layer, data, form, source, bytes, .. } => (layer, data, form, source, bytes),
            Loaded::Failed { ref reason, .. } => {
                // A store that cannot be reached says nothing of the chunk.
                if let (false, Some(mut state)) = (reason.starts_with("store"), self.pool.state()) {
                    state.forget(&wish.key, self.pool.layers);
                }
                return news;
            }
        };
        let came = match form {
            // The page cache keeps it.
            Form::Mapped => return Loaded::Layer { chunk: place, layer, data, form, source, bytes },
            Form::Whole => Entry { data, lacks: RowRanges::default() },
            Form::Gapped(lacks) => Entry { data, lacks },
        };
        let entry = match self.gapped.get(&(place, layer)) {
            Some(known) if !came.lacks.is_empty() => match joined(came, known, wish) {
                Ok(entry) => entry,
                Err(reason) => return Loaded::Failed { chunk: place, reason, service_down: false },
            },
            _ => came,
        };
        let cost = self.pool.layer_cost(wish);
        let freed = self.pool.state().map(|mut state| state.keep((wish.key, layer), held.since, entry.clone(), cost));
        drop(freed);
        let form = if entry.lacks.is_empty() { Form::Whole } else { Form::Gapped(entry.lacks) };
        Loaded::Layer { chunk: place, layer, data: entry.data, form, source, bytes }
    }
}

/// A layer with the rows of another one in its gaps.
fn joined(came: Entry, known: &Entry, wish: &Wish) -> Result<Entry, String> {
    let (bytes, known_bytes) = (came.data.len(), known.data.len());
    let mut data = BytesMut::from(came.data);
    let missing = came.lacks.without(&known.lacks);
    for &part in wish.layout.parts().iter().filter(|part| part.by_token()) {
        let (start, row_bytes) = (wish.layout.part_range(part, wish.tokens).start, wish.layout.row_bytes(part));
        for rows in missing.ranges() {
            let place = start + rows.start as usize * row_bytes..start + rows.end as usize * row_bytes;
            let (Some(to), Some(from)) = (data.get_mut(place.clone()), known.data.get(place)) else {
                return Err(format!("foreign: layers of {bytes} and {known_bytes} bytes do not fit"));
            };
            to.copy_from_slice(from);
        }
    }
    Ok(Entry { data: data.freeze(), lacks: came.lacks.intersection(&known.lacks) })
}
