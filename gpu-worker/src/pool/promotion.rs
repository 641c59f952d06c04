//! A layer's way to the device: room first, then the copy, then the book.
//!
//! The room stays spoken for while the layer is copied, so that the limit holds at every moment. A copy that fails is no
//! failure of the request: the layer is placed from the host, and the device is left alone for a while.

use std::time::{Duration, Instant};

use kvsplice_model::Error;
use kvsplice_model::resident::{LayerKv, ResidentLayer};
use kvsplice_model::stored::StoredLayer;
use tracing::warn;

use super::{LayerKey, Pool};

/// How long nothing goes to a device that had no memory left: each further attempt would cost the requests in hand time.
const REST: Duration = Duration::from_secs(60);

/// A layer that is to go to the device.
#[derive(Clone, Debug)]
pub(crate) struct Promotion {
    pub(super) pool: Pool,
    pub(super) key: LayerKey,
    /// It is kept if its chunk was not forgotten since.
    pub(super) since: u64,
    pub(super) cost: f64,
}

/// What the device's tier says to a layer.
enum Answer {
    There(ResidentLayer),
    Room(Room),
    Full,
}

/// Room for a layer; given back when this is dropped.
struct Room {
    promotion: Promotion,
    bytes: u64,
}

impl Promotion {
    /// The layer on the device, if it is there already or `upload` puts it there; else as it is.
    pub(crate) fn run(
        self,
        layer: LayerKv,
        upload: impl FnOnce(&StoredLayer) -> Result<ResidentLayer, Error>,
    ) -> LayerKv {
        let LayerKv::Host(stored) = layer else { return layer };
        let room = match self.ask(stored.device_bytes()) {
            Answer::There(resident) => return LayerKv::Device(resident),
            Answer::Room(room) => room,
            Answer::Full => return LayerKv::Host(stored),
        };
        match upload(&stored) {
            Ok(resident) => room.keep(resident).map_or(LayerKv::Host(stored), LayerKv::Device),
            Err(error) => {
                room.rest(&error);
                LayerKv::Host(stored)
            }
        }
    }

    fn ask(self, bytes: u64) -> Answer {
        let Some(mut guard) = self.pool.state() else { return Answer::Full };
        let state = &mut *guard;
        if let Some(resident) = state.device.get(&self.key) {
            return Answer::There(resident.clone());
        }
        let rests = state.full_until.is_some_and(|end| Instant::now() < end);
        if rests || !state.chunks.admits(&self.key.0, self.since) {
            return Answer::Full;
        }
        let (evicted, room) = state.device.make_room(bytes, &mut state.chunks);
        if room {
            state.device.reserve(bytes);
        }
        drop(guard);
        // Its memory must be free before the layer needs it.
        drop(evicted);
        if room { Answer::Room(Room { promotion: self, bytes }) } else { Answer::Full }
    }
}

impl Room {
    /// Puts the layer into the room, unless its chunk was forgotten or its request ended meanwhile: then it is gone before
    /// the room is.
    fn keep(mut self, resident: ResidentLayer) -> Option<ResidentLayer> {
        let Promotion { pool, key, since, cost } = &self.promotion;
        let mut guard = pool.state()?;
        let state = &mut *guard;
        if !state.chunks.admits(&key.0, *since) {
            return None;
        }
        state.device.release(self.bytes);
        state.device.insert(*key, resident.clone(), self.bytes, *cost);
        state.chunks.gain(&key.0);
        drop(guard);
        // The room is the layer's now.
        self.bytes = 0;
        Some(resident)
    }

    fn rest(self, error: &Error) {
        if let Some(mut state) = self.promotion.pool.state() {
            state.device.failed();
            state.full_until = Some(Instant::now() + REST);
        }
        warn!(%error, bytes = self.bytes, pause = ?REST, "no chunk goes to the device's pool for a while");
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(mut state) = self.promotion.pool.state() {
            state.device.release(self.bytes);
        }
    }
}
