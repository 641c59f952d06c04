//! A whole system whose object store goes wrong in every n-th call, seeded: 0 wrong answers. Each answer is the
//! undisturbed one, or that of a system in which just those chunks are fresh that the receipt calls fresh; each fault is
//! counted by reason.
//!
//! `KVSPLICE_FAULTS` sets how many faults a storm has at least; `make storm` asks for 10,000. `KVSPLICE_SEED` makes it
//! another storm.
#![allow(missing_docs)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvsplice_cache_service::{Admission, Config};
use kvsplice_kv::ChunkId;
use kvsplice_proto::v1;
use kvsplice_tests::{
    Answer, CacheService, Client, EXACT, Fault, Pair, Reference, StormStore, Verdict, Weather, cache_stats,
    delete_chunks, greedy, inline, run_ok, strategy, wait_idle, words,
};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tonic::Code;

const CHUNKS: usize = 10;
const PROMPTS: usize = 80;
/// Requests at once.
const CALLERS: usize = 4;
const OUTPUT: u32 = 6;
const QUESTION: &str = "Who keeps the beehives of the harbor?";
const STRATEGIES: [&str; 9] = [
    "clip:0.3",
    "clip:0.2:group=none",
    "direct",
    "direct:shared_prefix=false",
    "ape",
    "lego",
    "blend:0.2",
    "guided:0.3",
    "craft",
];
/// The chunks of prompts that are captured; each stands in one of them.
const CAPTURED: [&[usize]; 3] = [&[0, 1, 2], &[3, 4, 5, 6], &[7, 8, 9]];
/// Captures that are a little younger than those that a head trusts.
const TRUSTED: Duration = Duration::from_secs(20);

/// A number from the environment.
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// What a storm has at least, if nothing else is set.
const FAULTS: u64 = 300;
/// The same where others have shown most already.
const FEWER_FAULTS: u64 = 120;

fn seed() -> u64 {
    let seed = setting("KVSPLICE_SEED").unwrap_or(31);
    println!("seed {seed}");
    seed
}

/// Chunks in some order, with repeats, and a strategy.
#[derive(Clone)]
struct Prompt {
    /// Their places in the pool.
    places: Vec<usize>,
    chunks: Vec<String>,
    spec: &'static str,
}

impl Prompt {
    fn draw(random: &mut ChaCha8Rng, pool: &[String]) -> Self {
        let mut places: Vec<usize> = (0..pool.len()).collect();
        places.shuffle(random);
        places.truncate(random.random_range(1..=5));
        if random.random_range(0..3) == 0 {
            places.push(places[0]);
        }
        let chunks = places.iter().map(|&place| pool[place].clone()).collect();
        Self { places, chunks, spec: STRATEGIES[random.random_range(0..STRATEGIES.len())] }
    }
}

/// A request and what is needed to judge its answer.
struct Case {
    chunks: Vec<String>,
    spec: &'static str,
    /// It may be refused when the store fails, for it must read or write.
    may_fail: bool,
    request: v1::GenerateRequest,
}

struct System {
    store: Arc<StormStore>,
    cache: CacheService,
    pair: Pair,
    client: Client,
    prompts: Vec<Prompt>,
    ids: Vec<ChunkId>,
    pool: Vec<String>,
    /// The worker plans what is loaded.
    plans: bool,
    /// Faults that a storm has at least.
    faults: u64,
    random: ChaCha8Rng,
}

const SHOWERS: Weather = Weather { every_read: 6, every_write: 2, tears: false, slow_ms: 4 };

impl System {
    /// All chunks are stored, as documents of the corpus `storm` and behind the default prefix, before the storm begins.
    fn start(store: Arc<StormStore>, config: Config, seed: u64, settings: &[&str]) -> Self {
        let cache = CacheService::start_with(store.clone(), config, "127.0.0.1:0").unwrap();
        // The head reads auxiliary KV anew for each request.
        let settings = [&EXACT[..], &["--set", "head.auxiliary_kv_bytes=0"], settings].concat();
        let pair = Pair::start(cache.address(), &settings).unwrap();
        let client = Client::connect(pair.head.address()).unwrap();
        let pool: Vec<String> = (0..CHUNKS).map(|place| words(97 * place, 14 + 5 * place)).collect();
        let line =
            |(id, text): (usize, &String)| json!({"id": id.to_string(), "text": text, "chunk": true}).to_string();
        let documents = pool.iter().enumerate().map(line).collect::<Vec<_>>().join("\n");
        let path = pair.folder().join("storm.jsonl");
        std::fs::write(&path, documents).unwrap();
        run_ok(&["ingest", "--server", pair.head.address(), "--corpus", "storm", path.to_str().unwrap()]).unwrap();
        let listed = client.list_chunks("storm").unwrap();
        let ids = listed.iter().map(|chunk| chunk.id.parse().unwrap()).collect();
        let faults = setting("KVSPLICE_FAULTS").unwrap_or(FAULTS);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let prompts = (0..PROMPTS).map(|_| Prompt::draw(&mut random, &pool)).collect();
        Self { store, cache, pair, client, prompts, ids, pool, plans: false, faults, random }
    }

    fn case(&mut self) -> Case {
        let random = &mut self.random;
        let Prompt { places, chunks, spec } = self.prompts[random.random_range(0..self.prompts.len())].clone();
        let kind = random.random_range(0..10);
        let prompt = match kind {
            // A corpus has chunks behind its prefix only.
            0..3 => {
                let chunks = places.iter().map(|place| format!("{place}#0")).collect();
                let corpus = v1::CorpusSource { corpus: "storm".into(), chunks, ..v1::CorpusSource::default() };
                let source = Some(v1::prompt::Source::Corpus(corpus));
                v1::Prompt { source, question: QUESTION.into(), ..v1::Prompt::default() }
            }
            kind => inline(&chunks, QUESTION, kind < 5),
        };
        let options = strategy(spec);
        let request = v1::GenerateRequest {
            prompt: Some(prompt),
            options: Some(options),
            sampling: Some(greedy(OUTPUT)),
            dump: true,
        };
        Case { chunks, spec, may_fail: kind < 5, request }
    }

    /// Somebody removes a chunk: it is stored or encoded anew.
    fn lose_one(&mut self) {
        let place = self.random.random_range(0..self.ids.len());
        delete_chunks(self.cache.address(), &self.ids[place..=place]).unwrap();
    }

    fn lookups(&self) -> HashMap<String, u64> {
        cache_stats(self.cache.address()).unwrap().lookups
    }

    fn wait_idle(&self) {
        wait_idle(self.pair.worker.address(), self.cache.address(), Duration::from_secs(5)).unwrap();
    }
}

/// Random requests in the storm until there were enough faults, each answer judged; then the same prompts in the calm.
/// `needed`: what some answers must be. Gives what was counted during the storm.
fn rage(system: &mut System, needed: &[Verdict]) -> HashMap<String, u64> {
    let mut reference = Reference::start().unwrap();
    let check = |reference: &mut Reference, case: &Case, answer: &Answer| {
        reference.check(&case.chunks, QUESTION, case.spec, answer)
    };
    rage_before(system, needed, &mut reference, System::lose_one, check)
}

/// The same; `between` is done in the calm before each few requests, and `check` judges.
fn rage_before(
    system: &mut System,
    needed: &[Verdict],
    reference: &mut Reference,
    mut between: impl FnMut(&mut System),
    mut check: impl FnMut(&mut Reference, &Case, &Answer) -> anyhow::Result<Verdict>,
) -> HashMap<String, u64> {
    let before = system.lookups();
    let mut verdicts: BTreeMap<String, u64> = BTreeMap::new();
    let injected = |system: &System| system.store.all_injected().values().sum::<u64>();
    let (mut requests, mut slow) = (0, 0);
    let mut last = Vec::new();
    while injected(system) < system.faults {
        let cases: Vec<Case> = (0..CALLERS).map(|_| system.case()).collect();
        requests += cases.len();
        between(system);
        system.store.rage(true);
        let answers = system.client.generate_each(cases.iter().map(|case| case.request.clone()).collect());
        system.store.rage(false);
        for (case, answer) in cases.iter().zip(answers) {
            let verdict = match answer {
                Ok(answer) => {
                    slow += answer.receipt.chunks.iter().filter(|chunk| chunk.reason.starts_with("slow: ")).count();
                    let verdict = check(reference, case, &answer);
                    let wrong = |error| panic!("{}: {error:#}\n{:?}", case.spec, answer.receipt);
                    format!("{:?}", verdict.unwrap_or_else(wrong))
                }
                Err(status) => {
                    assert!(case.may_fail, "{}: {status}", case.spec);
                    let allowed = [Code::Unavailable, Code::DataLoss];
                    assert!(allowed.contains(&status.code()) && !status.message().is_empty(), "{status}");
                    "Refused".to_owned()
                }
            };
            *verdicts.entry(verdict).or_default() += 1;
        }
        last = cases;
    }
    system.wait_idle();
    let after = system.lookups();
    println!("{} faults in {requests} requests: {:?}", injected(system), system.store.all_injected());
    println!("answers: {verdicts:?}; {slow} chunks were computed because they were slow");
    let missing = needed.iter().find(|verdict| !verdicts.contains_key(&format!("{verdict:?}")));
    assert_eq!(missing, None, "{verdicts:?}");
    if system.plans {
        assert!(slow > 0, "no plan computed a chunk");
    }

    // When it is over, what is stored again is there.
    for case in last {
        let stored = v1::GenerateRequest { prompt: Some(inline(&case.chunks, QUESTION, true)), ..case.request.clone() };
        let answer = system.client.generate(stored).unwrap();
        check(reference, &case, &answer).unwrap();
    }
    system.wait_idle();
    let counted = after.iter().map(|(name, count)| (name.clone(), count - before.get(name).unwrap_or(&0)));
    let counted: HashMap<String, u64> = counted.collect();
    let shown: BTreeMap<_, _> = counted.iter().filter(|(_, count)| **count > 0).collect();
    println!("counted: {shown:?}");
    counted
}

const ALL: [Verdict; 3] = [Verdict::Stored, Verdict::Repaired, Verdict::Fresh];

/// Every fault that the caller is told of, or that the bytes show, is in the service's own counts.
fn assert_counted(system: &System, counted: &HashMap<String, u64>) {
    let sum = |names: &[&str]| names.iter().map(|name| counted[*name]).sum::<u64>();
    let injected = |faults: &[Fault]| system.store.injected(faults);
    assert_eq!(counted["store/error"], injected(&[Fault::Fail, Fault::BreakOff, Fault::LostAnswer]));
    assert_eq!(counted["store/short"], injected(&[Fault::Short]));
    assert_eq!(sum(&["store/damaged", "store/truncated", "store/foreign"]), injected(&[Fault::FlipBit]));
}

#[test]
fn each_fault_of_the_store_is_counted_and_no_answer_is_wrong() {
    let seed = seed();
    let config = Config { memory_bytes: 0, ..Config::default() };
    let mut system = System::start(StormStore::new(seed, SHOWERS), config, seed, &[]);
    let counted = rage(&mut system, &ALL);
    assert_counted(&system, &counted);
}

#[test]
fn no_answer_is_wrong_where_a_plan_decides_what_is_loaded() {
    let seed = seed();
    // So slow now and then that computing is faster, even here where chunks are computed in no time.
    let weather = Weather { slow_ms: 200, every_read: 5, ..SHOWERS };
    let config = Config { memory_bytes: 0, ..Config::default() };
    let settings = ["--set", "worker.plan_loads=true"];
    let mut system = System::start(StormStore::new(seed, weather), config, seed, &settings);
    system.plans = true;
    system.faults = setting("KVSPLICE_FAULTS").unwrap_or(FEWER_FAULTS);
    rage(&mut system, &[Verdict::Stored, Verdict::Fresh]);
}

#[test]
fn no_answer_is_wrong_of_chunks_that_were_captured_in_their_context() {
    let seed = seed();
    let config = Config { memory_bytes: 0, ..Config::default() };
    let mut system = System::start(StormStore::new(seed, SHOWERS), config, seed, &[]);
    system.faults = setting("KVSPLICE_FAULTS").unwrap_or(FEWER_FAULTS);
    let mut reference = Reference::start().unwrap();
    let pool: Vec<String> = system.pool.clone();
    let chunks_of = |places: &[usize]| -> Vec<String> { places.iter().map(|&place| pool[place].clone()).collect() };
    let prompt = |places: &&[usize]| Prompt { places: places.to_vec(), chunks: chunks_of(places), spec: "craft" };
    system.prompts = CAPTURED.iter().map(prompt).collect();
    let ask = |system: &System, places: &[usize], spec: &str| {
        let prompt = Some(inline(&chunks_of(places), QUESTION, true));
        let (options, sampling) = (Some(strategy(spec)), Some(greedy(OUTPUT)));
        system.client.generate(v1::GenerateRequest { prompt, options, sampling, dump: true }).unwrap()
    };
    for places in CAPTURED {
        reference.capture(&chunks_of(places), QUESTION).unwrap();
        ask(&system, places, "craft:capture=true");
    }
    let mut read: Option<Instant> = None;
    let between = |system: &mut System| {
        // What the head knows of captures it reads in the calm: what it decides in the storm is what it would decide anyway.
        if read.is_none_or(|read| read.elapsed() > TRUSTED) {
            for places in CAPTURED {
                ask(system, places, "craft");
            }
            read = Some(Instant::now());
        }
    };
    let check = |reference: &mut Reference, case: &Case, answer: &Answer| {
        reference.check_captured(&case.chunks, QUESTION, answer)
    };
    let counted = rage_before(&mut system, &[Verdict::Stored, Verdict::Repaired], &mut reference, between, check);
    assert_counted(&system, &counted);
}

#[test]
fn no_answer_is_wrong_behind_tiers_and_torn_writes() {
    let seed = seed();
    let folder = tempfile::tempdir().unwrap();
    // So small that most is read from the store again and again.
    let config = Config {
        memory_bytes: 100_000,
        disk_bytes: 400_000,
        disk_dir: folder.path().to_owned(),
        admission: Admission::Second,
        ..Config::default()
    };
    let weather = Weather { every_read: 4, tears: true, ..SHOWERS };
    let mut system = System::start(StormStore::new(seed, weather), config, seed, &[]);
    let counted = rage(&mut system, &ALL);
    let injected = |faults: &[Fault]| system.store.injected(faults);
    assert_eq!(
        counted["store/error"],
        injected(&[Fault::Fail, Fault::BreakOff, Fault::LostAnswer, Fault::TornAndFails])
    );
    assert_eq!(counted["store/short"], injected(&[Fault::Short]));
    assert!(injected(&[Fault::TornAndLies]) > 0 && counted["store/truncated"] > 0);
    assert!(counted["hit/memory"] > 0 && counted["hit/disk"] > 0 && counted["hit/object"] > 0);
}
