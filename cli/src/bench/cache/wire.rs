//! Memory tier → worker staging over loopback gRPC, beside a raw TCP copy of the same bytes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use anyhow::Context;
use bytes::Bytes;
use kvsplice_cache_service::Config;
use serde_json::json;

use super::bed::Bed;
use super::measure::{Spread, processor_time};
use super::report::{Ceiling, Figure, Goal};
use crate::output;

const CONNECTIONS: [u32; 3] = [1, 2, 4];
/// Bytes of one write and one read, as of one frame.
const PIECE_BYTES: usize = 1 << 20;

pub(super) async fn measure(bed: &Bed) -> anyhow::Result<Vec<Figure>> {
    output::note("memory tier: storing the chunks");
    let memory_bytes = 2 * bed.kv_bytes() as u64 + (64 << 20);
    let config = Config { store: "memory://bench".into(), memory_bytes, ..Config::default() };
    let service = bed.serve(config).await?;
    let gigabytes = bed.kv_bytes() / 1e9;
    let (mut copies, mut copies_processor) = (Vec::new(), Vec::new());
    let mut rates = CONNECTIONS.map(|_| Vec::new());
    let mut processor = CONNECTIONS.map(|_| Vec::new());
    for round in 0..=bed.rounds as usize {
        output::note(format_args!("memory tier: {}", super::round_name(round)));
        for turn in 0..=CONNECTIONS.len() {
            let which = (turn + round) % (CONNECTIONS.len() + 1);
            let Some(&connections) = CONNECTIONS.get(which) else {
                let chunks: Vec<Bytes> = bed.chunks.iter().map(|(_, object)| object.clone()).collect();
                let layer_bytes = bed.layout.layer_bytes(bed.tokens);
                let (seconds, processor_seconds) =
                    tokio::task::spawn_blocking(move || copy(chunks, layer_bytes)).await??;
                if round > 0 {
                    copies.push(gigabytes / seconds);
                    copies_processor.push(processor_seconds / gigabytes);
                }
                continue;
            };
            let load = bed.load(&bed.loader(&service, connections, false)?).await?;
            anyhow::ensure!(load.wire_bytes as f64 >= bed.kv_bytes(), "{} bytes came", load.wire_bytes);
            if round > 0 {
                rates[which].push(gigabytes / load.seconds);
                processor[which].push(load.processor_seconds / gigabytes);
            }
        }
    }
    service.stop().await?;
    let mut figures = Vec::new();
    for ((connections, rates), processor) in CONNECTIONS.iter().zip(&rates).zip(&processor) {
        let value = Spread::of(rates);
        figures.push(Figure {
            name: "memory",
            what: format!("memory tier to worker, loopback gRPC, {connections} connections"),
            unit: "GB/s",
            value,
            ceiling: Some(Ceiling::over("raw TCP copy", &copies, value)),
            goal: (*connections == 1).then_some(Goal::AtLeast(0.4)),
            notes: vec![
                ("processor seconds a GB, both ends", json!(Spread::of(processor).median)),
                ("processor seconds a GB of the raw copy", json!(Spread::of(&copies_processor).median)),
            ],
        });
    }
    Ok(figures)
}

/// Sends the chunks' layers over loopback from one thread to another, which keeps each in memory of its own.
fn copy(chunks: Vec<Bytes>, layer_bytes: usize) -> anyhow::Result<(f64, f64)> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listen on loopback")?;
    let mut receiver = TcpStream::connect(listener.local_addr()?)?;
    let (mut sender, _) = listener.accept()?;
    receiver.set_nodelay(true)?;
    sender.set_nodelay(true)?;
    let headers = |object: &Bytes| object.len() % layer_bytes.max(1);
    let layers: usize = chunks.iter().map(|object| (object.len() - headers(object)) / layer_bytes).sum();
    let (started, processor) = (Instant::now(), processor_time());
    let sending = std::thread::spawn(move || -> std::io::Result<()> {
        for object in &chunks {
            let start = object.len() % layer_bytes.max(1);
            for piece in object.get(start..).unwrap_or(&[]).chunks(PIECE_BYTES) {
                sender.write_all(piece)?;
            }
        }
        Ok(())
    });
    for _ in 0..layers {
        let mut layer = vec![0; layer_bytes];
        for piece in layer.chunks_mut(PIECE_BYTES) {
            receiver.read_exact(piece)?;
        }
        std::hint::black_box(&layer);
    }
    sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
    Ok((started.elapsed().as_secs_f64(), (processor_time() - processor).as_secs_f64()))
}
