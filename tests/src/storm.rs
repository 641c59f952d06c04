//! An object store in memory on which every n-th call goes wrong, in a way that a seed decides.
//!
//! A fault is counted when its caller is told, so that the service's own counts can be compared with these.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// What goes wrong in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// It takes some milliseconds longer; nothing is wrong with it.
    Slow,
    /// It fails.
    Fail,
    /// The bytes break off with an error.
    BreakOff,
    /// The bytes end early, without one.
    Short,
    /// One bit is wrong.
    FlipBit,
    /// A part is written; the caller hears that it failed.
    TornAndFails,
    /// A part is written; the caller hears that all is well.
    TornAndLies,
    /// All is written; the caller hears that it failed.
    LostAnswer,
    /// A listing from before.
    StaleList,
}

/// How bad it gets.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Of the reads, each goes wrong whose number this divides.
    pub every_read: u64,
    /// The same for all other calls.
    pub every_write: u64,
    /// Whether there are writes of a part.
    pub tears: bool,
    /// Milliseconds that a slow call takes at most.
    pub slow_ms: u64,
}

/// The store. Calm until [`StormStore::rage`].
#[derive(Debug)]
pub struct StormStore {
    inner: InMemory,
    random: Mutex<ChaCha8Rng>,
    weather: Weather,
    raging: AtomicBool,
    reads: AtomicU64,
    /// All calls that are no reads.
    writes: AtomicU64,
    injected: Mutex<BTreeMap<Fault, u64>>,
    listed: Mutex<HashMap<Option<Path>, Vec<ObjectMeta>>>,
}

fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failure() -> Error {
    Error::Generic { store: "storm", source: "injected fault".into() }
}

impl StormStore {
    /// A store that is calm.
    pub fn new(seed: u64, weather: Weather) -> Arc<Self> {
        Arc::new(Self {
            inner: InMemory::new(),
            random: Mutex::new(ChaCha8Rng::seed_from_u64(seed)),
            weather,
            raging: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            injected: Mutex::default(),
            listed: Mutex::default(),
        })
    }

    /// Begins or ends the storm.
    pub fn rage(&self, raging: bool) {
        self.raging.store(raging, Ordering::SeqCst);
    }

    /// How many faults of these kinds there were.
    pub fn injected(&self, faults: &[Fault]) -> u64 {
        let injected = hold(&self.injected);
        faults.iter().filter_map(|fault| injected.get(fault)).sum()
    }

    /// Every fault there was, by its kind.
    pub fn all_injected(&self) -> BTreeMap<Fault, u64> {
        hold(&self.injected).clone()
    }

    /// What goes wrong with this call, out of what can.
    fn draw(&self, reads: bool, faults: &[Fault]) -> Option<Fault> {
        if !self.raging.load(Ordering::SeqCst) {
            return None;
        }
        let (every_read, every_write) = (self.weather.every_read, self.weather.every_write);
        let (calls, every) = if reads { (&self.reads, every_read) } else { (&self.writes, every_write) };
        if !(calls.fetch_add(1, Ordering::SeqCst) + 1).is_multiple_of(every.max(1)) {
            return None;
        }
        faults.get(self.below(faults.len())).copied()
    }

    fn below(&self, end: usize) -> usize {
        hold(&self.random).random_range(0..end.max(1))
    }

    fn note(&self, fault: Fault) {
        *hold(&self.injected).entry(fault).or_default() += 1;
    }

    /// Fails, or takes its time. Gives back what else is to be done.
    async fn begin(&self, fault: Option<Fault>) -> Result<Option<Fault>> {
        match fault {
            Some(Fault::Fail) => {
                self.note(Fault::Fail);
                Err(failure())
            }
            Some(Fault::Slow) => {
                self.note(Fault::Slow);
                let most = usize::try_from(self.weather.slow_ms).unwrap_or(usize::MAX);
                tokio::time::sleep(Duration::from_millis(1 + self.below(most) as u64)).await;
                Ok(None)
            }
            other => Ok(other),
        }
    }
}

impl fmt::Display for StormStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StormStore")
    }
}

#[async_trait::async_trait]
impl ObjectStore for StormStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let all = [Fault::Slow, Fault::Fail, Fault::LostAnswer, Fault::TornAndFails, Fault::TornAndLies];
        let fault = self.draw(false, if self.weather.tears { &all } else { &all[..3] });
        let Some(fault) = self.begin(fault).await? else {
            return self.inner.put_opts(location, payload, options).await;
        };
        let mut payload = payload;
        if fault != Fault::LostAnswer {
            let mut bytes: Vec<u8> = payload.into_iter().flatten().collect();
            bytes.truncate(self.below(bytes.len()));
            payload = bytes.into();
        }
        // A create that finds the object says so, as it does without the fault.
        let result = self.inner.put_opts(location, payload, options).await?;
        self.note(fault);
        if fault == Fault::TornAndLies { Ok(result) } else { Err(failure()) }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let all = [Fault::Slow, Fault::Fail, Fault::BreakOff, Fault::Short, Fault::FlipBit];
        let fault = self.draw(true, if options.head { &all[..2] } else { &all });
        let fault = self.begin(fault).await?;
        let result = self.inner.get_opts(location, options).await?;
        let Some(fault) = fault.filter(|_| !result.range.is_empty()) else { return Ok(result) };
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let (attributes, extensions) = (result.attributes.clone(), result.extensions.clone());
        let mut bytes = result.bytes().await?.to_vec();
        let place = self.below(bytes.len());
        if fault == Fault::FlipBit {
            bytes[place] ^= 1 << self.below(8);
        } else {
            bytes.truncate(place);
        }
        let mut pieces = vec![Ok(Bytes::from(bytes))];
        if fault == Fault::BreakOff {
            pieces.push(Err(failure()));
        }
        self.note(fault);
        let payload = GetResultPayload::Stream(stream::iter(pieces).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        if self.draw(false, &[Fault::Fail]).is_some() {
            self.note(Fault::Fail);
            return stream::once(async { Err(failure()) }).boxed();
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let fault = self.draw(false, &[Fault::Fail, Fault::StaleList]);
        if fault == Some(Fault::Fail) {
            self.note(Fault::Fail);
            return stream::once(async { Err(failure()) }).boxed();
        }
        let before = hold(&self.listed).get(&prefix.cloned()).cloned();
        if let (Some(fault), Some(before)) = (fault, before) {
            self.note(fault);
            return stream::iter(before.into_iter().map(Ok)).boxed();
        }
        // What is in memory is listed at once.
        let now: Result<Vec<ObjectMeta>> = futures::executor::block_on(self.inner.list(prefix).try_collect());
        match now {
            Ok(metas) => {
                hold(&self.listed).insert(prefix.cloned(), metas.clone());
                stream::iter(metas.into_iter().map(Ok)).boxed()
            }
            Err(error) => stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt;

    use super::*;

    #[tokio::test]
    async fn every_third_call_goes_wrong_and_the_others_do_not() {
        let store = StormStore::new(7, Weather { every_read: 3, every_write: 2, tears: true, slow_ms: 4 });
        let path = Path::from("kv/x");
        store.put(&path, vec![0; 500].into()).await.unwrap();
        store.rage(true);
        for call in 1..=300 {
            let read = store.get_opts(&path, GetOptions::default()).await;
            let bytes = match read {
                Ok(read) => read.bytes().await,
                Err(error) => Err(error),
            };
            let right = bytes.is_ok_and(|bytes| bytes == vec![0; 500]);
            assert!(right || call % 3 == 0, "call {call}");
        }
        let faults = store.all_injected();
        assert_eq!(faults.values().sum::<u64>(), 100, "{faults:?}");
        assert_eq!(faults.len(), 5, "{faults:?}");
        store.rage(false);
        assert_eq!(store.get(&path).await.unwrap().bytes().await.unwrap().len(), 500);
    }
}
