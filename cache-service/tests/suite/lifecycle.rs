//! Orphans are removed and nothing else; what is stored can be verified past the tiers.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use kvsplice_cache_service::Config;
use kvsplice_kv::record::{Chunk as Named, Corpus, Document, Tokens};
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, ModelDigest};
use tonic::Code;

use crate::support::{Chunk, MODEL, PREFIX, Server, VARIANT, chunk, chunk_of, eventually_so, get, put, want};

const AUXILIARY: ModelDigest = ModelDigest::from_bytes([6; 32]);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn config(folder: &Path) -> Config {
    Config {
        store: format!("file://{}/store", folder.display()),
        disk_bytes: 1 << 30,
        disk_dir: folder.join("disk"),
        ..Config::default()
    }
}

fn tokens(seed: u32) -> Tokens {
    Tokens { ids: vec![seed, 3, 2], spans: vec![(0, 1), (1, 2), (2, 3)] }
}

#[tokio::test]
async fn a_lease_whose_holder_is_silent_lapses_until_it_is_heard_of() {
    let chunk = chunk(1, 2, 5);
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(config(folder.path())).await;
    put(&server.client, &chunk).await.unwrap();
    let leases = async || server.client.stats().await.unwrap().leases;
    let take = async |renew| {
        let contained = server.client.lease(&[chunk.id], VARIANT, DAY, renew).await.unwrap();
        contained.lease.unwrap()
    };
    let (lasting, lapsing) = (take(Duration::ZERO).await, take(Duration::from_millis(300)).await);
    eventually_so("one has lapsed", async || leases().await == 1).await;
    server.client.renew(lasting.clone()).await.unwrap();
    server.client.renew(lapsing.clone()).await.unwrap();
    assert_eq!(leases().await, 2);
    eventually_so("it has lapsed again", async || leases().await == 1).await;
    for lease in [lasting, lapsing] {
        server.client.release(lease.clone()).await.unwrap();
        server.client.renew(lease).await.unwrap();
        assert!(leases().await <= 1);
    }
    assert_eq!(leases().await, 0);
    server.stop().await;
}

/// A corpus of one document with one chunk, and the KV that belongs to it.
struct Wiki {
    manifest: Vec<u8>,
    document: Vec<u8>,
    kv: Vec<Chunk>,
}

fn wiki() -> Wiki {
    let corpus = Corpus {
        name: "wiki".into(),
        owner: "default".into(),
        primary: MODEL,
        auxiliary: AUXILIARY,
        chunk_tokens: 1000,
        overlap: 50,
        encoding: Encoding::Bf16,
        prefixes: BTreeMap::from([("default".into(), "You answer.".into())]),
    };
    let key = |model, before: &[u32], ids: &[u32]| ChunkKey::new(model, before, ids, "default");
    let ids = tokens(1).ids;
    let primary = key(MODEL, &PREFIX, &ids);
    let auxiliary = key(AUXILIARY, &[8, 9], &ids);
    let keys = [
        primary.clone(),
        auxiliary.clone(),
        key(MODEL, &[], &ids),
        key(AUXILIARY, &[], &ids),
        key(MODEL, &[], &PREFIX),
        key(AUXILIARY, &[], &[8, 9]),
    ];
    let named = Named {
        ids: BTreeMap::from([("default".into(), primary.id())]),
        auxiliary_ids: BTreeMap::from([("default".into(), auxiliary.id())]),
        text: "abc".into(),
        document_offset: 0,
        primary: tokens(1),
        auxiliary: tokens(1),
    };
    let document = Document { id: "a".into(), digest: "d".into(), chunks: vec![named] };
    Wiki {
        manifest: serde_json::to_vec(&corpus).unwrap(),
        document: serde_json::to_vec(&document).unwrap(),
        kv: keys.iter().zip(50..).map(|(key, seed)| chunk_of(key, seed, 2, 3)).collect(),
    }
}

#[tokio::test]
async fn orphans_are_removed_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(config(folder.path())).await;
    let client = &server.client;
    let wiki = wiki();
    client.put_record("default/wiki/manifest", wiki.manifest.clone()).await.unwrap();
    client.put_record("default/wiki/documents/aa", wiki.document.clone()).await.unwrap();
    client.put_record("default/wiki/version", b"7".to_vec()).await.unwrap();
    // Chunks and prefixes of nobody: the last two stand behind no prefix, and before nothing that is named.
    let alone = |ids: &[u32]| chunk_of(&ChunkKey::new(MODEL, &[], ids, "default"), 90, 2, 3);
    let orphans = [chunk(21, 2, 3), chunk(22, 2, 3), alone(&[1, 3]), alone(&[77])];
    let (pinned, leased) = (chunk(23, 2, 3), chunk(24, 2, 3));
    for chunk in wiki.kv.iter().chain(&orphans).chain([&pinned, &leased]) {
        assert!(put(client, chunk).await.unwrap());
    }
    client.pin(&[pinned.id]).await.unwrap();
    client.contains(&[leased.id], VARIANT, Duration::from_secs(60)).await.unwrap();
    let mut expected: Vec<String> = orphans.iter().map(|chunk| format!("kv/{}/{VARIANT}", chunk.id)).collect();
    expected.sort();

    let young = client.collect_orphans(false, DAY).await.unwrap();
    assert_eq!((young.removed.len(), young.young, young.named, young.protected), (0, 6, 4, 2));
    let dry = client.collect_orphans(true, Duration::ZERO).await.unwrap();
    assert_eq!(dry.removed, expected);
    assert_eq!((dry.named, dry.young, dry.protected, dry.more), (6, 0, 2, false));
    assert_eq!(dry.bytes, orphans.iter().map(|chunk| chunk.object.len() as u64).sum::<u64>());
    get(client, want(&[orphans[0].id])).await.unwrap()[&0].assert_is(&orphans[0]);

    // What cannot be read may name anything.
    client.put_record("default/wiki/documents/bb", b"{\"id\":1}".to_vec()).await.unwrap();
    let status = client.collect_orphans(false, Duration::ZERO).await.unwrap_err();
    assert_eq!(status.code(), Code::DataLoss);
    assert!(status.message().contains("default/wiki/documents/bb"), "{status}");
    client.delete(&[], &["default/wiki/documents/bb".into()]).await.unwrap();

    let done = client.collect_orphans(false, Duration::ZERO).await.unwrap();
    assert_eq!(done.removed, expected);
    for orphan in &orphans {
        let got = get(client, want(&[orphan.id])).await.unwrap();
        assert!(got[&0].error.as_ref().unwrap().starts_with("missing: "), "it left every tier");
    }
    assert!(client.collect_orphans(false, Duration::ZERO).await.unwrap().removed.is_empty());
    server.stop().await;

    let server = Server::open(config(folder.path())).await;
    for chunk in wiki.kv.iter().chain([&pinned, &leased]) {
        get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(chunk);
    }
    // After the document is gone all is orphaned but what is pinned: leases ended with the service, pins did not.
    server.client.delete(&[], &["default/wiki/documents/aa".into()]).await.unwrap();
    let done = server.client.collect_orphans(false, Duration::ZERO).await.unwrap();
    assert_eq!((done.removed.len(), done.protected), (7, 1));
    server.client.unpin(&[pinned.id]).await.unwrap();
    assert_eq!(server.client.collect_orphans(false, Duration::ZERO).await.unwrap().removed.len(), 1);
    server.stop().await;
}

#[tokio::test]
async fn what_is_stored_is_verified_past_the_tiers() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(config(folder.path())).await;
    let chunks: Vec<Chunk> = (0..4).map(|seed| chunk(seed, 6, 40)).collect();
    for chunk in &chunks {
        put(&server.client, chunk).await.unwrap();
    }
    let file = |chunk: &Chunk| folder.path().join(format!("store/kv/{}/{VARIANT}", chunk.id));
    let mut bytes = chunks[1].object.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(file(&chunks[1]), bytes).unwrap();
    std::fs::write(file(&chunks[2]), &chunks[2].object[..50_000]).unwrap();
    std::fs::write(file(&chunks[3]).with_file_name("notes"), b"x").unwrap();
    let missing = ChunkId::from_bytes([0xEE; 32]);
    let mut ids: Vec<ChunkId> = chunks.iter().map(|chunk| chunk.id).collect();
    ids.push(missing);
    let answer = server.client.verify(&ids).await.unwrap();
    assert_eq!((answer.objects, answer.bytes), (5, 2 * chunks[0].object.len() as u64));
    let fault = |path: String| {
        let fault = answer.faults.iter().find(|fault| fault.path == path);
        fault.unwrap_or_else(|| panic!("no fault of {path}: {:?}", answer.faults)).fault.clone()
    };
    assert_eq!(answer.faults.len(), 4);
    assert_eq!(fault(format!("kv/{}/{VARIANT}", chunks[1].id)), "damaged: layer 5 does not match its digest");
    assert!(fault(format!("kv/{}/{VARIANT}", chunks[2].id)).starts_with("truncated: 50000 bytes"));
    assert!(fault(format!("kv/{}/notes", chunks[3].id)).starts_with("foreign: "));
    assert!(fault(format!("kv/{missing}")).starts_with("missing: "));
    // The tiers hold what is right, and go on serving it.
    get(&server.client, want(&[chunks[1].id])).await.unwrap()[&0].assert_is(&chunks[1]);
    server.stop().await;
}

#[tokio::test]
async fn what_a_killed_put_has_left_in_a_folder_is_collected_once_it_is_old() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(config(folder.path())).await;
    let stored = chunk(1, 2, 3);
    assert!(put(&server.client, &stored).await.unwrap());
    server.client.put_record("default/wiki/version", b"7".to_vec()).await.unwrap();
    let store = folder.path().join("store");
    let object = format!("kv/{}/{VARIANT}", stored.id);
    let old = std::time::SystemTime::now() - 2 * DAY;
    let write = |path: &str, bytes: usize, old: Option<std::time::SystemTime>| {
        let path = store.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, vec![0; bytes]).unwrap();
        if let Some(old) = old {
            std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        }
        path
    };
    let left = [
        write(&format!("{object}#1"), 70_000, Some(old)),
        write(&format!("kv/{}/{VARIANT}#23", ChunkId::from_bytes([9; 32])), 500, Some(old)),
        write("records/default/wiki/documents/aa#1", 30, Some(old)),
    ];
    // Being written, not numbered, and not in a folder of the service.
    let stay = [
        write(&format!("{object}#2"), 10, None),
        write(&format!("{object}#x"), 10, Some(old)),
        write("kv/#", 10, Some(old)),
        write("elsewhere/notes#1", 10, Some(old)),
    ];
    // A put that was killed between its last two steps has left a second name of the object itself.
    let twin = store.join(format!("{object}#3"));
    std::fs::hard_link(store.join(&object), &twin).unwrap();

    let counts = |done: &kvsplice_proto::v1::CollectOrphansResponse| {
        (done.staging, done.staging_bytes, done.staging_young, done.removed.len())
    };
    let dry = server.client.collect_orphans(true, DAY).await.unwrap();
    assert_eq!(counts(&dry), (3, 70_530, 2, 0));
    assert!(left.iter().all(|path| path.is_file()), "only counted");
    let done = server.client.collect_orphans(false, DAY).await.unwrap();
    assert_eq!(counts(&done), (3, 70_530, 2, 0));
    assert!(left.iter().all(|path| !path.exists()) && stay.iter().all(|path| path.is_file()) && twin.is_file());
    // However short the grace asked for, what is being written stays.
    let done = server.client.collect_orphans(false, Duration::ZERO).await.unwrap();
    assert_eq!(counts(&done), (0, 0, 2, 1));
    assert!(put(&server.client, &stored).await.unwrap());
    std::fs::File::options().write(true).open(&twin).unwrap().set_modified(old).unwrap();
    let done = server.client.collect_orphans(true, DAY).await.unwrap();
    assert_eq!((done.staging, done.staging_young), (1, 1));
    get(&server.client, want(&[stored.id])).await.unwrap()[&0].assert_is(&stored);
    server.stop().await;
}
