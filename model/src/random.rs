//! Weights drawn from a seed, for tests and for speed: the same code path as real ones, without their files.

use kvsplice_kv::ModelDigest;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use crate::weights::{LayerWeights, OuterWeights, Weights};
use crate::{Config, Error};

/// Draws every tensor from its own stream of one seed.
pub(crate) struct Random {
    seed: u64,
    device: Device,
}

/// The digest of a random model: shape, seed, and the file that its tokenizer comes from.
pub(crate) fn digest(config: &Config, seed: u64, file: ModelDigest, device: Device) -> ModelDigest {
    // Other generators, other numbers.
    let drawn = if device == Device::Cpu { "" } else { " drawn on CUDA" };
    let text = format!("random weights{drawn}, seed {seed}, tokenizer {file}, {config:?}");
    ModelDigest::from_bytes(*blake3::hash(text.as_bytes()).as_bytes())
}

impl Random {
    pub(crate) fn new(seed: u64, device: Device) -> Self {
        Self { seed, device }
    }

    /// Uniform in ±`scale`, shape `[rows, columns]`; the stream number keeps tensors apart.
    fn matrix(&self, stream: u64, rows: u32, columns: u32, scale: f32) -> Result<Tensor, Error> {
        if self.device != Device::Cpu {
            // Billions of numbers: drawn where they stay.
            tch::manual_seed(self.seed.wrapping_mul(1 << 20).wrapping_add(stream) as i64);
            let shape = [i64::from(rows), i64::from(columns)];
            let mut numbers = Tensor::f_empty(shape, (Kind::Float, self.device))?;
            return Ok(numbers.f_uniform_(-f64::from(scale), f64::from(scale))?);
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream);
        let numbers: Vec<f32> =
            (0..u64::from(rows) * u64::from(columns)).map(|_| (rng.random::<f32>() * 2.0 - 1.0) * scale).collect();
        Ok(Tensor::f_from_slice(&numbers)?.f_view([i64::from(rows), i64::from(columns)])?)
    }

    /// One `[numbers]` vector around `center`.
    fn vector(&self, stream: u64, numbers: u32, center: f64, scale: f32) -> Result<Tensor, Error> {
        Ok(self.matrix(stream, numbers, 1, scale)?.f_view([-1])?.f_add_scalar(center)?)
    }
}

impl Weights for Random {
    fn outer(&mut self, config: &Config) -> Result<OuterWeights, Error> {
        Ok(OuterWeights {
            embedding: self.matrix(0, config.vocabulary, config.hidden, 1.0)?,
            norm: self.vector(1, config.hidden, 1.0, 0.2)?,
            head: if config.tied_embeddings {
                None
            } else {
                Some(self.matrix(2, config.vocabulary, config.hidden, 1.0)?)
            },
        })
    }

    fn layer(&mut self, config: &Config, layer: u32) -> Result<LayerWeights, Error> {
        let base = 100 + 20 * u64::from(layer);
        let (hidden, inner) = (config.hidden, config.intermediate);
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        // √(3/fan-in) keeps the variance; queries and keys get more, so that attention is not flat.
        let scale = |fan_in: u32| (3.0 / fan_in as f32).sqrt();
        let bias = |stream, numbers| self.vector(stream, numbers, 0.0, 0.3);
        Ok(LayerWeights {
            attention_norm: self.vector(base, hidden, 1.0, 0.2)?,
            query: self.matrix(base + 1, queries, hidden, 2.0 * scale(hidden))?,
            key: self.matrix(base + 2, keys, hidden, 2.0 * scale(hidden))?,
            value: self.matrix(base + 3, keys, hidden, scale(hidden))?,
            qkv_bias: if config.qkv_bias {
                Some([bias(base + 4, queries)?, bias(base + 5, keys)?, bias(base + 6, keys)?])
            } else {
                None
            },
            qk_norm: if config.qk_norm {
                let norm = |stream| self.vector(stream, config.head_dim, 1.0, 0.2);
                Some([norm(base + 7)?, norm(base + 8)?])
            } else {
                None
            },
            output: self.matrix(base + 9, hidden, queries, scale(queries))?,
            mlp_norm: self.vector(base + 10, hidden, 1.0, 0.2)?,
            gate: self.matrix(base + 11, inner, hidden, scale(hidden))?,
            up: self.matrix(base + 12, inner, hidden, scale(hidden))?,
            down: self.matrix(base + 13, hidden, inner, scale(inner))?,
        })
    }
}
