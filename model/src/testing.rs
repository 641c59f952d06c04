//! What the tests of weight sources share: weights in memory under the names of both formats, and a small tokenizer.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value, write};
use tch::Tensor;

use crate::decoder::{Keep, Segment};
use crate::random::Random;
use crate::weights::{LayerWeights, OuterWeights, Weights};
use crate::{Config, Decoder, Dtype, Error, Spec};

/// Tokens of the small tokenizer: the special ones, the bytes, and some merges.
pub(crate) const VOCABULARY: u32 = 512;

/// What the logits are compared over.
pub(crate) const PROMPT: [u32; 9] = [1, 300, 17, 42, 511, 260, 33, 90, 2];

/// Weights in memory. Clones share the tensors.
pub(crate) struct Held {
    outer: OuterWeights,
    layers: Vec<LayerWeights>,
}

impl Held {
    pub(crate) fn random(config: &Config, seed: u64) -> Self {
        let mut random = Random::new(seed, tch::Device::Cpu);
        let outer = random.outer(config).unwrap();
        Self { outer, layers: (0..config.layers).map(|layer| random.layer(config, layer).unwrap()).collect() }
    }

    pub(crate) fn read(config: &Config, mut weights: Box<dyn Weights>) -> Self {
        let outer = weights.outer(config).unwrap();
        Self { outer, layers: (0..config.layers).map(|layer| weights.layer(config, layer).unwrap()).collect() }
    }

    /// Visits every tensor with its names in Hugging Face folders and in GGUF files.
    pub(crate) fn each(&mut self, mut visit: impl FnMut(&str, &str, &mut Tensor)) {
        visit("model.embed_tokens.weight", "token_embd.weight", &mut self.outer.embedding);
        visit("model.norm.weight", "output_norm.weight", &mut self.outer.norm);
        if let Some(head) = &mut self.outer.head {
            visit("lm_head.weight", "output.weight", head);
        }
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let mut visit = |hub: &str, gguf: &str, tensor: &mut Tensor| {
                visit(&format!("model.layers.{index}.{hub}"), &format!("blk.{index}.{gguf}"), tensor);
            };
            visit("input_layernorm.weight", "attn_norm.weight", &mut layer.attention_norm);
            visit("self_attn.q_proj.weight", "attn_q.weight", &mut layer.query);
            visit("self_attn.k_proj.weight", "attn_k.weight", &mut layer.key);
            visit("self_attn.v_proj.weight", "attn_v.weight", &mut layer.value);
            if let Some([query, key, value]) = &mut layer.qkv_bias {
                visit("self_attn.q_proj.bias", "attn_q.bias", query);
                visit("self_attn.k_proj.bias", "attn_k.bias", key);
                visit("self_attn.v_proj.bias", "attn_v.bias", value);
            }
            if let Some([query, key]) = &mut layer.qk_norm {
                visit("self_attn.q_norm.weight", "attn_q_norm.weight", query);
                visit("self_attn.k_norm.weight", "attn_k_norm.weight", key);
            }
            visit("self_attn.o_proj.weight", "attn_output.weight", &mut layer.output);
            visit("post_attention_layernorm.weight", "ffn_norm.weight", &mut layer.mlp_norm);
            visit("mlp.gate_proj.weight", "ffn_gate.weight", &mut layer.gate);
            visit("mlp.up_proj.weight", "ffn_up.weight", &mut layer.up);
            visit("mlp.down_proj.weight", "ffn_down.weight", &mut layer.down);
        }
    }

    /// Every number, tensor after tensor.
    pub(crate) fn numbers(&mut self) -> Vec<f32> {
        let mut all = Vec::new();
        self.each(|_, _, tensor| all.extend(numbers(tensor)));
        all
    }

    /// The logits of a decoder with exactly these weights.
    pub(crate) fn logits(self, config: &Config) -> Vec<f32> {
        logits(config, Box::new(self)).unwrap()
    }
}

impl Weights for Held {
    fn outer(&mut self, _: &Config) -> Result<OuterWeights, Error> {
        let OuterWeights { embedding, norm, head } = &self.outer;
        let head = head.as_ref().map(Tensor::shallow_clone);
        Ok(OuterWeights { embedding: embedding.shallow_clone(), norm: norm.shallow_clone(), head })
    }

    fn layer(&mut self, _: &Config, layer: u32) -> Result<LayerWeights, Error> {
        let layer = &self.layers[layer as usize];
        Ok(LayerWeights {
            attention_norm: layer.attention_norm.shallow_clone(),
            query: layer.query.shallow_clone(),
            key: layer.key.shallow_clone(),
            value: layer.value.shallow_clone(),
            qkv_bias: layer.qkv_bias.as_ref().map(|biases| biases.each_ref().map(Tensor::shallow_clone)),
            qk_norm: layer.qk_norm.as_ref().map(|norms| norms.each_ref().map(Tensor::shallow_clone)),
            output: layer.output.shallow_clone(),
            mlp_norm: layer.mlp_norm.shallow_clone(),
            gate: layer.gate.shallow_clone(),
            up: layer.up.shallow_clone(),
            down: layer.down.shallow_clone(),
        })
    }
}

pub(crate) fn numbers(tensor: &Tensor) -> Vec<f32> {
    let mut numbers = vec![0f32; tensor.numel()];
    tensor.contiguous().copy_data(&mut numbers, tensor.numel());
    numbers
}

/// Logits after the last token of [`PROMPT`], in f32.
pub(crate) fn logits(config: &Config, weights: Box<dyn Weights>) -> Result<Vec<f32>, Error> {
    let decoder = Decoder::load(config, weights, Dtype::F32, tch::Device::Cpu)?;
    let slots: Vec<u32> = (0..PROMPT.len() as u32).collect();
    let mut cache = decoder.cache(slots.len() as u32)?;
    let rotation = decoder.rotation(&slots)?;
    let mut hidden = decoder.embed(&PROMPT)?;
    for layer in 0..config.layers {
        let mut segments = [Segment { cache: &mut cache, slots: &slots, two_part: None }];
        hidden = decoder.layer(layer, &hidden, &rotation, &mut segments, Keep::All, None)?;
    }
    Ok(numbers(&decoder.logits(&hidden.narrow(0, slots.len() as i64 - 1, 1))?))
}

pub(crate) fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    assert!(expected.iter().all(|logit| logit.is_finite()), "{what}");
    let farthest = found.iter().zip(expected).map(|(found, expected)| (found - expected).abs()).fold(0f32, f32::max);
    assert!(farthest <= 1e-5, "{what}: logits differ by {farthest}");
}

/// The metadata of a tokenizer with the first [`VOCABULARY`] tokens of the demo auxiliary model, and its template.
pub(crate) fn tokenizer_metadata() -> Vec<(String, Value)> {
    let spec = Spec { model: "smollm2-135m-instruct".to_owned(), ..Spec::default() };
    let path = spec.path().expect("the demo models are needed: run `make models`");
    let content = Content::read(&mut BufReader::new(File::open(path).unwrap())).unwrap();
    let mut tokens = content.metadata["tokenizer.ggml.tokens"].to_vec().unwrap().clone();
    tokens.truncate(VOCABULARY as usize);
    let known: std::collections::HashSet<&String> = tokens.iter().map(|token| token.to_string().unwrap()).collect();
    let mut metadata = Vec::new();
    for (key, value) in content.metadata.iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        let value = match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", _) => Value::Array(tokens.clone()),
            ("tokenizer.ggml.token_type", Value::Array(kinds)) => Value::Array(kinds[..tokens.len()].to_vec()),
            ("tokenizer.ggml.merges", Value::Array(merges)) => {
                let within = |merge: &&Value| {
                    let (left, right) = merge.to_string().unwrap().split_once(' ').unwrap();
                    [left.to_owned(), right.to_owned(), format!("{left}{right}")]
                        .iter()
                        .all(|part| known.contains(part))
                };
                Value::Array(merges.iter().filter(within).cloned().collect())
            }
            (_, value) => value.clone(),
        };
        metadata.push((key.clone(), value));
    }
    metadata.sort_by(|left, right| left.0.cmp(&right.0));
    metadata
}

/// The metadata of a GGUF file of this shape.
pub(crate) fn metadata(architecture: &str, config: &Config) -> Vec<(String, Value)> {
    let number = |key: &str, value: u32| (format!("{architecture}.{key}"), Value::U32(value));
    let mut metadata = vec![
        ("general.architecture".to_owned(), Value::String(architecture.to_owned())),
        number("block_count", config.layers),
        number("embedding_length", config.hidden),
        number("attention.head_count", config.heads),
        number("attention.head_count_kv", config.kv_heads),
        number("attention.key_length", config.head_dim),
        number("feed_forward_length", config.intermediate),
        number("context_length", config.context),
        (format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::F32(config.norm_eps as f32)),
        (format!("{architecture}.rope.freq_base"), Value::F32(config.rope_theta as f32)),
    ];
    metadata.extend(tokenizer_metadata());
    metadata
}

pub(crate) fn write_gguf(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
}
