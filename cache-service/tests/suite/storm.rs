//! Thousands of seeded faults below the service: never a wrong byte out, and each is counted.
//!
//! `KVSPLICE_FAULTS` sets how many faults a storm has at least.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use kvsplice_cache_service::{Admission, Config, Eviction};
use kvsplice_kv::ChunkId;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tonic::Code;

use crate::storm_store::{Fault, StormStore, Weather};
use crate::support::{Chunk, Server, VARIANT, chunk, get, put, want};

/// What callers know: every value that was ever written to each record.
#[derive(Default)]
struct Written(Mutex<HashMap<String, HashSet<Vec<u8>>>>);

const RECORDS: usize = 12;

/// One caller: `steps` seeded requests, each answer checked. Returns how many chunks came whole.
async fn call(server: &Server, chunks: &[Chunk], written: &Written, seed: u64, steps: usize) -> usize {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut whole = 0;
    let allowed = [Code::Unavailable, Code::DataLoss, Code::NotFound];
    let check = |what: &str, status: tonic::Status| {
        assert!(allowed.contains(&status.code()), "{what}, seed {seed}: {status}");
    };
    for step in 0..steps {
        let one = &chunks[random.random_range(0..chunks.len())];
        let key = format!("a/{}", random.random_range(0..RECORDS));
        match random.random_range(0..20) {
            0..4 => {
                if let Err(status) = put(&server.client, one).await {
                    check("put", status);
                }
            }
            4..14 => {
                let several: Vec<&Chunk> = (0..4).map(|_| &chunks[random.random_range(0..chunks.len())]).collect();
                let ids: Vec<ChunkId> = several.iter().map(|chunk| chunk.id).collect();
                for (place, got) in get(&server.client, want(&ids)).await.unwrap() {
                    let chunk = several[place as usize];
                    for (layer, parts) in &got.layers {
                        assert!(
                            parts.concat() == chunk.layers[*layer as usize],
                            "layer {layer}, seed {seed}, step {step}"
                        );
                    }
                    if got.error.is_none() {
                        got.assert_is(chunk);
                        whole += 1;
                    }
                }
            }
            14 => {
                if let Err(status) = server.client.contains(&[one.id], VARIANT, std::time::Duration::ZERO).await {
                    check("contains", status);
                }
            }
            15 | 16 => {
                let value: Vec<u8> = (0..random.random_range(0..200)).map(|_| random.random()).collect();
                written.0.lock().unwrap().entry(key.clone()).or_default().insert(value.clone());
                if let Err(status) = server.client.put_record(&key, value).await {
                    check("put a record", status);
                }
            }
            17 | 18 => match server.client.get_record(&key).await {
                Ok(None) => {}
                Ok(Some(value)) => {
                    let written = written.0.lock().unwrap();
                    assert!(written[&key].contains(value.as_ref()), "record {key}, seed {seed}, step {step}");
                }
                Err(status) => check("get a record", status),
            },
            _ => match random.random_range(0..3) {
                0 => {
                    if let Err(status) = server.client.delete(&[one.id], &[]).await {
                        check("delete", status);
                    }
                }
                _ => match server.client.list_records("").await {
                    Ok(keys) => assert!(keys.len() <= RECORDS && keys.iter().all(|key| key.starts_with("a/"))),
                    Err(status) => check("list", status),
                },
            },
        }
    }
    whole
}

fn least_faults() -> u64 {
    std::env::var("KVSPLICE_FAULTS").ok().and_then(|faults| faults.parse().ok()).unwrap_or(2500)
}

/// Callers in the storm until there were enough faults; what was injected, and the service's counts.
async fn rage(seed: u64, tears: bool, config: Config) -> (Arc<StormStore>, HashMap<String, u64>) {
    println!("seed {seed}");
    let chunks: Vec<Chunk> = (0..24).map(|seed| chunk(seed, 4, 2 + seed % 3)).collect();
    let storm = StormStore::new(seed, Weather { every_read: 6, every_write: 6, tears, slow_ms: 2 });
    let server = Server::start_with(storm.clone(), config).await;
    storm.rage(true);
    let injected = || storm.all_injected().values().sum::<u64>();
    let written = Written::default();
    let (mut whole, mut round) = (0, 0);
    while injected() < least_faults() {
        round += 1;
        let callers = (0..6).map(|caller| call(&server, &chunks, &written, seed + 1000 * round + caller, 50));
        whole += futures::future::join_all(callers).await.into_iter().sum::<usize>();
    }
    let lookups = server.client.stats().await.unwrap().lookups;
    let mut counted: Vec<_> = lookups.iter().filter(|(_, count)| **count > 0).collect();
    counted.sort();
    println!("{} faults in {round} rounds: {:?}", injected(), storm.all_injected());
    println!("{whole} chunks came whole; counted: {counted:?}");
    assert!(whole > 100, "the storm lets nothing through");
    // When it is over, what is put is read, whatever is left in the store.
    storm.rage(false);
    for chunk in &chunks {
        for _ in 0..2 {
            put(&server.client, chunk).await.unwrap();
            if get(&server.client, want(&[chunk.id])).await.unwrap()[&0].error.is_none() {
                break;
            }
        }
        get(&server.client, want(&[chunk.id])).await.unwrap()[&0].assert_is(chunk);
    }
    server.stop().await;
    (storm, lookups)
}

/// So little memory that most reads go to the store.
fn little_memory() -> Config {
    Config { memory_bytes: 150_000, ..Config::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_fault_of_the_store_is_counted_and_no_wrong_byte_goes_out() {
    let (storm, counted) = rage(11, false, little_memory()).await;
    let sum = |names: &[&str]| names.iter().map(|name| counted[*name]).sum::<u64>();
    assert_eq!(counted["store/error"], storm.injected(&[Fault::Fail, Fault::BreakOff, Fault::LostAnswer]));
    assert_eq!(counted["store/short"], storm.injected(&[Fault::Short]));
    assert_eq!(sum(&["store/damaged", "store/truncated", "store/foreign"]), storm.injected(&[Fault::FlipBit]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wrong_byte_goes_out_of_torn_writes() {
    for admission in [Admission::Always, Admission::Second] {
        let (storm, counted) = rage(12, true, Config { admission, ..little_memory() }).await;
        let told = [Fault::Fail, Fault::BreakOff, Fault::LostAnswer, Fault::TornAndFails];
        assert_eq!(counted["store/error"], storm.injected(&told));
        assert!(storm.injected(&[Fault::TornAndLies]) > 0 && counted["store/truncated"] > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_wrong_byte_goes_out_of_a_disk_tier_that_rots() {
    let folder = tempfile::tempdir().unwrap();
    let disk_dir = folder.path().to_owned();
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (rotting, stop) = (disk_dir.clone(), over.clone());
    // Flips bits in files, cuts them and removes them while they are written and read.
    let rot = std::thread::spawn(move || {
        let mut random = ChaCha8Rng::seed_from_u64(13);
        let mut done = 0;
        while !stop.load(std::sync::atomic::Ordering::SeqCst) {
            let mut files = Vec::new();
            for folder in std::fs::read_dir(&rotting).into_iter().flatten().flatten() {
                files.extend(std::fs::read_dir(folder.path()).into_iter().flatten().flatten().map(|file| file.path()));
            }
            if files.is_empty() {
                std::thread::yield_now();
                continue;
            }
            let path = &files[random.random_range(0..files.len())];
            done += usize::from(damage(path, &mut random).is_ok());
            std::thread::sleep(std::time::Duration::from_micros(500));
        }
        done
    });
    let config = Config { disk_bytes: 600_000, disk_dir, eviction: Eviction::Lru, ..little_memory() };
    let (_, counted) = rage(14, true, config).await;
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    println!("{} files of the disk tier were damaged", rot.join().unwrap());
    assert!(counted["hit/disk"] > 0 && counted["disk/evicted"] > 0);
    assert!(counted["disk/damaged"] + counted["disk/foreign"] > 0);
}

fn damage(path: &std::path::Path, random: &mut ChaCha8Rng) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
    let length = file.metadata()?.len();
    match random.random_range(0..8) {
        0 => std::fs::remove_file(path),
        1 => file.set_len(random.random_range(0..length.max(1))),
        _ => {
            let (place, mut byte) = (random.random_range(0..length.max(1)), [0]);
            file.read_exact_at(&mut byte, place)?;
            file.write_all_at(&[byte[0] ^ (1 << random.random_range(0..8u8))], place)
        }
    }
}
