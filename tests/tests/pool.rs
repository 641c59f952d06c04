//! The worker's pool of chunks, on the host and on the device: the next prompt finds them there, with the same answer; its
//! size holds; and whatever becomes of a request, nothing of it is held afterwards.
#![allow(missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvsplice_kv::ChunkId;
use kvsplice_proto::v1;
use kvsplice_tests::{
    Answer, CacheService, Client, Cluster, EXACT, FaultyStore, Gate, Pair, Reference, TINY, Verdict, cache_stats,
    delete_chunks, inline, request, strategy, wait_idle, wait_until, watch, words, worker_status,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

const QUESTION: &str = "Who built it, and when?";
const MEMORY: u64 = 64 << 20;
const SOON: Duration = Duration::from_secs(10);

/// A worker with a pool, on a store whose chunks are sent: none of them lies in a file.
struct System {
    cache: CacheService,
    gate: Gate,
    pair: Pair,
    client: Client,
    chunks: Vec<String>,
}

impl System {
    fn start(pool_bytes: u64) -> Self {
        Self::with(pool_bytes, 0)
    }

    /// With bytes of the pool on the host, and on the device.
    fn with(pool_bytes: u64, device_bytes: u64) -> Self {
        let cache = CacheService::start(Arc::new(FaultyStore::default()), MEMORY, "127.0.0.1:0").unwrap();
        let gate = Gate::start(cache.address()).unwrap();
        let pool = format!("worker.pool_bytes={pool_bytes}");
        let device = format!("worker.device_pool_bytes={device_bytes}");
        let settings = [&EXACT[..], &["--set", pool.as_str(), "--set", device.as_str()]].concat();
        let pair = Pair::start_through(cache.address(), gate.address(), &settings).unwrap();
        let client = Client::connect(pair.head.address()).unwrap();
        let chunks = (0..5).map(|place| words(place * 60, 25 + 4 * place)).collect();
        Self { cache, gate, pair, client, chunks }
    }

    fn request(&self, chunks: &[String], spec: &str, store: bool) -> v1::GenerateRequest {
        request(inline(chunks, QUESTION, store), strategy(spec), 8)
    }

    fn ask(&self, spec: &str) -> Answer {
        self.client.generate(self.request(&self.chunks, spec, false)).unwrap()
    }

    fn pool(&self) -> v1::ChunkPool {
        worker_status(self.pair.worker.address()).unwrap().pool.unwrap()
    }

    /// The chunks are stored by another worker: this one is not asked for them.
    fn store(&self) {
        let apart = Pair::start(self.cache.address(), &EXACT).unwrap();
        let client = Client::connect(apart.head.address()).unwrap();
        client.generate(self.request(&self.chunks, "direct", true)).unwrap();
    }

    /// The pool on the device, and the layers of the prefix and all chunks.
    fn device_pool(&self) -> (v1::ChunkPool, u64) {
        let status = worker_status(self.pair.worker.address()).unwrap();
        (status.device_pool.unwrap(), u64::from(status.model.unwrap().layers) * (1 + self.chunks.len() as u64))
    }

    /// Layers that the cache service was asked for.
    fn asked(&self) -> u64 {
        let lookups = cache_stats(self.cache.address()).unwrap().lookups;
        lookups["hit/memory"] + lookups["hit/object"]
    }

    fn wait_idle(&self) {
        wait_idle(self.pair.worker.address(), self.cache.address(), Duration::from_secs(5)).unwrap();
        assert_eq!(self.pool().held, 0, "{:?}", self.pool());
    }
}

fn bytes(answer: &Answer) -> u64 {
    answer.receipt.chunks.iter().map(|chunk| chunk.bytes).sum()
}

#[test]
fn the_second_prompt_of_the_same_chunks_finds_them_in_the_worker_and_answers_alike() {
    let system = System::start(MEMORY);
    let mut reference = Reference::start().unwrap();
    system.client.generate(system.request(&system.chunks, "direct", true)).unwrap();
    let first = system.ask("direct");
    system.wait_idle();
    // The rest in another order, and by other strategies: what is stored is the same.
    let before = system.asked();
    let mut orders = vec![system.chunks.clone()];
    orders.extend([system.chunks.iter().rev().cloned().collect()]);
    for chunks in &orders {
        for spec in ["direct", "lego", "guided:0.3", "clip:0.3"] {
            let answer = system.client.generate(system.request(chunks, spec, false)).unwrap();
            assert_eq!((answer.sources(), bytes(&answer)), (vec!["device"; 5], 0), "{spec}");
            assert_eq!(reference.check(chunks, QUESTION, spec, &answer).unwrap(), Verdict::Stored, "{spec}");
        }
    }
    let second = system.ask("direct");
    assert_eq!((second.text.as_str(), &second.token_ids), (first.text.as_str(), &first.token_ids));
    assert_eq!(second.dump.logits, first.dump.logits, "the very bytes");
    assert_eq!(system.asked(), before, "no layer of a chunk came from the service");
    let pool = system.pool();
    assert!(pool.hits > 0 && pool.bytes > 0 && pool.bytes <= MEMORY && pool.limit_bytes == MEMORY, "{pool:?}");

    // The service's word counts, of this request: what it does not have is not taken from the pool.
    let erased: ChunkId = first.planned.chunks[2].parse().unwrap();
    delete_chunks(system.cache.address(), &[erased]).unwrap();
    let answer = system.ask("direct");
    assert_eq!(answer.sources(), ["device", "device", "fresh", "device", "device"]);
    assert_eq!(reference.check(&system.chunks, QUESTION, "direct", &answer).unwrap(), Verdict::Fresh);
    // A worker without a pool asks every time.
    let without = System::start(0);
    without.client.generate(without.request(&without.chunks, "direct", true)).unwrap();
    let answer = without.ask("direct");
    assert!(answer.sources().iter().all(|source| *source == "memory") && bytes(&answer) > 0, "{:?}", answer.receipt);
    assert_eq!(without.pool(), v1::ChunkPool::default());
    system.wait_idle();
}

#[test]
fn chunks_that_are_asked_for_twice_are_placed_from_the_memory_of_the_device() {
    for host_bytes in [MEMORY, 0] {
        let system = System::with(host_bytes, MEMORY);
        let mut reference = Reference::start().unwrap();
        system.store();
        let first = system.ask("direct");
        system.wait_idle();
        let (pool, layers) = system.device_pool();
        assert_eq!((pool.layers, pool.hits, pool.misses), (0, 0, layers), "asked for once");
        assert!(bytes(&first) > 0, "{:?}", first.receipt);
        // The second prompt takes them from where they are, and puts them there.
        let second = system.ask("direct");
        assert_eq!(bytes(&second) == 0, host_bytes > 0, "{:?}", second.receipt);
        let (pool, _) = system.device_pool();
        assert!(pool.layers == layers && pool.bytes > 0 && pool.limit_bytes == MEMORY, "{pool:?} of {layers}");
        // From now on nothing is sent, and nothing is looked for on the host.
        let (before, asked) = (system.pool(), system.asked());
        let third = system.ask("direct");
        assert_eq!(system.asked(), asked, "no layer of a chunk came from the service");
        for answer in [&second, &third] {
            assert_eq!((&answer.text, &answer.token_ids), (&first.text, &first.token_ids));
            assert_eq!(answer.dump.logits, first.dump.logits, "the very bytes");
        }
        let backwards: Vec<String> = system.chunks.iter().rev().cloned().collect();
        for chunks in [&system.chunks, &backwards] {
            for spec in ["direct", "lego", "guided:0.3", "clip:0.3"] {
                let answer = system.client.generate(system.request(chunks, spec, false)).unwrap();
                assert_eq!((answer.sources(), bytes(&answer)), (vec!["device"; 5], 0), "{spec}");
                assert_eq!(reference.check(chunks, QUESTION, spec, &answer).unwrap(), Verdict::Stored, "{spec}");
            }
        }
        let (after, (pool, _)) = (system.pool(), system.device_pool());
        assert_eq!((after.hits, after.misses), (before.hits, before.misses));
        assert_eq!((pool.layers, pool.hits, pool.evicted, pool.failed), (layers, 9 * layers, 0, 0));
        // What the service does not have any more is not taken from there.
        let erased: ChunkId = first.planned.chunks[2].parse().unwrap();
        delete_chunks(system.cache.address(), &[erased]).unwrap();
        let answer = system.ask("direct");
        assert_eq!(answer.sources(), ["device", "device", "fresh", "device", "device"]);
        assert_eq!(reference.check(&system.chunks, QUESTION, "direct", &answer).unwrap(), Verdict::Fresh);
        system.wait_idle();
    }
}

#[test]
fn a_device_pool_that_is_too_small_for_a_layer_changes_nothing() {
    let system = System::with(MEMORY, 511);
    let mut reference = Reference::start().unwrap();
    system.store();
    let first = system.ask("direct");
    for _ in 0..2 {
        let answer = system.ask("direct");
        assert_eq!((answer.sources(), bytes(&answer)), (vec!["device"; 5], 0), "from the host");
        assert_eq!(answer.dump.logits, first.dump.logits, "the very bytes");
        assert_eq!(reference.check(&system.chunks, QUESTION, "direct", &answer).unwrap(), Verdict::Stored);
    }
    let (pool, layers) = system.device_pool();
    assert_eq!((pool.layers, pool.bytes, pool.hits, pool.evicted, pool.failed), (0, 0, 0, 0, 0));
    assert_eq!((system.pool().layers, system.pool().hits), (layers, 2 * layers));
    system.wait_idle();
}

#[test]
fn mapped_chunks_of_every_encoding_go_to_the_device_and_give_the_same_logits() {
    let chunks: Vec<String> = (0..4).map(|place| words(place * 70, 70 + 9 * place)).collect();
    for encoding in ["bf16", "int8", "fp8", "int4"] {
        let encoding = format!("head.encoding={encoding}");
        let device = format!("worker.device_pool_bytes={MEMORY}");
        let settings = ["--set", encoding.as_str(), "--set", device.as_str()];
        let cluster = Cluster::start(&[&TINY[..], &settings].concat()).unwrap();
        let client = Client::connect(cluster.head.address()).unwrap();
        client.generate(request(inline(&chunks, QUESTION, true), strategy("direct"), 8)).unwrap();
        let ask = || client.generate(request(inline(&chunks, QUESTION, false), strategy("direct"), 8)).unwrap();
        let answers = [ask(), ask(), ask(), ask()];
        for answer in &answers {
            assert_eq!((&answer.text, bytes(answer)), (&answers[0].text, 0), "{encoding}");
            assert_eq!(answer.dump.logits, answers[0].dump.logits, "{encoding}: the very bytes");
        }
        assert_eq!(answers[3].sources(), ["device"; 4]);
        let status = worker_status(cluster.worker.address()).unwrap();
        // A prefix is stored where that loses nothing.
        let stored = if encoding.ends_with("bf16") { 5 } else { 4 };
        let (pool, layers) = (status.device_pool.unwrap(), stored * u64::from(status.model.unwrap().layers));
        assert!(pool.layers == layers && pool.hits >= layers, "{encoding}: {pool:?}");
        assert_eq!(status.pool.unwrap(), v1::ChunkPool::default());
    }
}

#[test]
fn rows_that_one_request_left_out_are_all_that_the_next_one_loads() {
    let store = Arc::new(FaultyStore::default());
    let cache = CacheService::start(store.clone(), 0, "127.0.0.1:0").unwrap();
    let storing = Pair::start(cache.address(), &EXACT).unwrap();
    let pool = format!("worker.pool_bytes={MEMORY}");
    let pair = Pair::start(cache.address(), &[&EXACT[..], &["--set", pool.as_str()]].concat()).unwrap();
    let client = Client::connect(pair.head.address()).unwrap();
    let mut reference = Reference::start().unwrap();
    // Reads are slower than the head: what is to be left out is known before a layer is sent.
    store.delay_reads(Duration::from_millis(100));
    for (number, first) in ["lego:first_tokens=9", "lego:first_tokens=20"].into_iter().enumerate() {
        let chunks: Vec<String> = (0..4).map(|place| words(1000 * number + place * 60, 30 + 4 * place)).collect();
        let stored = request(inline(&chunks, QUESTION, true), strategy("direct"), 1);
        let all = bytes(&Client::connect(storing.head.address()).unwrap().generate(stored).unwrap());
        let mut loaded = Vec::new();
        // The second leaves out other rows, the third none.
        for (question, spec) in
            [(QUESTION, first), ("Where does the river end?", "lego:first_tokens=5"), (QUESTION, "clip:0.3")]
        {
            let answer = client.generate(request(inline(&chunks, question, false), strategy(spec), 8)).unwrap();
            let verdict = reference.check(&chunks, question, spec, &answer);
            assert_eq!(verdict.unwrap_or_else(|error| panic!("{spec} after {first}: {error:#}")), Verdict::Stored);
            loaded.push(bytes(&answer));
            wait_idle(pair.worker.address(), cache.address(), Duration::from_secs(5)).unwrap();
        }
        println!("{first}: {loaded:?} of {all} bytes");
        assert!(loaded[0] < all, "{first} leaves rows out");
        // With its rows each layer brings one more, with the word that it is there.
        assert!(loaded.iter().sum::<u64>() < all + all / 10, "{loaded:?} of {all}: rows came twice");
        let again = client.generate(request(inline(&chunks, QUESTION, false), strategy("direct"), 8)).unwrap();
        assert_eq!((again.sources(), bytes(&again)), (vec!["device"; 4], 0));
        assert_eq!(reference.check(&chunks, QUESTION, "direct", &again).unwrap(), Verdict::Stored);
    }
    let unset = worker_status(pair.worker.address()).unwrap().device_pool;
    assert_eq!(unset, Some(v1::ChunkPool::default()), "on the CPU there is none unless asked for");
}

#[test]
fn a_pool_that_is_too_small_keeps_its_size_and_the_answers_stay_right() {
    let seed = 61;
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let measured = System::start(0);
    measured.client.generate(measured.request(&measured.chunks, "direct", true)).unwrap();
    let all = bytes(&measured.ask("direct"));
    drop(measured);
    let limit = all * 2 / 3;
    let system = System::start(limit);
    let mut reference = Reference::start().unwrap();
    let texts: Vec<String> = (0..8).map(|place| words(place * 90, 25 + 3 * place)).collect();
    let (stop, most) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut pooled = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            watch(&stop, || {
                most.fetch_max(system.pool().bytes, Ordering::SeqCst);
            });
        });
        // Ends the watch even when an answer is wrong.
        let streamed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..12 {
                let cases: Vec<(Vec<String>, &str)> = ["direct", "lego", "guided:0.3"]
                    .map(|spec| {
                        let mut chunks = texts.clone();
                        chunks.shuffle(&mut random);
                        (chunks[..3].to_vec(), spec)
                    })
                    .to_vec();
                let asked = cases.iter().map(|(chunks, spec)| system.request(chunks, spec, true)).collect();
                for ((chunks, spec), answer) in cases.iter().zip(system.client.generate_each(asked)) {
                    let answer = answer.unwrap_or_else(|status| panic!("{spec}: {status}"));
                    let verdict = reference.check(chunks, QUESTION, spec, &answer);
                    assert_eq!(verdict.unwrap_or_else(|error| panic!("{spec}: {error:#}")), Verdict::Stored);
                    pooled += answer.sources().iter().filter(|source| **source == "device").count();
                }
            }
        }));
        stop.store(true, Ordering::SeqCst);
        streamed.unwrap();
    });
    let (most, pool) = (most.into_inner(), system.pool());
    println!("at most {most} of {limit} bytes; {pooled} of 108 chunks from the pool; {pool:?}");
    assert!(most <= limit && most > limit / 2, "{most} of {limit}");
    assert!(pool.evicted > 0 && pool.hits > 0 && pooled > 0, "{pool:?}");
    system.wait_idle();
}

#[test]
fn whatever_becomes_of_a_request_nothing_of_it_is_held() {
    let mut system = System::start(MEMORY);
    system.client.generate(system.request(&system.chunks, "direct", true)).unwrap();
    system.wait_idle();
    let here = system.chunks[1..].to_vec();
    // Its caller goes away: chunks that are here are held, and others waited for.
    let apart = Pair::start(system.cache.address(), &EXACT).unwrap();
    let elsewhere = Client::connect(apart.head.address()).unwrap();
    let others: Vec<String> = (0..4).map(|place| words(5000 + place * 60, 40)).collect();
    elsewhere.generate(system.request(&others, "direct", true)).unwrap();
    let mixed = [&here[..], &others[..]].concat();
    system.gate.shut();
    let opened = system.client.open(system.request(&mixed, "direct", false)).unwrap();
    wait_until("chunks that are held", SOON, || Ok((system.pool().held > 4).then_some(()))).unwrap();
    drop(opened);
    system.wait_idle();
    system.gate.open();
    let answer = system.client.generate(system.request(&mixed, "direct", false)).unwrap();
    assert_eq!(answer.sources(), [["device"; 4], ["memory"; 4]].concat());
    system.wait_idle();

    // The cache service is killed while a chunk is waited for.
    let late: Vec<String> = (0..4).map(|place| words(9000 + place * 60, 40)).collect();
    elsewhere.generate(system.request(&late, "direct", true)).unwrap();
    system.gate.shut();
    let opened = system.client.open(system.request(&late, "direct", false)).unwrap();
    wait_until("chunks that are held", SOON, || Ok((system.pool().held > 0).then_some(()))).unwrap();
    system.cache = CacheService::start(Arc::new(FaultyStore::default()), MEMORY, "127.0.0.1:0").unwrap();
    system.gate = Gate::start(system.cache.address()).unwrap();
    assert_eq!(opened.finish().unwrap().sources(), ["fresh"; 4]);
    wait_until("nothing that is held", SOON, || Ok((system.pool().held == 0).then_some(()))).unwrap();
}
