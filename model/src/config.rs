//! The shape of a decoder.

use serde::{Deserialize, Serialize};

/// The shape and constants of a decoder of the Llama family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Decoder layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Numbers a head.
    pub head_dim: u32,
    /// Width of the MLP.
    pub intermediate: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Longest prompt with its output, tokens.
    pub context: u32,
    /// RMSNorm's epsilon.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Q, K and V have a bias (Qwen2).
    pub qkv_bias: bool,
    /// Queries and keys are normalized per head (Qwen3).
    pub qk_norm: bool,
    /// The output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    /// Ids that end an answer.
    pub eos: Vec<u32>,
}

/// How rotary frequencies differ from the plain ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// θ^(−2i/d).
    None,
    /// Llama 3: low frequencies divided by `factor`, the band between interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Below original_context / this many turns: scaled fully.
        low_freq_factor: f64,
        /// Above original_context / this many turns: not scaled.
        high_freq_factor: f64,
        /// Context of the original training.
        original_context: f64,
    },
    /// One divisor a pair, from the model file.
    Factors(Vec<f64>),
}

impl Config {
    /// Two layers of the family with every feature that the demo models have, for tests.
    pub fn tiny(vocabulary: u32) -> Self {
        Self {
            layers: 2,
            hidden: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            intermediate: 96,
            vocabulary,
            context: 8192,
            norm_eps: 1e-6,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::None,
            qkv_bias: true,
            qk_norm: false,
            tied_embeddings: true,
            eos: Vec::new(),
        }
    }

    /// Names that [`Config::shape`] knows.
    pub const SHAPES: [&str; 2] = ["tiny", "qwen2.5-14b"];

    /// A shape by name, for random weights; `None` if there is none.
    pub fn shape(name: &str, vocabulary: u32) -> Option<Self> {
        match name {
            "tiny" => Some(Self::tiny(vocabulary)),
            "qwen2.5-14b" => Some(Self {
                layers: 48,
                hidden: 5120,
                heads: 40,
                kv_heads: 8,
                head_dim: 128,
                intermediate: 13824,
                vocabulary,
                context: 32768,
                norm_eps: 1e-6,
                rope_theta: 1e6,
                rope_scaling: RopeScaling::None,
                qkv_bias: true,
                qk_norm: false,
                tied_embeddings: false,
                eos: Vec::new(),
            }),
            _ => None,
        }
    }

    /// Numbers of all matrices.
    pub fn weights(&self) -> u64 {
        let outer = u64::from(self.vocabulary) * u64::from(self.hidden) * if self.tied_embeddings { 1 } else { 2 };
        outer + self.layer_weights() * u64::from(self.layers)
    }

    /// Refuses numbers that no model has: what a hostile file says must not become sizes of buffers. Returns which.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (what, value, most) in [
            ("layers", self.layers, 4096),
            ("hidden size", self.hidden, 1 << 18),
            ("heads", self.heads, 4096),
            ("KV heads", self.kv_heads, self.heads),
            ("head size", self.head_dim, 4096),
            ("MLP size", self.intermediate, 1 << 20),
            ("vocabulary", self.vocabulary, 1 << 24),
            ("context", self.context, 1 << 24),
        ] {
            if value == 0 || value > most {
                return Err(format!("{what} must be 1 to {most}, got {value}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} heads cannot share {} KV heads", self.heads, self.kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head size must be even to be rotated, got {}", self.head_dim));
        }
        for (what, value) in [("norm epsilon", self.norm_eps), ("rope base", self.rope_theta)] {
            if !value.is_finite() || value <= 0.0 {
                return Err(format!("{what} must be a positive number, got {value}"));
            }
        }
        let frequencies = self.inverse_frequencies();
        if frequencies.len() != self.head_dim as usize / 2 || !frequencies.iter().all(|number| number.is_finite()) {
            return Err(format!("rope scaling {:?} does not fit head size {}", self.rope_scaling, self.head_dim));
        }
        Ok(())
    }

    /// One inverse frequency a pair of numbers, `head_dim / 2` of them.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let pairs = self.head_dim / 2;
        let plain = (0..pairs).map(|pair| self.rope_theta.powf(-f64::from(pair) / f64::from(pairs)));
        match &self.rope_scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Factors(factors) => plain.zip(factors).map(|(frequency, factor)| frequency / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => plain
                .map(|frequency| {
                    let turns = original_context * frequency / std::f64::consts::TAU;
                    let smooth = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    smooth * frequency + (1.0 - smooth) * frequency / factor
                })
                .collect(),
        }
    }

    /// Multiply-adds of the matrix products of one row in one layer (attention itself not counted).
    pub fn layer_weights(&self) -> u64 {
        let (hidden, dim) = (u64::from(self.hidden), u64::from(self.head_dim));
        let (heads, kv_heads) = (u64::from(self.heads), u64::from(self.kv_heads));
        hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * u64::from(self.intermediate)
    }

    /// Floating-point operations of computing rows at these slots through all layers, with `outputs`
    /// rows through the last attention, MLP and, for one row, the output matrix.
    pub fn prefill_flops(&self, slots: impl Iterator<Item = u32>, outputs: u64) -> f64 {
        let (mut rows, mut pairs) = (0u64, 0u64);
        for slot in slots {
            rows += 1;
            pairs += u64::from(slot) + 1;
        }
        let (hidden, dim) = (u64::from(self.hidden), u64::from(self.head_dim));
        let attention = 4 * u64::from(self.heads) * dim;
        let layers = u64::from(self.layers);
        let last_layer_kv = hidden * dim * u64::from(self.heads + 2 * self.kv_heads);
        let linear =
            2 * (self.layer_weights() * rows * (layers - 1) + last_layer_kv * rows + self.layer_weights() * outputs);
        let head = 2 * hidden * u64::from(self.vocabulary) * outputs;
        (linear + attention * pairs * (layers - 1) + head) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_leaves_high_frequencies_and_divides_low_ones() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let plain = Config { head_dim: 128, rope_theta: 5e5, ..Config::tiny(10) };
        let scaled = Config { rope_scaling: scaling, ..plain.clone() };
        let (plain, scaled) = (plain.inverse_frequencies(), scaled.inverse_frequencies());
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-9);
        assert!(scaled.windows(2).all(|pair| pair[0] > pair[1]));
    }
}
