//! The disk tier: chunk objects as plain files in a folder, bounded in bytes by one setting. Off unless that is set.
//!
//! Layers enter one at a time, verified; a file reserves its whole size with its first layer, and goes whole: another program
//! may have it mapped. What is read from it is verified again by the reader. One thread writes; when the disk fails it, writing
//! pauses and the rest goes on. After a restart the folder is the index: headers are checked then, layers when they are read.

mod folder;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};

use self::folder::{Fault, Folder, Found, file_bytes};
use crate::Config;
use crate::eviction::Book;
use crate::lookups::{Lookups, Outcome};
use crate::protect::Protection;
use crate::tier::{Costs, Object, ObjectKey, Origin, Removal};

/// Layers waiting to be written, in bytes and in writes.
const QUEUE_BYTES: u64 = 256 << 20;
const QUEUE: usize = 1024;
/// Writing pauses for so long after it has failed.
const PAUSE: Duration = Duration::from_secs(60);
/// Reads under way at once.
const READS: usize = 64;
/// Files whose headers are read at once when the service starts.
const START_READS: usize = 16;

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
        let folder = Folder::new(config.disk_dir.clone());
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
            reads: Semaphore::new(READS),
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

    /// The bytes of layer `first`, and of as many of the `count` layers from it on as are here. Not verified.
    pub(crate) async fn read(&self, object: &Arc<Object>, first: u32, count: usize) -> Option<Bytes> {
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
            let range = object.header.layer_range(first).start..object.header.layer_range(last).end;
            match reader.folder.read(&object.key, whole, range) {
                Ok(bytes) => Some(bytes),
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

/// What to do with layers that are offered.
enum Place {
    /// All is here already.
    Whole,
    NoRoom,
    /// The file is there.
    Begun,
    /// Room is reserved, the file is to be made.
    New,
}

impl Shared {
    /// Reads the folder: the only index there is. Files are taken in the order in which they were written.
    fn rebuild(&self) {
        let started = Instant::now();
        if self.lock.is_some() {
            self.lookups.count_many(Outcome::DiskForeign, self.folder.remove_partial());
        }
        let (keys, failure) = self.folder.keys();
        if let Some(error) = failure {
            self.lookups.count(Outcome::DiskError);
            warn!(%error, "the disk tier's folder cannot be listed whole");
        }
        let mut found: Vec<Found> = Vec::with_capacity(keys.len());
        std::thread::scope(|scope| {
            let check = |keys: &[ObjectKey]| -> Vec<Found> { keys.iter().filter_map(|key| self.check(key)).collect() };
            let share = keys.len().div_ceil(START_READS).max(1);
            let readers: Vec<_> = keys.chunks(share).map(|keys| scope.spawn(move || check(keys))).collect();
            found.extend(readers.into_iter().filter_map(|reader| reader.join().ok()).flatten());
        });
        found.sort_by_key(|found| found.written);
        for Found { key, header, .. } in found {
            let bytes = file_bytes(&header);
            let mut index = hold(&self.index);
            let (evicted, room) = index.book.make_room(bytes, |_| false);
            for (old, entry) in evicted {
                index.layers -= u64::from(entry.layers);
                self.unlink(&old);
            }
            if room {
                index.layers += u64::from(header.layout.layers);
                let entry = Entry { layers: header.layout.layers, partial: None };
                index.book.insert(key, entry, bytes, self.costs.chunk_us(&header));
            } else {
                self.unlink(&key);
            }
        }
        let index = hold(&self.index);
        let (files, bytes) = (index.book.len(), index.book.bytes());
        info!(folder = %self.folder.path().display(), files, bytes, took = ?started.elapsed(), "read the disk tier");
    }

    /// Checks one file of the folder. One that cannot be used is removed: it would take room that nobody counts.
    fn check(&self, key: &ObjectKey) -> Option<Found> {
        match self.folder.check(key) {
            Ok(found) => Some(found),
            Err(fault) => {
                self.discard(key, &fault);
                self.unlink(key);
                None
            }
        }
    }

    /// Counts why a file cannot be used. One that is not as it was written is removed; one that the system cannot read
    /// just now, for want of memory or of file handles, stays.
    fn discard(&self, key: &ObjectKey, fault: &Fault) {
        use kvsplice_kv::object::Error as E;
        let outcome = match fault {
            Fault::Io(error) if error.kind() == ErrorKind::NotFound => return hold(&self.index).remove(key),
            Fault::Io(error) if error.kind() == ErrorKind::UnexpectedEof => Outcome::DiskDamaged,
            Fault::Io(_) => Outcome::DiskError,
            Fault::Object(E::Foreign { .. } | E::OutOfRange { .. }) => Outcome::DiskForeign,
            Fault::Object(_) => Outcome::DiskDamaged,
        };
        self.lookups.count(outcome);
        warn!(chunk = %key.chunk, ?fault, "a file of the disk tier cannot be used");
        if outcome != Outcome::DiskError {
            let _files = hold(&self.files);
            self.remove(key);
        }
    }

    /// Removes an entry and its file. `files` must be held.
    fn remove(&self, key: &ObjectKey) {
        hold(&self.index).remove(key);
        self.unlink(key);
    }

    fn unlink(&self, key: &ObjectKey) {
        if self.lock.is_none() {
            return;
        }
        if let Err(error) = self.folder.remove(key) {
            self.lookups.count(Outcome::DiskError);
            warn!(chunk = %key.chunk, %error, "a file of the disk tier cannot be removed");
        }
    }

    fn is_paused(&self) -> bool {
        self.lock.is_none() || hold(&self.paused_until).is_some_and(|until| until > Instant::now())
    }

    fn write_all(&self, jobs: &Receiver<Job>) {
        for job in jobs {
            self.write(&job);
            self.queued_bytes.fetch_sub(job.bytes(), Ordering::SeqCst);
        }
    }

    fn write(&self, job: &Job) {
        let _files = hold(&self.files);
        let count = job.layers.len() as u64;
        if job.epoch != self.epoch.load(Ordering::SeqCst) {
            return;
        }
        if self.is_paused() {
            return self.lookups.count_many(Outcome::DiskOff, count);
        }
        let key = &job.object.key;
        let (place, evicted) = self.reserve(&job.object);
        // Before anything new is written: the limit holds for the files as well.
        for old in &evicted {
            debug!(chunk = %old.chunk, "evicted from the disk tier");
            self.unlink(old);
        }
        let written = match place {
            Place::Whole => return,
            Place::NoRoom => return self.lookups.count_many(Outcome::DiskNoRoom, count),
            Place::New => self.folder.begin(key, &job.object.header),
            Place::Begun => Ok(()),
        };
        let written = written.and_then(|()| self.folder.write(key, &job.object.header, &job.layers));
        if let Err(error) = written.and_then(|()| self.note(job)) {
            self.lookups.count(reason(&error));
            self.remove(key);
            if error.kind() == ErrorKind::NotFound {
                warn!(chunk = %key.chunk, "somebody else removed a file of the disk tier");
                return;
            }
            warn!(chunk = %key.chunk, %error, pause = ?PAUSE, "the disk tier cannot be written and pauses");
            *hold(&self.paused_until) = Some(Instant::now() + PAUSE);
        }
    }

    /// Makes room for the whole object; returns what must be removed for it.
    fn reserve(&self, object: &Arc<Object>) -> (Place, Vec<ObjectKey>) {
        let key = &object.key;
        let bytes = file_bytes(&object.header);
        let mut index = hold(&self.index);
        match index.book.get(key).map(|entry| entry.partial.as_ref()) {
            Some(None) => return (Place::Whole, Vec::new()),
            Some(Some(partial)) if partial.object.header == object.header => return (Place::Begun, Vec::new()),
            // Of an object that has been replaced.
            Some(Some(_)) => index.remove(key),
            None => {}
        }
        let (evicted, room) = index.book.make_room(bytes, |key| self.protection.covers(&key.chunk));
        self.lookups.count_many(Outcome::DiskEvicted, evicted.len() as u64);
        index.layers -= evicted.iter().map(|(_, entry)| u64::from(entry.layers)).sum::<u64>();
        let evicted = evicted.into_iter().map(|(key, _)| key).collect();
        if !room {
            return (Place::NoRoom, evicted);
        }
        let present = vec![false; object.header.layer_digests.len()];
        let partial = Some(Box::new(Partial { object: object.clone(), present }));
        index.book.insert(*key, Entry { layers: 0, partial }, bytes, self.costs.chunk_us(&object.header));
        (Place::New, evicted)
    }

    /// Notes what has been written, and makes the file whole if that was the last of it.
    fn note(&self, job: &Job) -> io::Result<()> {
        let key = &job.object.key;
        let complete = {
            let mut index = hold(&self.index);
            let Some(entry) = index.book.get_mut(key) else { return Ok(()) };
            let Some(partial) = &mut entry.partial else { return Ok(()) };
            let mut new = 0;
            for (layer, _) in &job.layers {
                if let Some(present) = partial.present.get_mut(*layer as usize) {
                    new += u32::from(!std::mem::replace(present, true));
                }
            }
            entry.layers += new;
            let complete = partial.present.iter().all(|present| *present);
            index.layers += u64::from(new);
            complete
        };
        if complete {
            self.folder.finish(key)?;
            if let Some(entry) = hold(&self.index).book.get_mut(key) {
                entry.partial = None;
            }
        }
        Ok(())
    }
}

/// Why writing failed, in a word.
fn reason(error: &io::Error) -> Outcome {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Outcome::DiskFull,
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => Outcome::DiskReadOnly,
        _ => Outcome::DiskError,
    }
}

/// Where the tier lies unless the settings say otherwise.
pub(crate) fn default_folder(home: &Path) -> std::path::PathBuf {
    home.join("disk")
}

#[cfg(test)]
mod tests;
