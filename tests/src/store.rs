//! An object store in memory that is slow, or refuses to be written, when a test says so.

use std::fmt;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The store.
#[derive(Debug, Default)]
pub struct FaultyStore {
    inner: InMemory,
    read_delay_ms: AtomicU64,
    /// First byte of the reads that never end; 0 when every read ends.
    hold_from: AtomicU64,
    held: AtomicUsize,
    write_error: Mutex<Option<ErrorKind>>,
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

    /// Reads that were begun and never end.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// From now on every write fails with this error; with none, writes work.
    pub fn fail_writes(&self, error: Option<ErrorKind>) {
        *self.write_error.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }

    fn check_write(&self) -> Result<()> {
        match *self.write_error.lock().unwrap_or_else(PoisonError::into_inner) {
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
