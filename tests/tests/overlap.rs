//! Loading and scoring overlap, on an object store whose every read is slow; and a cache service that dies while a prompt
//! is loaded. The cache service has no memory tier, so that every request reads the store. The answering model is tiny,
//! the scoring model is the real one: then both take some hundred milliseconds.
#![allow(missing_docs)]

use std::sync::Arc;
use std::time::Duration;

use kvsplice_proto::v1;
use kvsplice_tests::{
    Answer, CacheService, Client, FaultyStore, Pair, TINY, inline, options, request, wait_until, words, worker_status,
};

const READ_DELAY: Duration = Duration::from_millis(200);
const ANY_PORT: &str = "127.0.0.1:0";
const TINY_PRIMARY: [&str; 12] = [
    "--dtype",
    "f32",
    "--set",
    "head.primary.shape=tiny",
    "--set",
    "head.primary.random_weights=true",
    "--set",
    "worker.primary.shape=tiny",
    "--set",
    "worker.primary.random_weights=true",
    "--set",
    "worker.plan_loads=false",
];

fn chunks(count: usize, length: usize) -> Vec<String> {
    (0..count).map(|place| words(place * length, length)).collect()
}

fn span(answer: &Answer, stage: &str) -> v1::Span {
    let spans = &answer.receipt.spans;
    spans.iter().find(|span| span.stage == stage).unwrap_or_else(|| panic!("no {stage} in {spans:?}")).clone()
}

fn length(span: &v1::Span) -> f64 {
    span.end_ms - span.start_ms
}

#[test]
fn a_prompt_is_loaded_while_it_is_scored() {
    let store = Arc::new(FaultyStore::default());
    let cache = CacheService::start(store.clone(), 0, ANY_PORT).unwrap();
    let pair = Pair::start(cache.address(), &TINY_PRIMARY).unwrap();
    let client = Client::connect(pair.head.address()).unwrap();
    let (chunks, question) = (chunks(8, 150), words(2000, 40));
    let ask = || client.generate(request(inline(&chunks, &question, true), options("clip", 0.2), 2)).unwrap();
    let quick = ask();

    store.delay_reads(READ_DELAY);
    let answer = ask();
    assert_eq!(answer.text, quick.text);
    assert_eq!(answer.sources(), ["object"; 8]);
    assert_eq!(answer.receipt.auxiliary_source, "memory");

    let (load, score, rows) = (span(&answer, "load"), span(&answer, "score"), span(&answer, "rows.1"));
    let clock = format!("{:?}", answer.receipt.spans);
    assert!(length(&load) >= 2.0 * READ_DELAY.as_secs_f64() * 1e3, "the store was not slow: {clock}");
    assert!(load.start_ms < score.end_ms, "loading waits for scoring: {clock}");
    let both = load.end_ms.min(score.end_ms) - load.start_ms.max(score.start_ms);
    let shorter = length(&load).min(length(&score));
    assert!(both >= 0.8 * shorter, "loading and scoring share {both} ms of {shorter}: {clock}");
    let total = span(&answer, "first_token").end_ms - load.start_ms.min(score.start_ms);
    let sum = length(&load) + length(&score) + length(&rows);
    assert!(total < sum - 0.5 * shorter, "{total} ms for stages of {sum} ms: {clock}");
}

#[test]
fn rows_are_computed_while_later_layers_are_loaded() {
    let store = Arc::new(FaultyStore::default());
    let cache = CacheService::start(store.clone(), 0, ANY_PORT).unwrap();
    let pair = Pair::start(cache.address(), &TINY).unwrap();
    let client = Client::connect(pair.head.address()).unwrap();
    let chunks = chunks(4, 60);
    let ask = || client.generate(request(inline(&chunks, "Who?", true), options("direct", 0.2), 2)).unwrap();
    ask();
    store.delay_reads(READ_DELAY);
    let answer = ask();
    let (load, rows) = (span(&answer, "load"), span(&answer, "rows.1"));
    assert!(rows.start_ms < load.end_ms, "{:?}", answer.receipt.spans);
}

fn loaded_bytes(answer: &Answer) -> u64 {
    answer.receipt.chunks.iter().map(|chunk| chunk.bytes).sum()
}

#[test]
fn rows_that_are_recomputed_are_not_loaded_when_loading_is_slow() {
    let store = Arc::new(FaultyStore::default());
    let cache = CacheService::start(store.clone(), 0, ANY_PORT).unwrap();
    // Scoring takes longer than loading from a store that is not slow, so that everything comes whole there.
    let pair = Pair::start(cache.address(), &TINY_PRIMARY).unwrap();
    let client = Client::connect(pair.head.address()).unwrap();
    let (chunks, question) = (chunks(6, 100), words(2000, 20));
    let ask = |specification: &str| {
        let options = v1::Options { prefix_cache: Some(false), ..kvsplice_tests::specification(specification) };
        client.generate(request(inline(&chunks, &question, true), options, 8)).unwrap()
    };
    ask("direct");
    let direct = ask("direct");
    let whole = loaded_bytes(&direct);
    for specification in ["clip:0.5", "clip:0.5:group=none", "clip:1"] {
        store.delay_reads(Duration::ZERO);
        let quick = ask(specification);
        assert!(loaded_bytes(&quick) <= whole);
        // Some layers are on their way when the rows are known, others are not.
        for delay_ms in [40, 100, 250] {
            store.delay_reads(Duration::from_millis(delay_ms));
            let answer = ask(specification);
            assert_eq!(answer.text, quick.text, "{specification}, {delay_ms} ms");
            assert_eq!(answer.logit_difference(&quick), 0.0, "{specification}, {delay_ms} ms");
            assert!(loaded_bytes(&answer) <= whole);
        }
        // No layer comes before the rows are known.
        store.delay_reads(Duration::from_secs(2));
        let slow = ask(specification);
        assert_eq!(slow.text, quick.text);
        assert_eq!(slow.logit_difference(&quick), 0.0);
        assert_eq!(slow.dump.rows, quick.dump.rows);
        let (rows, tokens) = slow
            .receipt
            .chunks
            .iter()
            .fold((0, 0), |(rows, tokens), chunk| (rows + u64::from(chunk.rows), tokens + u64::from(chunk.tokens)));
        let expected = whole as f64 * (1.0 - rows as f64 / tokens as f64);
        println!("{specification}: {} of {whole} bytes, {rows} of {tokens} rows are recomputed", loaded_bytes(&slow));
        assert!((loaded_bytes(&slow) as f64 - expected).abs() <= 0.02 * whole as f64, "expected {expected}");
    }
}

/// Five stored chunks, and a request for them.
struct Story {
    store: Arc<FaultyStore>,
    cache: CacheService,
    pair: Pair,
    client: Client,
    undisturbed: Answer,
}

impl Story {
    fn start() -> Self {
        let store = Arc::new(FaultyStore::default());
        let cache = CacheService::start(store.clone(), 0, ANY_PORT).unwrap();
        let pair = Pair::start(cache.address(), &TINY).unwrap();
        let client = Client::connect(pair.head.address()).unwrap();
        client.generate(Self::request("clip")).unwrap();
        let undisturbed = client.generate(Self::request("clip")).unwrap();
        assert_eq!(undisturbed.sources(), ["object"; 5]);
        Self { store, cache, pair, client, undisturbed }
    }

    fn request(strategy: &str) -> v1::GenerateRequest {
        request(inline(&chunks(5, 80), "Who built it, and when?", true), options(strategy, 0.3), 16)
    }
}

#[test]
fn a_cache_service_that_dies_in_the_middle_of_a_prompt_leaves_the_text_as_it_is() {
    let Story { store, cache, pair, client, undisturbed } = Story::start();
    let address = cache.address().to_owned();
    // The first layer comes, the second never does: it lies behind the header of 32 KiB and the first.
    store.hold_reads_from((32 << 10) + 1);
    let opened = client.open(Story::request("clip")).unwrap();
    wait_until("rows of the first layer", Duration::from_secs(20), || {
        let computing = worker_status(pair.worker.address())?.running == 1;
        Ok((store.held() == 6 && computing).then_some(()))
    })
    .unwrap();
    drop(cache);
    let answer = opened.finish().unwrap();
    assert_eq!(answer.sources(), ["repaired"; 5]);
    assert!(answer.receipt.chunks.iter().all(|chunk| chunk.reason.starts_with("store: ")), "{:?}", answer.receipt);
    assert_eq!(answer.receipt.effective, "clip");
    assert_eq!(answer.text, undisturbed.text);
    assert_eq!(answer.dump.rows, undisturbed.dump.rows);

    store.hold_reads_from(0);
    let _cache = CacheService::start(store, 0, &address).unwrap();
    let again = client.generate(Story::request("clip")).unwrap();
    assert_eq!(again.text, undisturbed.text);
    assert_eq!(again.sources(), ["object"; 5]);
}

#[test]
fn a_cache_service_that_dies_before_the_first_layer_makes_a_full_answer() {
    let Story { store, cache, pair: _pair, client, .. } = Story::start();
    let full = client.generate(Story::request("full")).unwrap();
    store.delay_reads(Duration::from_secs(2));
    let opened = client.open(Story::request("clip")).unwrap();
    drop(cache);
    let during = opened.finish().unwrap();
    let after = client.generate(Story::request("clip")).unwrap();
    for answer in [during, after] {
        assert_eq!(answer.text, full.text);
        assert_eq!(answer.receipt.effective, "full");
        assert!(answer.receipt.effective_reason.starts_with("every chunk is fresh: "), "{:?}", answer.receipt);
        assert_eq!(answer.sources(), ["fresh"; 5]);
        assert!(answer.receipt.chunks.iter().all(|chunk| !chunk.reason.is_empty()));
        assert_eq!(answer.receipt.tokens.unwrap().reused_approximate, 0);
    }
}
