//! Chunks whose files are named instead of sent, and what makes them be sent all the same.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvsplice_cache_service::Config;
use kvsplice_kv::ChunkId;
use kvsplice_proto::mmap::{self, Mapped};
use kvsplice_proto::v1;
use kvsplice_proto::v1::{Frame, Mapping, Want};
use object_store::memory::InMemory;
use tempfile::TempDir;

use crate::support::{Chunk, Faulty, Read, Server, VARIANT, chunk, eventually_so, get, put, want};

const LEASE: Duration = Duration::from_secs(60);

fn in_folder(folder: &Path) -> Config {
    Config { store: format!("file://{}/store", folder.display()), ..Config::default() }
}

fn file(folder: &Path, id: ChunkId) -> PathBuf {
    folder.join(format!("store/kv/{id}/{VARIANT}"))
}

/// A service on a folder that holds `chunks`, each under a lease.
async fn serve(chunks: &[&Chunk]) -> (TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(in_folder(folder.path())).await;
    for chunk in chunks {
        put(&server.client, chunk).await.unwrap();
    }
    lease(&server, chunks).await;
    (folder, server)
}

async fn lease(server: &Server, chunks: &[&Chunk]) {
    let ids: Vec<ChunkId> = chunks.iter().map(|chunk| chunk.id).collect();
    let contained = server.client.contains(&ids, VARIANT, LEASE).await.unwrap();
    assert!(contained.found.iter().all(|found| *found));
}

fn mapped(chunks: &[ChunkId]) -> Want {
    Want { mapped: true, ..want(chunks) }
}

async fn frames(server: &Server, want: Want) -> Vec<Frame> {
    let (_requests, mut stream) = server.client.get_chunks(want).await.unwrap();
    let mut frames = Vec::new();
    while let Some(frame) = stream.message().await.unwrap() {
        frames.push(frame);
    }
    frames
}

/// The layers that a frame names, as a caller on this host reads them.
fn layers(chunk: &Chunk, frame: &Frame) -> Vec<(u32, Result<Bytes, mmap::Error>)> {
    let mapping: &Mapping = frame.mapping.as_ref().expect("a file is named");
    assert!(frame.data.is_empty() && frame.error.is_empty());
    let file = Mapped::open(mapping).unwrap();
    assert_eq!(file.bytes().len(), chunk.object.len());
    let bytes = chunk.layers[0].len();
    let start = |layer: u32| mapping.header_bytes as usize + layer as usize * bytes;
    let read = |(layer, crc): (u32, &u32)| (layer, file.layer(start(layer)..start(layer + 1), *crc));
    (frame.layer..).zip(&mapping.layer_crc32c).map(read).collect()
}

async fn lookups(server: &Server, name: &str) -> u64 {
    server.client.stats().await.unwrap().lookups[name]
}

fn flip(path: &Path, place: usize) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place as u64).unwrap();
    file.write_all_at(&[byte[0] ^ 4], place as u64).unwrap();
    // Like a disk that rots: nothing but the byte tells.
    file.set_modified(modified).unwrap();
}

#[tokio::test]
async fn what_a_file_holds_is_what_the_stream_sends() {
    let chunks = [chunk(1, 12, 40), chunk(2, 12, 41)];
    let (_folder, server) = serve(&[&chunks[0], &chunks[1]]).await;
    let ids = [chunks[0].id, chunks[1].id];
    for round in 0..2 {
        let mut seen = [0; 2];
        for frame in frames(&server, mapped(&ids)).await {
            let place = frame.chunk as usize;
            assert_eq!((frame.layer, frame.source.as_str()), (seen[place], "object"), "lower layers first");
            for (layer, bytes) in layers(&chunks[place], &frame) {
                assert!(bytes.unwrap() == chunks[place].layers[layer as usize]);
                seen[place] += 1;
            }
            assert!(round == 0 || seen[place] == 12, "what is known goes out in one frame");
        }
        assert_eq!(seen, [12, 12]);
    }
    assert_eq!((lookups(&server, "mapped/layer").await, lookups(&server, "hit/object").await), (48, 48));
    for (place, got) in get(&server.client, want(&ids)).await.unwrap() {
        got.assert_is(&chunks[place as usize]);
    }
    let some = Want { layers: vec![0, 1, 5], ..mapped(&ids[..1]) };
    let named: Vec<u32> = frames(&server, some)
        .await
        .iter()
        .flat_map(|frame| layers(&chunks[0], frame))
        .map(|(layer, _)| layer)
        .collect();
    assert_eq!(named, [0, 1, 5]);
    server.stop().await;
}

#[tokio::test]
async fn without_a_lease_a_file_or_the_setting_layers_are_sent() {
    let chunk = chunk(1, 4, 30);
    let sent = async |server: &Server| {
        let got = get(&server.client, mapped(&[chunk.id])).await.unwrap();
        got[&0].assert_is(&chunk);
    };
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(in_folder(folder.path())).await;
    put(&server.client, &chunk).await.unwrap();
    sent(&server).await;
    server.client.contains(&[chunk.id], VARIANT, Duration::from_millis(1)).await.unwrap();
    eventually_so("the lease ends", async || server.client.stats().await.unwrap().leases == 0).await;
    sent(&server).await;
    server.client.pin(&[chunk.id]).await.unwrap();
    assert!(frames(&server, mapped(&[chunk.id])).await.iter().all(|frame| frame.mapping.is_some()), "a pin is as good");
    let some_heads = Want { kv_heads: vec![0], ..mapped(&[chunk.id]) };
    assert!(frames(&server, some_heads).await.iter().all(|frame| frame.mapping.is_none()));
    server.stop().await;
    let config = Config { hand_out_paths: false, ..in_folder(folder.path()) };
    let server = Server::open(config).await;
    lease(&server, &[&chunk]).await;
    sent(&server).await;
    server.stop().await;
    let server = Server::start(Arc::new(InMemory::new())).await;
    put(&server.client, &chunk).await.unwrap();
    lease(&server, &[&chunk]).await;
    sent(&server).await;
    server.stop().await;
}

#[tokio::test]
async fn a_stream_that_protects_its_chunks_needs_no_lease() {
    let chunk = chunk(1, 4, 30);
    let folder = tempfile::tempdir().unwrap();
    let server = Server::open(in_folder(folder.path())).await;
    put(&server.client, &chunk).await.unwrap();
    let protecting = Want { lease_ms: 60_000, ..mapped(&[chunk.id]) };
    let (requests, mut stream) = server.client.get_chunks(protecting.clone()).await.unwrap();
    let mut named = 0;
    while let Some(frame) = stream.message().await.unwrap() {
        named += frame.mapping.map_or(0, |mapping| mapping.layer_crc32c.len());
    }
    assert_eq!(named, 4);
    // Everything has been said, but the caller may still be about to open the file.
    assert_eq!(server.client.stats().await.unwrap().leases, 1);
    drop(requests);
    eventually_so("the stream's protection ends", async || server.client.stats().await.unwrap().leases == 0).await;
    // A caller that says nothing more does not hold it for ever.
    let short = Want { lease_ms: 50, ..protecting };
    let (_requests, _stream) = server.client.get_chunks(short).await.unwrap();
    eventually_so("its time is over", async || server.client.stats().await.unwrap().leases == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn a_file_of_the_disk_tier_is_named_and_outlives_its_removal() {
    let chunk = chunk(1, 6, 30);
    let folder = tempfile::tempdir().unwrap();
    let store = Faulty::on_read(Arc::new(InMemory::new()), |_, _| Read::Pass);
    let config = Config { disk_bytes: 1 << 30, disk_dir: folder.path().to_owned(), ..Config::default() };
    let server = Server::start_with(store.clone(), config).await;
    put(&server.client, &chunk).await.unwrap();
    lease(&server, &[&chunk]).await;
    let id = chunk.id.to_string();
    let path = folder.path().join(&id[..2]).join(format!("{id}-{VARIANT}.safetensors"));
    // Its file is there a little earlier than it is named.
    let is_named = async || frames(&server, mapped(&[chunk.id])).await.iter().all(|frame| frame.mapping.is_some());
    eventually_so("it is whole", is_named).await;
    assert!(path.exists());
    let frames = frames(&server, mapped(&[chunk.id])).await;
    let map = |frame: &Frame| Mapped::open(frame.mapping.as_ref().unwrap()).unwrap();
    let files: Vec<Mapped> = frames.iter().map(map).collect();
    server.client.delete(&[chunk.id], &[]).await.unwrap();
    assert!(!path.exists());
    for file in files {
        assert!(*file.bytes() == chunk.object, "what is mapped stays");
    }
    assert!(frames.iter().all(|frame| frame.source == "disk"));
    let got = get(&server.client, mapped(&[chunk.id])).await.unwrap();
    assert!(got[&0].error.as_ref().unwrap().starts_with("missing: "), "it is not named any more");
    server.stop().await;
}

#[tokio::test]
async fn a_damaged_file_is_not_named_but_reported_and_removed() {
    let chunk = chunk(1, 6, 30);
    let (folder, server) = serve(&[&chunk]).await;
    server.stop().await;
    let path = file(folder.path(), chunk.id);
    flip(&path, chunk.object.len() - 20);
    let server = Server::open(in_folder(folder.path())).await;
    lease(&server, &[&chunk]).await;
    let frames = frames(&server, mapped(&[chunk.id])).await;
    let last = frames.last().unwrap();
    assert!(last.error.starts_with("damaged: ") && last.layer == 5, "{}", last.error);
    assert!(frames[..frames.len() - 1].iter().all(|frame| frame.error.is_empty()));
    assert_eq!(lookups(&server, "miss/damaged").await, 1);
    assert!(!path.exists(), "it makes room for its repair");
    assert!(put(&server.client, &chunk).await.unwrap());
    server.stop().await;
}

#[tokio::test]
async fn a_file_that_rots_after_it_was_verified_is_seen_by_the_caller_and_then_by_the_service() {
    let chunk = chunk(1, 6, 30);
    let (folder, server) = serve(&[&chunk]).await;
    frames(&server, mapped(&[chunk.id])).await;
    flip(&file(folder.path(), chunk.id), chunk.object.len() - chunk.layers[0].len() - 20);
    let named = frames(&server, mapped(&[chunk.id])).await;
    let bad: Vec<u32> = named
        .iter()
        .flat_map(|frame| layers(&chunk, frame))
        .filter(|(_, read)| read.is_err())
        .map(|(layer, _)| layer)
        .collect();
    assert_eq!(bad, [4]);
    assert_eq!(lookups(&server, "mapped/refused").await, 0);
    // Memory holds what was put, whatever became of the file; then the file is verified again before it is named.
    let again = v1::Want { unmappable: true, ..mapped(&[chunk.id]) };
    get(&server.client, again).await.unwrap()[&0].assert_is(&chunk);
    assert_eq!(lookups(&server, "mapped/refused").await, 1);
    let last = frames(&server, mapped(&[chunk.id])).await;
    assert!(last.iter().any(|frame| frame.mapping.is_none()), "the damaged layer is sent from memory");
    server.stop().await;
}

#[tokio::test]
async fn some_heads_are_cut_out_of_every_row() {
    let chunk = chunk(1, 3, 30);
    let (_folder, server) = serve(&[&chunk]).await;
    let wanted = Want { kv_heads: vec![6, 1, 6], ..want(&[chunk.id]) };
    let got = &get(&server.client, wanted).await.unwrap()[&0];
    for (layer, parts) in &got.layers {
        let head = |row: &[u8], head: usize| row[head * 256..(head + 1) * 256].to_vec();
        let expected: Vec<u8> =
            chunk.layers[*layer as usize].chunks(2048).flat_map(|row| [head(row, 1), head(row, 6)].concat()).collect();
        assert!(parts.concat() == expected, "layer {layer}");
    }
    assert_eq!(got.layers.len(), 3);
    let wanted = Want { kv_heads: vec![8], ..want(&[chunk.id]) };
    let got = get(&server.client, wanted).await.unwrap();
    let error = got[&0].error.as_ref().unwrap();
    assert!(error.starts_with("foreign: KV head 8 asked for, the object has 8"), "{error}");
    server.stop().await;
}
