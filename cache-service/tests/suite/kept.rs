//! What survives a restart beside chunks and records, and what a clock that jumps or a request out of bounds does not break.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvsplice_cache_service::Config;
use kvsplice_kv::ChunkId;
use kvsplice_proto::v1::put_chunk_request::Message;
use kvsplice_proto::v1::{self, PutChunkRequest, PutChunkStart};
use object_store::memory::InMemory;
use object_store::path::Path as StorePath;
use object_store::{ObjectStore, ObjectStoreExt};
use tonic::Code;

use crate::support::{Faulty, MODEL, Read, Server, VARIANT, chunk, get, put, want};

const LEASE: Duration = Duration::from_secs(60);

fn in_folder(folder: &Path) -> Config {
    Config { store: format!("file://{}/store", folder.display()), ..Config::default() }
}

async fn paths(store: &InMemory, folder: &str) -> Vec<String> {
    use futures::TryStreamExt;
    let listed: Vec<_> = store.list(Some(&StorePath::from(folder))).try_collect().await.unwrap();
    listed.into_iter().map(|meta| meta.location.to_string()).collect()
}

#[tokio::test]
async fn pins_survive_a_restart_until_they_are_taken_away_or_their_chunk_is_deleted() {
    let store = Arc::new(InMemory::new());
    let chunks = [chunk(1, 2, 3), chunk(2, 2, 3)];
    let ids = [chunks[0].id, chunks[1].id];
    let server = Server::start(store.clone()).await;
    for chunk in &chunks {
        put(&server.client, chunk).await.unwrap();
    }
    server.client.pin(&ids).await.unwrap();
    server.stop().await;
    let server = Server::start(store.clone()).await;
    assert_eq!(server.client.stats().await.unwrap().pins, 2);
    let orphans = server.client.collect_orphans(false, Duration::ZERO).await.unwrap();
    assert_eq!((orphans.removed.len(), orphans.protected), (0, 2));
    server.client.unpin(&ids[..1]).await.unwrap();
    let removed = server.client.delete(&ids[1..], &[]).await.unwrap();
    assert_eq!(
        removed,
        [format!("kv/{}/{VARIANT}", ids[1]), format!("pins/{}", ids[1])],
        "the report names the pin too"
    );
    assert!(paths(&store, "pins").await.is_empty());
    server.stop().await;
    let server = Server::start(store).await;
    assert_eq!(server.client.stats().await.unwrap().pins, 0);
    server.stop().await;
}

#[tokio::test]
async fn another_services_pins_keep_its_chunks_from_collection() {
    let store = Arc::new(InMemory::new());
    let (one, other) = (Server::start(store.clone()).await, Server::start(store).await);
    let chunk = chunk(1, 2, 3);
    put(&one.client, &chunk).await.unwrap();
    one.client.pin(&[chunk.id]).await.unwrap();
    let orphans = other.client.collect_orphans(false, Duration::ZERO).await.unwrap();
    assert_eq!((orphans.removed.len(), orphans.protected), (0, 1));
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn a_pin_that_cannot_be_stored_is_an_error_and_no_pin() {
    let refuse = |path: &StorePath| path.as_ref().starts_with("pins/").then_some(std::io::ErrorKind::StorageFull);
    let server = Server::start(Faulty::new(Arc::new(InMemory::new()), |_, _| Read::Pass, refuse)).await;
    let status = server.client.pin(&[ChunkId::from_bytes([1; 32])]).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().starts_with("store a pin in the store: "), "{status}");
    assert_eq!(server.client.stats().await.unwrap().pins, 0);
    server.stop().await;
}

#[tokio::test]
async fn what_workers_measured_is_known_after_a_restart() {
    let store = Arc::new(InMemory::new());
    let server = Server::start(store.clone()).await;
    for (seed, cost) in [(1, 40.0), (2, 50.0)] {
        let chunk = chunk(seed, 2, 3);
        server.client.put_computed_chunk(chunk.id, VARIANT, chunk.object.clone(), cost).await.unwrap();
    }
    let model = MODEL.to_string();
    let measured = server.client.stats().await.unwrap().encode_us_per_token[&model];
    assert!((40.0..50.0).contains(&measured), "{measured}");
    let bad = chunk(3, 2, 3);
    for cost in [f64::NAN, -1.0, f64::INFINITY] {
        let status = server.client.put_computed_chunk(bad.id, VARIANT, bad.object.clone(), cost).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with("start.encode_us_per_token must be"), "{status}");
    }
    server.stop().await;
    // What somebody else has written there is passed over.
    store.put(&StorePath::from(format!("costs/{}", "00".repeat(32))), "much".into()).await.unwrap();
    store.put(&StorePath::from("costs/notes"), "1".into()).await.unwrap();
    let server = Server::start(store).await;
    let known = server.client.stats().await.unwrap().encode_us_per_token;
    assert_eq!(known.len(), 1);
    assert!((40.0..50.0).contains(&known[&model]));
    server.stop().await;
}

/// Sets the time of change of every file below `folder`, as a clock that was wrong would have.
fn set_times(folder: &Path, time: SystemTime) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.path().is_dir() {
            set_times(&entry.path(), time);
        } else {
            std::fs::File::options().write(true).open(entry.path()).unwrap().set_modified(time).unwrap();
        }
    }
}

#[tokio::test]
async fn a_clock_that_jumps_ends_no_lease_and_removes_nothing_young() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { disk_bytes: 1 << 30, disk_dir: folder.path().join("disk"), ..in_folder(folder.path()) };
    let chunks = [chunk(1, 2, 3), chunk(2, 2, 3)];
    let server = Server::open(config.clone()).await;
    for chunk in &chunks {
        put(&server.client, chunk).await.unwrap();
    }
    server.stop().await;
    let year = Duration::from_secs(365 * 24 * 3600);
    for (jump, orphans) in [(SystemTime::now() + 30 * year, 0), (SystemTime::UNIX_EPOCH, 1)] {
        set_times(folder.path(), jump);
        let server = Server::open(config.clone()).await;
        for chunk in &chunks {
            get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(chunk);
        }
        // Leases are timed by a clock that cannot be set: the files' times do not matter to them.
        let leased = server.client.contains(&[chunks[0].id], VARIANT, LEASE).await.unwrap();
        assert!(leased.lease.is_some());
        let found = server.client.collect_orphans(true, LEASE).await.unwrap();
        assert_eq!(
            (found.removed.len(), found.protected),
            (orphans, 1),
            "a time in the future is that of a young object"
        );
        assert_eq!(server.client.stats().await.unwrap().leases, 1);
        server.stop().await;
    }
}

#[tokio::test]
async fn requests_out_of_bounds_are_named() {
    let server = Server::start(Arc::new(InMemory::new())).await;
    let client = &server.client;
    let chunk = chunk(1, 4, 10);
    put(client, &chunk).await.unwrap();
    for (layers, heads, what) in [
        (vec![4], vec![], "foreign: layer 4 asked for, the object has 4"),
        (vec![u32::MAX], vec![], "foreign: layer 4294967295 asked for, the object has 4"),
        (vec![], vec![u32::MAX], "foreign: KV head 4294967295 asked for, the object has 8"),
    ] {
        for mapped in [false, true] {
            client.contains(&[chunk.id], VARIANT, LEASE).await.unwrap();
            let wanted = v1::Want { layers: layers.clone(), kv_heads: heads.clone(), mapped, ..want(&[chunk.id]) };
            let got = get(client, wanted).await.unwrap();
            assert_eq!(got[&0].error.as_deref(), Some(what));
        }
    }
    for layers in [vec![0; 1 << 17], (0..1 << 17).collect()] {
        let status = get(client, v1::Want { layers, ..want(&[chunk.id]) }).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with("want.layers must have at most"), "{status}");
    }
    let key = "a/".repeat(500) + "a";
    let status = client.get_record(&key).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("key must be segments"), "{status}");
    let lease = client.contains(&[chunk.id], VARIANT, Duration::from_secs(u64::from(u32::MAX))).await.unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
    assert!(lease.expires_ms <= now + 600_000, "no lease is longer than ten minutes");
    server.stop().await;
}

#[tokio::test]
async fn a_put_whose_header_is_of_another_chunk_is_named() {
    let server = Server::start(Arc::new(InMemory::new())).await;
    let (one, other) = (chunk(1, 2, 3), chunk(2, 2, 3));
    let status = server.client.put_chunk(one.id, VARIANT, other.object.clone()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with(&format!("chunk object {} refused: foreign: ", one.id)), "{status}");
    // Nothing of it is there, under either name.
    assert_eq!(server.client.contains(&[one.id, other.id], VARIANT, LEASE).await.unwrap().found, [false, false]);
    let start = |variant: &str| {
        let start = PutChunkStart {
            chunk: one.id.to_string(),
            variant: variant.into(),
            size: one.object.len() as u64,
            encode_us_per_token: 0.0,
        };
        let data = PutChunkRequest { message: Some(Message::Data(one.object.clone())) };
        futures::stream::iter([PutChunkRequest { message: Some(Message::Start(start)) }, data])
    };
    let mut client = v1::cache_client::CacheClient::new(server.channel.clone());
    for (variant, what) in [("int3-clean-1", "unknown encoding"), ("bf16-dirty-1", "unknown provenance")] {
        let status = client.put_chunk(start(variant)).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(what), "{status}");
    }
    drop(client);
    server.stop().await;
}
