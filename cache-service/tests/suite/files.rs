//! Objects that something else than the service has changed, in a folder.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvsplice_cache_service::{Config, check_store};
use kvsplice_proto::v1::cache_client::CacheClient;
use kvsplice_proto::v1::put_chunk_request::Message;
use kvsplice_proto::v1::{PutChunkRequest, PutChunkStart};
use object_store::local::LocalFileSystem;
use tempfile::TempDir;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::support::{Chunk, Server, VARIANT, chunk, eventually, get, put, want};

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    async fn serve(&self) -> Server {
        Server::start(Arc::new(LocalFileSystem::new_with_prefix(self.0.path()).unwrap())).await
    }

    fn file(&self, chunk: &Chunk) -> PathBuf {
        self.0.path().join(format!("kv/{}/{VARIANT}", chunk.id))
    }

    /// Puts two chunks and stops, so that the next service starts cold.
    async fn with(chunks: &[&Chunk]) -> Self {
        let folder = Self::new();
        let server = folder.serve().await;
        for chunk in chunks {
            assert!(put(&server.client, chunk).await.unwrap());
        }
        server.stop().await;
        folder
    }
}

/// The chunk fails for `reason`, the other is complete, and a repair brings both back.
async fn fails_alone_and_is_repaired(folder: &Folder, bad: &Chunk, good: &Chunk, reason: &str) {
    let server = folder.serve().await;
    let got = get(&server.client, want(&[bad.id, good.id])).await.unwrap();
    let error = got[&0].error.as_ref().unwrap();
    assert!(error.starts_with(reason), "{error}");
    for (layer, parts) in &got[&0].layers {
        assert!(parts.concat() == bad.layers[*layer as usize], "what came before the damage is right");
    }
    got[&1].assert_is(good);
    let lookups = server.client.stats().await.unwrap().lookups;
    assert_eq!(lookups[&format!("miss/{}", reason.trim_end_matches(": "))], 1);
    assert!(put(&server.client, bad).await.unwrap(), "a repair is taken");
    let got = get(&server.client, want(&[bad.id, good.id])).await.unwrap();
    got[&0].assert_is(bad);
    server.stop().await;
    let server = folder.serve().await;
    get(&server.client, want(&[bad.id])).await.unwrap()[&0].assert_is(bad);
    server.stop().await;
}

#[tokio::test]
async fn a_flipped_bit_costs_one_chunk() {
    let (bad, good) = (chunk(1, 12, 40), chunk(2, 12, 40));
    for layer in [0, 5, 11] {
        let folder = Folder::with(&[&bad, &good]).await;
        let mut bytes = bad.object.to_vec();
        let place = bytes.len() - (12 - layer) * bad.layers[0].len() + 17;
        bytes[place] ^= 16;
        std::fs::write(folder.file(&bad), bytes).unwrap();
        fails_alone_and_is_repaired(&folder, &bad, &good, "damaged: ").await;
    }
}

#[tokio::test]
async fn a_damaged_object_is_removed() {
    let bad = chunk(1, 2, 4);
    let folder = Folder::with(&[&bad]).await;
    let mut bytes = bad.object.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(folder.file(&bad), bytes).unwrap();
    let server = folder.serve().await;
    assert_eq!(server.client.contains(&[bad.id], VARIANT, Duration::ZERO).await.unwrap().found, [true]);
    get(&server.client, want(&[bad.id])).await.unwrap();
    assert!(!folder.file(&bad).exists());
    assert_eq!(server.client.contains(&[bad.id], VARIANT, Duration::ZERO).await.unwrap().found, [false]);
    server.stop().await;
}

#[tokio::test]
async fn a_half_written_object_costs_one_chunk() {
    let (bad, good) = (chunk(1, 12, 40), chunk(2, 12, 40));
    for length in [0, 5, 1000, 32 << 10, bad.object.len() / 2, bad.object.len() - 1] {
        let folder = Folder::with(&[&bad, &good]).await;
        std::fs::write(folder.file(&bad), &bad.object[..length]).unwrap();
        fails_alone_and_is_repaired(&folder, &bad, &good, "truncated: ").await;
    }
}

#[tokio::test]
async fn a_foreign_object_costs_one_chunk() {
    let (bad, good) = (chunk(1, 12, 40), chunk(2, 12, 40));
    let longer = [bad.object.as_ref(), b"x"].concat();
    for bytes in [good.object.to_vec(), vec![b'x'; 40_000], longer] {
        let folder = Folder::with(&[&bad, &good]).await;
        std::fs::write(folder.file(&bad), bytes).unwrap();
        fails_alone_and_is_repaired(&folder, &bad, &good, "foreign: ").await;
    }
}

#[tokio::test]
async fn an_object_replaced_under_a_running_service_is_read_again() {
    let chunk = chunk(1, 12, 40);
    let folder = Folder::with(&[&chunk]).await;
    let server = folder.serve().await;
    server.client.contains(&[chunk.id], VARIANT, Duration::ZERO).await.unwrap();
    // The same bytes in another file: the tag that came with the header is no longer right.
    std::fs::remove_file(folder.file(&chunk)).unwrap();
    std::fs::write(folder.file(&chunk), &chunk.object).unwrap();
    get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(&chunk);
    server.stop().await;
}

#[tokio::test]
async fn a_store_is_checked_before_serving() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/store", folder.path().display());
    let config = Config { store: url.clone(), ..Config::default() };
    assert_eq!(check_store(&config).await.unwrap(), url);
    std::fs::write(folder.path().join("file"), b"x").unwrap();
    let config = Config { store: format!("file://{}/file/store", folder.path().display()), ..Config::default() };
    let error = check_store(&config).await.unwrap_err().to_string();
    assert!(error.starts_with("open the store file://"), "{error}");
    let config = Config { store: "folder".into(), ..Config::default() };
    assert!(check_store(&config).await.is_err());
}

/// Files below a folder, whatever their names.
fn files_below(folder: &std::path::Path) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries.flatten().map(|entry| if entry.path().is_dir() { files_below(&entry.path()) } else { 1 }).sum()
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    for (chunk, caller_stays) in [(chunk(1, 4, 500), true), (chunk(2, 6, 2048), true), (chunk(3, 6, 2048), false)] {
        let folder = Folder::new();
        let server = folder.serve().await;
        let (messages, receiver) = tokio::sync::mpsc::channel(4);
        let mut client = CacheClient::new(server.channel.clone());
        let call = tokio::spawn(async move { client.put_chunk(ReceiverStream::new(receiver)).await });
        let size = chunk.object.len();
        let start = PutChunkStart {
            chunk: chunk.id.to_string(),
            variant: VARIANT.to_string(),
            size: size as u64,
            encode_us_per_token: 0.0,
        };
        messages.send(PutChunkRequest { message: Some(Message::Start(start)) }).await.unwrap();
        for first in (0..size * 3 / 4).step_by(1 << 20) {
            let data = chunk.object.slice(first..size.min(first + (1 << 20)));
            messages.send(PutChunkRequest { message: Some(Message::Data(data)) }).await.unwrap();
        }
        if caller_stays {
            drop(messages);
            let status = call.await.unwrap().unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{status}");
            assert!(status.message().contains("bytes early"), "{status}");
        } else {
            eventually("parts are written", || files_below(folder.0.path()) > 0).await;
            call.abort();
        }
        eventually("what was written is removed", || files_below(folder.0.path()) == 0).await;
        assert_eq!(server.client.contains(&[chunk.id], VARIANT, Duration::ZERO).await.unwrap().found, [false]);
        assert!(put(&server.client, &chunk).await.unwrap());
        get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(&chunk);
        server.stop().await;
    }
}
