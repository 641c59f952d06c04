//! An object store in memory that is slow, refuses to be written, hides or loses chunks, when a test says so.

use std::collections::HashSet;
use std::fmt;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The store.
#[derive(Debug, Default)]
pub struct FaultyStore {
    inner: InMemory,
    read_delay_ms: AtomicU64,
    /// First byte of the reads that never end; 0 when every read ends.
    hold_from: AtomicU64,
    held: AtomicUsize,
    /// Of all reads of chunk KV together; 0 for no limit.
    bytes_per_second: AtomicU64,
    /// Held by the read that is on the link; when the last one was through. A read that is given up leaves the link.
    link: tokio::sync::Mutex<Option<Instant>>,
    write_error: Mutex<Option<ErrorKind>>,
    /// Chunks that are not found.
    hidden: Mutex<HashSet<String>>,
    removing: Mutex<Option<Removing>>,
}

fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A read that finds its object removed.
#[derive(Debug)]
struct Removing {
    chunk: String,
    /// First byte that it reads, at least.
    from: u64,
    /// Such reads before it.
    pass: usize,
}

impl FaultyStore {
    /// From now on every read takes this much longer.
    pub fn delay_reads(&self, delay: Duration) {
        self.read_delay_ms.store(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// From now on a read that begins at this byte of an object or later never ends. At 0 every read ends again.
    pub fn hold_reads_from(&self, byte: u64) {
        self.hold_from.store(byte, Ordering::SeqCst);
    }

    /// From now on all reads of chunk KV together bring this many bytes a second, one after another; 0 for no limit.
    pub fn throttle(&self, bytes_per_second: u64) {
        self.bytes_per_second.store(bytes_per_second, Ordering::SeqCst);
    }

    /// Waits for a read's turn on the throttled link.
    async fn pass_link(&self, bytes: u64) {
        let asked = Instant::now();
        let mut last = self.link.lock().await;
        let rate = self.bytes_per_second.load(Ordering::SeqCst);
        if rate == 0 {
            return;
        }
        // Clocks wake late: the next read begins when this one should have been through.
        let begin = last.map_or(asked, |last| last.max(asked));
        let through = begin + Duration::from_secs_f64(bytes as f64 / rate as f64);
        tokio::time::sleep_until(through.into()).await;
        *last = Some(through);
    }

    /// Reads that were begun and never end.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// From now on every write fails with this error; with none, writes work.
    pub fn fail_writes(&self, error: Option<ErrorKind>) {
        *hold(&self.write_error) = error;
    }

    /// From now on these chunks, and no others, are not found.
    pub fn hide(&self, chunks: impl IntoIterator<Item = String>) {
        *hold(&self.hidden) = chunks.into_iter().collect();
    }

    /// After `pass` more reads of `chunk` that begin at byte `from` or later, it is removed.
    pub fn remove_while_read(&self, chunk: &str, from: u64, pass: usize) {
        *hold(&self.removing) = Some(Removing { chunk: chunk.to_owned(), from, pass });
    }

    /// Whether a removal is still to come.
    pub fn is_removing(&self) -> bool {
        hold(&self.removing).is_some()
    }

    /// Whether this read is the one that finds its object removed.
    fn removes(&self, location: &Path, options: &GetOptions) -> bool {
        let mut removing = hold(&self.removing);
        let (Some(next), Some(GetRange::Bounded(range))) = (removing.as_mut(), &options.range) else { return false };
        if range.start < next.from || !location.as_ref().contains(&next.chunk) {
            return false;
        }
        if next.pass > 0 {
            next.pass -= 1;
            return false;
        }
        *removing = None;
        true
    }

    fn check_write(&self) -> Result<()> {
        match *hold(&self.write_error) {
            Some(kind) => Err(Error::Generic { store: "faulty", source: std::io::Error::from(kind).into() }),
            None => Ok(()),
        }
    }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FaultyStore")
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.check_write()?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.check_write()?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        tokio::time::sleep(Duration::from_millis(self.read_delay_ms.load(Ordering::SeqCst))).await;
        let hold_from = self.hold_from.load(Ordering::SeqCst);
        if matches!(&options.range, Some(GetRange::Bounded(range)) if hold_from > 0 && range.start >= hold_from) {
            self.held.fetch_add(1, Ordering::SeqCst);
            return std::future::pending().await;
        }
        let hidden = hold(&self.hidden).iter().any(|chunk| location.as_ref().contains(chunk));
        if hidden {
            return Err(Error::NotFound { path: location.to_string(), source: "hidden".into() });
        }
        if let Some(GetRange::Bounded(range)) = &options.range {
            self.pass_link(range.end - range.start).await;
        }
        if self.removes(location, &options) {
            self.inner.delete(location).await?;
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.check_write()?;
        self.inner.copy_opts(from, to, options).await
    }
}
