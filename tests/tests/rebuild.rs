//! A bucket is all that is needed: after losing every process its documents are found and nothing is computed again. What
//! another program wrote into it, or another model, is a counted miss and never a wrong text.
#![allow(missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvsplice_kv::object::Header;
use kvsplice_kv::{Encoding, ModelDigest, Variant};
use kvsplice_proto::v1;
use kvsplice_tests::{
    Answer, Client, Cluster, EXACT, Pair, Reference, Verdict, article, cache_stats, inline, options, request, run_ok,
    strategy, wait_idle, wait_until, words,
};

const QUESTION: &str = "How many beehives does the captain of the Marguerite keep?";
const VARIANT: Variant = Variant::clean(Encoding::F32);
const SOON: Duration = Duration::from_secs(10);

/// Nothing above the store but the worker's and the head's own memory.
fn settings() -> Vec<&'static str> {
    [&EXACT[..], &["--set", "cache.memory_bytes=0", "--set", "head.auxiliary_kv_bytes=0"]].concat()
}

/// Every file of a store.
fn files(store: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![store.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else {
                found.insert(entry.path(), std::fs::read(entry.path()).unwrap());
            }
        }
    }
    found
}

fn lookups(cache: &str, kind: &str) -> u64 {
    let lookups = cache_stats(cache).unwrap().lookups;
    lookups.iter().filter(|(name, _)| name.starts_with(kind)).map(|(_, count)| count).sum()
}

fn from_corpus(question: &str, spec: &str) -> v1::GenerateRequest {
    let corpus = v1::CorpusSource { corpus: "harbor".into(), top_k: 5, ..v1::CorpusSource::default() };
    let source = Some(v1::prompt::Source::Corpus(corpus));
    let prompt = v1::Prompt { source, question: question.into(), ..v1::Prompt::default() };
    request(prompt, strategy(spec), 12)
}

#[test]
fn after_losing_every_process_all_is_found_in_the_bucket() {
    let cluster = Cluster::start(&settings()).unwrap();
    let names = ["marguerite.md", "ansel-drury.md", "pell-island.md", "eel-pie.md"].map(article);
    let common =
        ["ingest", "--server", cluster.server(), "--corpus", "harbor", "--chunk-tokens", "96", "--overlap", "8"];
    run_ok(&[&common[..], &names.each_ref().map(String::as_str)].concat()).unwrap();
    let questions = [QUESTION, "Who is Ansel Drury?", "When was the flood on Pell Island?", "What is in an eel pie?"];
    let ask_all = |cluster: &Cluster| -> Vec<Answer> {
        let client = Client::connect(cluster.server()).unwrap();
        let cases =
            questions.iter().flat_map(|question| ["clip:0.2", "direct", "guided:0.2"].map(|spec| (question, spec)));
        cases.map(|(question, spec)| client.generate(from_corpus(question, spec)).unwrap()).collect()
    };
    let before = ask_all(&cluster);
    let listed = Client::connect(cluster.server()).unwrap().list_chunks("harbor").unwrap();
    let stored = files(&cluster.store());

    let cluster = cluster.start_again(&settings()).unwrap();
    assert!(Client::connect(cluster.server()).unwrap().list_chunks("harbor").unwrap() == listed, "the chunks differ");
    let after = ask_all(&cluster);
    let (mut hits, mut chunks) = (0, 0);
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(after.planned, before.planned);
        assert_eq!(after.text, before.text);
        assert_eq!(after.dump.rows, before.dump.rows, "no row more is computed");
        assert!(["", "object"].contains(&after.receipt.auxiliary_source.as_str()), "{:?}", after.receipt);
        chunks += after.sources().len();
        hits += after.sources().iter().filter(|source| **source == "object").count();
    }
    println!("{hits} of {chunks} chunks were found in the bucket");
    assert!(hits as f64 >= 0.99 * chunks as f64, "{hits} of {chunks}");
    let address = cluster.cache.address();
    assert!(lookups(address, "hit/") > 0 && lookups(address, "miss/") == 0);
    assert!(files(&cluster.store()) == stored, "the bucket has changed");
}

/// What an object becomes.
type Change = (&'static str, fn(&[u8], Header) -> Vec<u8>, Option<&'static str>);

fn with_header(object: &[u8], header: &Header) -> Vec<u8> {
    let mut bytes = header.render().unwrap();
    bytes.extend_from_slice(&object[bytes.len()..]);
    bytes
}

fn other_format(object: &[u8], _: Header) -> Vec<u8> {
    let (old, new) = (br#""format_version":"1""#, br#""format_version":"2""#);
    let place = object.windows(old.len()).position(|window| window == old).expect("the header says its version");
    [&object[..place], new, &object[place + old.len()..]].concat()
}

fn other_semantics(object: &[u8], mut header: Header) -> Vec<u8> {
    header.variant.kv_semantics += 1;
    with_header(object, &header)
}

fn other_model(object: &[u8], mut header: Header) -> Vec<u8> {
    header.key.model = ModelDigest::from_bytes([9; 32]);
    with_header(object, &header)
}

fn other_chunk(object: &[u8], mut header: Header) -> Vec<u8> {
    header.key.tokens = header.key.prefix;
    with_header(object, &header)
}

fn other_build(object: &[u8], mut header: Header) -> Vec<u8> {
    header.build = "0.0.0-before".to_owned();
    with_header(object, &header)
}

/// Another build wrote the same bytes with the same meaning: `kv_semantics` is what says when they differ.
const CHANGES: [Change; 5] = [
    ("another format version", other_format, Some("foreign: format_version is 2, expected 1")),
    ("another kv_semantics", other_semantics, Some("foreign: variant is f32-clean-2, expected f32-clean-1")),
    ("another model", other_model, Some("foreign: chunk id is ")),
    ("another chunk", other_chunk, Some("foreign: chunk id is ")),
    ("another build", other_build, None),
];

#[test]
fn what_another_program_wrote_is_a_miss_with_a_reason() {
    let cluster = Cluster::start(&settings()).unwrap();
    let address = cluster.cache.address();
    let client = Client::connect(cluster.server()).unwrap();
    let texts: Vec<String> = (0..4).map(|place| words(80 * place, 40 + place)).collect();
    let document = cluster.folder().join("harbor.jsonl");
    let line = |(id, text): (usize, &String)| {
        serde_json::json!({"id": id.to_string(), "text": text, "chunk": true}).to_string()
    };
    std::fs::write(&document, texts.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    run_ok(&["ingest", "--server", cluster.server(), "--corpus", "harbor", document.to_str().unwrap()]).unwrap();
    let mut reference = Reference::start().unwrap();
    let corpus = v1::CorpusSource {
        corpus: "harbor".into(),
        chunks: (0..texts.len()).map(|id| format!("{id}#0")).collect(),
        ..v1::CorpusSource::default()
    };
    let mut asked = from_corpus(QUESTION, "clip:0.3");
    asked.prompt.as_mut().unwrap().source = Some(v1::prompt::Source::Corpus(corpus));
    let ask = |reference: &mut Reference, what: &str| {
        let answer = client.generate(asked.clone()).unwrap();
        let verdict = reference.check(&texts, QUESTION, "clip:0.3", &answer);
        (verdict.unwrap_or_else(|error| panic!("{what}: {error:#}")), answer)
    };
    assert_eq!(ask(&mut reference, "undisturbed").0, Verdict::Stored);
    let objects: BTreeMap<PathBuf, Vec<u8>> =
        files(&cluster.store()).into_iter().filter(|(path, _)| path.ends_with(VARIANT.to_string())).collect();
    assert!(objects.len() >= 2 * texts.len(), "the KV of both models");

    for (what, change, reason) in CHANGES {
        for (path, object) in &objects {
            std::fs::write(path, change(object, Header::parse(object).unwrap())).unwrap();
        }
        let (found, missed) = (lookups(address, "store/foreign"), lookups(address, "miss/foreign"));
        let inline_request = request(inline(&texts, QUESTION, false), options("direct", 0.0), 12);
        let answer = client.generate(inline_request).unwrap();
        let verdict = reference.check(&texts, QUESTION, "direct", &answer).unwrap();
        assert_eq!(verdict, if reason.is_some() { Verdict::Fresh } else { Verdict::Stored }, "{what}");
        let (verdict, answer) = ask(&mut reference, what);
        let Some(reason) = reason else {
            assert_eq!(verdict, Verdict::Stored, "{what}: {:?}", answer.receipt);
            assert_eq!(lookups(address, "store/foreign"), found, "{what}");
            continue;
        };
        assert_eq!(verdict, Verdict::Repaired, "{what}");
        for chunk in &answer.receipt.chunks {
            assert!(chunk.source == "repaired" && chunk.reason.starts_with(reason), "{what}: {chunk:?}");
        }
        assert_eq!(answer.receipt.auxiliary_source, "computed", "{what}");
        assert!(lookups(address, "store/foreign") > found, "{what}");
        assert!(lookups(address, "miss/foreign") >= missed + texts.len() as u64, "{what}");
        // It makes room for ours.
        wait_until(&format!("the repaired chunks, {what}"), SOON, || {
            let (_, again) = ask(&mut reference, what);
            Ok(again.sources().iter().all(|source| *source == "object").then_some(()))
        })
        .unwrap();
    }
    wait_idle(cluster.worker.address(), address, Duration::from_secs(5)).unwrap();
}

#[test]
fn the_same_name_with_other_weights_hits_nothing() {
    let cluster = Cluster::start(&settings()).unwrap();
    let (client, address) = (Client::connect(cluster.server()).unwrap(), cluster.cache.address());
    let texts: Vec<String> = (0..4).map(|place| words(90 * place, 45)).collect();
    let ask = |client: &Client, store: bool, spec: &str| {
        client.generate(request(inline(&texts, QUESTION, store), strategy(spec), 12)).unwrap()
    };
    ask(&client, true, "direct");
    let ours = ask(&client, false, "direct");
    assert_eq!(ours.sources(), ["object"; 4]);

    let seeds = ["--set", "head.primary.seed=7", "--set", "worker.primary.seed=7"];
    let other = Pair::start(address, &[&settings()[..], &seeds].concat()).unwrap();
    let theirs = Client::connect(other.head.address()).unwrap();
    let before = lookups(address, "hit/");
    for spec in ["direct", "clip:0.3", "guided:0.3"] {
        let answer = ask(&theirs, false, spec);
        assert_eq!(answer.sources(), ["fresh"; 4], "{spec}");
        assert!(answer.receipt.effective_reason.contains("not cached"), "{spec}: {:?}", answer.receipt);
        assert_eq!(answer.text, ask(&theirs, false, "full").text);
    }
    assert_eq!(lookups(address, "hit/"), before, "KV of other weights was loaded");
    // Both may keep theirs.
    let stored = ask(&theirs, true, "direct");
    assert_ne!(stored.dump.logits, ours.dump.logits);
    let ids = |answer: &Answer| answer.planned.chunks.iter().cloned().collect::<BTreeSet<_>>();
    assert!(ids(&stored).is_disjoint(&ids(&ours)));
    let again = ask(&client, false, "direct");
    assert_eq!((again.text, again.receipt.effective), (ours.text, ours.receipt.effective));
}
