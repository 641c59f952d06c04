//! The reference vectors: auxiliary scores and both tokenizations give exactly the reference's rows.
//! Needs both demo models (`kvsplice models pull all`) and fails without them.

use std::path::Path;

use kvsplice_kv::Options;
use kvsplice_kv::options::{Budget, Group};
use kvsplice_kv::select::{ScoredChunk, select};
use kvsplice_model::{Description, Spec};
use serde_json::Value;

fn reference() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/reference.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn describe(model: &str) -> Description {
    Description::read(&Spec { model: model.to_owned(), ..Spec::default() })
        .unwrap_or_else(|error| panic!("{error} (this test needs the demo models)"))
}

fn numbers<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn reference_scores_give_the_reference_rows() {
    let splice = &reference()["splice"];
    let (primary, auxiliary) = (describe("qwen2.5-coder-0.5b-instruct"), describe("smollm2-135m-instruct"));
    let texts: Vec<String> = numbers(&splice["chunks"]);
    let scores: Vec<Vec<f32>> = numbers(&splice["aux_scores"]);
    let chunk_starts: Vec<u32> = numbers(&splice["chunk_starts"]);

    let prefix = primary.tokenizer.encode_special(splice["prefix"].as_str().unwrap()).unwrap();
    let question = primary.tokenizer.encode_special(splice["question"].as_str().unwrap()).unwrap();
    let primary: Vec<_> = texts.iter().map(|text| primary.tokenizer.encode(text).unwrap()).collect();
    let auxiliary: Vec<_> = texts.iter().map(|text| auxiliary.tokenizer.encode(text).unwrap()).collect();
    let joined: Vec<u32> =
        prefix.iter().chain(primary.iter().flat_map(|tokens| &tokens.ids)).chain(&question).copied().collect();
    assert_eq!(joined, numbers::<Vec<u32>>(&splice["token_ids"]));

    let chunks: Vec<ScoredChunk> = (0..texts.len())
        .map(|index| ScoredChunk {
            first_slot: chunk_starts[index],
            selectable: true,
            primary: &primary[index].spans,
            auxiliary: &auxiliary[index].spans,
            scores: &scores[index],
        })
        .collect();
    for (name, ratio, group) in
        [("clip_nominal_0.3", 0.3, Group::default()), ("clip_nominal_0.2_no_grouping", 0.2, Group::NONE)]
    {
        let options = Options { ratio, group, budget: Budget::Nominal, ..Options::default() };
        let rows: Vec<u32> = select(&options, &chunks).unwrap().rows.slots().collect();
        assert_eq!(rows, numbers::<Vec<u32>>(&splice[name]["rows"]), "{name}");
    }
}
