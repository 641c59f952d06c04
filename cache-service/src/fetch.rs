//! Reads headers and layers through the tiers, and says why when it cannot.
//!
//! A layer is verified when it is read into memory, from the disk tier too: by its digest, and from then on, as long as the file
//! is the same one, by the CRC-32C that it had then. Adjacent layers that nobody has are read
//! together. An object whose layer does not match its digest is removed from where it was read: from the disk tier the
//! store takes its place, from the store so that a repair can put it anew.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use kvsplice_kv::object::{self, FIRST_READ_BYTES, Header};
use kvsplice_proto::mmap::Identity;
use object_store::ObjectMeta;
use object_store::path::Path;
use tracing::{debug, warn};

use crate::Error;
use crate::admission::Gate;
use crate::disk::Disk;
use crate::error::Fault;
use crate::frame;
use crate::lookups::{Lookups, Outcome};
use crate::mapping::{Mapped, Maps, Sums};
use crate::memory::{Claim, Lookup, Memory};
use crate::store::{Store, object_path};
use crate::tier::{Costs, Layer, LayerKey, Object, ObjectKey, Origin, Removal};

/// Why a chunk cannot be sent. Its text starts with one stable word, the one before the colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    Missing,
    Damaged(String),
    Truncated(String),
    Foreign(String),
    Store(String),
}

impl Miss {
    pub(crate) const fn outcome(&self) -> Outcome {
        match self {
            Miss::Missing => Outcome::Missing,
            Miss::Damaged(_) => Outcome::Damaged,
            Miss::Truncated(_) => Outcome::Truncated,
            Miss::Foreign(_) => Outcome::Foreign,
            Miss::Store(_) => Outcome::Store,
        }
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Miss::Missing => f.write_str("missing: no such object"),
            Miss::Damaged(detail) => write!(f, "damaged: {detail}"),
            Miss::Truncated(detail) => write!(f, "truncated: {detail}"),
            Miss::Foreign(detail) => write!(f, "foreign: {detail}"),
            Miss::Store(detail) => write!(f, "store: {detail}"),
        }
    }
}

impl From<object::Error> for Miss {
    fn from(error: object::Error) -> Self {
        match error {
            object::Error::Truncated { got, need } => Miss::Truncated(format!("{got} bytes, need {need}")),
            object::Error::Foreign { what, expected, found } => {
                Miss::Foreign(format!("{what} is {found}, expected {expected}"))
            }
            object::Error::DamagedHeader => Miss::Damaged("the header does not match its digest".into()),
            object::Error::DamagedLayer { layer } => Miss::Damaged(format!("layer {layer} does not match its digest")),
            object::Error::OutOfRange { .. } => Miss::Foreign(error.to_string()),
        }
    }
}

impl From<Error> for Miss {
    fn from(error: Error) -> Self {
        match error.fault() {
            Fault::NotFound => Miss::Missing,
            _ => Miss::Store(error.to_string()),
        }
    }
}

/// A verified layer, and where it was.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    pub(crate) layer: u32,
    /// K, then V.
    pub(crate) bytes: Bytes,
    /// The tier: `memory`, `disk` or `object`.
    pub(crate) source: &'static str,
    /// CRC-32C of each frame that it makes when it is sent whole; none where that is not known.
    pub(crate) sums: Arc<[u32]>,
}

/// What is read at first of the first object: the metadata of a model of some 30 layers.
pub(crate) const FIRST_HEADER_BYTES: usize = 4 << 10;
/// More is read in steps of these: names of owners differ.
const HEADER_STEP: usize = 1 << 10;

/// Reads through the tiers.
pub(crate) struct Fetcher {
    pub(crate) store: Store,
    pub(crate) memory: Memory,
    pub(crate) disk: Disk,
    pub(crate) maps: Arc<Maps>,
    pub(crate) gate: Gate,
    pub(crate) costs: Costs,
    pub(crate) lookups: Arc<Lookups>,
    /// What is read of an object at first: at least as much as the metadata of those seen so far.
    pub(crate) header_bytes: AtomicUsize,
}

impl Fetcher {
    /// Notes that a stream asks for a chunk, for the tiers' admission and eviction.
    pub(crate) fn ask(&self, key: &ObjectKey) {
        self.gate.ask(key);
        // Whatever tier serves it: else a chunk that is always served from memory would be the first to leave the disk.
        self.disk.touch(key);
    }

    /// The object's header, checked against its id, variant and size.
    pub(crate) async fn object(&self, key: &ObjectKey) -> Result<Arc<Object>, Miss> {
        let read = async {
            match self.disk.object(key).await {
                Some(object) => Ok(Arc::new(object)),
                None => self.read_object(key).await,
            }
        };
        self.memory.header(key, read).await
    }

    /// The file that a caller on this host may map: of the disk tier, else of a store without one above it.
    pub(crate) async fn mapped(&self, key: &ObjectKey) -> Option<Arc<Mapped>> {
        if !self.maps.may_name(key) {
            return None;
        }
        let (path, tier) = match self.disk.path(key) {
            Some(path) => (path, Outcome::Disk),
            // It is on its way into the disk tier, which is there because the store is slow.
            None if self.disk.is_on() => return None,
            None => (self.store.file(key)?, Outcome::Object),
        };
        self.maps.open(*key, path, tier).await
    }

    /// What the caller needs to read layers from a file; none if they are not as they were written.
    pub(crate) async fn sums(&self, mapped: &Arc<Mapped>, rest: &[u32], batch: &[u32]) -> Option<Sums> {
        let sums = self.maps.sums(mapped, rest, batch).await?;
        self.lookups.count_many(mapped.tier, sums.crc32c.len() as u64);
        self.lookups.count_many(Outcome::Mapped, sums.crc32c.len() as u64);
        Some(sums)
    }

    /// Notes that callers could not use the files of these objects.
    pub(crate) fn unmappable(&self, keys: impl Iterator<Item = ObjectKey>) {
        let objects: HashSet<ObjectKey> = keys.collect();
        self.lookups.count_many(Outcome::Unmappable, objects.len() as u64);
        self.maps.forget(&Removal { objects, ..Removal::default() });
    }

    /// Lets verified layers that were just written into the tiers. `epoch`: the disk tier's, from before.
    pub(crate) fn keep(&self, object: &Arc<Object>, layers: Vec<(u32, Layer)>, epoch: u64) {
        if !self.gate.admits(&object.key) {
            return;
        }
        let cost_us = self.costs.layer_us(&object.header);
        for (number, layer) in &layers {
            self.memory.insert(LayerKey { object: object.key, layer: *number }, layer.clone(), cost_us);
        }
        let bytes = layers.into_iter().map(|(number, layer)| (number, layer.bytes)).collect();
        self.disk.offer(object, bytes, epoch);
    }

    /// Removes from the tiers above the store.
    pub(crate) async fn remove(&self, gone: Removal) {
        self.memory.remove(&gone);
        self.maps.forget(&gone);
        self.disk.remove(gone).await;
    }

    /// Like [`Fetcher::object`], always from the store.
    pub(crate) async fn read_object(&self, key: &ObjectKey) -> Result<Arc<Object>, Miss> {
        let path = object_path(key);
        let (meta, start) = self.store.start_of(&path, self.header_bytes.load(Ordering::Relaxed)).await?;
        let header = match Header::parse_start(&start) {
            Some((header, _)) => Ok(header),
            None => self.read_header(&path, &meta, start).await?,
        };
        let checked = header.and_then(|header| {
            header.check_id(key.chunk)?;
            header.check_variant(key.variant)?;
            let (got, need) = (usize::try_from(meta.size).unwrap_or(usize::MAX), header.object_bytes());
            if got < need {
                return Err(object::Error::Truncated { got, need });
            }
            if got > need {
                let (expected, found) = (format!("{need} bytes"), format!("{got} bytes"));
                return Err(object::Error::Foreign { what: "size", expected, found });
            }
            Ok(header)
        });
        match checked {
            Ok(header) => Ok(Arc::new(Object { key: *key, header, origin: Origin::Store(meta.e_tag) })),
            Err(error) => {
                self.store.count_fault(&error);
                Err(error.into())
            }
        }
    }

    /// Reads the rest of a header whose metadata were not in what was read first, or were not as they should be.
    async fn read_header(
        &self,
        path: &Path,
        meta: &ObjectMeta,
        start: Bytes,
    ) -> Result<Result<Header, object::Error>, Miss> {
        let need = match Header::parse(&start) {
            Err(object::Error::Truncated { need, .. }) if need > start.len() && meta.size >= need as u64 => need,
            parsed => return Ok(parsed),
        };
        let rest = self.store.range(path, meta.e_tag.as_deref(), start.len()..need).await?;
        let whole = [start, rest].concat();
        if let Some((_, took)) = Header::parse_start(&whole) {
            // The next one of this kind takes one read.
            self.header_bytes.fetch_max(took.next_multiple_of(HEADER_STEP).min(FIRST_READ_BYTES), Ordering::Relaxed);
        }
        Ok(Header::parse(&whole))
    }

    /// The first of `layers`, and as many of the following ones as come with it cheaply. `layers` ascend without a gap.
    /// Never empty.
    pub(crate) async fn layers(&self, object: &Arc<Object>, layers: &[u32]) -> Result<Vec<Loaded>, Miss> {
        match self.try_layers(object, layers).await {
            Err(Attempt::Replaced) => {}
            Err(Attempt::Missed(miss)) => return Err(miss),
            Ok(loaded) => return Ok(loaded),
        }
        // The object was replaced since its header was read, or is no longer on the disk where its header was. The same
        // bytes under a new tag are as good.
        self.memory.forget_header(&object.key);
        let current = self.object(&object.key).await?;
        if current.header != object.header {
            return Err(Miss::Store("the object was replaced while it was read".into()));
        }
        self.try_layers(&current, layers).await.map_err(|attempt| match attempt {
            Attempt::Replaced => Miss::Store("the object was replaced twice while it was read".into()),
            Attempt::Missed(miss) => miss,
        })
    }

    async fn try_layers(&self, object: &Arc<Object>, layers: &[u32]) -> Result<Vec<Loaded>, Attempt> {
        let Some((&first, following)) = layers.split_first() else {
            return Err(Attempt::Missed(Miss::Foreign("no layer asked for".into())));
        };
        let Some((key, digest)) = object.layer(first) else {
            let detail = format!("layer {first} asked for, the object has {}", object.header.layout.layers);
            return Err(Attempt::Missed(Miss::Foreign(detail)));
        };
        let mut claims = match self.memory.lookup(&key, &digest).await {
            Lookup::Found(layer) => {
                self.lookups.count(Outcome::Memory);
                return Ok(vec![Loaded { layer: first, bytes: layer.bytes, source: "memory", sums: layer.sums }]);
            }
            Lookup::Claimed(claim) => vec![claim],
        };
        for &layer in following {
            // Waiting for others while holding claims could end in a circle: only take what is free.
            match object.layer(layer).and_then(|(key, _)| self.memory.claim(&key)) {
                Some(claim) => claims.push(claim),
                None => break,
            }
        }
        let work = Work { object, first, epoch: self.disk.epoch() };
        let (checked, maps, path) = (object.clone(), self.maps.clone(), self.disk.path(&object.key));
        let check = move |identity: Option<Identity>, apart| {
            let file = identity.zip(path).and_then(|(identity, path)| maps.file(&checked, &path, identity));
            verify_now(&checked, first, &Bytes::new(), apart, file.as_deref())
        };
        if let Some(Verified { layers, failure }) = self.disk.read(object, first, claims.len(), check).await {
            if let Some(error) = failure {
                self.disk.discard(&object.key, error).await;
            }
            if !layers.is_empty() {
                return Ok(self.fill(&work, claims, layers, Outcome::Disk));
            }
        }
        let Origin::Store(e_tag) = &object.origin else {
            // Its header came from the disk, its layer is not there any more: what does the store hold?
            return Err(Attempt::Replaced);
        };
        self.load(&work, e_tag.as_deref(), claims).await
    }

    /// Reads the claimed layers from the store; once more if the first of them does not verify.
    async fn load(&self, work: &Work<'_>, e_tag: Option<&str>, claims: Vec<Claim<'_>>) -> Result<Vec<Loaded>, Attempt> {
        let object = work.object;
        let mut verified = self.read_layers(work, e_tag, claims.len()).await?;
        if verified.layers.is_empty() {
            verified = self.read_layers(work, e_tag, 1).await?;
        }
        match verified.failure {
            // The good layers go out first; the damaged one fails alone when it is asked for.
            Some(error) if verified.layers.is_empty() => {
                self.discard(object, e_tag).await;
                Err(Attempt::Missed(error.into()))
            }
            _ => Ok(self.fill(work, claims, verified.layers, Outcome::Object)),
        }
    }

    async fn read_layers(&self, work: &Work<'_>, e_tag: Option<&str>, count: usize) -> Result<Verified, Attempt> {
        let Work { object, first, .. } = *work;
        let last = first + (count.max(1) - 1) as u32;
        let range = object.header.layer_range(first).start..object.header.layer_range(last).end;
        let bytes = match self.store.range(&object_path(&object.key), e_tag, range).await {
            Ok(bytes) => bytes,
            Err(error) => {
                return Err(match error.fault() {
                    Fault::Changed => Attempt::Replaced,
                    Fault::NotFound => {
                        self.memory.forget_header(&object.key);
                        Attempt::Missed(Miss::Missing)
                    }
                    _ => Attempt::Missed(error.into()),
                });
            }
        };
        let verified = verify(object.clone(), first, bytes, Vec::new()).await.map_err(Attempt::Missed)?;
        if let Some(error) = &verified.failure {
            self.store.count_fault(error);
        }
        Ok(verified)
    }

    /// Hands verified layers to those who wait, and to the tiers above the one that they came from.
    fn fill(&self, work: &Work<'_>, claims: Vec<Claim<'_>>, layers: Vec<Layer>, from: Outcome) -> Vec<Loaded> {
        let Work { object, first, epoch } = *work;
        let cost_us = self.gate.admits(&object.key).then(|| self.costs.layer_us(&object.header));
        let source = if from == Outcome::Disk { "disk" } else { "object" };
        let mut loaded = Vec::with_capacity(layers.len());
        for ((claim, layer), number) in claims.into_iter().zip(layers).zip(first..) {
            let (bytes, sums) = (layer.bytes.clone(), layer.sums.clone());
            loaded.push(Loaded { layer: number, bytes, source, sums });
            self.memory.fill(claim, layer, cost_us);
            self.lookups.count(from);
        }
        if from == Outcome::Object && cost_us.is_some() {
            let layers = loaded.iter().map(|loaded| (loaded.layer, loaded.bytes.clone())).collect();
            self.disk.offer(object, layers, epoch);
        }
        loaded
    }

    /// Removes a damaged object from the store, unless it has been replaced since.
    async fn discard(&self, object: &Object, e_tag: Option<&str>) {
        self.memory.forget_header(&object.key);
        let path = object_path(&object.key);
        let removed = match self.store.tag(&path).await {
            Ok(Some(tag)) if tag.as_deref() == e_tag => self.store.delete(&path).await,
            Ok(_) => Ok(false),
            Err(error) => Err(error),
        };
        match removed {
            Ok(removed) => debug!(chunk = %object.key.chunk, removed, "a damaged object makes room for its repair"),
            Err(error) => warn!(chunk = %object.key.chunk, %error, "cannot remove a damaged object"),
        }
    }

    /// Counts a miss and logs it.
    pub(crate) fn count_miss(&self, key: &ObjectKey, miss: &Miss) {
        self.lookups.count(miss.outcome());
        match miss {
            Miss::Missing => debug!(chunk = %key.chunk, "a chunk is missing"),
            other => warn!(chunk = %key.chunk, reason = %other, "a chunk cannot be read"),
        }
    }
}

/// What is being loaded.
struct Work<'a> {
    object: &'a Arc<Object>,
    first: u32,
    /// The disk tier's, from before the read.
    epoch: u64,
}

enum Attempt {
    /// The object is not, or may not be, the one that its header was read from.
    Replaced,
    Missed(Miss),
}

/// The leading layers that are as they were written, and what is wrong with the next one, if any.
pub(crate) struct Verified {
    pub(crate) layers: Vec<Layer>,
    pub(crate) failure: Option<object::Error>,
}

/// Hashes layers that were read in one piece, which is cut, or apart; off the async threads, for it may take milliseconds.
pub(crate) async fn verify(
    object: Arc<Object>,
    first: u32,
    joined: Bytes,
    apart: Vec<Bytes>,
) -> Result<Verified, Miss> {
    let work = move || verify_now(&object, first, &joined, apart, None);
    tokio::task::spawn_blocking(work).await.map_err(|error| Miss::Store(format!("verify a layer: {error}")))
}

/// `file`: the one that they were read of, if it is whole. A layer of it that was verified before is as it was if its CRC-32C is.
fn verify_now(object: &Object, first: u32, joined: &Bytes, apart: Vec<Bytes>, file: Option<&Mapped>) -> Verified {
    let header = &object.header;
    let mut verified = Verified { layers: Vec::new(), failure: None };
    let layer_bytes = header.layer_bytes();
    let cut = (0..joined.len()).step_by(layer_bytes.max(1));
    let cut = cut.map(|start| joined.slice(start..joined.len().min(start + layer_bytes)));
    let (got, whole) = (joined.len(), joined.len() == layer_bytes);
    for (number, piece) in (first..).zip(cut.chain(apart)) {
        let fits = piece.len() == layer_bytes;
        let (sums, sum) = if fits { frame::sums(&header.layout, header.tokens, &piece) } else { Default::default() };
        if !fits || file.is_none_or(|file| file.sum(number) != Some(sum)) {
            if let Err(error) = header.verify_layer(number, &piece) {
                verified.failure = Some(error);
                break;
            }
            if let Some(file) = file {
                file.remember(number, &[sum]);
            }
        }
        // A slice would keep the bytes of its neighbors alive: the tier would hold more than it counts.
        let bytes = if whole || got == 0 { piece } else { Bytes::copy_from_slice(&piece) };
        verified.layers.push(Layer { digest: header.layer_digests[number as usize], bytes, sums });
    }
    if verified.layers.is_empty() && verified.failure.is_none() {
        verified.failure = Some(object::Error::Truncated { got, need: layer_bytes });
    }
    verified
}
