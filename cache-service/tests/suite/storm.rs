//! Thousands of seeded faults below the service: never a wrong byte out, and each is counted.
//!
//! `KVSPLICE_FAULTS` sets how many faults a storm has at least.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use kvsplice_cache_service::{Admission, Config, Eviction};
use kvsplice_kv::ChunkId;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tonic::Code;

use crate::support::{Chunk, Server, VARIANT, chunk, get, put, want};

/// What goes wrong in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// Other calls go first.
    Slow,
    Fail,
    /// The stream of bytes breaks off with an error.
    BreakOff,
    /// The stream of bytes ends early, without one.
    Short,
    FlipBit,
    /// A part is written; the caller hears that it failed.
    TornAndFails,
    /// A part is written; the caller hears that all is well.
    TornAndLies,
    /// All is written; the caller hears that it failed.
    LostAnswer,
    /// An older listing.
    StaleList,
}

struct Storm {
    inner: InMemory,
    random: Mutex<ChaCha8Rng>,
    /// Whether writes may be torn: what is torn is noticed when it is read, if it is.
    tears: bool,
    raging: std::sync::atomic::AtomicBool,
    injected: Mutex<BTreeMap<Fault, u64>>,
    listed: Mutex<HashMap<Option<Path>, Vec<ObjectMeta>>>,
}

impl fmt::Debug for Storm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storm")
    }
}

impl fmt::Display for Storm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storm")
    }
}

fn failure() -> Error {
    Error::Generic { store: "storm", source: "injected fault".into() }
}

impl Storm {
    fn new(seed: u64, tears: bool) -> Arc<Self> {
        Arc::new(Self {
            inner: InMemory::new(),
            random: Mutex::new(ChaCha8Rng::seed_from_u64(seed)),
            tears,
            raging: true.into(),
            injected: Mutex::default(),
            listed: Mutex::default(),
        })
    }

    fn below(&self, end: usize) -> usize {
        self.random.lock().unwrap().random_range(0..end.max(1))
    }

    /// One of `faults` in about every sixth call.
    fn draw(&self, faults: &[Fault]) -> Option<Fault> {
        if !self.raging.load(std::sync::atomic::Ordering::SeqCst) {
            return None;
        }
        faults.get(self.below(6 * faults.len())).copied()
    }

    fn note(&self, fault: Fault) {
        *self.injected.lock().unwrap().entry(fault).or_default() += 1;
    }

    fn injected(&self, faults: &[Fault]) -> u64 {
        let injected = self.injected.lock().unwrap();
        faults.iter().filter_map(|fault| injected.get(fault)).sum()
    }

    fn all_injected(&self) -> u64 {
        self.injected.lock().unwrap().values().sum()
    }

    /// Lets others go first.
    async fn slow(&self) {
        for _ in 0..self.below(30) {
            tokio::task::yield_now().await;
        }
    }
}

#[async_trait::async_trait]
impl ObjectStore for Storm {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let torn = [Fault::TornAndFails, Fault::TornAndLies];
        let faults = [Fault::Slow, Fault::Fail, Fault::LostAnswer];
        let fault = self.draw(if self.tears && self.below(2) == 0 { &torn } else { &faults });
        let note = |fault| {
            self.note(fault);
            Err(failure())
        };
        match fault {
            Some(Fault::Fail) => return note(Fault::Fail),
            Some(torn @ (Fault::TornAndFails | Fault::TornAndLies)) => {
                let bytes: Bytes = payload.into_iter().flatten().collect::<Vec<u8>>().into();
                let part = bytes.slice(..self.below(bytes.len()));
                // A create that finds the object says so, as without the fault.
                let result = self.inner.put_opts(location, part.into(), opts).await?;
                let failed = note(torn);
                return if torn == Fault::TornAndLies { Ok(result) } else { failed };
            }
            Some(Fault::LostAnswer) => {
                self.inner.put_opts(location, payload, opts).await?;
                return note(Fault::LostAnswer);
            }
            Some(_) => {
                self.note(Fault::Slow);
                self.slow().await;
            }
            None => {}
        }
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let read = [Fault::Slow, Fault::Fail, Fault::BreakOff, Fault::Short, Fault::FlipBit];
        let fault = self.draw(if options.head { &read[..2] } else { &read });
        if fault == Some(Fault::Fail) {
            self.note(Fault::Fail);
            return Err(failure());
        }
        if fault == Some(Fault::Slow) {
            self.note(Fault::Slow);
            self.slow().await;
        }
        let result = self.inner.get_opts(location, options).await?;
        let Some(fault @ (Fault::BreakOff | Fault::Short | Fault::FlipBit)) = fault else { return Ok(result) };
        let (meta, range, attributes) = (result.meta.clone(), result.range.clone(), result.attributes.clone());
        let extensions = result.extensions.clone();
        let mut bytes = result.bytes().await?.to_vec();
        let place = self.below(bytes.len());
        let mut pieces: Vec<Result<Bytes>> = Vec::new();
        if bytes.is_empty() {
            // Nothing to damage.
        } else if fault == Fault::FlipBit {
            bytes[place] ^= 1 << self.below(8);
            self.note(fault);
        } else {
            bytes.truncate(place);
            self.note(fault);
        }
        let was_empty = range.start == range.end;
        pieces.push(Ok(bytes.into()));
        if fault == Fault::BreakOff && !was_empty {
            pieces.push(Err(failure()));
        }
        let payload = GetResultPayload::Stream(futures::stream::iter(pieces).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        if self.draw(&[Fault::Fail]).is_some() {
            self.note(Fault::Fail);
            return futures::stream::once(async { Err(failure()) }).boxed();
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let fault = self.draw(&[Fault::Fail, Fault::StaleList]);
        if fault == Some(Fault::Fail) {
            self.note(Fault::Fail);
            return futures::stream::once(async { Err(failure()) }).boxed();
        }
        let older = self.listed.lock().unwrap().get(&prefix.cloned()).cloned();
        if fault == Some(Fault::StaleList)
            && let Some(older) = older
        {
            self.note(Fault::StaleList);
            return futures::stream::iter(older.into_iter().map(Ok)).boxed();
        }
        // Listing what is in memory is ready at once.
        let now: Vec<Result<ObjectMeta>> = futures::executor::block_on(self.inner.list(prefix).collect());
        let metas = now.iter().filter_map(|meta| meta.as_ref().ok().cloned()).collect();
        self.listed.lock().unwrap().insert(prefix.cloned(), metas);
        futures::stream::iter(now).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

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
async fn rage(seed: u64, tears: bool, config: Config) -> (Arc<Storm>, HashMap<String, u64>) {
    println!("seed {seed}");
    let chunks: Vec<Chunk> = (0..24).map(|seed| chunk(seed, 4, 2 + seed % 3)).collect();
    let storm = Storm::new(seed, tears);
    let server = Server::start_with(storm.clone(), config).await;
    let written = Written::default();
    let (mut whole, mut round) = (0, 0);
    while storm.all_injected() < least_faults() {
        round += 1;
        let callers = (0..6).map(|caller| call(&server, &chunks, &written, seed + 1000 * round + caller, 50));
        whole += futures::future::join_all(callers).await.into_iter().sum::<usize>();
    }
    let lookups = server.client.stats().await.unwrap().lookups;
    let mut counted: Vec<_> = lookups.iter().filter(|(_, count)| **count > 0).collect();
    counted.sort();
    println!("{} faults in {round} rounds: {:?}", storm.all_injected(), storm.injected.lock().unwrap());
    println!("{whole} chunks came whole; counted: {counted:?}");
    assert!(whole > 100, "the storm lets nothing through");
    // When it is over, what is put is read, whatever is left in the store.
    storm.raging.store(false, std::sync::atomic::Ordering::SeqCst);
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

#[tokio::test]
async fn the_storm_itself_does_what_it_says() {
    let storm = Storm::new(1, true);
    let path = Path::from("kv/x");
    storm.inner.put(&path, vec![0u8; 1000].into()).await.unwrap();
    let mut changed = 0;
    for _ in 0..600 {
        match storm.get_opts(&path, GetOptions::default()).await {
            Ok(result) => changed += u64::from(result.bytes().await.map_or(true, |bytes| *bytes != [0; 1000])),
            Err(_) => changed += 1,
        }
    }
    assert_eq!(changed, storm.injected(&[Fault::Fail, Fault::BreakOff, Fault::Short, Fault::FlipBit]));
    assert!(changed > 30);
    let listed: Vec<ObjectMeta> = storm.inner.list(None).try_collect().await.unwrap();
    assert_eq!(listed.len(), 1);
}
