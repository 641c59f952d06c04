//! What happens to the files of the disk tier: read at the start, written by one thread, removed.
//!
//! Invariant: what the index counts covers what is in the folder, so its limit is the folder's.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::folder::{Fault, Found, file_bytes};
use super::{Entry, Job, Partial, Shared, hold};
use crate::lookups::Outcome;
use crate::tier::{Object, ObjectKey};

/// Writing pauses for so long after it has failed.
const PAUSE: Duration = Duration::from_secs(60);
/// Files whose headers are read at once when the service starts.
const START_READS: usize = 16;

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
    pub(super) fn rebuild(&self) {
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
    pub(super) fn discard(&self, key: &ObjectKey, fault: &Fault) {
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
    pub(super) fn remove(&self, key: &ObjectKey) {
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

    pub(super) fn is_paused(&self) -> bool {
        self.lock.is_none() || hold(&self.paused_until).is_some_and(|until| until > Instant::now())
    }

    pub(super) fn write_all(&self, jobs: &Receiver<Job>) {
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
pub(super) fn reason(error: &io::Error) -> Outcome {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Outcome::DiskFull,
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => Outcome::DiskReadOnly,
        _ => Outcome::DiskError,
    }
}
