//! Replays traces of chunk requests against the tiers' own order and admission, without data: what a setting is worth.
//!
//! The unit is a chunk, as in the disk tier. `kvsplice bench cache` and the tests read the same figures.

use std::sync::Arc;

use kvsplice_kv::eviction::{Book, Eviction};
use kvsplice_kv::{ChunkId, Encoding, Variant};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::admission::{Admission, Gate};
use crate::protect::Protection;
use crate::tier::ObjectKey;

/// One request of one chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Which chunk.
    pub chunk: u32,
    /// Bytes of its object.
    pub bytes: u64,
    /// Microseconds that computing it anew takes.
    pub cost_us: f64,
}

/// What came of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Requests.
    pub requests: u64,
    /// Requests of chunks that were held.
    pub hits: u64,
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes of those that were held.
    pub hit_bytes: u64,
    /// Microseconds that computing everything anew would have taken.
    pub cost_us: f64,
    /// Microseconds of that which hits saved.
    pub saved_us: f64,
}

/// A tier's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// What goes first.
    pub eviction: Eviction,
    /// What enters.
    pub admission: Admission,
    /// Bytes held at most.
    pub limit_bytes: u64,
}

/// Replays `requests` against an empty tier.
pub fn replay(settings: Settings, requests: &[Request]) -> Outcome {
    let gate = Gate::new(settings.admission, Arc::new(Protection::new()));
    let mut book: Book<ObjectKey, ()> = Book::new(settings.eviction, settings.limit_bytes);
    let mut outcome = Outcome::default();
    for request in requests {
        let key = key(request.chunk);
        outcome.requests += 1;
        outcome.bytes += request.bytes;
        outcome.cost_us += request.cost_us;
        gate.ask(&key);
        if book.get(&key).is_some() {
            book.touch(&key);
            outcome.hits += 1;
            outcome.hit_bytes += request.bytes;
            outcome.saved_us += request.cost_us;
        } else if gate.admits(&key) {
            let (_, room) = book.make_room(request.bytes, |_| false);
            if room {
                book.insert(key, (), request.bytes, request.cost_us);
            }
        }
    }
    outcome
}

fn key(number: u32) -> ObjectKey {
    let mut bytes = [0; 32];
    for (byte, value) in bytes.iter_mut().zip(number.to_le_bytes()) {
        *byte = value;
    }
    ObjectKey { chunk: ChunkId::from_bytes(bytes), variant: Variant::clean(Encoding::Bf16) }
}

/// A trace of a retrieval service, the same for the same seed: `requests` requests of `chunks` chunks of two models, with
/// Zipf's law of exponent `exponent` (RAGCache finds that 3 % of documents serve 60 % of requests). Every fifth of the trace
/// a tenth of the ranks change places, and once in it every chunk is asked for in order, as a check of the store does.
pub fn zipf(seed: u64, chunks: u32, requests: usize, exponent: f64) -> Vec<Request> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let kinds: Vec<Request> = (0..chunks)
        .map(|chunk| {
            let tokens = random.random_range(100..=1000u32);
            // Qwen2.5 0.5B and SmolLM2 135M in bf16: bytes a token, and microseconds in the ratio of their weights.
            let (token_bytes, token_us) =
                if random.random_range(0..2) == 0 { (12_288, 500.0) } else { (23_040, 135.0) };
            Request { chunk, bytes: 32_768 + u64::from(tokens) * token_bytes, cost_us: f64::from(tokens) * token_us }
        })
        .collect();
    let mut by_rank: Vec<u32> = (0..chunks).collect();
    by_rank.shuffle(&mut random);
    let mut total = 0.0;
    let below: Vec<f64> = (1..=chunks)
        .map(|rank| {
            total += f64::from(rank).powf(-exponent);
            total
        })
        .collect();
    let mut trace = Vec::with_capacity(requests + kinds.len());
    for number in 0..requests {
        if number % (requests / 5).max(1) == 0 && number > 0 {
            for _ in 0..chunks / 20 {
                let (one, other) = (random.random_range(0..chunks), random.random_range(0..chunks));
                by_rank.swap(one as usize, other as usize);
            }
        }
        if number == requests / 2 {
            trace.extend_from_slice(&kinds);
        }
        let place = random.random::<f64>() * total;
        let rank = below.partition_point(|sum| *sum < place);
        let chunk = by_rank.get(rank).and_then(|chunk| kinds.get(*chunk as usize));
        trace.extend(chunk.copied());
    }
    trace
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_beats_lru_on_a_zipf_trace() {
        let trace = zipf(7, 10_000, 200_000, 0.9);
        let all: u64 = trace
            .iter()
            .map(|request| (request.chunk, request.bytes))
            .collect::<std::collections::BTreeMap<_, _>>()
            .values()
            .sum();
        let share = |part: f64, whole: f64| 100.0 * part / whole;
        for part in [50, 20, 10, 5] {
            let limit_bytes = all / part;
            let run = |eviction, admission| {
                let outcome = replay(Settings { eviction, admission, limit_bytes }, &trace);
                println!(
                    "1/{part} of the bytes, {eviction:?}, {admission:?}: {:.1} % of bytes hit, {:.1} % of the cost saved",
                    share(outcome.hit_bytes as f64, outcome.bytes as f64),
                    share(outcome.saved_us, outcome.cost_us)
                );
                outcome
            };
            let lru = run(Eviction::Lru, Admission::Always);
            let value = run(Eviction::Value, Admission::Always);
            let second = run(Eviction::Lru, Admission::Second);
            run(Eviction::Value, Admission::Second);
            assert!(value.saved_us > 1.1 * lru.saved_us);
            assert!(value.hit_bytes > lru.hit_bytes);
            assert!(second.hit_bytes > lru.hit_bytes);
        }
    }

    #[test]
    fn value_beats_lru_in_hit_bytes_where_all_bytes_cost_the_same() {
        let mut trace = zipf(8, 10_000, 200_000, 0.9);
        for request in &mut trace {
            request.cost_us = request.bytes as f64;
        }
        for limit_bytes in [1 << 30, 4 << 30, 8 << 30] {
            let run = |eviction| replay(Settings { eviction, admission: Admission::Always, limit_bytes }, &trace);
            let (lru, value) = (run(Eviction::Lru), run(Eviction::Value));
            let gain = value.hit_bytes as f64 / lru.hit_bytes as f64;
            println!("{} GiB: value hits {gain:.3} × the bytes of lru", limit_bytes >> 30);
            assert!(gain > 1.05, "{gain}");
        }
    }

    #[test]
    fn a_trace_is_the_same_for_the_same_seed_and_skewed() {
        let trace = zipf(3, 1000, 20_000, 0.9);
        assert_eq!(trace, zipf(3, 1000, 20_000, 0.9));
        assert_ne!(trace, zipf(4, 1000, 20_000, 0.9));
        assert_eq!(trace.len(), 21_000);
        let mut counts = vec![0u32; 1000];
        for request in &trace {
            counts[request.chunk as usize] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let top: u32 = counts[..30].iter().sum();
        assert!((5000..14_000).contains(&top), "{top} of 21,000 for 3 % of the chunks");
    }

    #[test]
    fn everything_hits_after_the_first_request_if_all_fits() {
        let trace = zipf(5, 100, 2000, 0.9);
        let limit_bytes = 1 << 40;
        let first = |admission| replay(Settings { eviction: Eviction::Lru, admission, limit_bytes }, &trace).hits;
        assert_eq!(first(Admission::Always), 2000, "100 chunks miss once");
        assert_eq!(first(Admission::Second), 1900, "and twice");
    }
}
