//! What a request asks for: its distinct chunks, what this worker's pool has of them, and the loads of the rest.

use std::collections::HashMap;

use kvsplice_kv::{ChunkId, KvLayout, RowRanges, Variant};
use kvsplice_proto::load::{Skips, WantedChunk};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Active;
use crate::pace::Cost;
use crate::pool::{Keeper, Pool, PoolKey, Taken, Wish};

impl Active {
    /// The distinct chunks to load, by variant, and of each the layers that the pool does not have; what it has is taken in
    /// at once. Remembers which parts use which chunk. Call once.
    pub(crate) fn wanted(&mut self, pool: &Pool, cost: &Cost) -> Vec<(Variant, Vec<WantedChunk>)> {
        let mut wanted = self.distinct();
        let mut hold = pool.hold(self.wishes(cost));
        let all = self.layers;
        for (_, chunks) in &mut wanted {
            chunks.retain_mut(|chunk| {
                let Taken { whole, have } = hold.take(chunk.place);
                if !have.is_empty() {
                    chunk.have = have;
                    self.have.insert(chunk.place, chunk.have.clone());
                }
                if whole.is_empty() {
                    return true;
                }
                chunk.layers = (0..all).filter(|layer| !whole.iter().any(|(known, _)| known == layer)).collect();
                for (layer, kv) in whole {
                    let promotion = hold.promotion(chunk.place, layer);
                    self.pooled(chunk.place, layer, kv, promotion);
                }
                !chunk.layers.is_empty()
            });
        }
        wanted.retain(|(_, chunks)| !chunks.is_empty());
        self.hold = Some(hold);
        wanted
    }

    fn distinct(&mut self) -> Vec<(Variant, Vec<WantedChunk>)> {
        let mut places: HashMap<(ChunkId, Variant), usize> = HashMap::new();
        let mut wanted: Vec<(Variant, Vec<WantedChunk>)> = Vec::new();
        for (index, part) in self.request.parts.iter().enumerate() {
            let Some(id) = part.id().filter(|_| self.parts[index].cached) else { continue };
            let users = &mut self.users;
            let place = *places.entry((id, part.variant)).or_insert_with(|| {
                let place = users.len();
                users.push(Vec::new());
                let (tokens, have) = (part.ids.len() as u32, RowRanges::default());
                let chunk = WantedChunk { place, id, tokens, layers: Vec::new(), have };
                match wanted.iter_mut().find(|(variant, _)| *variant == part.variant) {
                    Some((_, chunks)) => chunks.push(chunk),
                    None => wanted.push((part.variant, vec![chunk])),
                }
                place
            });
            self.users[place].push(index);
        }
        wanted
    }

    /// The chunks by place. Encoding one anew computes its rows behind the prefix.
    fn wishes(&self, cost: &Cost) -> Vec<Wish> {
        let prefix = self.request.prefix_ids().len() as u32;
        let wish = |(place, users): (usize, &Vec<usize>)| {
            let part = &self.request.parts[*users.first()?];
            let first = if part.behind_prefix { prefix } else { 0 };
            let rows = RowRanges::from_range(first..first.saturating_add(part.ids.len() as u32));
            let confirmed = users.iter().all(|&user| self.request.parts[user].confirmed);
            let key = PoolKey { chunk: part.id()?, variant: part.variant };
            let layout = KvLayout { encoding: part.variant.encoding, ..self.layout };
            Some(Wish { place, key, cost: cost.rows(&rows), confirmed, layout, tokens: part.ids.len() as u32 })
        };
        self.users.iter().enumerate().filter_map(wish).collect()
    }

    /// What puts layers that come into the pool.
    pub(crate) fn keeper(&self) -> Option<Keeper> {
        self.hold.as_ref().map(crate::pool::Hold::keeper)
    }

    /// Remembers a load that has begun; it ends with the request.
    pub(crate) fn loads(&mut self, loader: AbortHandle, skips: mpsc::Sender<Skips>) {
        self.loaders.push(loader);
        self.skips.push(skips);
    }
}
