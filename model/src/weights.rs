//! Where a decoder's tensors come from: a file, a folder, or a seed.

use tch::Tensor;

use crate::{Config, Error};

/// The tensors of one layer, in f32. Matrices are `[out, in]`.
pub(crate) struct LayerWeights {
    /// `[hidden]`
    pub(crate) attention_norm: Tensor,
    /// `[heads · head_dim, hidden]`, halves convention of rotation.
    pub(crate) query: Tensor,
    /// `[kv_heads · head_dim, hidden]`, halves convention of rotation.
    pub(crate) key: Tensor,
    /// `[kv_heads · head_dim, hidden]`
    pub(crate) value: Tensor,
    /// Biases of the three, in the same order and rows.
    pub(crate) qkv_bias: Option<[Tensor; 3]>,
    /// `[head_dim]` each: normalization of queries and of keys.
    pub(crate) qk_norm: Option<[Tensor; 2]>,
    /// `[hidden, heads · head_dim]`
    pub(crate) output: Tensor,
    /// `[hidden]`
    pub(crate) mlp_norm: Tensor,
    /// `[intermediate, hidden]`
    pub(crate) gate: Tensor,
    /// `[intermediate, hidden]`
    pub(crate) up: Tensor,
    /// `[hidden, intermediate]`
    pub(crate) down: Tensor,
}

/// The tensors outside the layers, in f32.
pub(crate) struct OuterWeights {
    /// `[vocabulary, hidden]`
    pub(crate) embedding: Tensor,
    /// `[hidden]`
    pub(crate) norm: Tensor,
    /// `[vocabulary, hidden]`; `None` when tied to the embedding.
    pub(crate) head: Option<Tensor>,
}

/// Reads tensors in the decoder's terms. Shapes are checked by the decoder.
pub(crate) trait Weights {
    /// Embedding, last norm, output matrix.
    fn outer(&mut self, config: &Config) -> Result<OuterWeights, Error>;

    /// One layer.
    fn layer(&mut self, config: &Config, layer: u32) -> Result<LayerWeights, Error>;
}

/// Turns rows of Q or K from the pairs convention of rotation (2i with 2i + 1) to halves (i with i + d/2).
pub(crate) fn pairs_to_halves(weight: &Tensor, heads: u32, head_dim: u32) -> Result<Tensor, Error> {
    let shape = weight.size();
    let (heads, half) = (i64::from(heads), i64::from(head_dim) / 2);
    Ok(weight.f_reshape([heads, half, 2, -1])?.f_transpose(1, 2)?.f_reshape(&shape)?)
}

/// The first of `names` that is a bias which the decoder does not have: leaving one out would answer wrongly.
pub(crate) fn unknown_bias<'a>(mut names: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    let known = ["q_proj.bias", "k_proj.bias", "v_proj.bias", "attn_q.bias", "attn_k.bias", "attn_v.bias"];
    names.find(|name| name.ends_with(".bias") && !known.iter().any(|known| name.ends_with(known)))
}
