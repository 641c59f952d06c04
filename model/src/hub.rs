//! Models in Hugging Face folders: config.json, tokenizer.json, tokenizer_config.json, *.safetensors.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::config::RopeScaling;
use crate::spec::Opened;
use crate::weights::{LayerWeights, OuterWeights, Weights, unknown_bias};
use crate::{ChatTemplate, Config, Error, Tokenizer};

#[derive(Deserialize)]
struct RawConfig {
    model_type: String,
    hidden_size: u32,
    intermediate_size: u32,
    num_hidden_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    vocab_size: u32,
    max_position_embeddings: u32,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawScaling>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    use_sliding_window: bool,
    sliding_window: Option<u32>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Deserialize)]
struct RawScaling {
    #[serde(alias = "type")]
    rope_type: String,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Deserialize)]
struct RawTokenizerConfig {
    chat_template: Option<String>,
    bos_token: Option<Special>,
    eos_token: Option<Special>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Special {
    Text(String),
    Token { content: String },
}

impl Special {
    fn text(self) -> String {
        match self {
            Special::Text(text) | Special::Token { content: text } => text,
        }
    }
}

/// Opens a folder and reads all but the weights.
pub(crate) fn open(folder: &Path) -> Result<Opened, Error> {
    let raw: RawConfig = json(&folder.join("config.json"))?;
    let config = config(folder, raw)?;
    let path = folder.join("tokenizer.json");
    let bytes = read(&path)?;
    let tokenizer = Tokenizer::from_json(&bytes)
        .map_err(|error| Error::Format { path: path.display().to_string(), what: error.to_string() })?;
    let raw: RawTokenizerConfig = json(&folder.join("tokenizer_config.json"))?;
    let template = match raw.chat_template {
        Some(template) => template,
        None => String::from_utf8_lossy(&read(&folder.join("chat_template.jinja"))?).into_owned(),
    };
    let special = |token: Option<Special>| token.map(Special::text).unwrap_or_default();
    let template = ChatTemplate::new(&template, special(raw.bos_token), special(raw.eos_token))?;
    Ok(Opened { config, tokenizer, template, weights: Box::new(Folder::open(folder)?) })
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|source| Error::Read { path: path.display().to_string(), source })
}

fn json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, Error> {
    serde_json::from_slice(&read(path)?)
        .map_err(|error| Error::Format { path: path.display().to_string(), what: error.to_string() })
}

fn config(folder: &Path, raw: RawConfig) -> Result<Config, Error> {
    let path = folder.join("config.json").display().to_string();
    let unsupported = |what: String| Error::Unsupported { path: path.clone(), what };
    let (qkv_bias, qk_norm) = match raw.model_type.as_str() {
        "llama" | "mistral" => (raw.attention_bias, false),
        "qwen2" => (true, false),
        "qwen3" => (raw.attention_bias, true),
        other => return Err(unsupported(format!("model_type {other}; supported: llama, mistral, qwen2, qwen3"))),
    };
    // Mistral has no switch beside the window's size.
    let mistral_window = raw.sliding_window.filter(|_| raw.model_type == "mistral");
    if raw.use_sliding_window || mistral_window.is_some_and(|window| window < raw.max_position_embeddings) {
        return Err(unsupported("sliding-window attention".to_owned()));
    }
    if raw.mlp_bias {
        return Err(unsupported("biases in the MLP".to_owned()));
    }
    if let Some(other) = raw.hidden_act.filter(|name| name != "silu") {
        return Err(unsupported(format!("hidden_act {other}; supported: silu")));
    }
    if raw.num_attention_heads == 0 || raw.num_hidden_layers == 0 {
        return Err(Error::Format { path, what: "a model needs heads and layers".to_owned() });
    }
    let rope_scaling = match raw.rope_scaling {
        None => RopeScaling::None,
        Some(RawScaling {
            rope_type,
            factor: Some(factor),
            low_freq_factor: Some(low_freq_factor),
            high_freq_factor: Some(high_freq_factor),
            original_max_position_embeddings: Some(original_context),
        }) if rope_type == "llama3" => {
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }
        }
        Some(RawScaling { rope_type, .. }) if rope_type == "default" => RopeScaling::None,
        Some(RawScaling { rope_type, .. }) => {
            return Err(unsupported(format!(
                "rope scaling {rope_type}; supported: default, llama3 with its four numbers"
            )));
        }
    };
    let config = Config {
        layers: raw.num_hidden_layers,
        hidden: raw.hidden_size,
        heads: raw.num_attention_heads,
        kv_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
        head_dim: raw.head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads),
        intermediate: raw.intermediate_size,
        vocabulary: raw.vocab_size,
        context: raw.max_position_embeddings,
        norm_eps: raw.rms_norm_eps,
        rope_theta: raw.rope_theta.unwrap_or(1e4),
        rope_scaling,
        qkv_bias,
        qk_norm,
        tied_embeddings: raw.tie_word_embeddings,
        eos: match raw.eos_token_id {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
        },
    };
    config.check().map_err(|what| Error::Format { path, what })?;
    Ok(config)
}

/// One folder's tensors, over one or several files.
struct Folder {
    folder: PathBuf,
    /// Tensor name → file.
    files: HashMap<String, PathBuf>,
    /// The file read last: tensors of a layer lie together.
    current: Option<(PathBuf, Vec<u8>)>,
}

impl Folder {
    fn open(folder: &Path) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: HashMap<String, String>,
        }
        let index = folder.join("model.safetensors.index.json");
        let mut files = HashMap::new();
        if index.exists() {
            let index: Index = json(&index)?;
            for (tensor, file) in index.weight_map {
                // A file name only: nothing outside the folder.
                let name = Path::new(&file).file_name().unwrap_or_default().to_owned();
                files.insert(tensor, folder.join(name));
            }
        } else {
            let path = folder.join("model.safetensors");
            let bytes = read(&path)?;
            let tensors = parse(&path, &bytes)?;
            for name in tensors.names() {
                files.insert(name.to_owned(), path.clone());
            }
        }
        if let Some(bias) = unknown_bias(files.keys()) {
            let what = format!("tensor {bias}; supported: biases of query, key and value");
            return Err(Error::Unsupported { path: folder.display().to_string(), what });
        }
        Ok(Self { folder: folder.to_owned(), files, current: None })
    }

    fn tensor(&mut self, name: &str) -> Result<Tensor, Error> {
        let missing =
            || Error::Format { path: self.folder.display().to_string(), what: format!("tensor {name} is missing") };
        let path = self.files.get(name).ok_or_else(missing)?.clone();
        if self.current.as_ref().is_none_or(|(current, _)| *current != path) {
            let bytes = read(&path)?;
            self.current = Some((path.clone(), bytes));
        }
        let Some((_, bytes)) = &self.current else { return Err(missing()) };
        let tensors = parse(&path, bytes)?;
        let view = tensors.tensor(name).map_err(|_| missing())?;
        let kind = match view.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::F16 => Kind::Half,
            Dtype::BF16 => Kind::BFloat16,
            other => {
                let what = format!("tensor {name} is {other:?}; supported: F32, F16, BF16");
                return Err(Error::Unsupported { path: path.display().to_string(), what });
            }
        };
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        Ok(Tensor::f_from_data_size(view.data(), &shape, kind)?.f_to_kind(Kind::Float)?)
    }
}

fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>, Error> {
    SafeTensors::deserialize(bytes)
        .map_err(|error| Error::Format { path: path.display().to_string(), what: error.to_string() })
}

impl Weights for Folder {
    fn outer(&mut self, config: &Config) -> Result<OuterWeights, Error> {
        Ok(OuterWeights {
            embedding: self.tensor("model.embed_tokens.weight")?,
            norm: self.tensor("model.norm.weight")?,
            head: if config.tied_embeddings { None } else { Some(self.tensor("lm_head.weight")?) },
        })
    }

    fn layer(&mut self, config: &Config, layer: u32) -> Result<LayerWeights, Error> {
        let mut get = |name: &str| self.tensor(&format!("model.layers.{layer}.{name}"));
        Ok(LayerWeights {
            attention_norm: get("input_layernorm.weight")?,
            query: get("self_attn.q_proj.weight")?,
            key: get("self_attn.k_proj.weight")?,
            value: get("self_attn.v_proj.weight")?,
            qkv_bias: if config.qkv_bias {
                Some([get("self_attn.q_proj.bias")?, get("self_attn.k_proj.bias")?, get("self_attn.v_proj.bias")?])
            } else {
                None
            },
            qk_norm: if config.qk_norm {
                Some([get("self_attn.q_norm.weight")?, get("self_attn.k_norm.weight")?])
            } else {
                None
            },
            output: get("self_attn.o_proj.weight")?,
            mlp_norm: get("post_attention_layernorm.weight")?,
            gate: get("mlp.gate_proj.weight")?,
            up: get("mlp.up_proj.weight")?,
            down: get("mlp.down_proj.weight")?,
        })
    }
}

#[cfg(test)]
mod tests;
