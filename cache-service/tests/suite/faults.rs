//! Slow, failing, full and silent stores; callers that go away.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvsplice_cache_service::Config;
use kvsplice_kv::ChunkId;
use kvsplice_proto::cache::intact;
use kvsplice_proto::v1::get_chunks_request::Message;
use kvsplice_proto::v1::{Drop, GetChunksRequest, Range, Skip};
use object_store::memory::InMemory;
use object_store::{GetRange, ObjectStore, ObjectStoreExt, path::Path};
use tokio::sync::Semaphore;
use tonic::Code;

use crate::support::{Chunk, Faulty, Read, Server, VARIANT, chunk, eventually, get, put, want};

/// A store that holds `chunks`.
async fn filled(chunks: &[&Chunk]) -> Arc<dyn ObjectStore> {
    let store = Arc::new(InMemory::new());
    for chunk in chunks {
        let path = Path::from(format!("kv/{}/{VARIANT}", chunk.id));
        store.put(&path, chunk.object.clone().into()).await.unwrap();
    }
    store
}

fn is_of(path: &Path, chunk: ChunkId) -> bool {
    path.as_ref().contains(&chunk.to_string())
}

/// Over a slow link a header takes as long as its bytes.
#[tokio::test]
async fn a_header_is_looked_up_once_and_in_few_bytes() {
    let chunks: Vec<Chunk> = (0..3).map(|seed| chunk(seed, 64, 2)).collect();
    let (gate, read) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
    let (held, count) = (gate.clone(), read.clone());
    let store = Faulty::on_read(filled(&chunks.iter().collect::<Vec<_>>()).await, move |_, options| {
        if let Some(GetRange::Bounded(range)) = &options.range {
            count.fetch_add((range.end - range.start) as usize, Ordering::SeqCst);
        }
        Read::Wait(held.clone())
    });
    let server = Server::start(store.clone()).await;
    let look_up = |chunk: &Chunk| {
        let (client, id) = (server.client.clone(), chunk.id);
        async move { client.contains(&[id], VARIANT, Duration::ZERO).await.unwrap().found[0] }
    };
    let (mut reads, mut bytes) = (store.reads.load(Ordering::SeqCst), read.load(Ordering::SeqCst));
    let mut since = || {
        let now = (store.reads.load(Ordering::SeqCst), read.load(Ordering::SeqCst));
        let more = (now.0 - reads, now.1 - bytes);
        (reads, bytes) = now;
        more
    };
    // The first of a large model takes two reads, and no byte twice.
    gate.add_permits(100);
    assert!(look_up(&chunks[0]).await);
    assert_eq!(since(), (2, 32 << 10));
    assert!(look_up(&chunks[1]).await);
    assert_eq!(since(), (1, 6 << 10));
    assert!(look_up(&chunks[0]).await && look_up(&chunks[1]).await);
    assert_eq!(since(), (0, 0));
    // Many who ask at once wait for one read.
    gate.forget_permits(100);
    let asked: Vec<_> = (0..8).map(|_| tokio::spawn(look_up(&chunks[2]))).collect();
    eventually("it is being read", || store.reading.load(Ordering::SeqCst) == 1).await;
    gate.add_permits(100);
    for asked in asked {
        assert!(asked.await.unwrap());
    }
    assert_eq!(since(), (1, 6 << 10));
    server.stop().await;
}

/// Reads of `slow` wait at the gate, the others pass.
async fn gated(slow: ChunkId, chunks: &[&Chunk]) -> (Arc<Faulty>, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let store =
        Faulty::on_read(
            filled(chunks).await,
            move |path, _| {
                if is_of(path, slow) { Read::Wait(held.clone()) } else { Read::Pass }
            },
        );
    (store, gate)
}

fn request(message: Message) -> GetChunksRequest {
    GetChunksRequest { message: Some(message) }
}

#[tokio::test]
async fn a_slow_chunk_does_not_hold_up_the_others() {
    let (slow, fast) = (chunk(1, 6, 30), chunk(2, 6, 30));
    let (store, gate) = gated(slow.id, &[&slow, &fast]).await;
    let server = Server::start(store).await;
    let (_requests, mut frames) = server.client.get_chunks(want(&[slow.id, fast.id])).await.unwrap();
    for frame in 0..12 {
        assert_eq!(frames.message().await.unwrap().unwrap().chunk, 1, "frame {frame}");
    }
    gate.add_permits(1000);
    for frame in 0..12 {
        assert_eq!(frames.message().await.unwrap().unwrap().chunk, 0, "frame {frame}");
    }
    assert!(frames.message().await.unwrap().is_none());
    server.stop().await;
}

#[tokio::test]
async fn lower_layers_come_first() {
    let chunks: Vec<Chunk> = (0..4).map(|seed| chunk(seed, 8, 20)).collect();
    let store = filled(&chunks.iter().collect::<Vec<_>>()).await;
    let server = Server::start(store).await;
    let ids: Vec<ChunkId> = chunks.iter().map(|chunk| chunk.id).collect();
    // The second time all is in memory, so the order depends on the stream alone.
    get(&server.client, want(&ids)).await.unwrap();
    let (_requests, mut frames) = server.client.get_chunks(want(&ids)).await.unwrap();
    let mut layers = Vec::new();
    while let Some(frame) = frames.message().await.unwrap() {
        layers.push(frame.layer);
    }
    assert_eq!(layers.len(), 4 * 8 * 2);
    let sum = |half: &[u32]| half.iter().sum::<u32>();
    let (first, second) = layers.split_at(layers.len() / 2);
    assert!(sum(first) < sum(second), "{layers:?}");
    server.stop().await;
}

#[tokio::test]
async fn a_dropped_chunk_is_not_waited_for() {
    let (slow, fast) = (chunk(1, 6, 30), chunk(2, 6, 30));
    let (store, _gate) = gated(slow.id, &[&slow, &fast]).await;
    let server = Server::start(store.clone()).await;
    let (requests, mut frames) = server.client.get_chunks(want(&[slow.id, fast.id])).await.unwrap();
    requests.send(request(Message::Skip(Skip { chunk: 1, rows: vec![], from_layer: 0 }))).await.unwrap();
    requests.send(request(Message::Drop(Drop { chunk: 0 }))).await.unwrap();
    let mut count = 0;
    while let Some(frame) = frames.message().await.unwrap() {
        assert_eq!(frame.chunk, 1);
        count += 1;
    }
    assert_eq!(count, 12, "a skip of no rows changes nothing, a drop ends the chunk");
    eventually("the read of the dropped chunk ends", || store.reading.load(Ordering::SeqCst) == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn skipped_rows_do_not_come_and_the_others_are_exact() {
    let (chunk, dropped) = (chunk(3, 4, 30), chunk(4, 4, 30));
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let store = Faulty::on_read(filled(&[&chunk, &dropped]).await, move |_, _| Read::Wait(held.clone()));
    let server = Server::start(store.clone()).await;
    let (requests, mut frames) = server.client.get_chunks(want(&[chunk.id, dropped.id])).await.unwrap();
    eventually("both are read", || store.reading.load(Ordering::SeqCst) == 2).await;
    let ranges = [0..2, 5..11, 29..40];
    let rows = ranges.iter().map(|rows| Range { first: rows.start, end: rows.end }).collect();
    requests.send(request(Message::Skip(Skip { chunk: 0, rows, from_layer: 1 }))).await.unwrap();
    requests.send(request(Message::Drop(Drop { chunk: 1 }))).await.unwrap();
    // Requests are heard in order.
    eventually("the drop is heard", || store.reading.load(Ordering::SeqCst) == 1).await;
    gate.add_permits(1000);
    let row_bytes = chunk.layers[0].len() / 60;
    let skipped = |row: usize| ranges.iter().any(|range| range.contains(&(row as u32)));
    let mut seen = [[[false; 30]; 2]; 4];
    while let Some(frame) = frames.message().await.unwrap() {
        assert!(intact(&frame));
        let (layer, part) = (frame.layer as usize, frame.part as usize);
        let whole = [Range { first: frame.first_row, end: frame.first_row + frame.rows }];
        let ranges = if frame.gathered.is_empty() { &whole[..] } else { &frame.gathered };
        let rows = ranges.iter().flat_map(|range| range.first as usize..range.end as usize);
        for (row, data) in rows.zip(frame.data.chunks(row_bytes)) {
            let first = (part * 30 + row) * row_bytes;
            assert!(chunk.layers[layer][first..first + row_bytes] == *data, "layer {layer}, row {row}");
            seen[layer][part][row] = true;
        }
    }
    for (layer, parts) in seen.iter().enumerate() {
        for part in parts {
            assert!((0..30).all(|row| part[row] == (layer < 1 || !skipped(row))), "layer {layer}: {part:?}");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn a_place_that_was_not_wanted_and_bad_ranges_are_refused() {
    let slow = chunk(1, 2, 3);
    let (store, _gate) = gated(slow.id, &[&slow]).await;
    let server = Server::start(store).await;
    let overlapping = vec![Range { first: 3, end: 9 }, Range { first: 8, end: 9 }];
    for message in [
        Message::Drop(Drop { chunk: 1 }),
        Message::Want(want(&[slow.id])),
        Message::Skip(Skip { chunk: 1, rows: vec![], from_layer: 0 }),
        Message::Skip(Skip { chunk: 0, rows: overlapping, from_layer: 0 }),
    ] {
        let (requests, mut frames) = server.client.get_chunks(want(&[slow.id])).await.unwrap();
        requests.send(request(message)).await.unwrap();
        assert_eq!(frames.message().await.unwrap_err().code(), Code::InvalidArgument);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_ends_the_reads() {
    let slow: Vec<Chunk> = (0..20).map(|seed| chunk(seed, 6, 30)).collect();
    let ids: Vec<ChunkId> = slow.iter().map(|chunk| chunk.id).collect();
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let inner = filled(&slow.iter().collect::<Vec<_>>()).await;
    let store = Faulty::on_read(inner, move |_, _| Read::Wait(held.clone()));
    let server = Server::start(store.clone()).await;
    let (requests, frames) = server.client.get_chunks(want(&ids)).await.unwrap();
    eventually("reads are under way", || store.reading.load(Ordering::SeqCst) == 20).await;
    drop((requests, frames));
    eventually("all reads end", || store.reading.load(Ordering::SeqCst) == 0).await;
    // What the canceled stream was loading is free for others.
    gate.add_permits(10_000);
    let got = get(&server.client, want(&ids)).await.unwrap();
    for (place, chunk) in slow.iter().enumerate() {
        got[&(place as u32)].assert_is(chunk);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_caller_that_takes_nothing_bounds_the_reads() {
    let large: Vec<Chunk> = (0..12).map(|seed| chunk(seed, 4, 1024)).collect();
    let ids: Vec<ChunkId> = large.iter().map(|chunk| chunk.id).collect();
    let total: usize = large.iter().map(|chunk| chunk.object.len()).sum();
    assert!(total > 150 << 20);
    let store = filled(&large.iter().collect::<Vec<_>>()).await;
    let server = Server::start_with(store, Config { memory_bytes: 256 << 20, ..Config::default() }).await;
    let (_requests, mut frames) = server.client.get_chunks(want(&ids)).await.unwrap();
    frames.message().await.unwrap().unwrap();
    // The windows of the connection and the stream's own bound are far below the total: most stays unread until taken.
    let mut seen = server.client.stats().await.unwrap().tiers[0].bytes;
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = server.client.stats().await.unwrap().tiers[0].bytes;
        if now == seen {
            break;
        }
        seen = now;
    }
    assert!(seen < (total / 2) as u64, "{seen} of {total} bytes were read for a caller that took one frame");
    while frames.message().await.unwrap().is_some() {}
    server.stop().await;
}

#[tokio::test]
async fn many_callers_load_a_layer_once() {
    let chunk = chunk(1, 6, 30);
    let gate = Arc::new(Semaphore::new(0));
    let held = gate.clone();
    let store = Faulty::on_read(filled(&[&chunk]).await, move |_, _| Read::Wait(held.clone()));
    let server = Server::start(store.clone()).await;
    let callers: Vec<_> = (0..16)
        .map(|_| {
            let (client, id) = (server.client.clone(), chunk.id);
            tokio::spawn(async move { get(&client, want(&[id])).await.unwrap() })
        })
        .collect();
    eventually("a read is under way", || store.reading.load(Ordering::SeqCst) > 0).await;
    gate.add_permits(10_000);
    for caller in callers {
        caller.await.unwrap()[&0].assert_is(&chunk);
    }
    let lookups = server.client.stats().await.unwrap().lookups;
    assert_eq!(lookups["hit/object"], 6, "each layer once");
    assert_eq!(lookups["hit/memory"], 15 * 6);
    // The header, then one, two and three layers.
    assert!(store.reads.load(Ordering::SeqCst) <= 7, "{}", store.reads.load(Ordering::SeqCst));
    server.stop().await;
}

#[tokio::test]
async fn a_failing_read_costs_one_chunk_and_is_counted() {
    let chunks: Vec<Chunk> = (0..8).map(|seed| chunk(seed, 3, 10)).collect();
    let ids: Vec<ChunkId> = chunks.iter().map(|chunk| chunk.id).collect();
    let calls = AtomicUsize::new(0);
    let store = Faulty::on_read(filled(&chunks.iter().collect::<Vec<_>>()).await, move |_, options| {
        let failing = !options.head && calls.fetch_add(1, Ordering::SeqCst) % 5 == 4;
        if failing { Read::Fail } else { Read::Pass }
    });
    let server = Server::start(store).await;
    let (mut failed, mut rounds) = (0, 0);
    loop {
        let got = get(&server.client, want(&ids)).await.unwrap();
        let mut complete = 0;
        for (place, chunk) in chunks.iter().enumerate() {
            let got = &got[&(place as u32)];
            match &got.error {
                None => {
                    got.assert_is(chunk);
                    complete += 1;
                }
                Some(error) => {
                    assert!(error.starts_with("store: ") && error.contains("injected fault"), "{error}");
                    failed += 1;
                }
            }
        }
        rounds += 1;
        if complete == chunks.len() {
            break;
        }
        assert!(rounds < 20, "each round leaves fewer layers to read");
    }
    assert!(failed > 0);
    assert_eq!(server.client.stats().await.unwrap().lookups["miss/store"], failed);
    server.stop().await;
}

#[tokio::test]
async fn a_bit_flipped_on_the_way_is_never_sent() {
    let (bad, good) = (chunk(1, 6, 30), chunk(2, 6, 30));
    let flipped = bad.id;
    let store = Faulty::on_read(filled(&[&bad, &good]).await, move |path, options| {
        let is_layer = !options.head && options.if_match.is_some();
        if is_of(path, flipped) && is_layer { Read::FlipBit } else { Read::Pass }
    });
    let server = Server::start(store).await;
    let got = get(&server.client, want(&[bad.id, good.id])).await.unwrap();
    assert!(got[&0].error.as_ref().unwrap().starts_with("damaged: "));
    assert!(got[&0].layers.is_empty());
    got[&1].assert_is(&good);
    assert_eq!(server.client.stats().await.unwrap().lookups["miss/damaged"], 1);
    server.stop().await;
}

#[tokio::test]
async fn a_put_whose_connection_breaks_is_tried_once_more() {
    let (old, new) = (chunk(1, 2, 5), chunk(2, 2, 5));
    let writes = AtomicUsize::new(0);
    let every_other =
        move |_: &Path| writes.fetch_add(1, Ordering::SeqCst).is_multiple_of(2).then_some(ErrorKind::BrokenPipe);
    let server = Server::start(Faulty::new(filled(&[&old]).await, |_, _| Read::Pass, every_other)).await;
    assert!(put(&server.client, &new).await.unwrap());
    get(&server.client, want(&[new.id])).await.unwrap()[&0].assert_is(&new);
    assert!(!put(&server.client, &old).await.unwrap());
    server.stop().await;
}

#[tokio::test]
async fn a_store_that_cannot_be_written_says_why_and_still_serves() {
    let (old, new) = (chunk(1, 2, 5), chunk(2, 2, 5));
    let large = chunk(3, 5, 2048);
    for (kind, code) in [
        (ErrorKind::StorageFull, Code::ResourceExhausted),
        (ErrorKind::ReadOnlyFilesystem, Code::FailedPrecondition),
        (ErrorKind::ConnectionReset, Code::Unavailable),
    ] {
        let store = Faulty::new(filled(&[&old]).await, |_, _| Read::Pass, move |_| Some(kind));
        let server = Server::start(store).await;
        for chunk in [&new, &large] {
            let status = put(&server.client, chunk).await.unwrap_err();
            assert_eq!(status.code(), code, "{status}");
            assert!(status.message().contains(&std::io::Error::from(kind).to_string()), "{status}");
        }
        assert_eq!(server.client.put_record("a", vec![1]).await.unwrap_err().code(), code);
        assert!(!put(&server.client, &old).await.unwrap());
        get(&server.client, want(&[old.id])).await.unwrap()[&0].assert_is(&old);
        server.stop().await;
    }
}

#[tokio::test]
async fn a_silent_store_is_an_error_in_time() {
    let (slow, fast) = (chunk(1, 2, 5), chunk(2, 2, 5));
    let (store, _gate) = gated(slow.id, &[&slow, &fast]).await;
    let server = Server::start_with(store, Config { store_timeout_s: 1, ..Config::default() }).await;
    let got = get(&server.client, want(&[slow.id, fast.id])).await.unwrap();
    let error = got[&0].error.as_ref().unwrap();
    assert!(error.starts_with("store: ") && error.contains("no answer within 1 s"), "{error}");
    got[&1].assert_is(&fast);
    let status = server.client.contains(&[slow.id], VARIANT, Duration::ZERO).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    server.stop().await;
}

#[tokio::test]
async fn memory_is_bounded_and_pinned_chunks_stay() {
    let pinned = chunk(0, 4, 50);
    let others: Vec<Chunk> = (1..20).map(|seed| chunk(seed, 4, 50)).collect();
    let mut all = vec![&pinned];
    all.extend(&others);
    let store = filled(&all).await;
    let server = Server::start_with(store, Config { memory_bytes: 3 << 20, ..Config::default() }).await;
    server.client.pin(&[pinned.id]).await.unwrap();
    for chunk in all.iter().chain(&all) {
        get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(chunk);
        let memory = &server.client.stats().await.unwrap().tiers[0];
        assert!(memory.bytes <= 3 << 20);
    }
    let got = get(&server.client, want(&[pinned.id])).await.unwrap();
    assert!(got[&0].sources.iter().all(|source| source == "memory"));
    server.stop().await;
}

#[tokio::test]
async fn without_memory_everything_comes_from_the_store() {
    let chunk = chunk(1, 6, 30);
    let server = Server::start_with(filled(&[&chunk]).await, Config { memory_bytes: 0, ..Config::default() }).await;
    for _ in 0..2 {
        let got = get(&server.client, want(&[chunk.id])).await.unwrap();
        got[&0].assert_is(&chunk);
        assert!(got[&0].sources.iter().all(|source| source == "object"));
    }
    server.stop().await;
}
