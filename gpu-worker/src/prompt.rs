//! A prompt as computation sees it: ids, positions and slots, which chunk tokens may be selected, and how rows attend.

use std::ops::Range;

use kvsplice_kv::options::{Budget, ScaleForm};
use kvsplice_kv::select::{ScoredChunk, select};
use kvsplice_kv::{Options, RowRanges};
use kvsplice_model::Error;
use kvsplice_model::attention::TwoPart;

use crate::request::{Kind, Request};

/// What stays the same while a prompt is computed.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) options: Options,
    ids: Vec<u32>,
    positions: Vec<u32>,
    /// The slots of each part.
    pub(crate) parts: Vec<Range<u32>>,
    /// First slot of each chunk, and of the question.
    pub(crate) chunk_starts: Vec<u32>,
    /// By chunk, whether its tokens may be selected: it is reused, and not exact (unless the paper's budget counts it).
    chunks: Vec<bool>,
    pub(crate) two_part: Option<TwoPart>,
    /// Slots whose last hidden state is wanted.
    pub(crate) outputs: Range<u32>,
    /// Chunks are kept as variants of this context.
    pub(crate) capture: bool,
}

/// Rows that the worker picked, and the scores that it picked them by.
pub(crate) struct Selection {
    pub(crate) rows: RowRanges,
    /// One a chunk token; −1 where not selectable.
    pub(crate) scores: Vec<f32>,
}

impl Prompt {
    /// `cached`: by part, whether stored KV is used.
    pub(crate) fn new(request: &Request, cached: &[bool]) -> Self {
        let chunk_parts = || request.parts.iter().zip(cached).filter(|(part, _)| part.kind == Kind::Chunk);
        let count = chunk_parts().count();
        let question = request.parts.last().map_or(0, |part| part.slots.start);
        let mut chunk_starts: Vec<u32> = chunk_parts().map(|(part, _)| part.slots.start).collect();
        chunk_starts.push(question);
        let options = request.options;
        let counts_exact = options.budget == Budget::Nominal && count > 1;
        let context = chunk_starts[0]..question;
        let two_part = options.two_part() && !context.is_empty();
        let exponent = match options.context_form {
            ScaleForm::Paper => options.context_scale,
            ScaleForm::Code => options.context_scale * options.context_temperature,
        };
        let first_output = request.tokens().saturating_sub(request.targets.len() as u32 + 1);
        let last_output = if request.targets.is_empty() { first_output } else { request.tokens() - 2 };
        Self {
            options,
            ids: request.parts.iter().flat_map(|part| part.ids.iter().copied()).collect(),
            positions: request
                .parts
                .iter()
                .flat_map(|part| part.first_position..part.first_position + part.ids.len() as u32)
                .collect(),
            parts: request.parts.iter().map(|part| part.slots.clone()).collect(),
            chunks: chunk_parts().map(|(part, cached)| *cached && (counts_exact || !part.exact)).collect(),
            chunk_starts,
            two_part: two_part.then_some(TwoPart { context, temperature: options.context_temperature, exponent }),
            outputs: first_output..last_output + 1,
            capture: request.capture,
        }
    }

    /// Tokens, targets included.
    pub(crate) fn tokens(&self) -> u32 {
        self.ids.len() as u32
    }

    /// First slot of the question.
    pub(crate) fn question_start(&self) -> u32 {
        self.chunk_starts.last().copied().unwrap_or(0)
    }

    pub(crate) fn ids_of(&self, slots: &[u32]) -> Vec<u32> {
        slots.iter().map(|&slot| self.ids[slot as usize]).collect()
    }

    pub(crate) fn positions_of(&self, slots: &[u32]) -> Vec<u32> {
        slots.iter().map(|&slot| self.positions[slot as usize]).collect()
    }

    /// The position of the token at `slot`, which may be behind the prompt.
    pub(crate) fn position(&self, slot: u32) -> u32 {
        match (self.positions.get(slot as usize), self.positions.last()) {
            (Some(position), _) => *position,
            (None, Some(last)) => last + (slot + 1 - self.tokens()),
            (None, None) => slot,
        }
    }

    /// Which chunk a slot belongs to.
    pub(crate) fn chunk_of(&self, slot: u32) -> Option<usize> {
        let after = self.chunk_starts.partition_point(|&start| start <= slot);
        (1..self.chunk_starts.len()).contains(&after).then(|| after - 1)
    }

    /// Whether the token at `slot` is a reused one that may be selected.
    pub(crate) fn selectable(&self, slot: u32) -> bool {
        self.chunk_of(slot).is_some_and(|chunk| self.chunks[chunk])
    }

    /// N: how many tokens may be selected.
    pub(crate) fn selectable_tokens(&self) -> usize {
        let lengths = self.chunk_starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        lengths.zip(&self.chunks).filter(|(_, selectable)| **selectable).map(|(length, _)| length).sum()
    }

    /// Every selectable slot.
    pub(crate) fn all_selectable(&self) -> RowRanges {
        let ranges = self.chunk_starts.windows(2).zip(&self.chunks).filter(|(_, selectable)| **selectable);
        RowRanges::from_ranges(ranges.map(|(pair, _)| pair[0]..pair[1]))
    }

    /// Picks rows by `scores`, one a chunk token in prompt order, under `options`.
    pub(crate) fn select(&self, options: &Options, mut scores: Vec<f32>) -> Result<Selection, Error> {
        let first = self.chunk_starts[0];
        let spans: Vec<(u32, u32)> = (0..self.question_start() - first).map(|token| (token, token + 1)).collect();
        let mut chunks = Vec::new();
        for (pair, &selectable) in self.chunk_starts.windows(2).zip(&self.chunks) {
            let range = (pair[0] - first) as usize..(pair[1] - first) as usize;
            if !selectable {
                scores[range.clone()].fill(-1.0);
            }
            chunks.push((pair[0], selectable, range));
        }
        let chunks: Vec<ScoredChunk<'_>> = chunks
            .into_iter()
            .map(|(first_slot, selectable, range)| ScoredChunk {
                first_slot,
                selectable,
                primary: &spans[..range.len()],
                auxiliary: &spans[..range.len()],
                scores: &scores[range],
            })
            .collect();
        let selection = select(options, &chunks).map_err(|error| Error::Argument(error.to_string()))?;
        Ok(Selection { rows: selection.rows, scores })
    }
}
