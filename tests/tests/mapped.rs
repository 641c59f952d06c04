//! A worker on the cache service's host maps chunks instead of having them sent: the same answer, and nothing on the wire.
#![allow(missing_docs)]

use kvsplice_tests::{Cluster, project, run_ok};
use serde_json::Value;

const TINY: [&str; 3] = ["--shape", "tiny", "--random-weights"];
const SENT: [&str; 5] = ["--shape", "tiny", "--random-weights", "--set", "worker.map_files=false"];
const REFUSED: [&str; 5] = ["--shape", "tiny", "--random-weights", "--set", "cache.hand_out_paths=false"];

/// The head keeps no auxiliary KV from one request to the next.
const FORGETFUL: [&str; 5] = ["--shape", "tiny", "--random-weights", "--set", "head.auxiliary_kv_bytes=0"];

fn last(output: &str) -> Value {
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

/// The answer's text and logits, the bytes of its chunks, and how many layers were mapped.
fn ask(settings: &[&str], strategy: &str) -> (Value, u64, u64) {
    // A setting of one role is refused by nobody: all three read the whole configuration.
    let cluster = Cluster::start(settings).unwrap();
    let article = project().join("demo/corpus/marguerite.md").display().to_string();
    let server = cluster.server();
    run_ok(&[
        "ingest",
        "--server",
        server,
        "--corpus",
        "harbor",
        "--chunk-tokens",
        "96",
        "--overlap",
        "8",
        article.as_str(),
    ])
    .unwrap();
    let question = "How many beehives does the captain of the Marguerite keep?";
    let common =
        ["ask", "--server", server, "--corpus", "harbor", "--top-k", "6", "--max-tokens", "24", "--ignore-eos"];
    let done = last(&run_ok(&[&common[..], &["--json", "--strategy", strategy, question]].concat()).unwrap());
    let chunks = done["receipt"]["chunks"].as_array().unwrap();
    let bytes = chunks.iter().map(|chunk| chunk["bytes"].as_u64().unwrap()).sum();
    for chunk in chunks {
        assert!(["object", "memory"].contains(&chunk["source"].as_str().unwrap()), "{chunk}");
    }
    let stats = last(&run_ok(&["cache", "stats", "--json", "--server", cluster.cache.address()]).unwrap());
    assert_eq!(stats["lookups"]["mapped/refused"], 0);
    (done["text"].clone(), bytes, stats["lookups"]["mapped/layer"].as_u64().unwrap())
}

#[test]
fn mapped_chunks_give_the_same_answer_and_cost_no_byte() {
    for strategy in ["direct", "clip"] {
        let (text, bytes, layers) = ask(&TINY, strategy);
        assert!(bytes == 0 && layers > 0, "{strategy}: {bytes} bytes, {layers} layers mapped");
        for settings in [&SENT, &REFUSED] {
            let (sent, bytes, layers) = ask(settings, strategy);
            assert!(bytes > 0 && layers == 0, "{strategy}: {bytes} bytes, {layers} layers mapped");
            assert_eq!(sent, text, "{strategy}");
        }
    }
}

#[test]
fn the_head_maps_auxiliary_kv_as_well() {
    let (text, _, layers) = ask(&FORGETFUL, "clip");
    let (sent, _, without) = ask(&[&FORGETFUL[..], &["--set", "head.map_files=false"]].concat(), "clip");
    assert!(without > 0 && layers > without, "{layers} layers mapped, {without} by the worker alone");
    assert_eq!(text, sent);
}
