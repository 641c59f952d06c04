//! Which stored KV goes where: the cached parts of a prompt, layer by layer, behind its exact beginning.

use kvsplice_kernels::rope::Rotation;
use kvsplice_model::cache::KvCache;
use kvsplice_model::resident::LayerKv;
use kvsplice_model::{Decoder, Error};

use crate::prompt::Prompt;

/// The stored rows of a prompt.
pub(crate) struct Placing {
    /// By part, how many of its first rows are in the cache already; `None` if nothing is placed.
    parts: Vec<Option<u32>>,
    /// The slots of all placed rows, ascending.
    slots: Vec<u32>,
    rotation: Rotation,
    done: Vec<bool>,
}

impl Placing {
    /// `placed`: by part, whether its stored KV is used; `beginning`: slots whose KV is in the cache already.
    pub(crate) fn new(decoder: &Decoder, prompt: &Prompt, placed: &[bool], beginning: u32) -> Result<Self, Error> {
        let (mut parts, mut slots) = (Vec::new(), Vec::new());
        for (range, placed) in prompt.parts.iter().zip(placed) {
            let skipped = beginning.clamp(range.start, range.end) - range.start;
            parts.push((*placed && (skipped as usize) < range.len()).then_some(skipped));
            if *placed {
                slots.extend(range.start + skipped..range.end);
            }
        }
        let nothing = slots.is_empty();
        Ok(Self {
            rotation: decoder.rotation(&prompt.positions_of(&slots))?,
            done: vec![nothing; decoder.config().layers as usize],
            parts,
            slots,
        })
    }

    /// Whether the layer's stored KV is in place.
    pub(crate) fn done(&self, layer: u32) -> bool {
        self.done.get(layer as usize).copied().unwrap_or(true)
    }

    /// Places a layer. `stored`: by part.
    pub(crate) fn place(&mut self, cache: &mut KvCache, layer: u32, stored: &[Option<LayerKv>]) -> Result<(), Error> {
        let mut chunks = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let Some(skipped) = part else { continue };
            let Some(Some(stored)) = stored.get(index) else {
                return Err(Error::Argument(format!("layer {layer} of part {index} is not loaded")));
            };
            chunks.push((stored, *skipped));
        }
        cache.place(layer, &self.slots, &chunks, &self.rotation)?;
        self.done[layer as usize] = true;
        Ok(())
    }
}
