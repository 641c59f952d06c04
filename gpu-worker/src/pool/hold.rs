//! The chunks of one request: what is here of them, and that they stay.

use std::collections::HashMap;

use kvsplice_kv::RowRanges;
use kvsplice_model::resident::LayerKv;
use kvsplice_model::stored::StoredLayer;

use super::{Entry, Keeper, Pool, Promotion, Wish};

/// What the pool has of a chunk.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Whole layers, ascending; where both memories have one, the device's.
    pub(crate) whole: Vec<(u32, LayerKv)>,
    /// Rows that it has of every other layer.
    pub(crate) have: RowRanges,
}

/// The chunks of one request. They stay until this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    pool: Pool,
    chunks: Vec<Held>,
    /// By place and layer, those with gaps that were taken.
    gapped: HashMap<(usize, u32), Entry>,
}

/// A chunk that a request holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) wish: Wish,
    /// What the request brings is kept if the chunk was not forgotten since.
    pub(super) since: u64,
    /// An earlier request has asked for it, too.
    again: bool,
}

impl Pool {
    /// Holds the chunks of a request, from before it loads them until it is over. Those that the cache service has not
    /// confirmed are forgotten instead.
    pub(crate) fn hold(&self, wishes: Vec<Wish>) -> Hold {
        let mut chunks = Vec::new();
        if let Some(mut state) = self.state() {
            for wish in wishes {
                if wish.confirmed {
                    let (since, again) = state.chunks.hold(wish.key);
                    chunks.push(Held { wish, since, again });
                } else {
                    state.forget(&wish.key, self.layers);
                }
            }
        }
        Hold { pool: self.clone(), chunks, gapped: HashMap::new() }
    }
}

impl Hold {
    /// What is here of the chunk at `place`. Counts a request of each layer; on the host, of those that the device does not
    /// have, and one with gaps counts as missing.
    pub(crate) fn take(&mut self, place: usize) -> Taken {
        let Some(Held { wish, .. }) = self.chunks.iter().find(|held| held.wish.place == place) else {
            return Taken::default();
        };
        let Some(mut guard) = self.pool.state() else { return Taken::default() };
        let state = &mut *guard;
        let mut taken = Taken { whole: Vec::new(), have: RowRanges::from_range(0..wish.tokens) };
        for layer in 0..self.pool.layers {
            let key = (wish.key, layer);
            let resident = state.device.get(&key).cloned();
            state.device.asked(&key, resident.is_some());
            if let Some(resident) = resident {
                taken.whole.push((layer, LayerKv::Device(resident)));
                continue;
            }
            let entry = state.host.get(&key).cloned();
            state.host.asked(&key, entry.as_ref().is_some_and(|entry| entry.lacks.is_empty()));
            match entry {
                Some(Entry { data, lacks }) if lacks.is_empty() => {
                    let stored = StoredLayer { layout: wish.layout, tokens: wish.tokens, bytes: data };
                    taken.whole.push((layer, LayerKv::Host(stored)));
                }
                Some(entry) => {
                    taken.have = taken.have.without(&entry.lacks);
                    self.gapped.insert((place, layer), entry);
                }
                None => taken.have = RowRanges::default(),
            }
        }
        taken
    }

    /// How a whole layer of the chunk at `place` goes to the device when it is placed; not at all unless the chunk has been
    /// asked for before, and the device has a tier.
    pub(crate) fn promotion(&self, place: usize, layer: u32) -> Option<Promotion> {
        let held = self.chunks.iter().find(|held| held.wish.place == place)?;
        let wanted = held.again && self.pool.limits.device_bytes > 0;
        wanted.then(|| Promotion {
            key: (held.wish.key, layer),
            since: held.since,
            cost: self.pool.layer_cost(&held.wish),
            pool: self.pool.clone(),
        })
    }

    /// What keeps news of the load, for as long as the request lasts. Call it once everything is taken.
    pub(crate) fn keeper(&self) -> Keeper {
        Keeper { pool: self.pool.clone(), chunks: self.chunks.clone(), gapped: self.gapped.clone() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(mut guard) = self.pool.state() else { return };
        let state = &mut *guard;
        for held in &self.chunks {
            state.chunks.release(&held.wish.key);
        }
        state.host.look_again();
        state.device.look_again();
    }
}
