//! Splicing and recomputation of one prompt: cached layers are placed and rotated, chosen rows computed in context.
//!
//! Rows go layer by layer. In a layer, all rows are projected and their K and V written, then a selector may give rows
//! up, then the rest attends; each in slices of ascending slots, so that other work fits in between and layer l computes
//! while l + 1 loads. Invariants: the set of rows only shrinks with depth; when a slice of layer l attends, every slot
//! that it sees holds layer l's KV, placed or computed.

use kvsplice_kernels::rope::Rotation;
use kvsplice_kv::RowRanges;
use kvsplice_kv::options::{Mask, Strategy};
use kvsplice_model::attention::{attend, attend_masses};
use kvsplice_model::cache::KvCache;
use kvsplice_model::decoder::{joined, slice_of};
use kvsplice_model::resident::LayerKv;
use kvsplice_model::{Decoder, Error};
use tch::{Device, Kind, Tensor};

use crate::blend::Blend;
use crate::capture::Capture;
use crate::focus::Focus;
use crate::guide::Guide;
use crate::placing::Placing;
use crate::prompt::Prompt;

/// A prompt on its way through the layers.
pub(crate) struct Prefill {
    prompt: Prompt,
    cache: KvCache,
    placing: Placing,
    /// Rows that are computed in this layer.
    rows: Rows,
    layers: u32,
    layer: u32,
    at: At,
    guide: Option<Guide>,
    blend: Option<Blend>,
    focus: Option<Focus>,
    capture: Option<Capture>,
    outcome: Outcome,
}

/// The rows that are computed, and their state before the current layer.
struct Rows {
    slots: Vec<u32>,
    rotation: Rotation,
    /// `[rows, hidden]`
    hidden: Tensor,
}

/// How far the current layer is.
enum At {
    /// Rows from here on are projected; by slice, the queries of those before.
    Project(usize, Vec<Tensor>),
    /// Rows from here on attend; the query of all rows, and by slice, the layer's output of those before.
    Attend(usize, Tensor, Vec<Tensor>),
}

/// What a prefill did besides its result.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Slots that were computed in context, from the last selection on.
    pub(crate) rows: RowRanges,
    /// Selectable rows projected, summed over layers.
    pub(crate) projected: u64,
    /// One a chunk token, where the worker selected; −1 where not selectable.
    pub(crate) scores: Vec<f32>,
}

/// What a step led to.
pub(crate) enum Step {
    /// There is more to do in this layer or the next.
    More,
    Done(Box<Finished>),
}

/// A prompt that is through.
pub(crate) struct Finished {
    /// `[outputs, hidden]` after the last layer.
    pub(crate) hidden: Tensor,
    pub(crate) cache: KvCache,
    pub(crate) outcome: Outcome,
    pub(crate) capture: Option<Capture>,
    pub(crate) prompt: Prompt,
}

impl Prefill {
    /// Starts a prompt. `rows`: every slot that is known to be computed, ascending; a selector of the worker adds its own.
    /// `cache` holds the exact beginning that `placing` leaves out.
    pub(crate) fn new(
        decoder: &Decoder,
        prompt: Prompt,
        rows: Vec<u32>,
        cache: KvCache,
        placing: Placing,
    ) -> Result<Self, Error> {
        let options = prompt.options;
        let selecting = options.ratio < 1.0 && prompt.selectable_tokens() > 0;
        let guided = options.strategy == Strategy::Guided && selecting;
        let guide = if guided { Some(Guide::new(decoder, &prompt, &rows)?) } else { None };
        let blended = options.strategy == Strategy::Blend && selecting;
        let stops = options.early_stop.window > 0 && prompt.chunk_starts.len() > 2;
        Ok(Self {
            rows: Rows::new(decoder, &prompt, rows.clone())?,
            outcome: Outcome { rows: RowRanges::from_slots(rows.iter().copied()), ..Outcome::default() },
            layers: decoder.config().layers,
            layer: 0,
            at: At::Project(0, Vec::new()),
            guide,
            blend: blended.then(|| Blend::new(&prompt, decoder.config().layers)),
            focus: stops
                .then(|| Focus::new(options.early_stop, decoder.config().layers, prompt.chunk_starts.len() - 1)),
            capture: prompt.capture.then(|| Capture::new(&prompt)),
            prompt,
            cache,
            placing,
        })
    }

    /// The layer whose stored KV the next step needs; none when it is in place.
    pub(crate) fn wants(&self) -> Option<u32> {
        let layer = match &self.guide {
            Some(guide) => guide.wants()?,
            None if matches!(self.at, At::Project(0, _)) => self.layer,
            None => return None,
        };
        (!self.placing.done(layer)).then_some(layer)
    }

    /// Whether this layer's stored KV is in place.
    pub(crate) fn placed(&self, layer: u32) -> bool {
        self.placing.done(layer)
    }

    /// Computes at most `rows` rows of the current layer. `stored`: by part, the layer that [`Prefill::wants`] names.
    pub(crate) fn advance(
        &mut self,
        decoder: &Decoder,
        stored: &[Option<LayerKv>],
        rows: usize,
    ) -> Result<Step, Error> {
        if let Some(layer) = self.wants() {
            self.placing.place(&mut self.cache, layer, stored)?;
        }
        if let Some(guide) = &mut self.guide {
            if let Some(selection) = guide.advance(decoder, &self.prompt, &mut self.cache)? {
                self.guide = None;
                self.outcome.scores = selection.scores;
                let rows: Vec<u32> = self.outcome.rows.union(&selection.rows).slots().collect();
                self.outcome.rows = RowRanges::from_slots(rows.iter().copied());
                self.rows = Rows::new(decoder, &self.prompt, rows)?;
            }
            return Ok(Step::More);
        }
        match std::mem::replace(&mut self.at, At::Project(0, Vec::new())) {
            At::Project(first, queries) => self.project(decoder, first, rows, queries)?,
            At::Attend(first, query, outputs) => return self.attend(decoder, first, rows, query, outputs),
        }
        Ok(Step::More)
    }

    fn project(&mut self, decoder: &Decoder, first: usize, most: usize, mut queries: Vec<Tensor>) -> Result<(), Error> {
        let end = first + slice_of(self.rows.slots.len() - first, most);
        let slots = &self.rows.slots[first..end];
        let hidden = self.rows.hidden.f_narrow(0, first as i64, slots.len() as i64)?;
        let rotation = self.rows.rotation.narrow(first, slots.len())?;
        let projected = decoder.project(self.layer, &hidden, &rotation)?;
        if let Some(blend) = self.blend.as_mut().filter(|blend| blend.narrows(self.layer)) {
            blend.compare(&self.cache, self.layer, slots, &projected, self.prompt.chunk_starts[0])?;
        }
        self.cache.write(self.layer, slots, &projected.rotated_key, &projected.value)?;
        if let Some(capture) = &mut self.capture {
            capture.keep(self.layer, &projected)?;
        }
        queries.push(projected.query);
        if end < self.rows.slots.len() {
            self.at = At::Project(end, queries);
            return Ok(());
        }
        let selectable = self.rows.slots.iter().filter(|&&slot| self.prompt.selectable(slot)).count();
        self.outcome.projected += selectable as u64;
        let mut query = joined(queries)?;
        if let Some(kept) = self.narrow()? {
            query = query.f_index_select(0, &index(&kept, query.device())?)?;
            self.rows.keep(decoder, &self.prompt, &kept)?;
        }
        self.at = At::Attend(0, query, Vec::new());
        Ok(())
    }

    /// The rows that go on after their K and V are written; none for all.
    fn narrow(&mut self) -> Result<Option<Vec<usize>>, Error> {
        let slots = &self.rows.slots;
        let mut kept: Option<RowRanges> = None;
        if let Some(blend) = self.blend.as_mut().filter(|blend| blend.narrows(self.layer)) {
            let selection = blend.select(&self.prompt, slots)?;
            let unselectable: Vec<u32> = slots.iter().copied().filter(|&slot| !self.prompt.selectable(slot)).collect();
            let rows = selection.rows.union(&RowRanges::from_slots(unselectable.iter().copied()));
            self.outcome.scores = selection.scores;
            self.outcome.rows = rows.clone();
            kept = Some(rows);
        }
        if self.layer + 1 == self.layers && self.capture.is_none() {
            kept = Some(RowRanges::from_range(self.prompt.outputs.clone()));
        }
        let Some(kept) = kept else { return Ok(None) };
        let kept: Vec<usize> = (0..slots.len()).filter(|&row| kept.contains(slots[row])).collect();
        Ok(Some(kept))
    }

    fn attend(
        &mut self,
        decoder: &Decoder,
        first: usize,
        most: usize,
        query: Tensor,
        mut outputs: Vec<Tensor>,
    ) -> Result<Step, Error> {
        let slots = &self.rows.slots;
        let mut end = first + slice_of(slots.len() - first, most);
        // Question rows stand in slices of their own where their look at the chunks is asked for.
        let question = slots.partition_point(|&slot| slot < self.prompt.question_start());
        if self.focus.is_some() && first < question {
            end = end.min(question);
        }
        let rows = (end - first) as i64;
        let query_rows = query.f_narrow(0, first as i64, rows)?;
        let last = self.visible(first, end);
        let (layer, two_part) = (self.layer, self.prompt.two_part.as_ref());
        let asks = self.focus.is_some() && first >= question;
        let attention = if asks || self.capture.is_some() {
            let starts = &self.prompt.chunk_starts;
            let (attention, masses) = attend_masses(&self.cache, layer, &query_rows, &last, two_part, starts)?;
            if let Some(focus) = self.focus.as_mut().filter(|_| asks) {
                focus.look(&numbers(&masses.f_sum_dim_intlist([0].as_slice(), false, Kind::Float)?)?);
            }
            if let Some(capture) = &mut self.capture {
                capture.look(&self.rows.slots[first..end], &masses)?;
            }
            attention
        } else {
            attend(&self.cache, layer, &query_rows, &last, two_part)?
        };
        let hidden = self.rows.hidden.f_narrow(0, first as i64, rows)?;
        outputs.push(decoder.finish(layer, &hidden, &attention)?);
        if end < self.rows.slots.len() {
            self.at = At::Attend(end, query, outputs);
            return Ok(Step::More);
        }
        self.rows.hidden = joined(outputs)?;
        self.layer += 1;
        if self.layer < self.layers {
            self.give_up(decoder)?;
            return Ok(Step::More);
        }
        let outputs = self.rows.slots.partition_point(|&slot| slot < self.prompt.outputs.start);
        let kept = self.rows.slots.len() - outputs;
        let empty = decoder.cache(1)?;
        Ok(Step::Done(Box::new(Finished {
            hidden: self.rows.hidden.f_narrow(0, outputs as i64, kept as i64)?,
            cache: std::mem::replace(&mut self.cache, empty),
            outcome: std::mem::take(&mut self.outcome),
            capture: self.capture.take(),
            prompt: self.prompt.clone(),
        })))
    }

    /// The last slot that each row sees.
    fn visible(&self, first: usize, end: usize) -> Vec<u32> {
        match self.prompt.options.mask {
            Mask::Right => self.rows.slots[first..end].to_vec(),
            Mask::BottomRight => {
                let hidden = self.prompt.tokens() - self.rows.slots.len() as u32;
                (first..end).map(|row| hidden + row as u32).collect()
            }
        }
    }

    /// Between two layers: rows of chunks that the question does not look at are not computed any more.
    fn give_up(&mut self, decoder: &Decoder) -> Result<(), Error> {
        let Some(focused) = self.focus.as_mut().and_then(|focus| focus.decide(self.layer)) else { return Ok(()) };
        self.focus = None;
        let prompt = &self.prompt;
        let unfocused =
            |slot: u32| prompt.selectable(slot) && prompt.chunk_of(slot).is_some_and(|chunk| !focused[chunk]);
        let slots = &self.rows.slots;
        let kept: Vec<usize> = (0..slots.len()).filter(|&row| !unfocused(slots[row])).collect();
        self.rows.keep(decoder, &self.prompt, &kept)
    }
}

impl Rows {
    fn new(decoder: &Decoder, prompt: &Prompt, slots: Vec<u32>) -> Result<Self, Error> {
        Ok(Self {
            rotation: decoder.rotation(&prompt.positions_of(&slots))?,
            hidden: decoder.embed(&prompt.ids_of(&slots))?,
            slots,
        })
    }

    /// Gives up all but the rows `kept`, ascending.
    fn keep(&mut self, decoder: &Decoder, prompt: &Prompt, kept: &[usize]) -> Result<(), Error> {
        if kept.len() == self.slots.len() {
            return Ok(());
        }
        self.hidden = self.hidden.f_index_select(0, &index(kept, self.hidden.device())?)?;
        self.slots = kept.iter().map(|&row| self.slots[row]).collect();
        self.rotation = decoder.rotation(&prompt.positions_of(&self.slots))?;
        Ok(())
    }
}

fn index(rows: &[usize], device: Device) -> Result<Tensor, Error> {
    let rows: Vec<i64> = rows.iter().map(|&row| row as i64).collect();
    Ok(Tensor::f_from_slice(&rows)?.f_to_device(device)?)
}

/// A vector of f32 out of the library.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f32>, Error> {
    let mut numbers = vec![0f32; tensor.numel()];
    tensor.f_contiguous()?.f_copy_data(&mut numbers, tensor.numel())?;
    Ok(numbers)
}
