//! Many chunk records in a synthetic store inside this process: how soon a service is up, what listing all keys takes, the memory
//! of an index of them, and lookups. The service itself keeps no index: it reads a record from the store when it is asked for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvsplice_cache_service::{Config, run_with_store};
use kvsplice_proto::load::Loader;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::super::prompt::Random;
use super::bed::Service;
use super::measure::{Spread, quantile};
use super::report::{Figure, Goal};
use crate::failure::interrupted;
use crate::output;

const LOOKUPS: usize = 20_000;
const DEADLINE: Duration = Duration::from_secs(600);

pub(super) async fn measure(records: u32, stop: &CancellationToken) -> anyhow::Result<Vec<Figure>> {
    output::note(format_args!("records: making {records} in a synthetic store inside this process"));
    let store = Arc::new(InMemory::new());
    for number in 0..records {
        if number % 10_000 == 0 {
            tokio::task::yield_now().await;
            if stop.is_cancelled() {
                return Err(interrupted());
            }
        }
        store.put(&Path::from(format!("records/{}", key(number))), vec![b'x'; 200].into()).await?;
    }
    let config = Config { store: "memory://bench".into(), ..Config::default() };
    let started = Instant::now();
    let shared: Arc<dyn ObjectStore> = store.clone();
    let service = Service::serve(|listener, stopped| run_with_store(shared, config, listener, stopped)).await?;
    let up_seconds = started.elapsed().as_secs_f64();
    let client = Loader::new(&service.address, 1, false, DEADLINE)?.client();
    output::note("records: listing");
    let started = Instant::now();
    let keys = client.list_records("bench").await?;
    let list_seconds = started.elapsed().as_secs_f64();
    anyhow::ensure!(keys.len() == records as usize, "{} of {records} records were listed", keys.len());
    let index: HashMap<String, u32> = keys.into_iter().zip(0..).collect();
    let index_seconds = started.elapsed().as_secs_f64();
    let index_bytes = allocated_bytes(&index) as f64 / f64::from(records);
    output::note("records: looking up");
    let mut random = Random(1);
    let (mut of_index, mut of_service) = (Vec::with_capacity(LOOKUPS), Vec::with_capacity(LOOKUPS));
    for _ in 0..LOOKUPS {
        let key = key(random.below(records as usize) as u32);
        let started = Instant::now();
        let found = std::hint::black_box(index.get(&key));
        of_index.push(started.elapsed().as_secs_f64() * 1e6);
        anyhow::ensure!(found.is_some(), "{key} is not in the index");
        let started = Instant::now();
        let record = client.get_record(&key).await?;
        of_service.push(started.elapsed().as_secs_f64() * 1e6);
        anyhow::ensure!(record.is_some(), "{key} is not in the store");
    }
    service.stop().await?;
    of_index.sort_by(f64::total_cmp);
    of_service.sort_by(f64::total_cmp);
    let figure = |what: String, unit, value, notes| {
        let goal: Option<Goal> = None;
        Figure { name: "records", what, unit, value: Spread::once(value), ceiling: None, goal, notes }
    };
    let synthetic = ("store", json!("synthetic, inside this process: no network, no disk"));
    Ok(vec![
        figure(format!("{records} records: service up"), "s", up_seconds, vec![synthetic]),
        figure(format!("{records} records: all keys listed over gRPC"), "s", list_seconds, Vec::new()),
        figure("the same, and an index made of them".into(), "s", index_seconds, Vec::new()),
        figure(
            "memory of that index a record, counted: keys and table".into(),
            "bytes",
            index_bytes,
            vec![("memory a record in the service, which keeps no index", json!(0))],
        ),
        figure("lookup in the index, 99th of 100".into(), "µs", quantile(&of_index, 0.99), Vec::new()),
        figure(
            "record read over loopback gRPC, 99th of 100".into(),
            "µs",
            quantile(&of_service, 0.99),
            vec![("median, µs", json!(quantile(&of_service, 0.5)))],
        ),
    ])
}

/// What the index has allocated: its keys, and a table of which one part in eight stays free, with a byte of control for each place.
fn allocated_bytes(index: &HashMap<String, u32>) -> usize {
    let keys: usize = index.keys().map(String::capacity).sum();
    let places = index.capacity() / 7 * 8;
    keys + places * (size_of::<(String, u32)>() + 1)
}

fn key(number: u32) -> String {
    format!("bench/corpus/chunks/{:016x}", u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
