//! Hugging Face folders, made here, against a decoder on the same weights.
//! Needs the demo models' files for their tokenizer (`kvsplice models pull all`) and fails without them.

use std::fs;

use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::testing::{Held, VOCABULARY, assert_close, logits, metadata, numbers, write_gguf};

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n\
    {{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn qwen2() -> (Value, Config) {
    let json = json!({
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": true,
        "hidden_act": "silu", "use_sliding_window": false, "sliding_window": 4096, "eos_token_id": [2, 0],
    });
    (json, Config { eos: vec![2, 0], ..Config::tiny(VOCABULARY) })
}

fn llama3() -> (Value, Config) {
    let (mut json, config) = qwen2();
    json["model_type"] = json!("llama");
    json["tie_word_embeddings"] = json!(false);
    json["rope_theta"] = json!(5e5);
    json["eos_token_id"] = json!(2);
    json["rope_scaling"] = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let rope_scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64.0 };
    let eos = vec![2];
    (json, Config { rope_theta: 5e5, rope_scaling, qkv_bias: false, tied_embeddings: false, eos, ..config })
}

fn qwen3() -> (Value, Config) {
    let (mut json, config) = qwen2();
    json["model_type"] = json!("qwen3");
    // Heads that are wider than their share of the hidden size.
    json["head_dim"] = json!(32);
    (json, Config { head_dim: 32, qkv_bias: false, qk_norm: true, ..config })
}

type Named = (String, Vec<usize>, Vec<u8>);

/// The tensors as bytes of `dtype`; `held` keeps what those bytes say.
fn bytes(held: &mut Held, dtype: Dtype) -> Vec<Named> {
    let mut tensors = Vec::new();
    held.each(|name, _, tensor| {
        let numbers = numbers(tensor);
        let bytes: Vec<u8> = match dtype {
            Dtype::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
            Dtype::BF16 => numbers.iter().flat_map(|&number| half::bf16::from_f32(number).to_le_bytes()).collect(),
            Dtype::F64 => numbers.iter().flat_map(|&number| f64::from(number).to_le_bytes()).collect(),
            other => panic!("{other:?}"),
        };
        if dtype == Dtype::BF16 {
            *tensor = tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
        }
        tensors.push((name.to_owned(), tensor.size().iter().map(|&size| size as usize).collect(), bytes));
    });
    tensors
}

fn write(path: &Path, tensors: &[Named], dtype: Dtype) {
    let views =
        tensors.iter().map(|(name, shape, bytes)| (name, TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The tokenizer of a small GGUF file, as tokenizer.json.
fn tokenizer() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.gguf");
    let config = Config::tiny(VOCABULARY);
    let embedding =
        candle_core::Tensor::zeros((VOCABULARY as usize, 64), candle_core::DType::F32, &candle_core::Device::Cpu);
    let embedding =
        candle_core::quantized::QTensor::quantize(&embedding.unwrap(), candle_core::quantized::GgmlDType::F32);
    write_gguf(&path, &metadata("qwen2", &config), &[("token_embd.weight".to_owned(), embedding.unwrap())]);
    crate::gguf::open(&path).unwrap().tokenizer
}

/// A folder with everything but weights.
fn folder(config: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| fs::write(folder.path().join(name), text).unwrap();
    write("config.json", config.to_string());
    write("tokenizer.json", tokenizer().to_json().unwrap());
    let bos = json!({"content": "<|im_start|>", "lstrip": false});
    write(
        "tokenizer_config.json",
        json!({"chat_template": TEMPLATE, "bos_token": bos, "eos_token": "<|im_end|>"}).to_string(),
    );
    folder
}

/// A whole folder with weights in one file.
fn whole(config: &Value, held: &mut Held) -> TempDir {
    let folder = folder(config);
    write(&folder.path().join("model.safetensors"), &bytes(held, Dtype::F32), Dtype::F32);
    folder
}

fn refusal(folder: &Path) -> Error {
    let error = match open(folder) {
        Err(error) => error,
        Ok(opened) => logits(&opened.config, opened.weights).unwrap_err(),
    };
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

#[test]
fn a_folder_gives_the_logits_of_its_weights_in_one_file_and_in_shards() {
    for ((json, config), seed) in [qwen2(), llama3(), qwen3()].into_iter().zip(1..) {
        for dtype in [Dtype::F32, Dtype::BF16] {
            let mut held = Held::random(&config, seed);
            let tensors = bytes(&mut held, dtype);
            let expected = held.logits(&config);
            let what = format!("{} in {dtype:?}", json["model_type"]);

            let single = folder(&json);
            write(&single.path().join("model.safetensors"), &tensors, dtype);
            let opened = open(single.path()).unwrap();
            assert_eq!(opened.config, config, "{what}");
            assert_close(&logits(&config, opened.weights).unwrap(), &expected, &what);

            let sharded = folder(&json);
            let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
            let (first, second) = tensors.split_at(tensors.len() / 2 + 1);
            let mut map = serde_json::Map::new();
            for (name, part) in names.into_iter().zip([first, second]) {
                write(&sharded.path().join(name), part, dtype);
                map.extend(part.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
            }
            let index = json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string();
            fs::write(sharded.path().join("model.safetensors.index.json"), index).unwrap();
            let opened = open(sharded.path()).unwrap();
            assert_close(&logits(&config, opened.weights).unwrap(), &expected, &format!("{what}, sharded"));

            fs::remove_file(sharded.path().join(names[1])).unwrap();
            assert!(matches!(refusal(sharded.path()), Error::Read { path, .. } if path.ends_with(names[1])));
        }
    }
}

#[test]
fn tokenizer_and_template_are_read_and_the_template_may_stand_in_its_own_file() {
    let (json, config) = qwen2();
    let folder = whole(&json, &mut Held::random(&config, 1));
    let opened = open(folder.path()).unwrap();
    let text = "The ferry leaves at nine,\n<|im_end|> and it's 1234 späti.";
    let expected = tokenizer();
    assert_eq!(opened.tokenizer.encode(text).unwrap(), expected.encode(text).unwrap());
    assert_eq!(opened.tokenizer.encode_special(text).unwrap(), expected.encode_special(text).unwrap());
    assert_ne!(opened.tokenizer.encode(text).unwrap().ids, opened.tokenizer.encode_special(text).unwrap());
    let ids = opened.tokenizer.encode(text).unwrap().ids;
    assert_eq!(opened.tokenizer.decode(&ids, false).unwrap(), text);
    let parts = opened.template.split("Be brief.", None, "Where?").unwrap();
    assert!(parts.prefix.starts_with("<|im_start|><|im_start|>system\nBe brief.<|im_end|>\n"), "{parts:?}");

    let path = folder.path().join("tokenizer_config.json");
    let bos = json!({"bos_token": "<|im_start|>", "eos_token": null}).to_string();
    fs::write(&path, bos).unwrap();
    assert!(matches!(refusal(folder.path()), Error::Read { path, .. } if path.ends_with("chat_template.jinja")));
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    assert_eq!(open(folder.path()).unwrap().template.split("Be brief.", None, "Where?").unwrap(), parts);
}

#[test]
fn a_configuration_that_is_not_supported_is_named_with_what_is() {
    let (json, config) = qwen2();
    let mut held = Held::random(&config, 1);
    let yarn = json!({"rope_type": "yarn", "factor": 4.0});
    let incomplete = json!({"rope_type": "llama3", "factor": 8.0});
    for (changes, words) in [
        (vec![("model_type", json!("gemma"))], ["gemma", "llama, mistral, qwen2, qwen3"]),
        (vec![("rope_scaling", yarn)], ["yarn", "llama3"]),
        (vec![("rope_scaling", incomplete)], ["llama3", "four numbers"]),
        (vec![("use_sliding_window", json!(true))], ["sliding", "attention"]),
        (vec![("model_type", json!("mistral"))], ["sliding", "attention"]),
        (vec![("model_type", json!("llama")), ("mlp_bias", json!(true))], ["bias", "MLP"]),
        (vec![("hidden_act", json!("gelu"))], ["gelu", "silu"]),
    ] {
        let mut json = json.clone();
        for (key, value) in changes {
            json[key] = value;
        }
        let error = refusal(whole(&json, &mut held).path());
        let named = matches!(&error, Error::Unsupported { what, .. } if words.iter().all(|word| what.contains(word)));
        assert!(named, "{error} lacks one of {words:?}");
    }
    for (key, value) in [
        ("num_attention_heads", json!(0)),
        ("num_attention_heads", json!(u32::MAX)),
        ("num_hidden_layers", json!(0)),
        ("num_key_value_heads", json!(3)),
        ("max_position_embeddings", json!(u32::MAX)),
        ("rms_norm_eps", json!(0.0)),
        ("hidden_size", json!(-1)),
        ("vocab_size", json!("many")),
    ] {
        let mut json = json.clone();
        json[key] = value.clone();
        let error = refusal(whole(&json, &mut held).path());
        assert!(
            matches!(&error, Error::Format { path, .. } if path.ends_with("config.json")),
            "{key} {value}: {error}"
        );
    }
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let (json, config) = qwen2();
    let mut held = Held::random(&config, 1);
    let tensors = bytes(&mut held, Dtype::F32);
    let with = |change: &dyn Fn(&mut Vec<Named>)| {
        let folder = folder(&json);
        let mut tensors = tensors.clone();
        change(&mut tensors);
        write(&folder.path().join("model.safetensors"), &tensors, Dtype::F32);
        refusal(folder.path())
    };
    let error = with(&|tensors| drop(tensors.remove(5)));
    assert!(matches!(&error, Error::Format { what, .. } if what.contains(&tensors[5].0)), "{error}");
    for (name, place) in [("embedding", 0), ("attention norm", 2), ("query", 3), ("query bias", 6), ("down", 13)] {
        let error = with(&|tensors| tensors[place].1.insert(0, 1));
        assert!(matches!(&error, Error::Shape { tensor, .. } if tensor == name), "{}: {error}", tensors[place].0);
    }
    let bias = ("model.layers.1.self_attn.o_proj.bias".to_owned(), vec![1], vec![0; 4]);
    let error = with(&|tensors| tensors.push(bias.clone()));
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains(&bias.0)), "{error}");

    let other = folder(&json);
    write(&other.path().join("model.safetensors"), &bytes(&mut held, Dtype::F64), Dtype::F64);
    let error = refusal(other.path());
    assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("F32, F16, BF16")), "{error}");

    let cut = whole(&json, &mut held);
    let path = cut.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for kept in [0, 7, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..kept]).unwrap();
        let error = refusal(cut.path());
        assert!(matches!(&error, Error::Format { .. }), "{kept} bytes: {error}");
    }
}
