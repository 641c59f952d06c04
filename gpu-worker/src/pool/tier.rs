//! Layers in one kind of memory: a book, room that is spoken for, and counts.

use kvsplice_kv::eviction::{Book, Eviction};
use kvsplice_proto::v1;

use super::LayerKey;
use super::chunks::Chunks;

#[derive(Debug)]
pub(super) struct Tier<V> {
    book: Book<LayerKey, V>,
    /// Bytes for which room has been made, and which are not in the book yet.
    reserved: u64,
    hits: u64,
    misses: u64,
    evicted: u64,
    failed: u64,
}

impl<V> Tier<V> {
    /// At most `limit_bytes`; off when that is 0.
    pub(super) fn new(limit_bytes: u64) -> Self {
        let book = Book::new(Eviction::Value, limit_bytes);
        Self { book, reserved: 0, hits: 0, misses: 0, evicted: 0, failed: 0 }
    }

    pub(super) fn get(&self, key: &LayerKey) -> Option<&V> {
        self.book.get(key)
    }

    /// Notes that a layer was asked for, and whether it was found.
    pub(super) fn asked(&mut self, key: &LayerKey, found: bool) {
        self.book.touch(key);
        if found {
            self.hits += 1;
        } else {
            self.misses += 1;
        }
    }

    /// Evicts until `bytes` more fit beside what is held and reserved, and says whether they do. What was evicted is to be
    /// freed without the lock.
    pub(super) fn make_room(&mut self, bytes: u64, chunks: &mut Chunks) -> (Vec<V>, bool) {
        let bytes = self.reserved.saturating_add(bytes);
        let (evicted, room) = self.book.make_room(bytes, |(key, _)| chunks.is_held(key));
        self.evicted += evicted.len() as u64;
        let free = |((key, _), value): (LayerKey, V)| {
            chunks.lose(&key);
            value
        };
        (evicted.into_iter().map(free).collect(), room)
    }

    /// Holds the room that [`Tier::make_room`] has made for a layer that is on its way.
    pub(super) fn reserve(&mut self, bytes: u64) {
        self.reserved += bytes;
    }

    /// Gives such room back.
    pub(super) fn release(&mut self, bytes: u64) {
        self.reserved = self.reserved.saturating_sub(bytes);
    }

    /// A layer could not be put here.
    pub(super) fn failed(&mut self) {
        self.failed += 1;
    }

    /// Puts in a layer for which there is room. `cost`: what computing it takes.
    pub(super) fn insert(&mut self, key: LayerKey, value: V, bytes: u64, cost: f64) {
        self.book.insert(key, value, bytes, cost);
    }

    pub(super) fn remove(&mut self, key: &LayerKey) -> Option<V> {
        self.book.remove(key)
    }

    /// Some of what was passed over may be held no more.
    pub(super) fn look_again(&mut self) {
        self.book.look_again();
    }

    /// `held`: chunks that are held.
    pub(super) fn status(&self, held: u64) -> v1::ChunkPool {
        if self.book.limit_bytes() == 0 {
            return v1::ChunkPool::default();
        }
        v1::ChunkPool {
            bytes: self.book.bytes() + self.reserved,
            limit_bytes: self.book.limit_bytes(),
            layers: self.book.len() as u64,
            held,
            hits: self.hits,
            misses: self.misses,
            evicted: self.evicted,
            failed: self.failed,
        }
    }
}
