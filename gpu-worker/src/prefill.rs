//! Splicing and recomputation of one prompt: cached layers are placed and rotated, chosen rows computed in context.
//!
//! Rows go layer by layer, within a layer in slices of ascending slots, so that layer l computes while l + 1 loads and
//! other work fits between two slices. Invariant: when a slice of layer l runs, every slot below its last row holds
//! layer l's KV, placed or computed.

use kvsplice_kernels::rope::Rotation;
use kvsplice_model::cache::{KvCache, StoredLayer};
use kvsplice_model::decoder::{Keep, SLICE_ROWS, Segment};
use kvsplice_model::{Decoder, Error};
use tch::Tensor;

use crate::request::Request;

/// A prompt on its way through the layers.
#[derive(Debug)]
pub(crate) struct Prefill {
    cache: KvCache,
    /// Computed rows, ascending.
    slots: Vec<u32>,
    rotation: Rotation,
    /// `[rows, hidden]`, input of the current layer.
    hidden: Tensor,
    /// Output of the current layer, slice by slice.
    next: Vec<Tensor>,
    /// By part, whether its KV is placed, not computed.
    placed: Vec<bool>,
    /// The slots of all placed parts, ascending.
    placed_slots: Vec<u32>,
    placed_rotation: Rotation,
    /// Indices into `slots` whose last hidden state is wanted.
    outputs: Vec<usize>,
    layers: u32,
    layer: u32,
    row: usize,
}

/// What a step led to.
pub(crate) enum Step {
    /// There is more to do in this layer or the next.
    More,
    /// `[outputs, hidden]` after the last layer, and the sequence's KV.
    Done(Tensor, KvCache),
}

impl Prefill {
    /// Starts a prompt. `rows`: every slot to compute, ascending; `placed`: by part, whether its KV will be placed.
    pub(crate) fn new(decoder: &Decoder, request: &Request, rows: Vec<u32>, placed: &[bool]) -> Result<Self, Error> {
        let ids: Vec<u32> = request.parts.iter().flat_map(|part| part.ids.iter().copied()).collect();
        let positions: Vec<u32> = request
            .parts
            .iter()
            .flat_map(|part| part.first_position..part.first_position + part.ids.len() as u32)
            .collect();
        let at =
            |values: &[u32], slots: &[u32]| -> Vec<u32> { slots.iter().map(|&slot| values[slot as usize]).collect() };
        let parts = request.parts.iter().zip(placed).filter(|(_, placed)| **placed);
        let placed_slots: Vec<u32> = parts.flat_map(|(part, _)| part.slots.clone()).collect();
        let first_output = request.tokens().saturating_sub(request.targets.len() as u32 + 1);
        let last_output = if request.targets.is_empty() { first_output } else { request.tokens() - 2 };
        let wanted = first_output..=last_output;
        Ok(Self {
            cache: decoder.cache(request.slots_needed())?,
            rotation: decoder.rotation(&at(&positions, &rows))?,
            hidden: decoder.embed(&at(&ids, &rows))?,
            next: Vec::new(),
            placed: placed.to_vec(),
            placed_rotation: decoder.rotation(&at(&positions, &placed_slots))?,
            placed_slots,
            outputs: (0..rows.len()).filter(|&row| wanted.contains(&rows[row])).collect(),
            layers: decoder.config().layers,
            slots: rows,
            layer: 0,
            row: 0,
        })
    }

    /// The layer that runs next.
    pub(crate) fn layer(&self) -> u32 {
        self.layer
    }

    /// Whether the next step places this layer's KV first.
    pub(crate) fn starts_layer(&self) -> bool {
        self.row == 0
    }

    /// Computes at most `rows` rows of the current layer. `stored`: by part, this layer of each placed part, when
    /// [`Prefill::starts_layer`].
    pub(crate) fn advance(
        &mut self,
        decoder: &Decoder,
        stored: &[Option<StoredLayer>],
        rows: usize,
    ) -> Result<Step, Error> {
        if self.starts_layer() {
            self.place(stored)?;
        }
        let last = self.layer + 1 == self.layers;
        let end = self.slots.len().min(self.row + rows.clamp(1, SLICE_ROWS));
        let count = end - self.row;
        let hidden = self.hidden.f_narrow(0, self.row as i64, count as i64)?;
        let rotation = self.rotation.narrow(self.row, count)?;
        let outputs: Vec<usize> =
            self.outputs.iter().filter(|row| (self.row..end).contains(row)).map(|row| row - self.row).collect();
        let keep = if last { Keep::Rows(&outputs) } else { Keep::All };
        let mut segments = [Segment { cache: &mut self.cache, slots: &self.slots[self.row..end] }];
        self.next.push(decoder.layer(self.layer, &hidden, &rotation, &mut segments, keep, None)?);
        self.row = end;
        if self.row < self.slots.len() {
            return Ok(Step::More);
        }
        self.hidden = Tensor::f_cat(&self.next, 0)?;
        self.next.clear();
        self.layer += 1;
        self.row = 0;
        if !last {
            return Ok(Step::More);
        }
        let empty = decoder.cache(1)?;
        Ok(Step::Done(self.hidden.shallow_clone(), std::mem::replace(&mut self.cache, empty)))
    }

    fn place(&mut self, stored: &[Option<StoredLayer>]) -> Result<(), Error> {
        let mut layers = Vec::new();
        for (index, _) in self.placed.iter().enumerate().filter(|(_, placed)| **placed) {
            let Some(Some(stored)) = stored.get(index) else {
                return Err(Error::Argument(format!("layer {} of part {index} is not loaded", self.layer)));
            };
            layers.push(stored);
        }
        match StoredLayer::join(&layers)? {
            Some(joined) => self.cache.place(self.layer, &self.placed_slots, &joined, &self.placed_rotation),
            None => Ok(()),
        }
    }
}
