//! GGUF files of every supported type, written by candle, against the numbers that candle reads from them.
//! Needs the demo models' files for their tokenizer (`kvsplice models pull all`) and fails without them.

use std::fs;
use std::path::PathBuf;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor as CandleTensor};
use tempfile::TempDir;

use super::*;
use crate::testing::{Held, VOCABULARY, assert_close, logits, metadata, numbers, write_gguf};

/// A shape whose rows are whole blocks of every type. Norm epsilon as f32, which is what a file holds.
fn shape() -> Config {
    let config = Config::tiny(VOCABULARY);
    Config {
        hidden: 256,
        heads: 8,
        kv_heads: 4,
        head_dim: 32,
        intermediate: 512,
        norm_eps: f64::from(1e-6f32),
        ..config
    }
}

fn quantized(tensor: &Tensor, dtype: GgmlDType) -> QTensor {
    let shape: Vec<usize> = tensor.size().iter().map(|&size| size as usize).collect();
    let dtype = if shape.len() == 1 { GgmlDType::F32 } else { dtype };
    QTensor::quantize(&CandleTensor::from_vec(numbers(tensor), shape, &Device::Cpu).unwrap(), dtype).unwrap()
}

fn tensors(held: &mut Held, dtype: GgmlDType) -> Vec<(String, QTensor)> {
    let mut tensors = Vec::new();
    held.each(|_, name, tensor| tensors.push((name.to_owned(), quantized(tensor, dtype))));
    tensors
}

/// A written file in a folder of its own.
fn file(metadata: &[(String, Value)], tensors: &[(String, QTensor)]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_gguf(&path, metadata, tensors);
    (folder, path)
}

fn f32_file(architecture: &str, config: &Config) -> (TempDir, PathBuf) {
    file(&metadata(architecture, config), &tensors(&mut Held::random(config, 1), GgmlDType::F32))
}

/// What opening and reading it says, on one line.
fn refusal(path: &Path) -> Error {
    let error = match open(path) {
        Err(error) => error,
        Ok(opened) => logits(&opened.config, opened.weights).unwrap_err(),
    };
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

#[test]
fn every_supported_type_gives_the_numbers_that_candle_gives() {
    let types = [
        ("F32", GgmlDType::F32),
        ("F16", GgmlDType::F16),
        ("BF16", GgmlDType::BF16),
        ("Q4_0", GgmlDType::Q4_0),
        ("Q4_1", GgmlDType::Q4_1),
        ("Q5_0", GgmlDType::Q5_0),
        ("Q5_1", GgmlDType::Q5_1),
        ("Q8_0", GgmlDType::Q8_0),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
    ];
    let named: Vec<&str> = types.iter().map(|(name, _)| *name).collect();
    assert_eq!(TYPES, named.join(", "), "what users are told is what is tested");
    let config = shape();
    for (name, dtype) in types {
        let mut held = Held::random(&config, 1);
        let before = held.numbers();
        let (_folder, path) = file(&metadata("qwen2", &config), &tensors(&mut held, dtype));
        held.each(|_, _, tensor| {
            let read = quantized(tensor, dtype).dequantize(&Device::Cpu).unwrap();
            let read = read.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            *tensor = Tensor::from_slice(&read).view(tensor.size().as_slice());
        });
        assert_eq!(held.numbers() == before, dtype == GgmlDType::F32, "{name}");
        let opened = open(&path).unwrap();
        assert_eq!((opened.config.layers, opened.config.qkv_bias, opened.config.tied_embeddings), (2, true, true));
        assert_eq!(Config { eos: Vec::new(), ..opened.config.clone() }, config, "{name}");
        let mut read = Held::read(&opened.config, opened.weights);
        assert!(read.numbers() == held.numbers(), "{name}: other numbers");
        assert_close(&read.logits(&config), &held.logits(&config), name);
    }
}

#[test]
fn the_pairs_of_llama_become_halves_and_its_factors_divide_the_frequencies() {
    let factors: Vec<f32> = (0..16).map(|pair| 1.0 + pair as f32 / 2.0).collect();
    let scaling = RopeScaling::Factors(factors.iter().map(|&factor| f64::from(factor)).collect());
    let plain = Config { qkv_bias: false, tied_embeddings: false, ..shape() };
    let config = Config { rope_scaling: scaling.clone(), ..plain.clone() };
    let mut written = Held::random(&config, 2);
    written.each(|_, name, tensor| {
        let heads = if name.ends_with("attn_q.weight") { config.heads } else { config.kv_heads };
        if name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight") {
            let halves = tensor.reshape([i64::from(heads), 2, 16, -1]);
            *tensor = halves.transpose(1, 2).reshape(tensor.size().as_slice());
        }
    });
    let mut tensors = tensors(&mut written, GgmlDType::F32);
    let with_factors =
        |factors: &[f32]| ("rope_freqs.weight".to_owned(), quantized(&Tensor::from_slice(factors), GgmlDType::F32));
    tensors.push(with_factors(&factors));
    let (_folder, path) = file(&metadata("llama", &config), &tensors);
    let opened = open(&path).unwrap();
    assert_eq!(opened.config.rope_scaling, scaling);
    let found = logits(&opened.config, opened.weights).unwrap();
    assert_close(&found, &Held::random(&config, 2).logits(&config), "llama with factors");
    let unscaled = Held::random(&config, 2).logits(&plain);
    assert!(found.iter().zip(&unscaled).any(|(found, unscaled)| (found - unscaled).abs() > 1e-2), "factors matter");

    for bad in [&factors[..15], &[0.0; 16], &[f32::NAN; 16]] {
        tensors.pop();
        tensors.push(with_factors(bad));
        let (_folder, path) = file(&metadata("llama", &config), &tensors);
        assert!(matches!(refusal(&path), Error::Format { what, .. } if what.contains("rope_freqs.weight")));
    }
}

#[test]
fn qwen3_normalizes_queries_and_keys() {
    let config = Config { qkv_bias: false, qk_norm: true, ..shape() };
    let (_folder, path) = f32_file("qwen3", &config);
    let opened = open(&path).unwrap();
    assert!(opened.config.qk_norm);
    let found = logits(&opened.config, opened.weights).unwrap();
    assert_close(&found, &Held::random(&config, 1).logits(&config), "qwen3");
}

#[test]
fn a_truncated_file_is_an_error_wherever_it_ends() {
    let (_folder, path) = f32_file("qwen2", &shape());
    let whole = fs::read(&path).unwrap();
    for kept in [0, 3, 4, 20, 100, 5_000, whole.len() / 4, whole.len() / 2, whole.len() - 40] {
        fs::write(&path, &whole[..kept]).unwrap();
        let error = refusal(&path);
        assert!(matches!(error, Error::Format { .. } | Error::Unsupported { .. }), "{kept} bytes: {error}");
    }
}

#[test]
fn missing_or_hostile_metadata_is_named() {
    let config = shape();
    let whole = metadata("qwen2", &config);
    let tensors = tensors(&mut Held::random(&config, 1), GgmlDType::F32);
    for key in [
        "general.architecture",
        "qwen2.block_count",
        "qwen2.attention.head_count",
        "qwen2.attention.layer_norm_rms_epsilon",
        "qwen2.context_length",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.chat_template",
    ] {
        let without: Vec<_> = whole.iter().filter(|(name, _)| name != key).cloned().collect();
        let (_folder, path) = file(&without, &tensors);
        let error = refusal(&path);
        assert!(matches!(&error, Error::Format { what, .. } if what.contains(key)), "{key}: {error}");
    }
    for (key, value, word) in [
        ("qwen2.block_count", Value::U32(0), "layers"),
        ("qwen2.block_count", Value::String("two".into()), "block_count"),
        ("qwen2.attention.head_count", Value::U32(0), "heads"),
        ("qwen2.attention.head_count", Value::U32(u32::MAX), "heads"),
        ("qwen2.attention.head_count_kv", Value::U32(0), "KV heads"),
        ("qwen2.attention.head_count_kv", Value::U32(3), "KV heads"),
        ("qwen2.attention.key_length", Value::U32(31), "even"),
        ("qwen2.context_length", Value::U32(u32::MAX), "context"),
        ("qwen2.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN), "norm epsilon"),
        ("qwen2.feed_forward_length", Value::U32(513), "shape"),
        ("general.alignment", Value::U32(0), "header"),
    ] {
        let mut changed: Vec<_> = whole.iter().filter(|(name, _)| name != key).cloned().collect();
        changed.push((key.to_owned(), value));
        let (_folder, path) = file(&changed, &tensors);
        let error = refusal(&path);
        assert!(error.to_string().contains(word), "{key}: {error} lacks {word:?}");
    }
}

#[test]
fn what_is_not_supported_is_named_with_what_is() {
    let config = shape();
    let mut tensors = tensors(&mut Held::random(&config, 1), GgmlDType::F32);
    let of = |architecture: &str, key: &str, value: &str| {
        let mut metadata = metadata(architecture, &config);
        metadata.retain(|(name, _)| name != key);
        metadata.push((key.to_owned(), Value::String(value.to_owned())));
        metadata
    };
    for (metadata, words) in [
        (metadata("gemma2", &config), ["gemma2", "llama, qwen2, qwen3"]),
        (of("qwen2", "qwen2.rope.scaling.type", "yarn"), ["yarn", "none"]),
        (of("qwen2", "tokenizer.ggml.model", "llama"), ["tokenizer llama", "gpt2"]),
    ] {
        let (_folder, path) = file(&metadata, &tensors);
        let error = refusal(&path);
        assert!(
            matches!(&error, Error::Unsupported { what, .. } if words.iter().all(|word| what.contains(word))),
            "{error}"
        );
    }
    let removed = tensors.pop().unwrap().0;
    let (_folder, path) = file(&metadata("qwen2", &config), &tensors);
    let error = refusal(&path);
    assert!(matches!(&error, Error::Format { what, .. } if what.contains(&removed)), "{error}");
    tensors.push((
        "blk.0.attn_output.bias".to_owned(),
        quantized(&Tensor::zeros([256], (tch::Kind::Float, tch::Device::Cpu)), GgmlDType::F32),
    ));
    let (_folder, path) = file(&metadata("qwen2", &config), &tensors);
    let error = refusal(&path);
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("attn_output.bias")), "{error}");
}
