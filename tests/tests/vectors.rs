//! Every splice of tests/vectors/reference.json through the real program: real models, f32, chunk KV stored as f32.
#![allow(missing_docs)]

use std::path::Path;

use kvsplice_kv::{ChunkKey, RowRanges};
use kvsplice_proto::v1::prefill_event::Event;
use kvsplice_proto::v1::prefill_request::Message;
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_proto::{convert, v1};
use kvsplice_tests::{Cluster, project, run_ok};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const EXACT: [&str; 6] = ["--dtype", "f32", "--set", "head.encoding=f32", "--set", "head.auxiliary_encoding=f32"];

fn reference() -> Value {
    let path = project().join("tests/vectors/reference.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// What `--dump` wrote.
struct Dump {
    token_ids: Vec<i64>,
    chunk_starts: Vec<i64>,
    rows: Vec<i64>,
    scores: Vec<f32>,
    aux_scores: Vec<f32>,
    logits: Vec<f32>,
}

impl Dump {
    fn read(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("request.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let data = |name: &str| tensors.tensor(name).unwrap().data().to_vec();
        let integers = |name: &str| -> Vec<i64> {
            data(name).chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect()
        };
        let floats = |name: &str| -> Vec<f32> {
            data(name).chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
        };
        Self {
            token_ids: integers("token_ids"),
            chunk_starts: integers("chunk_starts"),
            rows: integers("rows"),
            scores: floats("scores"),
            aux_scores: floats("aux_scores"),
            logits: floats("logits"),
        }
    }
}

fn check_logits(case: &str, logits: &[f32], expected: &Value) {
    for pair in expected["logits_top10"].as_array().unwrap() {
        let (id, value) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap());
        assert!((f64::from(logits[id]) - value).abs() <= 5e-3, "{case}: logit {id} is {}, not {value}", logits[id]);
    }
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit)).sum();
    let mean_error = (sum - expected["logits_sum"].as_f64().unwrap()).abs() / logits.len() as f64;
    assert!(mean_error <= 1e-4, "{case}: the mean logit is off by {mean_error}");
}

#[test]
fn every_splice_equals_the_reference() {
    let cluster = Cluster::start(&EXACT).unwrap();
    let splice = reference()["splice"].clone();
    let raw = cluster.folder().join("raw.json");
    let prompt = json!({"prefix": splice["prefix"], "chunks": splice["chunks"], "question": splice["question"]});
    std::fs::write(&raw, prompt.to_string()).unwrap();
    let ask = |case: &str, options: &[&str]| -> (Dump, Value) {
        let dump = cluster.folder().join(case);
        let (raw, dump_text) = (raw.display().to_string(), dump.display().to_string());
        let common = ["ask", "--server", cluster.server(), "--raw", &raw, "--store", "--json", "--max-tokens", "16"];
        let output = run_ok(&[&common[..], &["--dump", &dump_text], options].concat()).unwrap();
        (Dump::read(&dump), serde_json::from_str(output.lines().last().unwrap()).unwrap())
    };

    let (full, done) = ask("full", &["--strategy", "full"]);
    assert_eq!(full.token_ids, ids(&splice["token_ids"]).iter().map(|&id| i64::from(id)).collect::<Vec<_>>());
    assert_eq!(full.chunk_starts, ids(&splice["chunk_starts"]).iter().map(|&slot| i64::from(slot)).collect::<Vec<_>>());
    check_logits("full", &full.logits, &splice["full"]);
    assert_eq!(done["text"], splice["full"]["greedy_text"]);

    let (direct, done) = ask("direct", &["--strategy", "direct", "--prefix-cache", "false"]);
    check_logits("direct", &direct.logits, &splice["direct_shared_prefix"]);
    assert_eq!(done["receipt"]["tokens"]["reused_exact"], 19 + 46, "prefix and first chunk are exact");
    let (alone, done) = ask("alone", &["--strategy", "direct", "--shared-prefix", "false", "--prefix-cache", "false"]);
    check_logits("direct without prefix", &alone.logits, &splice["direct_no_prefix"]);
    assert_eq!(done["receipt"]["tokens"]["reused_exact"], 19 + 46, "the first chunk stands behind the prefix anyway");

    let (all, _) = ask("all", &["--strategy", "clip", "--ratio", "1", "--prefix-cache", "false"]);
    check_logits("ratio 1", &all.logits, &splice["rows_all"]);
    let difference = full.logits.iter().zip(&all.logits).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(difference <= 1e-3, "ratio 1 differs from full by {difference}");

    for (case, options) in [
        ("clip_nominal_0.3", ["--ratio", "0.3", "--group", "8,5"]),
        ("clip_nominal_0.2_no_grouping", ["--ratio", "0.2", "--group", "none"]),
    ] {
        // The paper's way, with nothing kept from the asks before.
        let paper = ["--strategy", "clip", "--budget", "nominal", "--aux-layers", "last", "--prefix-cache", "false"];
        let options = [&paper[..], &options[..]].concat();
        let (clip, _) = ask(case, &options);
        let rows: Vec<i64> = ids(&splice[case]["rows"]).iter().map(|&row| i64::from(row)).collect();
        assert_eq!(clip.rows, rows, "{case}");
        check_logits(case, &clip.logits, &splice[case]);
        let expected: Vec<f64> = splice["aux_scores"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|chunk| chunk.as_array().unwrap().iter().map(|score| score.as_f64().unwrap()))
            .collect();
        assert_eq!(clip.aux_scores.len(), expected.len());
        for (got, expected) in clip.aux_scores.iter().zip(&expected) {
            assert!((f64::from(*got) - expected).abs() <= 1e-5, "{case}: score {got}, not {expected}");
        }
        let spread: f32 = clip.scores.iter().filter(|score| **score >= 0.0).sum();
        let total: f32 = clip.aux_scores.iter().sum();
        assert!((spread - total).abs() < 1e-3, "spreading scores over bytes keeps their sum: {spread}, {total}");
    }

    check_rows(&cluster, &splice);
}

/// The rows of `rows_every_third` are no selector's: they go to the worker as a head would send them.
fn check_rows(cluster: &Cluster, splice: &Value) {
    let case = &splice["rows_every_third"];
    let token_ids = ids(&splice["token_ids"]);
    let starts = ids(&splice["chunk_starts"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let logits = runtime.block_on(async {
        let channel = kvsplice_proto::client::channel(cluster.worker.address()).unwrap();
        let mut worker = WorkerClient::new(channel).max_decoding_message_size(64 << 20);
        let digest = worker.status(v1::WorkerStatusRequest {}).await.unwrap().into_inner().model.unwrap().digest;
        let model = convert::model_digest("model", &digest).unwrap();
        let prefix = &token_ids[..starts[0] as usize];
        let mut parts = vec![v1::Part {
            kind: v1::part::Kind::Prefix.into(),
            token_ids: prefix.to_vec(),
            chunk: ChunkKey::new(model, &[], prefix, "default").id().to_string(),
            exact: true,
            ..v1::Part::default()
        }];
        for pair in starts.windows(2) {
            let chunk = &token_ids[pair[0] as usize..pair[1] as usize];
            parts.push(v1::Part {
                kind: v1::part::Kind::Chunk.into(),
                token_ids: chunk.to_vec(),
                first_slot: pair[0],
                first_position: pair[0],
                chunk: ChunkKey::new(model, prefix, chunk, "default").id().to_string(),
                behind_prefix: true,
                ..v1::Part::default()
            });
        }
        let question = *starts.last().unwrap();
        parts.push(v1::Part {
            kind: v1::part::Kind::Question.into(),
            token_ids: token_ids[question as usize..].to_vec(),
            first_slot: question,
            first_position: question,
            ..v1::Part::default()
        });
        let start = v1::PrefillStart {
            model: digest,
            owner: "default".to_owned(),
            parts,
            sampling: Some(v1::Sampling { max_tokens: Some(1), ..v1::Sampling::default() }),
            variant: "f32-clean-1".to_owned(),
            want_logits: true,
            ..v1::PrefillStart::default()
        };
        let rows = v1::Rows {
            ranges: convert::ranges(&RowRanges::from_slots(ids(&case["rows"]))),
            complete_below: token_ids.len() as u32,
        };
        let messages =
            [Message::Start(start), Message::Rows(rows)].map(|message| v1::PrefillRequest { message: Some(message) });
        let mut events = worker.prefill(tokio_stream::iter(messages)).await.unwrap().into_inner();
        let mut logits = Vec::new();
        while let Some(event) = events.message().await.unwrap() {
            if let Some(Event::Logits(bytes)) = event.event {
                logits = bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
            }
        }
        logits
    });
    check_logits("rows_every_third", &logits, case);
}
