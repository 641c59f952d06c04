//! The disk tier: chunk objects as plain files in a folder, bounded in bytes by one setting. Off unless that is set.
//!
//! Layers enter one at a time, verified; a file reserves its whole size with its first layer, and goes whole: another program
//! may have it mapped. What is read from it is verified again by the reader. One thread writes; when the disk fails it, writing
//! pauses and the rest goes on. After a restart the folder is the index: headers are checked then, layers when they are read.

mod files;
mod folder;

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use kvsplice_kv::eviction::Book;
use kvsplice_proto::mmap::Identity;
use tokio::sync::Semaphore;
use tracing::warn;

use self::files::reason;
pub(crate) use self::folder::check_file;
use self::folder::{Fault, Folder, Found};
use crate::Config;
use crate::lookups::{Lookups, Outcome};
use crate::protect::Protection;
use crate::tier::{Costs, Object, ObjectKey, Origin, Removal};

/// Layers waiting to be written, in bytes and in writes.
const QUEUE_BYTES: u64 = 256 << 20;
const QUEUE: usize = 1024;
/// Reads under way at once, beside one for each processor: what is read is copied and checked by one. With more of them those who
/// send wait behind those who read, and the first layer of a prompt with them.
const MORE_READS: usize = 1;

/// The tier, or nothing if it is off.
pub(crate) struct Disk(Option<Running>);

struct Running {
    shared: Arc<Shared>,
    queue: Mutex<Option<SyncSender<Job>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    folder: Folder,
    /// Held while the process has the folder; none when it cannot be written at all.
    lock: Option<File>,
    index: Mutex<Index>,
    /// Held while files are made or removed, so that a removal is not undone by a write that was under way.
    files: Mutex<()>,
    protection: Arc<Protection>,
    lookups: Arc<Lookups>,
    costs: Costs,
    queued_bytes: AtomicU64,
    /// Rises with each removal: what was read before it is not written after it.
    epoch: AtomicU64,
    paused_until: Mutex<Option<Instant>>,
    reads: Semaphore,
}

struct Index {
    book: Book<ObjectKey, Entry>,
    /// Layers held.
    layers: u64,
}

/// What is known of a file. It is small: there may be a million.
struct Entry {
    layers: u32,
    /// None once the file is whole.
    partial: Option<Box<Partial>>,
}

struct Partial {
    object: Arc<Object>,
    present: Vec<bool>,
}

/// Verified layers to be written.
struct Job {
    object: Arc<Object>,
    layers: Vec<(u32, Bytes)>,
    epoch: u64,
}

impl Job {
    fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }
}

/// The disk tier's share of Stats.
pub(crate) struct Usage {
    pub(crate) bytes: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) layers: u64,
}

fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while a lock was held cannot make a wrong byte: what is read is verified.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// Opens the folder and reads what it holds. Blocks. A folder that cannot be used turns the tier off, with a counted
    /// reason.
    pub(crate) fn open(config: &Config, protection: Arc<Protection>, lookups: Arc<Lookups>, costs: Costs) -> Self {
        if config.disk_bytes == 0 {
            return Self(None);
        }
        // Absolute: other programs open its files.
        let folder = Folder::new(std::path::absolute(&config.disk_dir).unwrap_or_else(|_| config.disk_dir.clone()));
        let lock = match folder.lock() {
            Ok(Some(lock)) => Some(lock),
            Ok(None) => {
                lookups.count(Outcome::DiskInUse);
                warn!(folder = %folder.path().display(), "the disk tier is off: another process uses its folder");
                return Self(None);
            }
            Err(error) => {
                lookups.count(reason(&error));
                warn!(folder = %folder.path().display(), %error, "the disk tier is not written: its folder cannot be");
                None
            }
        };
        let index = Index { book: Book::new(config.eviction, config.disk_bytes), layers: 0 };
        let shared = Arc::new(Shared {
            folder,
            lock,
            index: Mutex::new(index),
            files: Mutex::new(()),
            protection,
            lookups,
            costs,
            queued_bytes: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            paused_until: Mutex::new(None),
            reads: Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from) + MORE_READS),
        });
        shared.rebuild();
        let (queue, jobs) = sync_channel(QUEUE);
        let writing = shared.clone();
        let writer = std::thread::Builder::new().name("disk-tier".into()).spawn(move || writing.write_all(&jobs));
        let (queue, writer) = match writer {
            Ok(writer) => (Some(queue), Some(writer)),
            Err(error) => {
                shared.lookups.count(Outcome::DiskError);
                warn!(%error, "the disk tier is not written: no thread for it");
                (None, None)
            }
        };
        Self(Some(Running { shared, queue: Mutex::new(queue), writer: Mutex::new(writer) }))
    }

    /// Writes what is queued and lets go of the folder. Nothing is written after this.
    pub(crate) async fn close(&self) {
        let Some(running) = &self.0 else { return };
        drop(hold(&running.queue).take());
        let writer = hold(&running.writer).take();
        if let Some(writer) = writer {
            // Fails only if the thread has panicked, which has been reported by then.
            let _ = tokio::task::spawn_blocking(move || writer.join()).await;
        }
        if let Some(lock) = &running.shared.lock {
            // The system does it too when the file is closed.
            let _ = lock.unlock();
        }
    }

    /// Notes that a stream asks for a chunk.
    pub(crate) fn touch(&self, key: &ObjectKey) {
        if let Some(running) = &self.0 {
            hold(&running.shared.index).book.touch(key);
        }
    }

    /// The header of an object that is whole here.
    pub(crate) async fn object(&self, key: &ObjectKey) -> Option<Object> {
        let shared = &self.0.as_ref()?.shared;
        hold(&shared.index).book.get(key).filter(|entry| entry.partial.is_none())?;
        let _permit = shared.reads.acquire().await.ok();
        let (reader, key) = (shared.clone(), *key);
        let read = move || match reader.folder.check(&key) {
            Ok(Found { header, .. }) => Some(Object { key, header, origin: Origin::Disk }),
            Err(fault) => {
                reader.discard(&key, &fault);
                None
            }
        };
        tokio::task::spawn_blocking(read).await.ok().flatten()
    }

    /// Whether the tier is on.
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Where an object lies that is whole here.
    pub(crate) fn path(&self, key: &ObjectKey) -> Option<PathBuf> {
        let shared = &self.0.as_ref()?.shared;
        hold(&shared.index).book.get(key).filter(|entry| entry.partial.is_none())?;
        Some(shared.folder.whole(key))
    }

    /// Layer `first`, and as many of the `count` layers from it on as are here, as `check` finds them: off the async threads,
    /// right after they are read. It is told which file they are of if that is whole, hence never written again.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        object: &Arc<Object>,
        first: u32,
        count: usize,
        check: impl FnOnce(Option<Identity>, Vec<Bytes>) -> T + Send + 'static,
    ) -> Option<T> {
        let shared = &self.0.as_ref()?.shared;
        let (whole, count) = {
            let index = hold(&shared.index);
            match &index.book.get(&object.key)?.partial {
                None => (true, count),
                Some(partial) => (false, partial.run(object, first).min(count)),
            }
        };
        let last = first.checked_add(u32::try_from(count).ok()?.checked_sub(1)?)?;
        let _permit = shared.reads.acquire().await.ok();
        let (reader, object) = (shared.clone(), object.clone());
        let read = move || {
            let ranges = (first..=last).map(|layer| object.header.layer_range(layer));
            match reader.folder.read(&object.key, whole, ranges) {
                Ok((identity, bytes)) => Some(check(identity, bytes)),
                // Evicted since it was looked up.
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => {
                    reader.discard(&object.key, &Fault::Io(error));
                    None
                }
            }
        };
        tokio::task::spawn_blocking(read).await.ok().flatten()
    }

    /// Removes a file that is not as it was written.
    pub(crate) async fn discard(&self, key: &ObjectKey, error: kvsplice_kv::object::Error) {
        let Some(running) = &self.0 else { return };
        let (shared, key) = (running.shared.clone(), *key);
        // Fails only if the removal has panicked; then the file stays, and is verified again when it is read again.
        let _ = tokio::task::spawn_blocking(move || shared.discard(&key, &Fault::Object(error))).await;
    }

    /// What [`Disk::offer`] takes: read it before the layers are read.
    pub(crate) fn epoch(&self) -> u64 {
        self.0.as_ref().map_or(0, |running| running.shared.epoch.load(Ordering::SeqCst))
    }

    /// Queues verified layers to be written. Never waits: when the disk is slower than what is read, it is left out.
    pub(crate) fn offer(&self, object: &Arc<Object>, layers: Vec<(u32, Bytes)>, epoch: u64) {
        let Some(running) = &self.0 else { return };
        let shared = &running.shared;
        let count = layers.len() as u64;
        if count == 0 || hold(&shared.index).book.get(&object.key).is_some_and(|entry| entry.partial.is_none()) {
            return;
        }
        if shared.is_paused() {
            return shared.lookups.count_many(Outcome::DiskOff, count);
        }
        let job = Job { object: object.clone(), layers, epoch };
        let bytes = job.bytes();
        let queued = shared.queued_bytes.fetch_add(bytes, Ordering::SeqCst);
        let sent = queued.saturating_add(bytes) <= QUEUE_BYTES.max(bytes)
            && hold(&running.queue).as_ref().is_some_and(|queue| queue.try_send(job).is_ok());
        if !sent {
            shared.queued_bytes.fetch_sub(bytes, Ordering::SeqCst);
            shared.lookups.count_many(Outcome::DiskBusy, count);
        }
    }

    /// Removes what `gone` covers, and what is queued or being read of it.
    pub(crate) async fn remove(&self, gone: Removal) {
        let Some(running) = &self.0 else { return };
        let shared = running.shared.clone();
        let remove = move || {
            let _files = hold(&shared.files);
            shared.epoch.fetch_add(1, Ordering::SeqCst);
            let keys: Vec<ObjectKey> = {
                let index = hold(&shared.index);
                index.book.iter().map(|(key, _)| *key).filter(|key| gone.covers(key)).collect()
            };
            for key in keys {
                shared.remove(&key);
            }
        };
        if let Err(error) = tokio::task::spawn_blocking(remove).await {
            warn!(%error, "chunks may be left in the disk tier");
        }
    }

    /// Bytes and layers held, and the limit in bytes; none while the tier is off.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let index = hold(&self.0.as_ref()?.shared.index);
        Some(Usage { bytes: index.book.bytes(), limit_bytes: index.book.limit_bytes(), layers: index.layers })
    }
}

impl Partial {
    /// How many layers from `first` on are here, of just this object.
    fn run(&self, object: &Object, first: u32) -> usize {
        if self.object.header != object.header {
            return 0;
        }
        self.present.get(first as usize..).unwrap_or(&[]).iter().take_while(|present| **present).count()
    }
}

impl Index {
    fn remove(&mut self, key: &ObjectKey) {
        if let Some(entry) = self.book.remove(key) {
            self.layers -= u64::from(entry.layers);
        }
    }
}

/// Where the tier lies unless the settings say otherwise.
pub(crate) fn default_folder(home: &Path) -> PathBuf {
    home.join("disk")
}

#[cfg(test)]
mod tests;
