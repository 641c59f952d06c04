//! Models in GGUF files: one file with weights, configuration, tokenizer and chat template.
//!
//! Reading and dequantizing are candle's; here is what the metadata means.

use std::fs::File;
use std::io::BufReader;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use tch::Tensor;

use crate::config::RopeScaling;
use crate::spec::Opened;
use crate::tokenizer::{ByteLevelBpe, Tokenizer};
use crate::weights::{LayerWeights, OuterWeights, Weights, pairs_to_halves, unknown_bias};
use crate::{ChatTemplate, Config, Error};

/// The types that users meet and tests cover.
const TYPES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";

/// Divisors of the inverse rotary frequencies, such as Llama 3's.
const ROPE_FACTORS: &str = "rope_freqs.weight";

struct Gguf {
    path: String,
    content: Content,
    reader: BufReader<File>,
    /// Rows of Q and K come in the pairs convention (architecture `llama`).
    pairs: bool,
}

/// What candle says, without the backtrace that it appends when RUST_BACKTRACE is set.
fn said(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Why a header cannot be read. A tensor of a type that nobody here knows is no damage.
fn unreadable(path: &str, error: &candle_core::Error) -> Error {
    let path = path.to_owned();
    let said = said(error);
    match said.strip_prefix("unknown dtype for tensor ") {
        Some(number) => Error::Unsupported { path, what: format!("GGUF tensor type {number}; supported: {TYPES}") },
        None => Error::Format { path, what: format!("not a readable GGUF file: {said}") },
    }
}

/// Opens a file and reads all but the weights.
pub(crate) fn open(path: &Path) -> Result<Opened, Error> {
    let shown = path.display().to_string();
    let file = File::open(path).map_err(|source| Error::Read { path: shown.clone(), source })?;
    let mut reader = BufReader::new(file);
    // A hostile file may ask the reader for absurd sizes, which panics.
    let content = catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)))
        .map_err(|_| Error::Format { path: shown.clone(), what: "absurd sizes in the header".to_owned() })?
        .map_err(|error| unreadable(&shown, &error))?;
    let meta = Metadata { path: &shown, content: &content };
    let architecture = meta.text("general.architecture")?;
    let pairs = match architecture.as_str() {
        "llama" => true,
        "qwen2" | "qwen3" => false,
        other => return Err(meta.unsupported(format!("architecture {other}; supported: llama, qwen2, qwen3"))),
    };
    let tokenizer = meta.tokenizer()?;
    let mut config = meta.config(&architecture)?;
    let template = meta.template(&tokenizer)?;
    if let Some(bias) = unknown_bias(content.tensor_infos.keys()) {
        return Err(meta.unsupported(format!("tensor {bias}; supported: biases of query, key and value")));
    }
    let mut gguf = Gguf { path: shown.clone(), content, reader, pairs };
    if gguf.content.tensor_infos.contains_key(ROPE_FACTORS) {
        config.rope_scaling = RopeScaling::Factors(gguf.rope_factors(config.head_dim)?);
    }
    config.check().map_err(|what| Error::Format { path: shown, what })?;
    Ok(Opened { config, tokenizer, template, weights: Box::new(gguf) })
}

struct Metadata<'a> {
    path: &'a str,
    content: &'a Content,
}

impl Metadata<'_> {
    fn format(&self, what: String) -> Error {
        Error::Format { path: self.path.to_owned(), what }
    }

    fn unsupported(&self, what: String) -> Error {
        Error::Unsupported { path: self.path.to_owned(), what }
    }

    fn get(&self, key: &str) -> Result<&Value, Error> {
        self.content.metadata.get(key).ok_or_else(|| self.format(format!("metadata {key} is missing")))
    }

    fn text(&self, key: &str) -> Result<String, Error> {
        self.get(key)?.to_string().cloned().map_err(|error| self.format(format!("metadata {key}: {}", said(&error))))
    }

    fn number(&self, key: &str) -> Result<u32, Error> {
        integer(self.get(key)?).ok_or_else(|| self.format(format!("metadata {key} is not a 32-bit integer")))
    }

    fn number_or(&self, key: &str, default: u32) -> Result<u32, Error> {
        if self.content.metadata.contains_key(key) { self.number(key) } else { Ok(default) }
    }

    fn float(&self, key: &str) -> Result<f64, Error> {
        match self.get(key)? {
            Value::F32(value) => Ok(f64::from(*value)),
            Value::F64(value) => Ok(*value),
            _ => Err(self.format(format!("metadata {key} is not a float"))),
        }
    }

    fn texts(&self, key: &str) -> Result<Vec<String>, Error> {
        let values =
            self.get(key)?.to_vec().map_err(|error| self.format(format!("metadata {key}: {}", said(&error))))?;
        let texts: Result<Vec<_>, _> = values.iter().map(|value| value.to_string().cloned()).collect();
        texts.map_err(|error| self.format(format!("metadata {key}: {}", said(&error))))
    }

    fn config(&self, architecture: &str) -> Result<Config, Error> {
        let key = |name: &str| format!("{architecture}.{name}");
        let vocabulary = self.number_or(&key("vocab_size"), 0)?;
        let tokens = self.get("tokenizer.ggml.tokens")?.to_vec().map_or(0, Vec::len) as u32;
        let embedding = self.shape("token_embd.weight")?;
        let heads = self.number(&key("attention.head_count"))?;
        let hidden = self.number(&key("embedding_length"))?;
        if heads == 0 || self.number(&key("block_count"))? == 0 {
            return Err(self.format("a model needs heads and layers".to_owned()));
        }
        if let Some(value) = self.content.metadata.get(&key("rope.scaling.type")) {
            let kind = value.to_string().map(String::as_str).unwrap_or("");
            if kind != "none" && !kind.is_empty() {
                return Err(self.unsupported(format!("rope scaling {kind}; supported: none, Llama-3 factors")));
            }
        }
        let mut eos = vec![self.number("tokenizer.ggml.eos_token_id")?];
        for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            if self.content.metadata.contains_key(key) {
                eos.push(self.number(key)?);
            }
        }
        // The file's end token is often the base model's; chat models end a turn with <|im_end|>, <|eot_id|> or this one.
        for (id, token) in self.texts("tokenizer.ggml.tokens")?.iter().enumerate() {
            if ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>"].contains(&token.as_str()) {
                eos.push(id as u32);
            }
        }
        eos.sort_unstable();
        eos.dedup();
        Ok(Config {
            layers: self.number(&key("block_count"))?,
            hidden,
            heads,
            kv_heads: self.number_or(&key("attention.head_count_kv"), heads)?,
            head_dim: self.number_or(&key("attention.key_length"), hidden / heads)?,
            intermediate: self.number(&key("feed_forward_length"))?,
            vocabulary: vocabulary.max(tokens).max(embedding.first().copied().unwrap_or(0) as u32),
            context: self.number(&key("context_length"))?,
            norm_eps: self.float(&key("attention.layer_norm_rms_epsilon"))?,
            rope_theta: if self.content.metadata.contains_key(&key("rope.freq_base")) {
                self.float(&key("rope.freq_base"))?
            } else {
                1e4
            },
            rope_scaling: RopeScaling::None,
            qkv_bias: self.content.tensor_infos.contains_key("blk.0.attn_q.bias"),
            qk_norm: self.content.tensor_infos.contains_key("blk.0.attn_q_norm.weight"),
            tied_embeddings: !self.content.tensor_infos.contains_key("output.weight"),
            eos,
        })
    }

    fn shape(&self, tensor: &str) -> Result<Vec<usize>, Error> {
        let info = self.content.tensor_infos.get(tensor);
        info.map(|info| info.shape.dims().to_vec()).ok_or_else(|| self.format(format!("tensor {tensor} is missing")))
    }

    fn tokenizer(&self) -> Result<Tokenizer, Error> {
        let model = self.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(self.unsupported(format!("tokenizer {model}; supported: byte-level BPE (gpt2)")));
        }
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let kinds = self.get("tokenizer.ggml.token_type")?.to_vec().cloned().unwrap_or_default();
        let pre = if self.content.metadata.contains_key("tokenizer.ggml.pre") {
            self.text("tokenizer.ggml.pre")?
        } else {
            "gpt-2".to_owned()
        };
        // Kinds of tokens: 3 is control, 4 is user-defined.
        let of_kind = |wanted: u32| {
            let kinds = kinds.iter().enumerate();
            kinds.filter(move |(_, kind)| integer(kind) == Some(wanted)).map(|(id, _)| id as u32).collect::<Vec<_>>()
        };
        ByteLevelBpe {
            control: of_kind(3),
            user_defined: of_kind(4),
            merges: self.texts("tokenizer.ggml.merges")?,
            tokens,
            pre,
        }
        .build()
        .map_err(|error| self.format(error.to_string()))
    }

    fn template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate, Error> {
        let special = |key: &str| match self.content.metadata.get(key).and_then(integer) {
            Some(id) => tokenizer.token(id).unwrap_or_default(),
            None => String::new(),
        };
        ChatTemplate::new(
            &self.text("tokenizer.chat_template")?,
            special("tokenizer.ggml.bos_token_id"),
            special("tokenizer.ggml.eos_token_id"),
        )
    }
}

fn integer(value: &Value) -> Option<u32> {
    match value {
        Value::U8(value) => Some(u32::from(*value)),
        Value::U16(value) => Some(u32::from(*value)),
        Value::U32(value) => Some(*value),
        Value::U64(value) => u32::try_from(*value).ok(),
        Value::I32(value) => u32::try_from(*value).ok(),
        Value::I64(value) => u32::try_from(*value).ok(),
        _ => None,
    }
}

impl Gguf {
    /// One divisor a pair of numbers.
    fn rope_factors(&mut self, head_dim: u32) -> Result<Vec<f64>, Error> {
        let tensor = self.tensor(ROPE_FACTORS)?;
        let mut factors = vec![0f32; tensor.numel()];
        tensor.f_copy_data(&mut factors, tensor.numel())?;
        let usable = |factor: &f32| factor.is_finite() && *factor > 0.0;
        if factors.len() != head_dim as usize / 2 || !factors.iter().all(usable) {
            let what = format!("tensor {ROPE_FACTORS} must be {} positive numbers, one a pair of a head", head_dim / 2);
            return Err(Error::Format { path: self.path.clone(), what });
        }
        Ok(factors.into_iter().map(f64::from).collect())
    }

    /// Reads and dequantizes one tensor to f32.
    fn tensor(&mut self, name: &str) -> Result<Tensor, Error> {
        let format = |what: String| Error::Format { path: self.path.clone(), what };
        if !self.content.tensor_infos.contains_key(name) {
            return Err(format(format!("tensor {name} is missing")));
        }
        let mut read = || -> candle_core::Result<(Vec<usize>, Vec<f32>)> {
            let cpu = candle_core::Device::Cpu;
            let tensor = self.content.tensor(&mut self.reader, name, &cpu)?.dequantize(&cpu)?;
            Ok((tensor.dims().to_vec(), tensor.flatten_all()?.to_vec1::<f32>()?))
        };
        let (shape, numbers) = read().map_err(|error| {
            let line = said(&error);
            Error::Format {
                path: self.path.clone(),
                what: format!("tensor {name} cannot be read ({line}); is the file whole?"),
            }
        })?;
        let shape: Vec<i64> = shape.into_iter().map(|size| size as i64).collect();
        Ok(Tensor::f_from_slice(&numbers)?.f_view(shape.as_slice())?)
    }
}

impl Weights for Gguf {
    fn outer(&mut self, config: &Config) -> Result<OuterWeights, Error> {
        Ok(OuterWeights {
            embedding: self.tensor("token_embd.weight")?,
            norm: self.tensor("output_norm.weight")?,
            head: if config.tied_embeddings { None } else { Some(self.tensor("output.weight")?) },
        })
    }

    fn layer(&mut self, config: &Config, layer: u32) -> Result<LayerWeights, Error> {
        let mut get = |name: &str| self.tensor(&format!("blk.{layer}.{name}"));
        let mut weights = LayerWeights {
            attention_norm: get("attn_norm.weight")?,
            query: get("attn_q.weight")?,
            key: get("attn_k.weight")?,
            value: get("attn_v.weight")?,
            qkv_bias: if config.qkv_bias {
                Some([get("attn_q.bias")?, get("attn_k.bias")?, get("attn_v.bias")?])
            } else {
                None
            },
            qk_norm: if config.qk_norm { Some([get("attn_q_norm.weight")?, get("attn_k_norm.weight")?]) } else { None },
            output: get("attn_output.weight")?,
            mlp_norm: get("ffn_norm.weight")?,
            gate: get("ffn_gate.weight")?,
            up: get("ffn_up.weight")?,
            down: get("ffn_down.weight")?,
        };
        if self.pairs {
            weights.query = pairs_to_halves(&weights.query, config.heads, config.head_dim)?;
            weights.key = pairs_to_halves(&weights.key, config.kv_heads, config.head_dim)?;
            if let Some([query, key, _]) = &mut weights.qkv_bias {
                *query = pairs_to_halves(query, config.heads, config.head_dim)?;
                *key = pairs_to_halves(key, config.kv_heads, config.head_dim)?;
            }
        }
        Ok(weights)
    }
}

#[cfg(test)]
mod tests;
