//! How chunk KV is stored, through the running system with the demo models: heads of every encoding on one worker and one
//! store. Prints each encoding's loss as KL to bf16 of the first token, and what it loads.
#![allow(missing_docs)]

use std::fs;
use std::path::Path;

use kvsplice_proto::v1;
use kvsplice_tests::{Answer, Client, Cluster, Process, inline, options, project, request, wait_serving};

const QUESTIONS: [&str; 2] = [
    "How many beehives does the captain of the Marguerite keep?",
    "Which year was the lighthouse lens replaced, and by whom?",
];

/// Chunks are sent, so that bytes are counted.
const SETTINGS: [&str; 6] =
    ["--dtype", "f32", "--set", "head.auxiliary_encoding=f32", "--set", "worker.map_files=false"];

/// Heads beside the cluster's own, which stores bf16, on the same worker and cache service.
struct Heads {
    // Clients drop before the heads, these before the rest.
    clients: Vec<(&'static str, Client)>,
    _heads: Vec<Process>,
    _cluster: Cluster,
}

fn heads(settings: &[&str], encodings: &[&'static str]) -> Heads {
    let cluster = Cluster::start(settings).unwrap();
    let mut clients = vec![("bf16", Client::connect(cluster.server()).unwrap())];
    let mut heads = Vec::new();
    for &encoding in encodings {
        let own = [
            format!("head.cache={}", cluster.cache.address()),
            format!("head.worker={}", cluster.worker.address()),
            format!("head.encoding={encoding}"),
        ];
        let own: Vec<&str> = own.iter().flat_map(|setting| ["--set", setting]).collect();
        let head = Process::start("head", &[settings, &own].concat(), cluster.folder()).unwrap();
        wait_serving(&head).unwrap();
        clients.push((encoding, Client::connect(head.address()).unwrap()));
        heads.push(head);
    }
    Heads { clients, _heads: heads, _cluster: cluster }
}

/// Pieces of the demo corpus of about `bytes` bytes each.
fn pieces(count: usize, bytes: usize) -> Vec<String> {
    let mut files: Vec<_> =
        fs::read_dir(project().join("demo/corpus")).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    let cut = |text: String| text.chars().take(bytes).collect::<String>();
    files
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "txt" || end == "md"))
        .take(count)
        .map(|path| cut(text(path)))
        .collect()
}

fn distribution(answer: &Answer) -> Vec<f64> {
    let logits = &answer.dump.logits;
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - greatest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// KL divergence of `other` from `one`, nats.
fn divergence(one: &Answer, other: &Answer) -> f64 {
    let terms = distribution(one).into_iter().zip(distribution(other));
    terms.filter(|(p, _)| *p > 0.0).map(|(p, q)| p * (p / q.max(1e-300)).ln()).sum()
}

fn bytes(answer: &Answer) -> u64 {
    answer.receipt.chunks.iter().map(|chunk| chunk.bytes).sum()
}

#[test]
fn smaller_encodings_cost_what_they_say() {
    let heads = heads(&SETTINGS, &["f32", "int8", "fp8", "int4"]);
    let chunks = pieces(5, 600);
    // By encoding: mean KL over the questions with direct and with clip, and the bytes that direct loads.
    let mut losses: Vec<(&str, f64, f64, u64)> = Vec::new();
    let mut reference: Vec<[Answer; 2]> = Vec::new();
    for (encoding, client) in &heads.clients {
        let (mut direct_loss, mut clip_loss, mut loaded) = (0.0, 0.0, 0);
        for (index, question) in QUESTIONS.iter().enumerate() {
            let ask = |strategy, ratio| {
                let options = v1::Options { prefix_cache: Some(false), ..options(strategy, ratio) };
                client.generate(request(inline(&chunks, question, true), options, 2)).unwrap()
            };
            // The first question stores the chunks.
            let [direct, clip] = [ask("direct", 0.2), ask("clip", 0.2)];
            assert_eq!(direct.receipt.chunks.len(), chunks.len());
            assert!(direct.sources().iter().all(|source| *source != "fresh"), "{:?}", direct.sources());
            let tokens = direct.receipt.tokens.unwrap();
            let exact = matches!(*encoding, "bf16" | "f32");
            // The prefix is exact everywhere; the first chunk only where its numbers are not codes.
            let first = direct.receipt.chunks[0].tokens;
            assert_eq!(tokens.reused_exact > first, exact, "{encoding}: {tokens:?}");
            loaded = bytes(&direct);
            if *encoding == "bf16" {
                reference.push([direct, clip]);
                continue;
            }
            direct_loss += divergence(&reference[index][0], &direct) / QUESTIONS.len() as f64;
            clip_loss += divergence(&reference[index][1], &clip) / QUESTIONS.len() as f64;
        }
        losses.push((encoding, direct_loss, clip_loss, loaded));
    }
    let bf16 = losses[0].3 as f64;
    for (encoding, direct, clip, loaded) in &losses {
        let share = *loaded as f64 / bf16;
        println!("{encoding}: KL to bf16 {direct:.2e} (direct), {clip:.2e} (clip); {share:.2} of the bytes");
    }
    let loss = |name: &str| losses.iter().find(|loss| loss.0 == name).map(|loss| loss.1).unwrap();
    let share = |name: &str| losses.iter().find(|loss| loss.0 == name).map(|loss| loss.3 as f64 / bf16).unwrap();
    assert!(loss("f32") < 1e-3 && loss("int8") < 3e-3 && loss("fp8") < 0.03 && loss("int4") < 0.3);
    assert!(share("int8") < 0.56 && share("fp8") < 0.56 && share("int4") < 0.31);
}
