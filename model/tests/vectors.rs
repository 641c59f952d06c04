//! Both demo models against values from an independent implementation (tests/vectors/reference.json), in f32.

use kvsplice_kv::options::{Depth, Reduce, Softmax};
use kvsplice_kv::{Encoding, ModelDigest};
use kvsplice_model::auxiliary::{ScoreRequest, score};
use kvsplice_model::decoder::{Keep, Segment};
use kvsplice_model::encode::encode;
use kvsplice_model::template::Message;
use kvsplice_model::{Decoder, Dtype, Model, Spec};
use serde_json::Value;
use std::sync::Arc;

fn reference() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/reference.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn load(name: &str) -> Model {
    let spec = Spec { model: name.to_owned(), dtype: Some(Dtype::F32), ..Spec::default() };
    Model::load(&spec).expect("the demo models are needed: run `make models`")
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Logits after the last of `ids`, then greedy tokens, through the layer-by-layer path.
fn run(decoder: &Decoder, prompt: &[u32], greedy: usize) -> (Vec<f32>, Vec<u32>) {
    let mut cache = decoder.cache((prompt.len() + greedy) as u32).unwrap();
    let mut step = |first: usize, ids: &[u32]| -> Vec<f32> {
        let slots: Vec<u32> = (first as u32..(first + ids.len()) as u32).collect();
        let rotation = decoder.rotation(&slots).unwrap();
        let mut hidden = decoder.embed(ids).unwrap();
        let last = decoder.config().layers - 1;
        let output = [ids.len() - 1];
        for layer in 0..=last {
            let keep = if layer == last { Keep::Rows(&output) } else { Keep::All };
            let mut segments = [Segment { cache: &mut cache, slots: &slots, two_part: None }];
            hidden = decoder.layer(layer, &hidden, &rotation, &mut segments, keep, None).unwrap();
        }
        let logits = decoder.logits(&hidden).unwrap();
        let mut numbers = vec![0f32; logits.numel()];
        logits.copy_data(&mut numbers, logits.numel());
        numbers
    };
    let first = step(0, prompt);
    let mut tokens = vec![kvsplice_model::sampling::argmax(&first)];
    while tokens.len() < greedy {
        let logits = step(prompt.len() + tokens.len() - 1, &tokens[tokens.len() - 1..]);
        tokens.push(kvsplice_model::sampling::argmax(&logits));
    }
    (first, tokens)
}

fn check_logits(logits: &[f32], expected: &Value) {
    for pair in expected["logits_top10"].as_array().unwrap() {
        let (id, value) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
        assert!((f64::from(logits[id]) - value).abs() <= 5e-3, "logit {id}: {} against {value}", logits[id]);
    }
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit)).sum();
    let mean_error = (sum - expected["logits_sum"].as_f64().unwrap()).abs() / logits.len() as f64;
    assert!(mean_error <= 1e-4, "mean logit is off by {mean_error}");
}

fn check_model(name: &str, expected: &Value) {
    let model = load(name);
    for case in expected["tokenize"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(model.tokenizer.encode_special(text).unwrap(), ids(&case["ids"]), "{text:?}");
    }
    let chat = &expected["chat"];
    let messages: Vec<Message> = chat["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| Message {
            role: if message["role"] == "system" { "system" } else { "user" },
            content: message["content"].as_str().unwrap().to_owned(),
        })
        .collect();
    let rendered = model.template.render(&messages).unwrap();
    assert_eq!(rendered, chat["rendered"].as_str().unwrap());
    let prompt = model.tokenizer.encode_special(&rendered).unwrap();
    assert_eq!(prompt, ids(&chat["ids"]));
    let decoder = model.decoder.lock().unwrap();
    let (logits, tokens) = run(&decoder, &prompt, 24);
    check_logits(&logits, chat);
    let greatest = logits.iter().fold(0f32, |greatest, logit| greatest.max(logit.abs()));
    assert!((f64::from(greatest) - chat["logits_abs_max"].as_f64().unwrap()).abs() <= 5e-3);
    assert_eq!(tokens, ids(&chat["greedy_24"]));
    let mut stream = model.tokenizer.stream(false);
    let text: String = tokens.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(text, chat["greedy_text"].as_str().unwrap());
}

#[test]
fn the_primary_equals_the_reference() {
    check_model("qwen2.5-coder-0.5b-instruct", &reference()["primary"]);
}

#[test]
fn the_auxiliary_equals_the_reference() {
    check_model("smollm2-135m-instruct", &reference()["auxiliary"]);
}

#[test]
fn auxiliary_scores_equal_the_reference() {
    let splice = reference()["splice"].clone();
    let model = load("smollm2-135m-instruct");
    let prefix = model.tokenizer.encode_special(splice["prefix"].as_str().unwrap()).unwrap();
    let question = model.tokenizer.encode_special(splice["question"].as_str().unwrap()).unwrap();
    let chunks: Vec<Vec<u32>> = splice["chunks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|chunk| model.tokenizer.encode(chunk.as_str().unwrap()).unwrap().ids)
        .collect();
    let decoder = model.decoder.lock().unwrap();
    let slices: Vec<&[u32]> = chunks.iter().map(Vec::as_slice).collect();
    let chunk_kv = encode(&decoder, &prefix, &slices, Encoding::F32).unwrap().into_iter().map(Arc::new).collect();
    let prefix_kv = encode(&decoder, &[], &[&prefix], Encoding::F32).unwrap().pop().map(Arc::new);
    let request = ScoreRequest {
        prefix_kv,
        chunk_kv,
        question_ids: question,
        layers: Depth::Last,
        softmax: Softmax::Chunk,
        reduce: Reduce::Mean,
    };
    let scores = score(&decoder, request.clone()).unwrap();
    for (got, expected) in scores.iter().zip(splice["aux_scores"].as_array().unwrap()) {
        let expected: Vec<f64> = expected.as_array().unwrap().iter().map(|score| score.as_f64().unwrap()).collect();
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!((f64::from(*got) - expected).abs() <= 1e-5, "score {got} against {expected}");
        }
    }
    let joint = score(&decoder, ScoreRequest { softmax: Softmax::Joint, ..request }).unwrap();
    let total: f64 = joint.iter().flatten().map(|&score| f64::from(score)).sum();
    assert!((total - 1.0).abs() < 1e-4, "joint scores are one distribution, their sum is {total}");
}

#[test]
fn one_digest_a_model_and_another_one_for_other_weights() {
    let spec = |seed| Spec {
        model: "smollm2-135m-instruct".to_owned(),
        shape: Some("tiny".to_owned()),
        random_weights: true,
        seed,
        ..Spec::default()
    };
    let digest = |spec: &Spec| kvsplice_model::Description::read(spec).unwrap().digest;
    let first: ModelDigest = digest(&spec(1));
    assert_eq!(first, digest(&spec(1)));
    assert_ne!(first, digest(&spec(2)));
    assert_ne!(first, digest(&Spec { model: "smollm2-135m-instruct".to_owned(), ..Spec::default() }));
}
