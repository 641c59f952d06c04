//! What the service promises on every store.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvsplice_cache_service::{Config, Eviction};
use kvsplice_kv::object::{self, Header};
use kvsplice_kv::{ChunkId, Encoding, Variant};
use kvsplice_proto::v1;
use object_store::memory::InMemory;
use tonic::Code;

use crate::support::{Faulty, Read, Server, VARIANT, chunk, get, put, want};

#[tokio::test]
async fn the_service_conforms_on_memory() {
    let store = Arc::new(InMemory::new());
    conforms("memory://test", "object", async || Server::start(store.clone()).await).await;
}

#[tokio::test]
async fn the_service_conforms_on_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    let config = Config { store: store.clone(), ..Config::default() };
    conforms(&store, "object", async || Server::open(config.clone()).await).await;
}

#[tokio::test]
async fn the_service_conforms_through_a_wrapper() {
    let store = Faulty::on_read(Arc::new(InMemory::new()), |_, _| Read::Pass);
    conforms("memory://test", "object", async || Server::start(store.clone()).await).await;
}

#[tokio::test]
async fn the_service_conforms_with_a_disk_tier() {
    for eviction in [Eviction::Lru, Eviction::Value] {
        let (store, folder) = (Arc::new(InMemory::new()), tempfile::tempdir().unwrap());
        let disk_dir = folder.path().to_owned();
        let config = Config { disk_bytes: 1 << 30, disk_dir, eviction, ..Config::default() };
        conforms("memory://test", "disk", async || Server::start_with(store.clone(), config.clone()).await).await;
    }
}

/// The suite, on a store that is called `name`. Each part uses chunks of its own. `cold`: the tier that serves what was put
/// before a restart.
pub(crate) async fn conforms(name: &str, cold: &str, start: impl AsyncFn() -> Server) {
    let server = start().await;
    what_is_put_is_read(&server).await;
    a_part_of_the_layers_can_be_wanted(&server).await;
    the_first_writer_wins(&server).await;
    a_bad_object_never_becomes_visible(&server).await;
    a_large_object_goes_in_parts(&server).await;
    a_missing_chunk_does_not_stop_the_others(&server).await;
    leases_and_pins_are_counted(&server, name).await;
    records_are_replaced_listed_and_removed(&server).await;
    a_deleted_chunk_is_gone(&server).await;
    variants_of_a_chunk_are_apart(&server).await;
    bad_requests_are_refused(&server).await;
    server.stop().await;
    let server = start().await;
    what_is_put_survives_a_restart(&server, cold).await;
    server.stop().await;
}

async fn what_is_put_is_read(server: &Server) {
    // K and V of one layer take several frames each.
    let (long, short) = (chunk(1, 4, 1500), chunk(2, 30, 3));
    assert!(put(&server.client, &long).await.unwrap());
    assert!(put(&server.client, &short).await.unwrap());
    let got = get(&server.client, want(&[long.id, short.id, long.id])).await.unwrap();
    assert_eq!(got.keys().copied().collect::<Vec<_>>(), [0, 1], "a repeat is sent once");
    got[&0].assert_is(&long);
    got[&1].assert_is(&short);
    assert!(got[&0].sources.iter().all(|source| source == "memory"), "a put fills the memory tier");
}

async fn a_part_of_the_layers_can_be_wanted(server: &Server) {
    let chunk = chunk(3, 6, 5);
    put(&server.client, &chunk).await.unwrap();
    let got = get(&server.client, v1::Want { layers: vec![4, 1, 2, 4], ..want(&[chunk.id]) }).await.unwrap();
    assert_eq!(got[&0].layers.keys().copied().collect::<Vec<_>>(), [1, 2, 4]);
    assert!(got[&0].layers[&4].concat() == chunk.layers[4]);
    let got = get(&server.client, v1::Want { layers: vec![5, 6], ..want(&[chunk.id]) }).await.unwrap();
    assert_eq!(got[&0].layers.len(), 1);
    assert!(got[&0].error.as_ref().unwrap().starts_with("foreign: layer 6"));
}

async fn the_first_writer_wins(server: &Server) {
    let chunk = chunk(4, 2, 7);
    assert!(put(&server.client, &chunk).await.unwrap());
    assert!(!put(&server.client, &chunk).await.unwrap());
    let both = crate::support::chunk(5, 8, 64);
    let (one, two) = tokio::join!(put(&server.client, &both), put(&server.client, &both));
    assert_eq!(u32::from(one.unwrap()) + u32::from(two.unwrap()), 1);
}

async fn a_bad_object_never_becomes_visible(server: &Server) {
    let good = chunk(6, 3, 9);
    let other = chunk(7, 3, 9);
    let mut flipped = good.object.to_vec();
    *flipped.last_mut().unwrap() ^= 1;
    let mut lying = good.object.to_vec();
    lying[100] ^= 1;
    let mut long = good.object.to_vec();
    long.push(0);
    let size = good.object.len();
    let bad: [(&str, Bytes, Variant); 7] = [
        ("another chunk", other.object, VARIANT),
        ("a flipped bit in a layer", flipped.into(), VARIANT),
        ("a flipped bit in the header", lying.into(), VARIANT),
        ("a byte too many", long.into(), VARIANT),
        ("a byte too few", good.object.slice(..size - 1), VARIANT),
        ("nothing", Bytes::new(), VARIANT),
        ("another variant", good.object.clone(), Variant::clean(Encoding::F32)),
    ];
    for (what, object, variant) in bad {
        let status = server.client.put_chunk(good.id, variant, object).await.expect_err(what);
        assert_eq!(status.code(), Code::InvalidArgument, "{what}: {status}");
    }
    let contained = server.client.contains(&[good.id], VARIANT, Duration::ZERO).await.unwrap();
    assert_eq!(contained.found, [false]);
    assert!(put(&server.client, &good).await.unwrap());
    get(&server.client, want(&[good.id])).await.unwrap()[&0].assert_is(&good);
}

async fn a_large_object_goes_in_parts(server: &Server) {
    let large = chunk(8, 5, 2048);
    assert!(large.object.len() > 32 << 20);
    let mut flipped = large.object.to_vec();
    *flipped.last_mut().unwrap() ^= 1;
    let status = server.client.put_chunk(large.id, VARIANT, flipped.into()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert_eq!(server.client.contains(&[large.id], VARIANT, Duration::ZERO).await.unwrap().found, [false]);
    assert!(put(&server.client, &large).await.unwrap());
    assert!(!put(&server.client, &large).await.unwrap());
    get(&server.client, want(&[large.id])).await.unwrap()[&0].assert_is(&large);
}

async fn a_missing_chunk_does_not_stop_the_others(server: &Server) {
    let there = chunk(9, 4, 11);
    put(&server.client, &there).await.unwrap();
    let missing = ChunkId::from_bytes([0xEE; 32]);
    let before = server.client.stats().await.unwrap().lookups["miss/missing"];
    let got = get(&server.client, want(&[missing, there.id])).await.unwrap();
    assert!(got[&0].error.as_ref().unwrap().starts_with("missing: "));
    assert!(got[&0].layers.is_empty());
    got[&1].assert_is(&there);
    assert_eq!(server.client.stats().await.unwrap().lookups["miss/missing"], before + 1);
}

async fn leases_and_pins_are_counted(server: &Server, name: &str) {
    let chunk = chunk(10, 2, 3);
    put(&server.client, &chunk).await.unwrap();
    let missing = ChunkId::from_bytes([0xEF; 32]);
    let none = server.client.contains(&[chunk.id], VARIANT, Duration::ZERO).await.unwrap();
    assert_eq!((none.lease, none.expires_ms), (None, 0));
    let leased = server.client.contains(&[missing, chunk.id], VARIANT, Duration::from_secs(3600)).await.unwrap();
    assert_eq!(leased.found, [false, true]);
    let left = leased.expires_ms as i128 - i128::try_from(now_ms()).unwrap();
    assert!((590_000..=601_000).contains(&left), "cut at ten minutes, has {left} ms");
    assert!(leased.lease.is_some());
    server.client.pin(&[chunk.id, chunk.id]).await.unwrap();
    let stats = server.client.stats().await.unwrap();
    assert_eq!((stats.leases, stats.pins), (1, 1));
    server.client.release(leased.lease.unwrap()).await.unwrap();
    assert_eq!(server.client.stats().await.unwrap().leases, 0);
    assert_eq!(stats.store, name);
    assert_eq!(stats.tiers[0].name, "memory");
    assert!(stats.tiers[0].entries > 0 && stats.tiers[0].bytes <= stats.tiers[0].limit_bytes);
    server.client.unpin(&[chunk.id]).await.unwrap();
    assert_eq!(server.client.stats().await.unwrap().pins, 0);
}

fn now_ms() -> u128 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis()
}

async fn records_are_replaced_listed_and_removed(server: &Server) {
    let client = &server.client;
    assert_eq!(client.get_record("default/wiki/manifest").await.unwrap(), None);
    client.put_record("default/wiki/manifest", b"one".to_vec()).await.unwrap();
    client.put_record("default/wiki/manifest", b"two".to_vec()).await.unwrap();
    client.put_record("default/wiki2/manifest", Vec::new()).await.unwrap();
    assert_eq!(client.get_record("default/wiki/manifest").await.unwrap().unwrap(), "two");
    assert_eq!(client.get_record("default/wiki2/manifest").await.unwrap().unwrap(), "");
    let mut keys: Vec<String> = (0..1005).map(|i| format!("default/wiki/documents/{i:04x}")).collect();
    for batch in keys.chunks(100) {
        let puts = batch.iter().map(|key| client.put_record(key, key.clone().into_bytes()));
        futures::future::try_join_all(puts).await.unwrap();
    }
    assert_eq!(client.list_records("default/wiki/documents").await.unwrap(), keys, "more than one page, in order");
    keys.push("default/wiki/manifest".into());
    assert_eq!(client.list_records("default/wiki").await.unwrap(), keys, "whole segments only");
    assert_eq!(client.list_records("").await.unwrap().len(), keys.len() + 1);
    assert!(client.list_records("nobody").await.unwrap().is_empty());
    keys.push("default/none".into());
    let removed = client.delete(&[], &keys).await.unwrap();
    assert_eq!(removed.len(), keys.len() - 1);
    assert!(removed.contains(&"records/default/wiki/manifest".to_owned()));
    assert_eq!(client.list_records("").await.unwrap(), ["default/wiki2/manifest"]);
}

async fn a_deleted_chunk_is_gone(server: &Server) {
    let (gone, kept) = (chunk(11, 2, 3), chunk(12, 2, 3));
    put(&server.client, &gone).await.unwrap();
    put(&server.client, &kept).await.unwrap();
    server.client.contains(&[gone.id], VARIANT, Duration::from_secs(60)).await.unwrap();
    let removed = server.client.delete(&[gone.id, ChunkId::from_bytes([0xED; 32])], &[]).await.unwrap();
    assert_eq!(removed, [format!("kv/{}/{VARIANT}", gone.id)]);
    let got = get(&server.client, want(&[gone.id, kept.id])).await.unwrap();
    assert!(got[&0].error.as_ref().unwrap().starts_with("missing: "));
    got[&1].assert_is(&kept);
    assert!(put(&server.client, &gone).await.unwrap(), "it can be put again");
}

async fn variants_of_a_chunk_are_apart(server: &Server) {
    let client = &server.client;
    let clean = chunk(13, 2, 3);
    let header = Header::parse(&clean.object).unwrap();
    let captured = Variant::context(Encoding::Bf16, &[chunk(14, 2, 3).id]);
    let others: Vec<Vec<u8>> = clean.layers.iter().map(|layer| layer.iter().map(|byte| byte ^ 1).collect()).collect();
    let object = object::write(&header.key, &header.layout, captured, 3, "f32", &others).unwrap();
    let status = client.put_chunk(clean.id, VARIANT, object.clone().into()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "an object of another variant");
    assert!(put(client, &clean).await.unwrap());
    assert!(client.put_chunk(clean.id, captured, object.into()).await.unwrap());

    let want_captured = || v1::Want { variant: captured.to_string(), ..want(&[clean.id]) };
    get(client, want(&[clean.id])).await.unwrap()[&0].assert_is(&clean);
    assert!(get(client, want_captured()).await.unwrap()[&0].layers[&1].concat() == others[1]);

    let other = Variant::context(Encoding::Bf16, &[clean.id]);
    let removed = client.delete_variants(&[(clean.id, captured), (clean.id, other)], &[]).await.unwrap();
    assert_eq!(removed, [format!("kv/{}/{captured}", clean.id)]);
    let found = |variant| client.contains(std::slice::from_ref(&clean.id), variant, Duration::ZERO);
    assert_eq!(found(captured).await.unwrap().found, [false]);
    assert_eq!(found(VARIANT).await.unwrap().found, [true]);
    assert!(get(client, want_captured()).await.unwrap()[&0].error.as_ref().unwrap().starts_with("missing: "));
    get(client, want(&[clean.id])).await.unwrap()[&0].assert_is(&clean);
}

async fn bad_requests_are_refused(server: &Server) {
    let client = &server.client;
    let id = ChunkId::from_bytes([1; 32]);
    let wants = [
        v1::Want { chunks: vec!["nonsense".into()], ..want(&[]) },
        v1::Want { variant: "int3-clean-1".into(), ..want(&[id]) },
        v1::Want { kv_heads: vec![0; 1 << 17], ..want(&[id]) },
    ];
    for bad in wants {
        assert_eq!(get(client, bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    assert!(get(client, want(&[])).await.unwrap().is_empty());
    for key in ["", "../x", "a//b", "a b"] {
        assert_eq!(client.put_record(key, vec![1]).await.unwrap_err().code(), Code::InvalidArgument, "{key:?}");
        assert_eq!(client.get_record(key).await.unwrap_err().code(), Code::InvalidArgument, "{key:?}");
    }
    let status = client.put_record("big", vec![0; (16 << 20) + 1]).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    client.put_record("big", vec![7; 16 << 20]).await.unwrap();
    assert_eq!(client.get_record("big").await.unwrap().unwrap().len(), 16 << 20);
    client.delete(&[], &["big".to_owned()]).await.unwrap();
}

async fn what_is_put_survives_a_restart(server: &Server, cold: &str) {
    let (long, short) = (chunk(1, 4, 1500), chunk(2, 30, 3));
    let got = get(&server.client, want(&[short.id, long.id])).await.unwrap();
    got[&0].assert_is(&short);
    got[&1].assert_is(&long);
    assert!(got[&0].sources.iter().all(|source| source == cold));
    let again = get(&server.client, want(&[long.id])).await.unwrap();
    again[&0].assert_is(&long);
    assert!(again[&0].sources.iter().all(|source| source == "memory"));
    let lookups = server.client.stats().await.unwrap().lookups;
    assert_eq!((lookups[&format!("hit/{cold}")], lookups["hit/memory"]), (34, 4));
    assert!(!put(&server.client, &long).await.unwrap());
    assert_eq!(server.client.list_records("").await.unwrap(), ["default/wiki2/manifest"]);
}
