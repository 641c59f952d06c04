//! The disk tier at its cap, and disks that are really full, under a whole system: the service stays up, the cap holds at
//! every look, the answers are right.
#![allow(missing_docs)]

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvsplice_cache_service::{Config, Eviction};
use kvsplice_proto::v1;
use kvsplice_tests::{
    CacheService, Client, EXACT, FaultyStore, Pair, Process, Reference, SmallDisk, Verdict, cache_stats, file_bytes,
    inline, on_a_small_disk, request, run, run_ok, strategy, wait_idle, wait_serving, wait_until, watch, words,
};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

const QUESTION: &str = "Who built it, and when?";
const ANY_PORT: &str = "127.0.0.1:0";
const STRATEGIES: [&str; 3] = ["clip:0.3", "direct", "guided:0.3"];

fn asked(chunks: &[String], spec: &str, store: bool) -> v1::GenerateRequest {
    let options = strategy(spec);
    request(inline(chunks, QUESTION, store), options, 4)
}

/// A head and a worker on a cache service with a disk tier in `folder` and no memory tier.
struct System {
    store: Arc<FaultyStore>,
    cache: CacheService,
    pair: Pair,
    client: Client,
    reference: Reference,
    pool: Vec<String>,
}

impl System {
    fn start(folder: &Path, disk_bytes: u64, eviction: Eviction) -> Self {
        let store = Arc::new(FaultyStore::default());
        let disk_dir = folder.to_owned();
        let config = Config { memory_bytes: 0, disk_bytes, disk_dir, eviction, ..Config::default() };
        let cache = CacheService::start_with(store.clone(), config, ANY_PORT).unwrap();
        // Auxiliary KV is read anew as well.
        let settings = [&EXACT[..], &["--set", "head.auxiliary_kv_bytes=0"]].concat();
        let pair = Pair::start(cache.address(), &settings).unwrap();
        let client = Client::connect(pair.head.address()).unwrap();
        let pool = (0..24).map(|place| words(70 * place, 20 + 3 * place)).collect();
        Self { store, cache, pair, client, reference: Reference::start().unwrap(), pool }
    }

    /// `count` random prompts of stored chunks, four at a time; each answer is judged.
    fn stream(&mut self, random: &mut ChaCha8Rng, count: usize) {
        for _ in 0..count.div_ceil(4) {
            let cases: Vec<(Vec<String>, &str)> = STRATEGIES
                .into_iter()
                .chain(["direct"])
                .map(|spec| {
                    self.pool.shuffle(random);
                    (self.pool[..3].to_vec(), spec)
                })
                .collect();
            let requests = cases.iter().map(|(chunks, spec)| asked(chunks, spec, true)).collect();
            for ((chunks, spec), answer) in cases.iter().zip(self.client.generate_each(requests)) {
                let answer = answer.unwrap_or_else(|status| panic!("{spec}: {status}"));
                let verdict = self.reference.check(chunks, QUESTION, spec, &answer);
                assert_eq!(verdict.unwrap_or_else(|error| panic!("{spec}: {error:#}")), Verdict::Stored);
            }
        }
    }

    fn lookups(&self, name: &str) -> u64 {
        cache_stats(self.cache.address()).unwrap().lookups[name]
    }

    fn disk_bytes(&self) -> (u64, u64) {
        let tiers = cache_stats(self.cache.address()).unwrap().tiers;
        let tier = tiers.iter().find(|tier| tier.name == "disk").expect("the tier is on");
        (tier.bytes, tier.limit_bytes)
    }
}

#[test]
fn the_cap_of_the_disk_tier_holds_at_every_look() {
    let seed = 51;
    println!("seed {seed}");
    for eviction in [Eviction::Lru, Eviction::Value] {
        let folder = tempfile::tempdir().unwrap();
        let cap = 900_000;
        let mut system = System::start(folder.path(), cap, eviction);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (stop, most, looks) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                watch(&stop, || {
                    most.fetch_max(file_bytes(folder.path()), Ordering::SeqCst);
                    looks.fetch_add(1, Ordering::SeqCst);
                });
            });
            // Ends the watch even when an answer is wrong.
            let streamed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..5 {
                    system.stream(&mut random, 16);
                    let (bytes, limit) = system.disk_bytes();
                    assert!(limit == cap && bytes <= cap, "{bytes} of {limit}");
                }
            }));
            stop.store(true, Ordering::SeqCst);
            streamed.unwrap();
        });
        let (most, looks) = (most.into_inner(), looks.into_inner());
        println!(
            "{eviction:?}: at most {most} of {cap} bytes in {looks} looks, {} evicted",
            system.lookups("disk/evicted")
        );
        assert!(most <= cap + cap / 100, "{most} of {cap} bytes");
        assert!(most >= cap / 2 && looks > 100, "the tier was not at its cap, or nobody looked");
        assert!(system.lookups("disk/evicted") > 0 && system.lookups("hit/disk") > 0);
        wait_idle(system.pair.worker.address(), system.cache.address(), Duration::from_secs(5)).unwrap();
    }
}

#[test]
fn a_disk_tier_on_a_full_disk_is_counted_and_the_answers_stay_right() {
    let folder =
        match on_a_small_disk("a_disk_tier_on_a_full_disk_is_counted_and_the_answers_stay_right", 1024).unwrap() {
            SmallDisk::Here(folder) => folder,
            SmallDisk::Passed => return,
            SmallDisk::NotTried => {
                return println!("not tried: this system lets nobody mount a small disk (unshare --user --mount)");
            }
        };
    // The setting allows far more than the disk has.
    let mut system = System::start(&folder, 1 << 30, Eviction::Lru);
    let mut random = ChaCha8Rng::seed_from_u64(52);
    system.stream(&mut random, 32);
    assert!(system.lookups("disk/full") > 0, "the disk was not full");
    system.stream(&mut random, 8);
    assert!(system.lookups("hit/disk") > 0, "what had been written is read");
}

/// One line on stderr, and the exit code of a server that refuses.
fn assert_refused(arguments: &[&str], part: &str) {
    let output = run(arguments).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(69), "{stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("kvsplice: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    assert!(lines[0].to_lowercase().contains(part), "{stderr}");
}

#[test]
fn an_object_store_on_a_full_disk_refuses_what_is_new_and_serves_what_it_has() {
    let name = "an_object_store_on_a_full_disk_refuses_what_is_new_and_serves_what_it_has";
    let disk = match on_a_small_disk(name, 4096).unwrap() {
        SmallDisk::Here(folder) => folder,
        SmallDisk::Passed => return,
        SmallDisk::NotTried => {
            return println!("not tried: this system lets nobody mount a small disk (unshare --user --mount)");
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}", disk.join("store").display());
    let mut cache = Process::start("cache", &["--object-store", &store], folder.path()).unwrap();
    wait_serving(&cache).unwrap();
    let pair = Pair::start(cache.address(), &EXACT).unwrap();
    let client = Client::connect(pair.head.address()).unwrap();
    let mut reference = Reference::start().unwrap();
    let old: Vec<String> = (0..4).map(|place| words(100 * place, 40)).collect();
    client.generate(asked(&old, "clip:0.3", true)).unwrap();

    let filler = disk.join("filler");
    let ballast = std::fs::write(&filler, vec![7; 8 << 20]);
    assert_eq!(ballast.unwrap_err().kind(), ErrorKind::StorageFull);
    let document = folder.path().join("new.txt");
    std::fs::write(&document, words(2000, 400)).unwrap();
    let ingest = ["ingest", "--server", pair.head.address(), "--corpus", "new", document.to_str().unwrap()];
    assert_refused(&ingest, "no space");
    let new = vec![words(4000, 60), old[0].clone()];
    let status = client.generate(asked(&new, "direct", true)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    assert!(cache_stats(cache.address()).unwrap().lookups["store/full"] > 0);
    // What is there is served, what is not is fresh.
    let answer = client.generate(asked(&old, "clip:0.3", true)).unwrap();
    assert_eq!(reference.check(&old, QUESTION, "clip:0.3", &answer).unwrap(), Verdict::Stored);
    let answer = client.generate(asked(&new, "direct", false)).unwrap();
    assert_eq!(reference.check(&new, QUESTION, "direct", &answer).unwrap(), Verdict::Fresh);
    assert!(cache.is_running().unwrap());
    // Nothing half written has been left behind.
    std::fs::remove_file(&filler).unwrap();
    let listed = run_ok(&["cache", "verify", "--all", "--server", cache.address()]).unwrap();
    assert!(listed.contains("0 bad") || !listed.contains("bad"), "{listed}");
    wait_until("room", Duration::from_secs(10), || Ok(run(&ingest)?.status.success().then_some(()))).unwrap();
    let answer = client.generate(asked(&new, "direct", true)).unwrap();
    assert_eq!(reference.check(&new, QUESTION, "direct", &answer).unwrap(), Verdict::Stored);
}

#[test]
fn a_store_without_space_is_counted_and_the_answers_stay_right() {
    let folder = tempfile::tempdir().unwrap();
    let mut system = System::start(folder.path(), 10 << 20, Eviction::Lru);
    let mut random = ChaCha8Rng::seed_from_u64(53);
    system.stream(&mut random, 8);
    system.store.fail_writes(Some(ErrorKind::StorageFull));
    let new = vec![words(3000, 50), words(3100, 50)];
    let status = system.client.generate(asked(&new, "direct", true)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("no storage space"), "{status}");
    assert!(system.lookups("store/full") > 0);
    let answer = system.client.generate(asked(&new, "direct", false)).unwrap();
    assert_eq!(system.reference.check(&new, QUESTION, "direct", &answer).unwrap(), Verdict::Fresh);
    system.store.fail_writes(None);
    system.stream(&mut random, 8);
}
