//! What is kept of a prompt's chunks when they are captured in its context (Cache-Craft, arXiv 2502.15734): K before
//! rotation and V of every layer, and the attention between chunks (Eq. 3, 4 and 14), averaged over heads and layers.
//!
//! Every row of the prompt is computed when this is asked for, so what is kept is exactly what full attention computes.

use kvsplice_kv::Encoding;
use kvsplice_model::decoder::Projected;
use kvsplice_model::encode::{ChunkKv, pack};
use kvsplice_model::{Config, Error};
use tch::Tensor;

use crate::prefill::numbers;
use crate::prompt::Prompt;

/// A prompt's chunks on their way.
pub(crate) struct Capture {
    /// First slot of each chunk, and of the question.
    starts: Vec<u32>,
    /// By layer, slices of all rows.
    layers: Vec<Vec<(Tensor, Tensor)>>,
    /// `[chunks][chunks]`: mass of a chunk's rows on a chunk, summed over rows and layers.
    masses: Vec<Vec<f64>>,
    /// By chunk and token: mass on all chunks before, summed over layers.
    external: Vec<Vec<f64>>,
}

/// One captured chunk.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) kv: ChunkKv,
    /// Mass of the chunk's rows on each chunk before it, summed over rows, mean over layers (Eq. 3).
    pub(crate) inter: Vec<f32>,
    /// The same on itself (Eq. 4).
    pub(crate) intra: f32,
    /// By token, the mass on all chunks before, mean over layers (Eq. 14).
    pub(crate) external: Vec<f32>,
}

impl Capture {
    pub(crate) fn new(prompt: &Prompt) -> Self {
        let starts = prompt.chunk_starts.clone();
        let chunks = starts.len() - 1;
        Self {
            layers: Vec::new(),
            masses: vec![vec![0.0; chunks]; chunks],
            external: starts.windows(2).map(|pair| vec![0.0; (pair[1] - pair[0]) as usize]).collect(),
            starts,
        }
    }

    /// A slice of rows, in ascending order.
    pub(crate) fn keep(&mut self, layer: u32, rows: &Projected) -> Result<(), Error> {
        self.layers.resize_with(self.layers.len().max(layer as usize + 1), Vec::new);
        // Copies: the projection's own buffer holds queries too.
        self.layers[layer as usize].push((rows.key.f_contiguous()?, rows.value.f_contiguous()?));
        Ok(())
    }

    /// Masses `[rows, chunks]` of the rows at `slots`.
    pub(crate) fn look(&mut self, slots: &[u32], masses: &Tensor) -> Result<(), Error> {
        let chunks = self.masses.len();
        let numbers = numbers(masses)?;
        for (slot, row) in slots.iter().zip(numbers.chunks_exact(chunks)) {
            let after = self.starts.partition_point(|start| start <= slot);
            let Some(chunk) = after.checked_sub(1).filter(|&chunk| chunk < chunks) else { continue };
            for (sum, mass) in self.masses[chunk].iter_mut().zip(row) {
                *sum += f64::from(*mass);
            }
            let before: f64 = row[..chunk].iter().map(|&mass| f64::from(mass)).sum();
            self.external[chunk][(slot - self.starts[chunk]) as usize] += before;
        }
        Ok(())
    }

    /// The chunks, in prompt order.
    pub(crate) fn finish(self, config: &Config, encoding: Encoding) -> Result<Vec<Captured>, Error> {
        let layers = self.layers.len().max(1) as f64;
        let mean = |sum: &f64| (sum / layers) as f32;
        let mut chunks = Vec::new();
        for (index, pair) in self.starts.windows(2).enumerate() {
            let (first, tokens) = (i64::from(pair[0]), i64::from(pair[1] - pair[0]));
            chunks.push(Captured {
                kv: pack(config, encoding, &self.layers, first, tokens)?,
                inter: self.masses[index][..index].iter().map(mean).collect(),
                intra: mean(&self.masses[index][index]),
                external: self.external[index].iter().map(mean).collect(),
            });
        }
        Ok(chunks)
    }
}
