//! The disk tier through the service: what is served from it, what bounds it, and what happens when it goes wrong.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvsplice_cache_service::{Admission, Config, Eviction};
use kvsplice_kv::ChunkId;
use kvsplice_proto::v1;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt, path::Path as StorePath};
use tempfile::TempDir;

use crate::support::{Chunk, Faulty, Read, Server, VARIANT, chunk, eventually, eventually_so, get, put, want};

/// No memory tier, so that what is not on the disk comes from the store.
fn config(folder: &Path, disk_bytes: u64) -> Config {
    Config { memory_bytes: 0, disk_bytes, disk_dir: folder.to_owned(), ..Config::default() }
}

fn file(folder: &Path, id: ChunkId) -> PathBuf {
    folder.join(&id.to_string()[..2]).join(format!("{id}-{VARIANT}.safetensors"))
}

/// Chunk objects in the folder, and all bytes that files take there.
fn files(folder: &Path) -> (usize, u64) {
    let (mut objects, mut bytes) = (0, 0);
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            let (below, more) = files(&entry.path());
            (objects, bytes) = (objects + below, bytes + more);
        } else if let Ok(meta) = entry.metadata() {
            objects += usize::from(entry.path().extension().is_some());
            bytes += meta.blocks() * 512;
        }
    }
    (objects, bytes)
}

async fn store_of(chunks: &[&Chunk]) -> Arc<dyn ObjectStore> {
    let store = Arc::new(InMemory::new());
    for chunk in chunks {
        let path = StorePath::from(format!("kv/{}/{VARIANT}", chunk.id));
        store.put(&path, chunk.object.clone().into()).await.unwrap();
    }
    store
}

async fn sources(server: &Server, chunk: &Chunk) -> Vec<String> {
    let got = get(&server.client, want(&[chunk.id])).await.unwrap();
    got[&0].assert_is(chunk);
    let mut sources = got[&0].sources.clone();
    sources.dedup();
    sources
}

async fn lookups(server: &Server, name: &str) -> u64 {
    server.client.stats().await.unwrap().lookups[name]
}

async fn disk_tier(server: &Server) -> v1::Tier {
    let tiers = server.client.stats().await.unwrap().tiers;
    tiers.into_iter().find(|tier| tier.name == "disk").expect("the tier is on")
}

#[tokio::test]
async fn what_was_read_or_put_is_served_from_the_disk_without_the_store() {
    let (read, written, large) = (chunk(1, 6, 30), chunk(2, 6, 30), chunk(3, 5, 2048));
    let folder = tempfile::tempdir().unwrap();
    let store = Faulty::on_read(store_of(&[&read]).await, |_, _| Read::Pass);
    let server = Server::start_with(store.clone(), config(folder.path(), 1 << 30)).await;
    assert_eq!(sources(&server, &read).await, ["object"]);
    put(&server.client, &written).await.unwrap();
    put(&server.client, &large).await.unwrap();
    for chunk in [&read, &written, &large] {
        eventually("it is whole", || file(folder.path(), chunk.id).exists()).await;
        let bytes = std::fs::read(file(folder.path(), chunk.id)).unwrap();
        assert!(bytes == chunk.object, "a plain file in the object format");
    }
    let reads = store.reads.load(std::sync::atomic::Ordering::SeqCst);
    for chunk in [&read, &written, &large] {
        assert_eq!(sources(&server, chunk).await, ["disk"]);
    }
    assert_eq!(store.reads.load(std::sync::atomic::Ordering::SeqCst), reads, "the store is not asked");
    assert_eq!(lookups(&server, "hit/disk").await, 17);
    let tier = disk_tier(&server).await;
    assert_eq!((tier.entries, tier.limit_bytes), (17, 1 << 30));
    assert!(tier.bytes >= (read.object.len() + written.object.len() + large.object.len()) as u64);
    server.stop().await;
}

#[tokio::test]
async fn a_chunk_that_was_read_in_part_is_served_from_the_disk_in_part() {
    let chunk = chunk(1, 8, 30);
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start_with(store_of(&[&chunk]).await, config(folder.path(), 1 << 30)).await;
    let part = v1::Want { layers: vec![0, 1, 5], ..want(&[chunk.id]) };
    get(&server.client, part.clone()).await.unwrap();
    eventually_so("three layers are written", async || disk_tier(&server).await.entries == 3).await;
    let got = get(&server.client, part).await.unwrap();
    assert!(got[&0].sources.iter().all(|source| source == "disk"), "{:?}", got[&0].sources);
    assert!(got[&0].layers[&5].concat() == chunk.layers[5]);
    assert_eq!(sources(&server, &chunk).await, ["disk", "object"], "neighbors are read together");
    eventually("it is whole", || file(folder.path(), chunk.id).exists()).await;
    assert_eq!(sources(&server, &chunk).await, ["disk"]);
    server.stop().await;
}

/// A folder that holds `chunks`, written by a service that has stopped.
async fn folder_with(chunks: &[&Chunk]) -> (TempDir, Arc<dyn ObjectStore>) {
    let folder = tempfile::tempdir().unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let server = Server::start_with(store.clone(), config(folder.path(), 1 << 30)).await;
    for chunk in chunks {
        put(&server.client, chunk).await.unwrap();
    }
    server.stop().await;
    assert_eq!(files(folder.path()).0, chunks.len(), "stopping writes what is queued");
    (folder, store)
}

#[tokio::test]
async fn the_folder_is_the_index_after_a_restart() {
    let chunks: Vec<Chunk> = (0..5).map(|seed| chunk(seed, 6, 30)).collect();
    let (folder, _) = folder_with(&chunks.iter().collect::<Vec<_>>()).await;
    // Not even the store is needed for what is on the disk.
    let nothing = Faulty::on_read(Arc::new(InMemory::new()), |_, _| Read::Fail);
    let server = Server::start_with(nothing, config(folder.path(), 1 << 30)).await;
    assert_eq!(disk_tier(&server).await.entries, 30);
    for chunk in &chunks {
        assert_eq!(sources(&server, chunk).await, ["disk"]);
    }
    server.stop().await;
    let server = Server::start_with(Arc::new(InMemory::new()), config(folder.path(), 800_000)).await;
    assert!(disk_tier(&server).await.bytes <= 800_000, "a smaller limit holds at once");
    assert_eq!(files(folder.path()).0, 1);
    server.stop().await;
}

#[tokio::test]
async fn files_that_do_not_verify_are_removed_and_counted() {
    let chunks: Vec<Chunk> = (0..8).map(|seed| chunk(seed, 6, 30)).collect();
    let (folder, store) = folder_with(&chunks.iter().collect::<Vec<_>>()).await;
    let path = |index: usize| file(folder.path(), chunks[index].id);
    let flip = |index: usize, place: u64| {
        let file = OpenOptions::new().read(true).write(true).open(path(index)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 8], place).unwrap();
    };
    let size = chunks[0].object.len() as u64;
    flip(0, 300);
    OpenOptions::new().write(true).open(path(1)).unwrap().set_len(size - 1).unwrap();
    OpenOptions::new().write(true).open(path(2)).unwrap().set_len(0).unwrap();
    std::fs::copy(path(7), path(3)).unwrap();
    // In the first and in the last layer: seen when they are read.
    flip(4, 40_000);
    flip(5, size - 1);
    let partial = folder.path().join("partial").join(path(6).file_name().unwrap());
    std::fs::write(&partial, b"unfinished").unwrap();
    std::fs::write(folder.path().join("notes.txt"), b"not ours").unwrap();
    std::fs::write(path(6).with_file_name("mine.safetensors"), b"not ours").unwrap();

    let server = Server::start_with(store, config(folder.path(), 1 << 30)).await;
    // What a flipped bit in a header makes of it depends on the bit.
    let (damaged, foreign) = (lookups(&server, "disk/damaged").await, lookups(&server, "disk/foreign").await);
    assert_eq!(damaged + foreign, 5, "{damaged} damaged, {foreign} foreign");
    assert!(damaged >= 2 && foreign >= 2);
    for (index, chunk) in chunks[..4].iter().enumerate() {
        assert!(!path(index).exists());
        assert_eq!(sources(&server, chunk).await, ["object"]);
    }
    assert_eq!(sources(&server, &chunks[4]).await, ["object"]);
    assert_eq!(sources(&server, &chunks[5]).await, ["disk", "object"]);
    assert_eq!(lookups(&server, "disk/damaged").await, damaged + 2);
    for chunk in &chunks[6..] {
        assert_eq!(sources(&server, chunk).await, ["disk"]);
    }
    for (index, chunk) in chunks[..6].iter().enumerate() {
        get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(chunk);
        eventually("it is on the disk again", || path(index).exists()).await;
        assert_eq!(sources(&server, chunk).await, ["disk"]);
    }
    assert!(!partial.exists());
    assert!(folder.path().join("notes.txt").exists() && path(6).with_file_name("mine.safetensors").exists());
    server.stop().await;
}

/// What was verified once is checked by its CRC-32C from then on; that finds a bit that turned in the same file, too.
#[tokio::test]
async fn a_bit_that_turns_in_a_file_that_was_verified_is_found() {
    let chunk = chunk(1, 6, 30);
    let (folder, store) = folder_with(&[&chunk]).await;
    let path = file(folder.path(), chunk.id);
    let server = Server::start_with(store, config(folder.path(), 1 << 30)).await;
    for _ in 0..2 {
        assert_eq!(sources(&server, &chunk).await, ["disk"]);
    }
    // Nothing but the bit tells: neither inode nor size nor time.
    let (opened, place) =
        (OpenOptions::new().read(true).write(true).open(&path).unwrap(), chunk.object.len() as u64 - 9);
    let written = opened.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    opened.read_exact_at(&mut byte, place).unwrap();
    opened.write_all_at(&[byte[0] ^ 1], place).unwrap();
    opened.set_modified(written).unwrap();
    assert_eq!(opened.metadata().unwrap().modified().unwrap(), written);
    assert_eq!(sources(&server, &chunk).await, ["disk", "object"]);
    assert_eq!(lookups(&server, "disk/damaged").await, 1);
    server.stop().await;
}

#[tokio::test]
async fn the_limit_holds_for_the_files_and_leased_chunks_stay() {
    for eviction in [Eviction::Lru, Eviction::Value] {
        let chunks: Vec<Chunk> = (0..30).map(|seed| chunk(seed, 4, 10 + seed % 7)).collect();
        let store = store_of(&chunks.iter().collect::<Vec<_>>()).await;
        let folder = tempfile::tempdir().unwrap();
        let limit = 1 << 20;
        let server = Server::start_with(store, Config { eviction, ..config(folder.path(), limit) }).await;
        let (leased, pinned) = (&chunks[0], &chunks[1]);
        server.client.contains(&[leased.id], VARIANT, Duration::from_secs(60)).await.unwrap();
        server.client.pin(&[pinned.id]).await.unwrap();
        for (number, chunk) in chunks.iter().chain(&chunks).enumerate() {
            sources(&server, chunk).await;
            if number < 2 {
                eventually("it is whole", || file(folder.path(), chunk.id).exists()).await;
            }
            assert!(disk_tier(&server).await.bytes <= limit);
            // A file that is renamed or replaced during the count is counted twice.
            let bytes = (0..5).map(|_| files(folder.path()).1).min().unwrap();
            assert!(bytes <= limit + limit / 100, "{bytes} bytes of files");
        }
        assert_eq!(sources(&server, leased).await, ["disk"]);
        assert_eq!(sources(&server, pinned).await, ["disk"]);
        eventually_so("others are evicted", async || lookups(&server, "disk/evicted").await > 0).await;
        server.stop().await;
        assert!(files(folder.path()).1 <= limit + limit / 100);
    }
}

#[tokio::test]
async fn an_object_larger_than_the_tier_is_served_and_not_kept() {
    let chunk = chunk(1, 4, 50);
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start_with(store_of(&[&chunk]).await, config(folder.path(), 100_000)).await;
    for _ in 0..2 {
        assert_eq!(sources(&server, &chunk).await, ["object"]);
    }
    eventually_so("its layers are turned away", async || lookups(&server, "disk/no-room").await == 8).await;
    assert_eq!(files(folder.path()).0, 0);
    server.stop().await;
}

#[tokio::test]
async fn a_deleted_chunk_leaves_the_disk() {
    let (gone, kept) = (chunk(1, 4, 30), chunk(2, 4, 30));
    let (folder, store) = folder_with(&[&gone, &kept]).await;
    let server = Server::start_with(store, config(folder.path(), 1 << 30)).await;
    server.client.delete(&[gone.id], &[]).await.unwrap();
    assert!(!file(folder.path(), gone.id).exists());
    let got = get(&server.client, want(&[gone.id, kept.id])).await.unwrap();
    assert!(got[&0].error.as_ref().unwrap().starts_with("missing: "));
    got[&1].assert_is(&kept);
    assert_eq!(server.client.contains(&[gone.id], VARIANT, Duration::ZERO).await.unwrap().found, [false]);
    server.stop().await;
    assert_eq!(files(folder.path()).0, 1);
}

#[tokio::test]
async fn a_chunk_enters_when_it_is_asked_for_twice_or_pinned() {
    let (asked, pinned) = (chunk(1, 4, 30), chunk(2, 4, 30));
    let folder = tempfile::tempdir().unwrap();
    let config = Config { admission: Admission::Second, memory_bytes: 1 << 30, ..config(folder.path(), 1 << 30) };
    let server = Server::start_with(Arc::new(InMemory::new()), config).await;
    server.client.pin(&[pinned.id]).await.unwrap();
    put(&server.client, &asked).await.unwrap();
    put(&server.client, &pinned).await.unwrap();
    assert_eq!(sources(&server, &pinned).await, ["memory"]);
    for source in ["object", "object", "memory"] {
        assert_eq!(sources(&server, &asked).await, [source]);
    }
    server.stop().await;
    assert!(file(folder.path(), asked.id).exists() && file(folder.path(), pinned.id).exists());
}

#[tokio::test]
async fn a_folder_belongs_to_one_service() {
    let chunk = chunk(1, 4, 30);
    let (folder, store) = folder_with(&[&chunk]).await;
    let first = Server::start_with(store.clone(), config(folder.path(), 1 << 30)).await;
    assert_eq!(sources(&first, &chunk).await, ["disk"]);
    let second = Server::start_with(store, config(folder.path(), 1 << 30)).await;
    assert_eq!(sources(&second, &chunk).await, ["object"]);
    assert_eq!(lookups(&second, "disk/in-use").await, 1);
    second.stop().await;
    first.stop().await;
}

#[tokio::test]
async fn a_folder_that_cannot_be_made_turns_the_tier_off() {
    let chunk = chunk(1, 4, 30);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), b"x").unwrap();
    let config = config(&folder.path().join("file/below"), 1 << 30);
    let server = Server::start_with(store_of(&[&chunk]).await, config).await;
    for _ in 0..2 {
        assert_eq!(sources(&server, &chunk).await, ["object"]);
    }
    assert_eq!(lookups(&server, "disk/error").await, 1);
    assert_eq!(lookups(&server, "disk/off").await, 8);
    server.stop().await;
}

/// Where the tests below find the folder that they run on.
const SMALL_DISK: &str = "KVSPLICE_TEST_SMALL_DISK";

/// Runs the test `name` of this program again in a mount namespace of its own, with a file system of `kib` KiB. False if
/// this system does not let us make one.
fn on_a_small_disk(name: &str, kib: u32) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size={kib}k tmpfs {}", folder.path().display());
    let namespace = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]);
        command
    };
    if !namespace(&mount).status().is_ok_and(|status| status.success()) {
        return false;
    }
    let program = std::env::current_exe().unwrap();
    let script = format!("{mount} && exec {} --exact {name} --nocapture", program.display());
    let status = namespace(&script).env(SMALL_DISK, folder.path()).status().unwrap();
    assert!(status.success(), "{name} on a small disk");
    true
}

#[tokio::test]
async fn a_full_disk_stops_writing_and_nothing_else() {
    let Some(folder) = std::env::var_os(SMALL_DISK).map(PathBuf::from) else {
        if !on_a_small_disk("disk::a_full_disk_stops_writing_and_nothing_else", 2048) {
            println!("not tried: this system lets nobody mount a small disk (unshare --user --mount)");
        }
        return;
    };
    let chunks: Vec<Chunk> = (0..20).map(|seed| chunk(seed, 6, 20)).collect();
    let store = store_of(&chunks.iter().collect::<Vec<_>>()).await;
    // The setting allows far more than the disk has.
    let server = Server::start_with(store, config(&folder, 1 << 30)).await;
    for chunk in chunks.iter().chain(&chunks) {
        sources(&server, chunk).await;
    }
    assert_eq!(lookups(&server, "disk/full").await, 1, "it pauses after the first");
    assert!(lookups(&server, "disk/off").await > 0);
    assert!(lookups(&server, "hit/disk").await > 0, "what is there is served");
    assert_eq!(lookups(&server, "miss/store").await, 0);
    server.stop().await;
    let status = Command::new("mount").args(["-o", "remount,ro"]).arg(&folder).status().unwrap();
    assert!(status.success());
    let store = store_of(&chunks.iter().collect::<Vec<_>>()).await;
    let server = Server::start_with(store, config(&folder, 1 << 30)).await;
    for chunk in &chunks {
        sources(&server, chunk).await;
    }
    assert_eq!(lookups(&server, "disk/read-only").await, 1);
    assert!(lookups(&server, "hit/disk").await > 0, "a read-only folder is read");
    server.stop().await;
}
