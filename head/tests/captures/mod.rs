//! Decisions of Cache-Craft and the bounds on what is kept, against a cache service over a map.

use std::time::Duration;

use bytes::Bytes;
use kvsplice_head::Config;
use kvsplice_head::craft::{Captures, Chunk, Decision, forget};
use kvsplice_kv::{Capture, ChunkId, Encoding, Variant};
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::client::channel;
use kvsplice_proto::v1::cache_server::CacheServer;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;

use crate::peers::{Cache, listener};

const DEADLINE: Duration = Duration::from_secs(60);
const TOKENS: u32 = 8;
const CLEAN: Variant = Variant::clean(Encoding::Bf16);

fn id(byte: u8) -> ChunkId {
    ChunkId::from_bytes([byte; 32])
}

fn chunks(bytes: &[u8]) -> Vec<Chunk> {
    bytes.iter().map(|&byte| Chunk { id: id(byte), tokens: TOKENS }).collect()
}

/// The capture of a chunk behind others. Its last tokens look back most.
fn capture(chunk: u8, before: &[u8]) -> Capture {
    let prefix: Vec<ChunkId> = before.iter().copied().map(id).collect();
    Capture {
        inter: vec![1.0; prefix.len()],
        prefix_tokens: vec![TOKENS; prefix.len()],
        intra: 4.0,
        external: (0..TOKENS).map(|token| token as f32 / 16.0).collect(),
        prefix: prefix.clone(),
        ..Capture::clean(id(chunk), Variant::context(Encoding::Bf16, &prefix), TOKENS)
    }
}

struct Store {
    cache: Cache,
    client: CacheClient,
}

impl Store {
    async fn start() -> Self {
        let cache = Cache::default();
        let (incoming, address) = listener().await;
        let service = CacheServer::new(cache.clone());
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(incoming)));
        Self { cache, client: CacheClient::new(channel(&address).unwrap(), DEADLINE) }
    }

    fn captures(&self, config: Config) -> Captures {
        Captures::new(self.client.clone(), &config)
    }

    fn put_kv(&self, chunk: ChunkId, variant: Variant) {
        self.cache.chunks.lock().unwrap().insert((chunk.to_string(), variant.to_string()), Bytes::new());
    }

    fn put_record(&self, key: &str, json: Vec<u8>) {
        self.cache.records.lock().unwrap().insert(key.to_owned(), json);
    }

    /// Stores KV and record.
    fn put(&self, capture: &Capture) {
        self.put_kv(capture.chunk, capture.variant);
        self.put_record(&capture.key(), capture.to_json().unwrap());
    }

    fn uses(&self, capture: &Capture) -> Option<f64> {
        let records = self.cache.records.lock().unwrap();
        records.get(&capture.key()).map(|json| Capture::from_json(json).unwrap().uses)
    }

    fn has_kv(&self, capture: &Capture) -> bool {
        self.cache.chunks.lock().unwrap().contains_key(&(capture.chunk.to_string(), capture.variant.to_string()))
    }
}

async fn decide(captures: &Captures, prompt: &[u8]) -> Vec<Decision> {
    captures.decide(&chunks(prompt), Encoding::Bf16, 1.0, DEADLINE).await.unwrap()
}

#[tokio::test]
async fn each_chunk_gets_the_variant_that_costs_least_where_it_stands() {
    let store = Store::start().await;
    let captured = capture(2, &[1]);
    store.put(&captured);
    for chunk in [1, 2] {
        store.put_kv(id(chunk), CLEAN);
    }
    let captures = store.captures(Config::default());
    let decisions = decide(&captures, &[1, 2, 3]).await;
    assert_eq!((decisions[0].variant(), decisions[0].cfo, decisions[0].fresh), (CLEAN, 0.0, false));
    assert_eq!((decisions[1].stale.clone(), decisions[1].cfo), (captured.clone(), 0.0));
    assert!(decisions[0].rows.is_empty() && decisions[1].rows.is_empty());
    assert!(decisions[2].fresh, "nothing is stored of it");
    assert_eq!(decisions[2].rows, (0..TOKENS).collect::<Vec<_>>());

    // Behind another chunk the capture costs its CCI, which is above the clean-room chunk's 0.5.
    let decisions = decide(&captures, &[1, 9, 2, 9]).await;
    assert_eq!(decisions[2].cfo, 0.0, "chunks that came in between do not matter");
    let decisions = decide(&captures, &[9, 2]).await;
    assert_eq!((decisions[1].variant(), decisions[1].cfo), (CLEAN, 0.5));
    assert_eq!(decisions[1].rows, [0, 1, 2, 3]);

    // Without a clean-room chunk the capture is all there is: its last tokens look back most.
    store.cache.chunks.lock().unwrap().remove(&(id(2).to_string(), CLEAN.to_string()));
    let decisions = decide(&store.captures(Config::default()), &[9, 2]).await;
    assert_eq!((decisions[1].variant(), decisions[1].fresh), (captured.variant, false));
    let first = TOKENS - decisions[1].rows.len() as u32;
    assert!(first > 0 && decisions[1].rows == (first..TOKENS).collect::<Vec<_>>(), "{:?}", decisions[1]);

    let dear = store.captures(Config::default()).decide(&chunks(&[9, 2]), Encoding::Bf16, 2.0, DEADLINE).await.unwrap();
    assert!(dear[1].fresh && dear[1].cfo == 1.0);
    let wide = captures.decide(&chunks(&[1, 2]), Encoding::F32, 1.0, DEADLINE).await.unwrap();
    assert!(wide.iter().all(|decision| decision.fresh), "another encoding");
}

#[tokio::test]
async fn a_capture_that_cannot_be_used_is_left_out() {
    let store = Store::start().await;
    let (orphan, damaged, foreign, shorter) = (capture(2, &[1]), capture(3, &[1]), capture(4, &[1]), capture(5, &[1]));
    for capture in [&orphan, &damaged, &foreign, &shorter] {
        store.put(capture);
    }
    store.cache.chunks.lock().unwrap().remove(&(id(2).to_string(), orphan.variant.to_string()));
    store.put_record(&damaged.key(), b"{\"format\":1}".to_vec());
    store.put_record(&foreign.key(), capture(6, &[1]).to_json().unwrap());
    let longer = Capture { tokens: TOKENS + 1, external: vec![0.0; TOKENS as usize + 1], ..shorter.clone() };
    store.put_record(&shorter.key(), longer.to_json().unwrap());
    store.put_record(&format!("craft/{}/manifest", id(2)), b"of a corpus".to_vec());
    let decisions = decide(&store.captures(Config::default()), &[1, 2, 3, 4, 5]).await;
    assert!(decisions.iter().all(|decision| decision.fresh && decision.variant() == CLEAN), "{decisions:?}");
}

#[tokio::test]
async fn without_the_cache_service_every_chunk_is_fresh_and_none_is_captured() {
    let (nobody, address) = listener().await;
    drop(nobody);
    let client = CacheClient::new(channel(&address).unwrap(), Duration::from_secs(5));
    let captures = Captures::new(client, &Config { craft_capture_after: 1, ..Config::default() });
    for decision in decide(&captures, &[1, 2]).await {
        assert!(decision.fresh && !decision.capture && decision.rows.len() == TOKENS as usize);
    }
    let late = captures.decide(&chunks(&[1]), Encoding::Bf16, 1.0, Duration::ZERO).await.unwrap();
    assert!(late[0].fresh);
    assert!(decide(&captures, &[]).await.is_empty());
}

#[tokio::test]
async fn captures_are_trusted_for_a_while_and_read_again_after_one_was_added() {
    let store = Store::start().await;
    let (old, new) = (capture(2, &[1]), capture(2, &[3]));
    store.put(&old);
    let captures = store.captures(Config::default());
    assert_eq!(decide(&captures, &[1, 2]).await[1].cfo, 0.0);
    store.put(&new);
    assert!(decide(&captures, &[3, 2]).await[1].cfo > 0.0);
    captures.admit(&[(new.chunk, new.variant)]).await.unwrap();
    assert_eq!(decide(&captures, &[3, 2]).await[1].stale, new);
}

#[tokio::test]
async fn a_use_counts_by_the_inverse_of_its_cost_and_brings_nothing_back() {
    let store = Store::start().await;
    let (kept, gone) = (Capture { uses: 2.5, ..capture(2, &[1]) }, capture(3, &[1]));
    store.put_kv(id(1), CLEAN);
    store.put(&kept);
    store.put(&gone);
    let captures = store.captures(Config::default());
    let decisions = decide(&captures, &[1, 2, 3, 4, 2]).await;
    store.cache.records.lock().unwrap().remove(&gone.key());
    captures.used(&decisions).await;
    // Twice in one prompt, at no cost each time: 1/0.05.
    assert_eq!(store.uses(&kept), Some(42.5));
    assert_eq!(store.uses(&gone), None);
    let moved = decide(&captures, &[9, 2]).await;
    captures.used(&moved).await;
    assert!((store.uses(&kept).unwrap() - 42.5 - 1.0 / moved[1].cfo).abs() < 1e-9);
    assert_eq!(store.cache.records.lock().unwrap().len(), 1, "clean-room and fresh chunks have no record");
}

#[tokio::test]
async fn uses_at_the_same_time_are_all_counted() {
    let store = Store::start().await;
    let kept = capture(2, &[1]);
    store.put(&kept);
    let captures = store.captures(Config::default());
    let decisions = decide(&captures, &[1, 2]).await;
    futures::future::join_all((0..8).map(|_| captures.used(&decisions))).await;
    assert_eq!(store.uses(&kept), Some(160.0));
}

#[tokio::test]
async fn the_least_used_variant_of_a_chunk_makes_room() {
    let store = Store::start().await;
    store.put_kv(id(1), CLEAN);
    let used = |before: u8, uses: f64, created_ms: u64| Capture { uses, created_ms, ..capture(1, &[before]) };
    let (often, older, newer, new) = (used(2, 9.0, 1), used(3, 1.0, 5), used(4, 1.0, 6), used(5, 0.0, 9));
    for capture in [&often, &older, &newer, &new] {
        store.put(capture);
    }
    let captures = store.captures(Config { craft_variants: 3, ..Config::default() });
    let removed = captures.admit(&[(new.chunk, new.variant)]).await.unwrap();
    assert_eq!(removed, [format!("kv/{}/{}", id(1), older.variant), format!("records/{}", older.key())]);
    assert!(store.has_kv(&often) && store.has_kv(&newer) && store.has_kv(&new) && !store.has_kv(&older));
    assert_eq!(store.cache.chunks.lock().unwrap().len(), 4, "the clean-room chunk stays");

    store.put_record(&often.key(), b"damaged".to_vec());
    store.put(&older);
    captures.admit(&[(older.chunk, older.variant)]).await.unwrap();
    assert!(!store.has_kv(&often), "what cannot be used goes first");
    assert!(captures.admit(&[(older.chunk, older.variant)]).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_least_used_chunks_make_room() {
    let store = Store::start().await;
    let used = |chunk: u8, before: u8, uses: f64| Capture { uses, ..capture(chunk, &[before]) };
    // Chunk 2 is used more than chunk 1, though none of its variants is.
    let (one, two, twin, new) = (used(1, 8, 3.0), used(2, 8, 2.0), used(2, 9, 2.0), used(3, 8, 0.0));
    for capture in [&one, &two, &twin, &new] {
        store.put(capture);
    }
    store.put_record("craft/wiki/manifest", b"of an owner of that name".to_vec());
    let captures = store.captures(Config { craft_chunks: 2, ..Config::default() });
    captures.admit(&[(new.chunk, new.variant)]).await.unwrap();
    assert!(!store.has_kv(&one) && store.uses(&one).is_none());
    assert!(store.has_kv(&two) && store.has_kv(&twin) && store.has_kv(&new));

    let mut removed = forget(&store.client, &[id(2), id(7)]).await.unwrap();
    removed.sort();
    let mut expected = [two.key(), twin.key()].map(|key| format!("records/{key}"));
    expected.sort();
    assert_eq!(removed, expected);
    assert_eq!(store.cache.records.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn a_chunk_without_captures_asks_for_one_at_the_use_that_the_policy_names() {
    let store = Store::start().await;
    store.put(&capture(2, &[1]));
    let asked = |decisions: Vec<Decision>| decisions.iter().map(|decision| decision.capture).collect::<Vec<_>>();
    let captures = store.captures(Config { craft_capture_after: 2, ..Config::default() });
    // The first chunk stands in its clean room, chunk 2 has a capture, and a repeat counts once.
    assert_eq!(asked(decide(&captures, &[1, 2, 3, 3]).await), [false; 4]);
    assert_eq!(asked(decide(&captures, &[1, 2, 3, 3]).await), [false, false, true, false]);
    assert_eq!(asked(decide(&captures, &[3, 1]).await), [false, false]);
    let never = store.captures(Config::default());
    for _ in 0..3 {
        assert_eq!(asked(decide(&never, &[1, 3]).await), [false; 2]);
    }
}
