//! Layers that have come, out of the pool, over the wire, mapped or computed anew, until they are placed.

use std::time::Instant;

use kvsplice_kv::KvLayout;
use kvsplice_kv::receipt::Source;
use kvsplice_model::encode::ChunkKv;
use kvsplice_model::resident::LayerKv;
use kvsplice_model::stored::StoredLayer;
use kvsplice_proto::load::{Form, Loaded};
use tch::Device;

use super::{Active, PartKv, Stage};
use crate::pool::Promotion;

/// A layer of a part that is not placed yet.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    kv: LayerKv,
    /// How it goes to the device's pool; not at all where it has gaps, or is there already.
    promotion: Option<Promotion>,
}

impl Arrived {
    /// The layer to be placed, on `device` if it is to stay there. For the compute thread.
    pub(crate) fn ready(self, device: Device) -> LayerKv {
        match self.promotion {
            Some(promotion) => promotion.run(self.kv, |layer| layer.to_device(device)),
            None => self.kv,
        }
    }
}

impl Active {
    /// Takes in news of a chunk.
    pub(crate) fn loaded(&mut self, news: Loaded) {
        match news {
            Loaded::Layer { chunk, layer, data, form, source, bytes } => {
                self.arrived = Some(Instant::now());
                self.came += if form == Form::Mapped { data.len() as f64 } else { bytes as f64 };
                let Some(part) = self.users[chunk].first().map(|&part| &self.request.parts[part]) else { return };
                let layout = KvLayout { encoding: part.variant.encoding, ..self.layout };
                let kv = LayerKv::Host(StoredLayer { layout, tokens: part.ids.len() as u32, bytes: data });
                let hold = self.hold.as_ref().filter(|_| !matches!(form, Form::Gapped(_)));
                let promotion = hold.and_then(|hold| hold.promotion(chunk, layer));
                self.arrive(chunk, layer, &Arrived { kv, promotion }, source, bytes);
            }
            Loaded::Failed { chunk, reason, service_down } => self.lost(chunk, &reason, service_down),
        }
        self.note_load_end();
    }

    /// Takes in a whole layer that this worker's pool had.
    pub(super) fn pooled(&mut self, chunk: usize, layer: u32, kv: LayerKv, promotion: Option<Promotion>) {
        for &part in &self.users[chunk] {
            self.parts[part].pooled += 1;
        }
        self.arrive(chunk, layer, &Arrived { kv, promotion }, Source::Device, 0);
        self.note_load_end();
    }

    fn arrive(&mut self, chunk: usize, layer: u32, arrived: &Arrived, source: Source, bytes: u64) {
        for (user, &part) in self.users[chunk].iter().enumerate() {
            let part = &mut self.parts[part];
            part.arrived += 1;
            if !part.cached {
                continue;
            }
            part.layers[layer as usize] = Some(arrived.clone());
            // A chunk may come from several tiers: the slowest one says where it came from.
            let first = part.arrived == 1;
            part.outcome.source = if first { source } else { slower(part.outcome.source, source) };
            part.outcome.bytes += if user == 0 { bytes } else { 0 };
        }
    }

    fn lost(&mut self, chunk: usize, reason: &str, service_down: bool) {
        let started = !matches!(self.stage, Stage::Waiting);
        for &part in &self.users[chunk] {
            let part = &mut self.parts[part];
            if !part.cached {
                continue;
            }
            reason.clone_into(&mut part.outcome.reason);
            if service_down && !started {
                part.cached = false;
                part.outcome.source = Source::Fresh;
            } else {
                part.failed = Some(reason.to_owned());
            }
        }
    }

    fn note_load_end(&mut self) {
        if self.timeline.load_end.is_none() && self.all_settled() {
            self.timeline.load_end = Some(self.request.now_ms());
        }
    }

    fn all_settled(&self) -> bool {
        let settled = |(index, part): (usize, &PartKv)| {
            !self.needs(index) || part.failed.is_some() || part.arrived >= self.layers
        };
        self.parts.iter().enumerate().all(settled)
    }

    /// The KV of a layer, by part; what is placed is not kept, and what need not be placed is dropped.
    pub(crate) fn take_layer(&mut self, layer: u32) -> Vec<Option<Arrived>> {
        let taken = self.parts.iter_mut().map(|part| part.layers[layer as usize].take());
        let taken: Vec<Option<Arrived>> = taken.collect();
        taken.into_iter().enumerate().map(|(part, arrived)| arrived.filter(|_| self.needs(part))).collect()
    }

    /// Fills in what a repair has computed, for every part that uses the chunk.
    pub(crate) fn repaired(&mut self, part: usize, kv: &ChunkKv) {
        self.repair = None;
        let id = self.request.parts[part].id();
        for (other, kv_part) in self.request.parts.iter().zip(&mut self.parts) {
            if other.id() != id {
                continue;
            }
            for layer in 0..self.layers {
                if matches!(&self.stage, Stage::Prefill(prefill) if prefill.placed(layer)) {
                    continue;
                }
                let computed = || Some(Arrived { kv: LayerKv::Host(kv.layer(layer)?), promotion: None });
                let place = &mut kv_part.layers[layer as usize];
                *place = place.take().or_else(computed);
            }
            kv_part.failed = None;
            kv_part.arrived = self.layers;
            kv_part.outcome.source = Source::Repaired;
        }
        self.note_load_end();
    }
}

fn slower(one: Source, other: Source) -> Source {
    let rank = |source: Source| match source {
        Source::Device => 0,
        Source::Memory => 1,
        Source::Disk => 2,
        Source::Object => 3,
        Source::Repaired => 4,
        Source::Fresh => 5,
    };
    if rank(other) > rank(one) { other } else { one }
}
