//! Files that the worker maps on the service's host, checksums included, beside memcpy of the same bytes.

use std::time::Instant;

use bytes::Bytes;
use kvsplice_cache_service::Config;
use serde_json::json;

use super::bed::Bed;
use super::measure::Spread;
use super::report::{Ceiling, Figure, Goal};
use crate::output;

/// As many as the loader has checks under way.
const THREADS: usize = 2;

pub(super) async fn measure(bed: &Bed) -> anyhow::Result<Vec<Figure>> {
    output::note("mapped path: storing the chunks");
    let store = url::Url::from_directory_path(bed.folder("store"))
        .map_err(|()| anyhow::anyhow!("the temporary folder has no absolute path"))?;
    let service = bed.serve(Config { store: store.into(), memory_bytes: 1 << 20, ..Config::default() }).await?;
    let loader = bed.loader(&service, 1, true)?;
    let gigabytes = bed.kv_bytes() / 1e9;
    let objects: Vec<Bytes> = bed.chunks.iter().map(|(_, object)| object.clone()).collect();
    let target_bytes = objects.iter().map(Bytes::len).max().unwrap_or(0) * objects.len().div_ceil(THREADS);
    let mut targets = vec![vec![1u8; target_bytes]; THREADS];
    let (mut rates, mut copies, mut processor) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = 0.0;
    for round in 0..=bed.rounds as usize {
        output::note(format_args!("mapped path: {}", super::round_name(round)));
        let load = bed.load(&loader).await?;
        anyhow::ensure!(load.wire_bytes == 0, "{} bytes came over the wire: files were not mapped", load.wire_bytes);
        let (copied, seconds);
        (copied, targets, seconds) = {
            let (objects, targets) = (objects.clone(), std::mem::take(&mut targets));
            tokio::task::spawn_blocking(move || copy(objects, targets)).await?
        };
        if round == 0 {
            // The service verifies each layer once.
            first = gigabytes / load.seconds;
            continue;
        }
        rates.push(gigabytes / load.seconds);
        copies.push(copied as f64 / 1e9 / seconds);
        processor.push(load.processor_seconds / gigabytes);
    }
    service.stop().await?;
    std::fs::remove_dir_all(bed.folder("store"))?;
    let value = Spread::of(&rates);
    Ok(vec![Figure {
        name: "mapped",
        what: "files mapped on the same host, crc32c included".into(),
        unit: "GB/s",
        value,
        ceiling: Some(Ceiling::over("memcpy, 2 threads", &copies, value)),
        goal: Some(Goal::AtLeast(0.8)),
        notes: vec![
            ("processor seconds a GB", json!(Spread::of(&processor).median)),
            ("GB/s of the first load, in which the service verifies", json!(first)),
        ],
    }])
}

/// Copies the objects into memory that has been touched before.
fn copy(objects: Vec<Bytes>, mut targets: Vec<Vec<u8>>) -> (usize, Vec<Vec<u8>>, f64) {
    let started = Instant::now();
    let share = objects.len().div_ceil(THREADS).max(1);
    std::thread::scope(|scope| {
        for (objects, target) in objects.chunks(share).zip(&mut targets) {
            scope.spawn(move || {
                let mut rest = target.as_mut_slice();
                for object in objects {
                    let (place, next) = rest.split_at_mut(object.len().min(rest.len()));
                    place.copy_from_slice(object.get(..place.len()).unwrap_or(&[]));
                    rest = next;
                }
                std::hint::black_box(rest);
            });
        }
    });
    (objects.iter().map(Bytes::len).sum(), targets, started.elapsed().as_secs_f64())
}
