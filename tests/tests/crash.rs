//! kill -9 in the middle of 50 streams, of real processes: every stream ends with the right text or a clear status, nothing
//! leaks, and after a restart everything is as before.
#![allow(missing_docs)]

use std::path::Path;
use std::time::{Duration, Instant};

use kvsplice_kv::object::Header;
use kvsplice_proto::{client, v1};
use kvsplice_tests::{
    Answer, Client, Cluster, Crowd, EXACT, Pair, Process, Reference, Verdict, cache_stats, inline, request, strategy,
    wait_idle, wait_serving, wait_until, words,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tonic::{Code, Status};

const STREAMS: usize = 50;
const OUTPUT: u32 = 16;
const QUESTION: &str = "Who keeps the beehives of the harbor?";
/// Each stream's own; far less than the test's patience.
const DEADLINE: Duration = Duration::from_secs(60);
/// Until a stream has noticed that its worker is gone.
const NOTICED: Duration = Duration::from_secs(10);
/// A pause that a living head may make.
const PAUSE: Duration = Duration::from_secs(2);
/// Until nothing is held any more.
const RELEASED: Duration = Duration::from_secs(5);

/// One stream's prompt.
struct Case {
    chunks: Vec<String>,
    spec: &'static str,
}

fn cases(count: usize, seed: u64) -> Vec<Case> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let strategies = ["clip:0.3", "direct", "lego", "guided:0.3", "full"];
    let case = |place: usize| {
        let chunks = (0..random.random_range(2..=5)).map(|_| {
            let chunk: usize = random.random_range(0..12);
            words(120 * chunk, 40 + 6 * chunk)
        });
        Case { chunks: chunks.collect(), spec: strategies[place % strategies.len()] }
    };
    (0..count).map(case).collect()
}

fn asked(case: &Case, store: bool) -> v1::GenerateRequest {
    request(inline(&case.chunks, QUESTION, store), strategy(case.spec), OUTPUT)
}

/// Stores what the cases need, and begins all of them at once.
fn begin(client: &Client, cases: &[Case]) -> Crowd {
    client.begin_each(cases.iter().map(|case| asked(case, false)).collect(), DEADLINE)
}

fn store(client: &Client, cases: &[Case]) {
    for case in cases.iter().filter(|case| case.spec != "full") {
        client.generate(asked(case, true)).unwrap();
    }
}

fn judge(reference: &mut Reference, case: &Case, answer: &Answer) -> Verdict {
    assert_eq!(answer.token_ids.len(), OUTPUT as usize);
    let verdict = reference.check(&case.chunks, QUESTION, case.spec, answer);
    verdict.unwrap_or_else(|error| panic!("{}: {error:#}\n{:?}", case.spec, answer.receipt))
}

/// All at once again, each from stored chunks.
fn assert_as_before(client: &Client, reference: &mut Reference, cases: &[Case]) {
    for (case, answer) in cases.iter().zip(begin(client, cases).finish()) {
        let answer = answer.unwrap_or_else(|status| panic!("{}: {status}", case.spec));
        let verdict = judge(reference, case, &answer);
        assert_eq!(verdict, Verdict::Stored, "{}: {:?}", case.spec, answer.receipt);
    }
}

#[test]
fn a_killed_cache_service_leaves_every_stream_right() {
    let seed = 21;
    println!("seed {seed}");
    let mut cluster = Cluster::start(&EXACT).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let mut reference = Reference::start().unwrap();
    let cases = cases(STREAMS, seed);
    store(&client, &cases);
    let object_store = format!("file://{}", cluster.store().display());
    let settings = [&["--object-store", object_store.as_str()], &EXACT[..]].concat();
    // While the first prompts are planned, while most are computed, while all generate.
    for (planned, begun) in [(1, 0), (STREAMS / 2, 0), (STREAMS, STREAMS)] {
        let crowd = begin(&client, &cases);
        wait_until("streams under way", DEADLINE, || {
            Ok((crowd.planned() >= planned && crowd.begun() >= begun).then_some(()))
        })
        .unwrap();
        let address = cluster.cache.address().to_owned();
        cluster.cache.kill().unwrap();
        let start = Instant::now();
        let mut verdicts = [0; 3];
        for (case, answer) in cases.iter().zip(crowd.finish()) {
            let answer = answer.unwrap_or_else(|status| panic!("{}: {status}", case.spec));
            verdicts[judge(&mut reference, case, &answer) as usize] += 1;
        }
        assert!(start.elapsed() < DEADLINE);
        println!("killed after {planned} plans: {verdicts:?} stored, repaired, fresh");
        cluster.cache = Process::start_at("cache", &address, &settings, cluster.folder()).unwrap();
        wait_serving(&cluster.cache).unwrap();
        wait_idle(cluster.worker.address(), cluster.cache.address(), RELEASED).unwrap();
        assert_as_before(&client, &mut reference, &cases);
        wait_idle(cluster.worker.address(), cluster.cache.address(), RELEASED).unwrap();
    }
    assert!(cluster.worker.is_running().unwrap() && cluster.head.is_running().unwrap());
}

#[test]
fn a_killed_head_leaves_no_lease_and_a_paused_one_keeps_its_own() {
    let seed = 23;
    println!("seed {seed}");
    let mut cluster = Cluster::start(&EXACT).unwrap();
    let mut reference = Reference::start().unwrap();
    let cases = cases(STREAMS, seed);
    store(&Client::connect(cluster.server()).unwrap(), &cases);
    let to_cache = format!("head.cache={}", cluster.cache.address());
    let to_worker = format!("head.worker={}", cluster.worker.address());
    let settings = [&["--set", to_cache.as_str(), "--set", to_worker.as_str()], &EXACT[..]].concat();
    let leases = |cluster: &Cluster| cache_stats(cluster.cache.address()).map(|stats| stats.leases);
    for planned in [1, STREAMS / 2, STREAMS] {
        let client = Client::connect(cluster.server()).unwrap();
        let crowd = begin(&client, &cases);
        wait_until("streams under way", DEADLINE, || {
            Ok((crowd.planned() >= planned && leases(&cluster)? > 0).then_some(()))
        })
        .unwrap();
        let address = cluster.head.address().to_owned();
        cluster.head.kill().unwrap();
        wait_idle(cluster.worker.address(), cluster.cache.address(), RELEASED).unwrap();
        let (mut ended, mut failed) = (0, 0);
        for (case, answer) in cases.iter().zip(crowd.finish()) {
            match answer {
                Ok(answer) => {
                    judge(&mut reference, case, &answer);
                    ended += 1;
                }
                Err(status) => {
                    let status = client::explain(status);
                    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
                    failed += 1;
                }
            }
        }
        println!("killed after {planned} plans: {ended} streams had ended, {failed} failed");
        cluster.head = Process::start_at("head", &address, &settings, cluster.folder()).unwrap();
        wait_serving(&cluster.head).unwrap();
    }
    let client = Client::connect(cluster.server()).unwrap();
    let crowd = begin(&client, &cases);
    wait_until("streams under way", DEADLINE, || Ok((crowd.planned() == STREAMS).then_some(()))).unwrap();
    cluster.head.signal("STOP").unwrap();
    let (start, held) = (Instant::now(), leases(&cluster).unwrap());
    assert!(held > 0);
    // What was under way between the two when it stopped may still arrive.
    let slack = held / 10;
    wait_until("the end of the pause", DEADLINE, || Ok((start.elapsed() > PAUSE).then_some(()))).unwrap();
    let kept = leases(&cluster).unwrap();
    cluster.head.signal("CONT").unwrap();
    assert!(kept + slack >= held, "{kept} of {held} leases were kept");
    for (case, answer) in cases.iter().zip(crowd.finish()) {
        judge(&mut reference, case, &answer.unwrap());
    }
    wait_idle(cluster.worker.address(), cluster.cache.address(), RELEASED).unwrap();
}

/// A status that says who is gone, to one who can ask again.
#[track_caller]
fn assert_clear(status: &Status, who: &str) {
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert!(status.message().contains(who), "{status:?}");
}

/// Chunk objects of a store, each checked whole, and files that no object is.
fn check_objects(store: &Path) -> (usize, usize) {
    let (mut objects, mut others) = (0, 0);
    for chunk in std::fs::read_dir(store.join("kv")).into_iter().flatten().flatten() {
        for file in std::fs::read_dir(chunk.path()).into_iter().flatten().flatten() {
            if file.file_name() != "f32-clean-1" {
                others += 1;
                continue;
            }
            let bytes = std::fs::read(file.path()).unwrap();
            let header = Header::parse(&bytes).unwrap_or_else(|error| panic!("{}: {error}", file.path().display()));
            assert_eq!(bytes.len(), header.object_bytes(), "{}", file.path().display());
            for layer in 0..header.layout.layers {
                header.verify_layer(layer, &bytes[header.layer_range(layer)]).unwrap();
            }
            objects += 1;
        }
    }
    (objects, others)
}

#[test]
fn a_cache_service_killed_while_it_writes_leaves_whole_objects() {
    let mut cluster = Cluster::start(&EXACT).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let mut reference = Reference::start().unwrap();
    let object_store = format!("file://{}", cluster.store().display());
    let settings = [&["--object-store", object_store.as_str()], &EXACT[..]].concat();
    for round in 0..3 {
        let case = |place: usize| {
            let chunks = (0..3).map(|chunk| words(3000 * round + 120 * place + 40 * chunk, 40)).collect();
            Case { chunks, spec: ["clip:0.3", "direct"][place % 2] }
        };
        let cases: Vec<Case> = (0..20).map(case).collect();
        let (before, _) = check_objects(&cluster.store());
        let crowd = client.begin_each(cases.iter().map(|case| asked(case, true)).collect(), DEADLINE);
        wait_until("some objects", DEADLINE, || {
            Ok((check_objects(&cluster.store()).0 >= before + 10 + 15 * round).then_some(()))
        })
        .unwrap();
        let address = cluster.cache.address().to_owned();
        cluster.cache.kill().unwrap();
        let (mut answered, mut refused) = (0, 0);
        for (case, answer) in cases.iter().zip(crowd.finish()) {
            match answer {
                Ok(answer) => {
                    judge(&mut reference, case, &answer);
                    answered += 1;
                }
                Err(status) => {
                    assert_clear(&status, "cache service");
                    refused += 1;
                }
            }
        }
        let (objects, others) = check_objects(&cluster.store());
        println!("killed with {objects} objects: {answered} answered, {refused} refused, {others} unfinished files");
        cluster.cache = Process::start_at("cache", &address, &settings, cluster.folder()).unwrap();
        wait_serving(&cluster.cache).unwrap();
        store(&client, &cases);
        assert_as_before(&client, &mut reference, &cases);
        wait_idle(cluster.worker.address(), cluster.cache.address(), RELEASED).unwrap();
        check_objects(&cluster.store());
    }
}

#[test]
fn a_killed_worker_ends_its_own_streams_and_no_others() {
    let seed = 22;
    println!("seed {seed}");
    let mut cluster = Cluster::start(&EXACT).unwrap();
    // Another worker, with a head of its own, on the same cache service.
    let other = Pair::start(cluster.cache.address(), &EXACT).unwrap();
    let (client, untouched) =
        (Client::connect(cluster.server()).unwrap(), Client::connect(other.head.address()).unwrap());
    let mut reference = Reference::start().unwrap();
    let cases = cases(STREAMS, seed);
    store(&client, &cases);
    let to_cache = format!("worker.cache={}", cluster.cache.address());
    let settings = [&["--set", to_cache.as_str()], &EXACT[..]].concat();
    for (planned, begun) in [(STREAMS / 5, 0), (STREAMS, STREAMS / 2)] {
        let crowd = begin(&client, &cases);
        let others = begin(&untouched, &cases[..10]);
        wait_until("streams under way", DEADLINE, || {
            Ok((crowd.planned() >= planned && crowd.begun() >= begun).then_some(()))
        })
        .unwrap();
        let address = cluster.worker.address().to_owned();
        cluster.worker.kill().unwrap();
        let start = Instant::now();
        let (mut ended, mut failed) = (0, 0);
        for (case, answer) in cases.iter().zip(crowd.finish()) {
            match answer {
                Ok(answer) => {
                    judge(&mut reference, case, &answer);
                    ended += 1;
                }
                Err(status) => {
                    assert_clear(&status, "worker");
                    failed += 1;
                }
            }
        }
        assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
        println!("killed after {planned} plans: {ended} streams had ended, {failed} failed");
        assert!(failed > 0);
        for (case, answer) in cases.iter().zip(others.finish()) {
            judge(&mut reference, case, &answer.unwrap());
        }
        wait_idle(other.worker.address(), cluster.cache.address(), RELEASED).unwrap();

        // Refused at once, not in the end.
        let start = Instant::now();
        for answer in begin(&client, &cases[..5]).finish() {
            assert_clear(&answer.unwrap_err(), "worker");
        }
        assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
        cluster.worker = Process::start_at("worker", &address, &settings, cluster.folder()).unwrap();
        wait_serving(&cluster.worker).unwrap();
        assert_as_before(&client, &mut reference, &cases);
        wait_idle(cluster.worker.address(), cluster.cache.address(), RELEASED).unwrap();
    }
    assert_eq!(cache_stats(cluster.cache.address()).unwrap().leases, 0);
}
