//! Names chunk objects as files, for a caller on the same host that maps them.
//!
//! A file is named only while its chunk is under a lease or pinned, and each layer only after it has been verified once, with
//! the checksum that it had then. Sums are remembered for the very file (device, inode, size, time of change) that they were
//! taken of; what is sent of it is checked by them too. Whatever goes wrong here makes the chunk go over the wire instead: that
//! path finds out, counts and repairs.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvsplice_proto::mmap::Identity;
use kvsplice_proto::v1;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::Semaphore;
use tracing::debug;

use crate::disk::check_file;
use crate::lookups::Outcome;
use crate::protect::Protection;
use crate::tier::{Object, ObjectKey, Origin, Removal};

/// Bytes of remembered sums: some 100,000 chunks of 48 layers.
const KNOWN_BYTES: u64 = 64 << 20;
/// Verifications under way at once.
const CHECKS: usize = 16;

/// The files that may be named.
pub(crate) struct Maps {
    on: bool,
    protection: Arc<Protection>,
    known: Cache<ObjectKey, Arc<Mapped>, Weigh>,
    checks: Semaphore,
}

/// A whole chunk object in a file.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) object: Arc<Object>,
    path: String,
    identity: Identity,
    /// The tier that it is in: [`Outcome::Disk`] or [`Outcome::Object`].
    pub(crate) tier: Outcome,
    /// CRC-32C by layer, of those that have been verified.
    sums: Mutex<Vec<Option<u32>>>,
}

#[derive(Clone, Debug)]
struct Weigh;

impl Weighter<ObjectKey, Arc<Mapped>> for Weigh {
    fn weight(&self, _: &ObjectKey, mapped: &Arc<Mapped>) -> u64 {
        // Digest, sum, and what is around them.
        512 + mapped.path.len() as u64 + 40 * mapped.object.header.layer_digests.len() as u64
    }
}

/// Consecutive layers that the caller reads from the file.
#[derive(Clone, Debug)]
pub(crate) struct Sums {
    pub(crate) mapped: Arc<Mapped>,
    pub(crate) first: u32,
    pub(crate) crc32c: Vec<u32>,
}

impl Maps {
    pub(crate) fn new(on: bool, protection: Arc<Protection>) -> Self {
        let known = Cache::with_weighter(1024, KNOWN_BYTES, Weigh);
        Self { on, protection, known, checks: Semaphore::new(CHECKS) }
    }

    /// Whether a file of this chunk may be named: nothing evicts it before the caller has opened it.
    pub(crate) fn may_name(&self, key: &ObjectKey) -> bool {
        self.on && self.protection.covers(&key.chunk)
    }

    /// The object in the file at `path`, if it is whole there.
    pub(crate) async fn open(&self, key: ObjectKey, path: PathBuf, tier: Outcome) -> Option<Arc<Mapped>> {
        let known = self.known.get(&key);
        let opening = move || {
            let file = File::open(&path).ok()?;
            let identity = Identity::of(&file.metadata().ok()?);
            let path_text = path.to_str()?;
            if let Some(known) = known.filter(|known| known.identity == identity && known.path == path_text) {
                return Some(known);
            }
            let found =
                check_file(file, &key).inspect_err(|fault| debug!(chunk = %key.chunk, ?fault, "not mapped")).ok()?;
            let object = Arc::new(Object { key, header: found.header, origin: Origin::Disk });
            Some(Arc::new(Mapped::new(object, path_text.to_owned(), identity, tier)))
        };
        let mapped = tokio::task::spawn_blocking(opening).await.ok().flatten()?;
        self.known.insert(key, mapped.clone());
        Some(mapped)
    }

    /// What is known of the file of the disk tier that an object lies in.
    pub(crate) fn file(&self, object: &Object, path: &Path, identity: Identity) -> Option<Arc<Mapped>> {
        let path = path.to_str()?;
        let same = |known: &Arc<Mapped>| {
            known.identity == identity && known.path == path && known.object.header == object.header
        };
        if let Some(known) = self.known.get(&object.key).filter(same) {
            return Some(known);
        }
        let object = Arc::new(Object { key: object.key, header: object.header.clone(), origin: Origin::Disk });
        let file = Arc::new(Mapped::new(object, path.to_owned(), identity, Outcome::Disk));
        self.known.insert(file.object.key, file.clone());
        Some(file)
    }

    /// The sums of the first of `rest` and of those that follow it without a gap, as far as they are known; else those of
    /// `batch`, its first layers, once they are verified.
    pub(crate) async fn sums(&self, mapped: &Arc<Mapped>, rest: &[u32], batch: &[u32]) -> Option<Sums> {
        let first = *rest.first()?;
        let crc32c = mapped.known_run(rest);
        if !crc32c.is_empty() {
            return Some(Sums { mapped: mapped.clone(), first, crc32c });
        }
        let _permit = self.checks.acquire().await.ok();
        let (checked, count) = (mapped.clone(), batch.len());
        let verified = tokio::task::spawn_blocking(move || checked.verify(first, count)).await.ok().flatten();
        if verified.is_none() {
            self.known.remove(&mapped.object.key);
        }
        Some(Sums { mapped: mapped.clone(), first, crc32c: verified? })
    }

    /// Forgets what is known of these chunks' files.
    pub(crate) fn forget(&self, gone: &Removal) {
        for key in &gone.objects {
            self.known.remove(key);
        }
        if !gone.chunks.is_empty() {
            self.known.retain(|key, _| !gone.covers(key));
        }
    }
}

impl Mapped {
    fn new(object: Arc<Object>, path: String, identity: Identity, tier: Outcome) -> Self {
        let sums = Mutex::new(vec![None; object.header.layer_digests.len()]);
        Self { object, path, identity, tier, sums }
    }

    // A panic while the lock was held cannot leave a sum that is wrong.
    fn sums(&self) -> MutexGuard<'_, Vec<Option<u32>>> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a layer of this file had when it was verified.
    pub(crate) fn sum(&self, layer: u32) -> Option<u32> {
        self.sums().get(layer as usize).copied().flatten()
    }

    /// Notes the sums of layers that have been verified, from `first` on.
    pub(crate) fn remember(&self, first: u32, sums: &[u32]) {
        for (place, sum) in self.sums().iter_mut().skip(first as usize).zip(sums) {
            *place = Some(*sum);
        }
    }

    fn known_run(&self, layers: &[u32]) -> Vec<u32> {
        let sums = self.sums();
        let first = layers.first().copied().unwrap_or(0);
        let known = |layer: &u32| sums.get(*layer as usize).copied().flatten();
        layers
            .iter()
            .zip(first..)
            .take_while(|&(layer, next)| *layer == next)
            .map_while(|(layer, _)| known(layer))
            .collect()
    }

    /// Reads and verifies `count` layers from `first` on; their sums, or nothing if one is not as it was written.
    fn verify(&self, first: u32, count: usize) -> Option<Vec<u32>> {
        let header = &self.object.header;
        let last = first.checked_add(u32::try_from(count).ok()?.checked_sub(1)?)?;
        if last >= header.layout.layers {
            return None;
        }
        let file = File::open(&self.path).ok()?;
        if Identity::of(&file.metadata().ok()?) != self.identity {
            return None;
        }
        let range = header.layer_range(first).start..header.layer_range(last).end;
        // Read, not mapped: a disk that fails is an error here, and would be a signal there.
        let mut bytes = vec![0; range.len()];
        file.read_exact_at(&mut bytes, range.start as u64).ok()?;
        let mut crc32c = Vec::with_capacity(count);
        for (layer, bytes) in (first..).zip(bytes.chunks(header.layer_bytes())) {
            if let Err(error) = header.verify_layer(layer, bytes) {
                debug!(chunk = %self.object.key.chunk, %error, "not mapped");
                return None;
            }
            crc32c.push(crc32c::crc32c(bytes));
        }
        self.remember(first, &crc32c);
        Some(crc32c)
    }
}

impl Sums {
    /// The frame that names these layers of the chunk at `place`.
    pub(crate) fn frame(self, place: u32) -> v1::Frame {
        let mapped = &self.mapped;
        let Identity { device, inode, size, modified_ns } = mapped.identity;
        let mapping = v1::Mapping {
            path: mapped.path.clone(),
            device,
            inode,
            size,
            modified_ns,
            header_bytes: mapped.object.header.layout.header_bytes() as u32,
            layer_crc32c: self.crc32c,
        };
        let source = if mapped.tier == Outcome::Disk { "disk" } else { "object" };
        v1::Frame {
            chunk: place,
            layer: self.first,
            source: source.to_owned(),
            mapping: Some(mapping),
            ..v1::Frame::default()
        }
    }
}
