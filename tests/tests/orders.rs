//! 500 orders of a fixed corpus, each new: nothing more is stored, and the last hundred gain what the first hundred did.
#![allow(missing_docs)]

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvsplice_proto::v1;
use kvsplice_tests::{Answer, Client, Cluster, cache_stats, inline, request, strategy, words};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// How fast this machine is does not decide what is loaded.
const TINY: [&str; 5] = ["--shape", "tiny", "--random-weights", "--set", "worker.plan_loads=false"];
const ORDERS: usize = 500;
const SAMPLE: usize = 100;
const QUESTION: &str = "How many beehives does the captain keep?";

/// Files of a store and the bytes that each has.
fn files(folder: &Path, found: &mut BTreeMap<PathBuf, u64>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.path().is_dir() {
            files(&entry.path(), found);
        } else {
            found.insert(entry.path(), entry.metadata().unwrap().len());
        }
    }
}

/// What a hundred orders gave, under one strategy.
#[derive(Default)]
struct Sums {
    chunks: usize,
    hits: usize,
    reused: u32,
    recomputed: u32,
    rows: u32,
    bytes: u64,
    first_token: Vec<Duration>,
    full: Vec<Duration>,
}

impl Sums {
    fn add(&mut self, answer: &Answer) {
        let tokens = answer.receipt.tokens.unwrap();
        self.chunks += answer.sources().len();
        self.hits += answer.sources().iter().filter(|source| ["memory", "object"].contains(source)).count();
        self.reused += tokens.reused_exact + tokens.reused_approximate;
        self.recomputed += tokens.recomputed;
        self.rows += answer.receipt.chunks.iter().map(|chunk| chunk.rows).sum::<u32>();
        self.bytes += answer.receipt.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
    }

    fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.chunks as f64
    }

    /// The gain in the time to the first token over `full`.
    fn gain(&mut self) -> f64 {
        let median = |times: &mut Vec<Duration>| {
            times.sort_unstable();
            times[times.len() / 2].as_secs_f64()
        };
        median(&mut self.full) / median(&mut self.first_token)
    }
}

#[test]
fn new_orders_store_nothing_and_gain_as_much_as_the_first() {
    let seed = 41;
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let cluster = Cluster::start(&TINY).unwrap();
    let client = Client::connect(cluster.server()).unwrap();
    let corpus: Vec<String> = (0..7).map(|place| words(place * 200, 150 + 3 * place)).collect();
    let ask = |order: &[usize], spec: &str| {
        let chunks: Vec<&String> = order.iter().map(|&place| &corpus[place]).collect();
        // Whatever is not there would be stored.
        let options = strategy(spec);
        let request = v1::GenerateRequest { dump: false, ..request(inline(&chunks, QUESTION, true), options, 1) };
        let start = Instant::now();
        let answer = client.generate(request).unwrap();
        let first_token = answer.times[0] - start;
        (answer, first_token)
    };
    let mut order: Vec<usize> = (0..corpus.len()).collect();
    for spec in ["clip:0.2", "direct", "full"] {
        ask(&order, spec);
    }
    let stored = || {
        let mut found = BTreeMap::new();
        files(&cluster.store(), &mut found);
        found
    };
    let (before, tiers) = (stored(), cache_stats(cluster.cache.address()).unwrap().tiers);

    let mut seen = HashSet::from([order.clone()]);
    // Of clip and direct, the first and the last hundred orders.
    let mut sums: [[Sums; 2]; 2] = Default::default();
    for number in 0..ORDERS {
        while !seen.insert(order.clone()) {
            order.shuffle(&mut random);
        }
        let sample = match number {
            0..SAMPLE => Some(0),
            _ if number >= ORDERS - SAMPLE => Some(1),
            _ => None,
        };
        let (answer, first_token) = ask(&order, ["clip:0.2", "direct"][number % 2]);
        assert!(answer.sources().iter().all(|source| ["memory", "object"].contains(source)), "{:?}", answer.receipt);
        let tokens = answer.receipt.tokens.unwrap();
        assert!(tokens.reused_approximate > 0 && answer.receipt.ratio_charged <= 0.201);
        if let Some(sample) = sample {
            let sums = &mut sums[number % 2][sample];
            sums.add(&answer);
            sums.first_token.push(first_token);
            sums.full.push(ask(&order, "full").1);
        }
    }
    assert_eq!(seen.len(), ORDERS + 1);
    assert!(stored() == before, "the store has changed");
    assert_eq!(cache_stats(cluster.cache.address()).unwrap().tiers, tiers, "the tiers have changed");

    for (strategy, [first, last]) in ["clip", "direct"].into_iter().zip(&mut sums) {
        let (gain, later) = (first.gain(), last.gain());
        println!(
            "{strategy}: hit rate {:.3}, then {:.3}; gain in TTFT {gain:.2}, then {later:.2} ({:+.1} %)",
            first.hit_rate(),
            last.hit_rate(),
            100.0 * (later / gain - 1.0)
        );
        assert!(last.hit_rate() >= 0.95 * first.hit_rate());
        assert_eq!(last.reused + last.recomputed, first.reused + first.recomputed, "{strategy}: tokens");
        // Times are those of a busy machine and a tiny model; the rows are what they come from.
        assert!(later >= gain / 2.0, "{strategy}: {later} after {gain}");
    }
    let [first, last] = &sums[1];
    assert_eq!((last.reused, last.recomputed, last.rows, last.bytes), (first.reused, first.recomputed, 0, first.bytes));
    let [first, last] = &sums[0];
    let near = |last: f64, first: f64| (last / first - 1.0).abs() <= 0.05;
    assert!(near(f64::from(last.rows), f64::from(first.rows)), "clip: {} rows after {}", last.rows, first.rows);
}
