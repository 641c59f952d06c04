//! Chunks that go away between plan and load, or in the middle of the load, for every chunk of a prompt: the answer is
//! the undisturbed one, the processes live, and the receipt says what was encoded anew and why.
#![allow(missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvsplice_cache_service::Config;
use kvsplice_kv::object::Header;
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, Variant};
use kvsplice_proto::v1;
use kvsplice_tests::{
    Answer, CacheService, Client, EXACT, FaultyStore, Gate, Pair, Reference, Verdict, cache_stats, delete_chunks,
    find_chunks, inline, request, strategy, wait_idle, wait_until, words, worker_status,
};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tempfile::TempDir;

const QUESTION: &str = "Who built it, and when?";
const STRATEGIES: [&str; 4] = ["clip:0.3", "direct", "lego", "guided:0.3"];
const VARIANT: Variant = Variant::clean(Encoding::F32);
const SOON: Duration = Duration::from_secs(10);

/// A worker that reaches the cache service through a gate, and chunks that are stored.
struct System {
    store: Arc<FaultyStore>,
    cache: CacheService,
    gate: Gate,
    pair: Pair,
    client: Client,
    reference: Reference,
    chunks: Vec<String>,
    ids: Vec<ChunkId>,
    prefix: ChunkId,
}

impl System {
    fn start(config: Config) -> Self {
        Self::start_with(config, &[])
    }

    fn start_with(config: Config, settings: &[&str]) -> Self {
        let store = Arc::new(FaultyStore::default());
        let cache = CacheService::start_with(store.clone(), config, "127.0.0.1:0").unwrap();
        let gate = Gate::start(cache.address()).unwrap();
        let pair = Pair::start_through(cache.address(), gate.address(), &[&EXACT[..], settings].concat()).unwrap();
        let client = Client::connect(pair.head.address()).unwrap();
        let reference = Reference::start().unwrap();
        let chunks: Vec<String> = (0..6).map(|place| words(place * 60, 25 + 4 * place)).collect();
        let stored = client.generate(request(inline(&chunks, QUESTION, true), strategy("clip:0.3"), 1)).unwrap();
        let ids = stored.planned.chunks.iter().map(|id| id.parse().unwrap()).collect();
        let model = worker_status(pair.worker.address()).unwrap().model.unwrap().digest.parse().unwrap();
        let prefix_ids = &stored.dump.token_ids[..stored.dump.chunk_starts[0] as usize];
        let prefix = ChunkKey::new(model, &[], prefix_ids, "default").id();
        Self { store, cache, gate, pair, client, reference, chunks, ids, prefix }
    }

    fn request(&self, spec: &str) -> v1::GenerateRequest {
        request(inline(&self.chunks, QUESTION, false), strategy(spec), 8)
    }

    fn path(chunk: &ChunkId) -> Path {
        Path::from(format!("kv/{chunk}/{VARIANT}"))
    }

    /// Runs `between` after the head has looked the chunks up and before the worker asks for them.
    fn ask(&self, spec: &str, between: impl FnOnce(&Self)) -> Answer {
        self.gate.shut();
        let opened = self.client.open(self.request(spec)).unwrap();
        wait_until("a worker that waits for its chunks", SOON, || {
            let status = worker_status(self.pair.worker.address())?;
            Ok((status.queued == 1 && self.gate.waiting() > 0).then_some(()))
        })
        .unwrap();
        between(self);
        self.gate.open();
        opened.finish().unwrap()
    }

    /// Asserts that just the chunk `place` was encoded anew, and waits until it is stored again.
    fn assert_repaired(&mut self, what: &str, spec: &str, place: usize, answer: &Answer) {
        let verdict = self.reference.check(&self.chunks, QUESTION, spec, answer);
        assert_eq!(verdict.unwrap_or_else(|error| panic!("{what}: {error:#}")), Verdict::Repaired, "{what}");
        for (other, chunk) in answer.receipt.chunks.iter().enumerate() {
            assert_eq!(chunk.source == "repaired", other == place, "{what}: {chunk:?}");
            assert!(other != place || chunk.reason.starts_with("missing"), "{what}: {chunk:?}");
        }
        self.wait_stored(what, self.ids[place]);
    }

    fn wait_stored(&self, what: &str, chunk: ChunkId) {
        wait_until(&format!("the repaired chunk, {what}"), SOON, || {
            Ok(find_chunks(self.cache.address(), &[chunk], VARIANT)?[0].then_some(()))
        })
        .unwrap();
    }

    fn assert_nothing_leaked(&self) {
        wait_idle(self.pair.worker.address(), self.cache.address(), Duration::from_secs(5)).unwrap();
        assert!(cache_stats(self.cache.address()).unwrap().lookups["miss/missing"] > 0);
    }
}

/// Memory and a disk tier that hold everything.
fn tiers(folder: &TempDir) -> Config {
    Config { memory_bytes: 64 << 20, disk_bytes: 64 << 20, disk_dir: folder.path().to_owned(), ..Config::default() }
}

#[test]
fn a_chunk_that_is_removed_between_plan_and_load_is_encoded_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut system = System::start(tiers(&folder));
    for spec in STRATEGIES {
        for place in 0..system.ids.len() {
            let what = format!("{spec}, chunk {place}");
            let answer = system.ask(spec, |system| {
                let removed = delete_chunks(system.cache.address(), &[system.ids[place]]).unwrap();
                assert_eq!(removed.len(), 1, "{what}: {removed:?}");
            });
            system.assert_repaired(&what, spec, place, &answer);
        }
    }
    // What stands before all chunks.
    let answer = system.ask("clip:0.3", |system| {
        assert_eq!(delete_chunks(system.cache.address(), &[system.prefix]).unwrap().len(), 1);
    });
    let verdict = system.reference.check(&system.chunks, QUESTION, "clip:0.3", &answer).unwrap();
    assert_eq!(verdict, Verdict::Stored);
    system.wait_stored("the prefix", system.prefix);
    // All at once.
    let answer = system.ask("direct", |system| {
        assert_eq!(delete_chunks(system.cache.address(), &system.ids).unwrap().len(), system.ids.len());
    });
    assert_eq!(answer.sources(), ["repaired"; 6]);
    system.reference.check(&system.chunks, QUESTION, "direct", &answer).unwrap();
    system.assert_nothing_leaked();
}

#[test]
fn a_chunk_that_leaves_the_tiers_between_plan_and_load_is_read_from_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let mut system = System::start(tiers(&folder));
    let spec = "clip:0.3";
    for place in 0..system.ids.len() {
        let id = system.ids[place];
        let answer = system.ask(spec, |system| {
            let object =
                system.client.run(async { system.store.get(&System::path(&id)).await?.bytes().await }).unwrap();
            delete_chunks(system.cache.address(), &[id]).unwrap();
            system.client.run(system.store.put(&System::path(&id), object.into())).unwrap();
        });
        let verdict = system.reference.check(&system.chunks, QUESTION, spec, &answer).unwrap();
        assert_eq!(verdict, Verdict::Stored);
        for (other, source) in answer.sources().into_iter().enumerate() {
            assert_eq!(source == "object", other == place, "chunk {place}: {:?}", answer.sources());
        }
    }
}

#[test]
fn a_chunk_that_is_lost_in_the_middle_of_the_load_is_encoded_anew() {
    // Without tiers each request reads the store.
    let mut system = System::start(Config { memory_bytes: 0, ..Config::default() });
    for spec in STRATEGIES {
        for place in 0..system.ids.len() {
            let id = system.ids[place];
            let object =
                system.client.run(async { system.store.get(&System::path(&id)).await?.bytes().await }).unwrap();
            let header = Header::parse(&object).unwrap();
            // The plan reads the header first, then the load does.
            let mut moments = vec![("header".to_owned(), 0, 1)];
            let layers = 0..header.layout.layers;
            moments.extend(layers.map(|layer| (format!("layer {layer}"), header.layer_range(layer).start as u64, 0)));
            for (moment, from, pass) in moments {
                system.store.remove_while_read(&id.to_string(), from, pass);
                let answer = system.client.generate(system.request(spec)).unwrap();
                assert!(!system.store.is_removing(), "{spec}, chunk {place}, {moment}: it was not read");
                system.assert_repaired(&format!("{spec}, chunk {place}, {moment}"), spec, place, &answer);
                let again = system.client.run(async { system.store.get(&System::path(&id)).await?.bytes().await });
                assert_eq!(again.unwrap(), object, "the very bytes that were there");
            }
        }
    }
    system.assert_nothing_leaked();
}

#[test]
fn a_cache_service_or_a_store_that_falls_silent_is_not_waited_for_longer_than_the_deadline() {
    let config = Config { memory_bytes: 0, ..Config::default() };
    let mut system = System::start_with(config, &["--set", "worker.cache_deadline_s=2"]);
    for spec in STRATEGIES {
        for silent in ["cache service", "store"] {
            match silent {
                "store" => system.store.hold_reads_from(1),
                _ => system.gate.shut(),
            }
            let start = Instant::now();
            let answer = system.client.generate(system.request(spec)).unwrap();
            assert!(start.elapsed() < SOON, "{spec}, a silent {silent}: {:?}", start.elapsed());
            println!("{spec}, a silent {silent}, after {:?}: {}", start.elapsed(), answer.receipt.chunks[0].reason);
            assert_eq!(answer.sources(), ["fresh"; 6], "{spec}, a silent {silent}");
            assert_eq!(system.reference.check(&system.chunks, QUESTION, spec, &answer).unwrap(), Verdict::Fresh);
            system.store.hold_reads_from(0);
            system.gate.open();
            let answer = system.client.generate(system.request(spec)).unwrap();
            assert_eq!(system.reference.check(&system.chunks, QUESTION, spec, &answer).unwrap(), Verdict::Stored);
        }
    }
    wait_idle(system.pair.worker.address(), system.cache.address(), Duration::from_secs(5)).unwrap();
}
