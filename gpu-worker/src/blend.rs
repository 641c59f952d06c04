//! `blend`: rows whose fresh K and V deviate most from the cached ones are recomputed (CacheBlend, arXiv 2405.16444).
//!
//! Layer 0 computes every reusable row; its K and V are exact anyway. `paper`: from layer 1 on, each layer compares the
//! rows that are left and keeps fewer, from 1.2 to 0.8 of the ratio, so that the ratio is the mean (the paper gives no
//! schedule). `code`: one selection at layer 1, by V alone, as the public code does.

use kvsplice_kv::options::{BlendMode, Budget};
use kvsplice_kv::{Options, RowRanges};
use kvsplice_model::Error;
use kvsplice_model::cache::KvCache;
use kvsplice_model::decoder::Projected;
use tch::{Kind, Tensor};

use crate::prefill::numbers;
use crate::prompt::{Prompt, Selection};

/// The first layer that compares.
const FIRST: u32 = 1;
/// Share of the ratio that the first comparison keeps; the last one keeps as much less.
const MOST: f32 = 1.2;

/// Comparison of fresh and cached K and V.
pub(crate) struct Blend {
    mode: BlendMode,
    layers: u32,
    layer: u32,
    /// One a chunk token: the deviation in this layer; 0 for rows that are not computed.
    deviation: Vec<f32>,
}

impl Blend {
    pub(crate) fn new(prompt: &Prompt, layers: u32) -> Self {
        let tokens = (prompt.question_start() - prompt.chunk_starts[0]) as usize;
        Self { mode: prompt.options.blend, layers, layer: FIRST, deviation: vec![0.0; tokens] }
    }

    /// Whether rows are given up in this layer.
    pub(crate) fn narrows(&self, layer: u32) -> bool {
        layer == self.layer
    }

    /// Takes in rows before they overwrite the cached ones. Keys are compared rotated: rotation changes no distance.
    pub(crate) fn compare(
        &mut self,
        cache: &KvCache,
        layer: u32,
        slots: &[u32],
        rows: &Projected,
        first_slot: u32,
    ) -> Result<(), Error> {
        let (keys, values) = cache.read(layer, slots)?;
        let distance = |fresh: &Tensor, cached: &Tensor| -> Result<Tensor, Error> {
            let difference = fresh.f_to_kind(Kind::Float)?.f_sub(&cached.f_to_kind(Kind::Float)?)?;
            Ok(difference.f_square()?.f_sum_dim_intlist([1, 2].as_slice(), false, Kind::Float)?)
        };
        let mut deviation = distance(&rows.value, &values)?;
        if self.mode == BlendMode::Paper {
            deviation = deviation.f_add(&distance(&rows.rotated_key, &keys)?)?;
        }
        for (&slot, deviation) in slots.iter().zip(numbers(&deviation)?) {
            let Some(place) = slot.checked_sub(first_slot) else { continue };
            if let Some(token) = self.deviation.get_mut(place as usize) {
                *token = deviation;
            }
        }
        Ok(())
    }

    /// The rows that stay, of those at `slots`.
    pub(crate) fn select(&mut self, prompt: &Prompt, slots: &[u32]) -> Result<Selection, Error> {
        let options = Options { ratio: self.ratio(prompt.options.ratio), budget: Budget::Charged, ..prompt.options };
        let tokens = self.deviation.len();
        let deviation = std::mem::replace(&mut self.deviation, vec![0.0; tokens]);
        let mut selection = prompt.select(&options, deviation)?;
        // A window may cover rows that an earlier layer has given up.
        selection.rows = selection.rows.intersection(&RowRanges::from_slots(slots.iter().copied()));
        self.layer = match self.mode {
            BlendMode::Paper if self.layer + 1 < self.layers => self.layer + 1,
            _ => u32::MAX,
        };
        Ok(selection)
    }

    fn ratio(&self, ratio: f32) -> f32 {
        if self.mode == BlendMode::Code {
            return ratio;
        }
        let depth = (self.layer - FIRST) as f32 / (self.layers - FIRST).saturating_sub(1).max(1) as f32;
        (ratio * (MOST - 2.0 * (MOST - 1.0) * depth)).min(1.0)
    }
}
