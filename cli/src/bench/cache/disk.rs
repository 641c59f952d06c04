//! Disk tier → worker, beside a sequential read of the same files, and how soon the first layer of every chunk is there.
//!
//! Before each read the files are dropped from the page cache (posix_fadvise DONTNEED on synced files); how much then came
//! from the disk is reported, for a file system may keep pages all the same.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use kvsplice_cache_service::Config;
use serde_json::json;

use super::bed::{Bed, files};
use super::measure::{Spread, disk_bytes};
use super::report::{Ceiling, Figure, Goal};
use crate::output;

/// Loads that may be needed until the disk tier holds everything.
const FILLS: usize = 20;
const READ_BYTES: usize = 8 << 20;

pub(super) async fn measure(bed: &Bed) -> anyhow::Result<Vec<Figure>> {
    output::note("disk tier: storing the chunks");
    let disk_dir = bed.folder("disk");
    let config = Config {
        store: "memory://bench".into(),
        // For headers; of the layers it holds next to nothing.
        memory_bytes: 4 << 20,
        disk_bytes: 2 * bed.kv_bytes() as u64 + (64 << 20),
        disk_dir: disk_dir.clone(),
        ..Config::default()
    };
    let service = bed.serve(config).await?;
    // What came faster than the disk takes it was left out: asking brings it in.
    let streamed = bed.loader(&service, 1, false)?;
    for _ in 0..FILLS {
        if !service.settle(bed).await? {
            break;
        }
        bed.load(&streamed).await?;
    }
    anyhow::ensure!(!service.settle(bed).await?, "the disk tier does not take all chunks: is the disk full?");
    let mapped = bed.loader(&service, 1, true)?;
    bed.load(&mapped).await?;
    let files: Vec<PathBuf> = files(&disk_dir)?.into_iter().filter(|path| path.extension().is_some()).collect();
    let gigabytes = bed.kv_bytes() / 1e9;
    let (mut reads, mut from_disk) = (Vec::new(), Vec::new());
    let (mut rates, mut firsts) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let (mut first_ms, mut bare_ms) = ([Vec::new(), Vec::new()], Vec::new());
    let first_layer = bed.layout.layer_range(0, bed.tokens);
    for round in 0..=bed.rounds as usize {
        output::note(format_args!("disk tier: {}", super::round_name(round)));
        for turn in 0..4 {
            let which = (turn + round) % 4;
            let dropped = files.clone();
            tokio::task::spawn_blocking(move || drop_pages(&dropped)).await??;
            let before = disk_bytes();
            if which == 3 {
                let (files, range) = (files.clone(), first_layer.clone());
                let seconds = tokio::task::spawn_blocking(move || read_part(&files, &range)).await??;
                if round > 0 {
                    bare_ms.push(1e3 * seconds);
                }
                continue;
            }
            let Some(loader) = [&streamed, &mapped].get(which).copied() else {
                let files = files.clone();
                let (bytes, seconds) = tokio::task::spawn_blocking(move || read(&files)).await??;
                if round > 0 {
                    reads.push(bytes / 1e9 / seconds);
                    from_disk.push((disk_bytes() - before) / bytes);
                }
                continue;
            };
            let load = bed.load(loader).await?;
            if round > 0 {
                rates[which].push(gigabytes / load.seconds);
                firsts[which].push(load.first_layer_seconds / load.seconds);
                first_ms[which].push(1e3 * load.first_layer_seconds);
            }
        }
    }
    service.stop().await?;
    let cold = json!(Spread::of(&from_disk).median);
    let mut figures = Vec::new();
    for (which, what) in ["sent", "mapped"].into_iter().enumerate() {
        let (rates, firsts) = (&rates[which], &firsts[which]);
        let value = Spread::of(rates);
        figures.push(Figure {
            name: "disk",
            what: format!("disk tier to worker, {what}"),
            unit: "GB/s",
            value,
            ceiling: Some(Ceiling::over("sequential read", &reads, value)),
            goal: Some(Goal::AtLeast(0.85)),
            notes: vec![("share of the sequential read that came from the disk", cold.clone())],
        });
        figures.push(Figure {
            name: "first-layer",
            what: format!("first layer of {} chunks, {what}: share of the whole load", bed.chunks.len()),
            unit: "",
            value: Spread::of(firsts),
            ceiling: None,
            goal: Some(Goal::AtMost(2.0 / f64::from(bed.layout.layers))),
            notes: vec![
                ("milliseconds until it was there", json!(Spread::of(&first_ms[which]))),
                ("milliseconds of reading these bytes and nothing else", json!(Spread::of(&bare_ms))),
            ],
        });
    }
    Ok(figures)
}

fn drop_pages(files: &[PathBuf]) -> anyhow::Result<()> {
    for path in files {
        let file = File::open(path)?;
        // Pages that are not written yet stay.
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Seconds of reading this range of every file, each in a thread of its own.
fn read_part(files: &[PathBuf], range: &Range<usize>) -> anyhow::Result<f64> {
    let started = Instant::now();
    let read = |path: &PathBuf| File::open(path)?.read_exact_at(&mut vec![0; range.len()], range.start as u64);
    std::thread::scope(|scope| -> anyhow::Result<()> {
        let readers: Vec<_> = files.iter().map(|path| scope.spawn(move || read(path))).collect();
        for reader in readers {
            reader.join().map_err(|_| anyhow::anyhow!("a thread that read a file has panicked"))??;
        }
        Ok(())
    })?;
    Ok(started.elapsed().as_secs_f64())
}

/// Bytes and seconds of reading the files from start to end.
fn read(files: &[PathBuf]) -> anyhow::Result<(f64, f64)> {
    let mut buffer = vec![0; READ_BYTES];
    let (mut bytes, started) = (0, Instant::now());
    for path in files {
        let mut file = File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                count => bytes += count,
            }
        }
    }
    std::hint::black_box(&buffer);
    Ok((bytes as f64, started.elapsed().as_secs_f64()))
}
