//! Layers that lie in files of this host: mapped once a chunk, and each layer checked, off the async threads, before it is
//! handed on. Lower layers first, whatever the chunk.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesOrdered;
use kvsplice_kv::receipt::Source;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::assembly::Assembly;
use crate::mmap::{Error, Mapped};
use crate::{convert, v1};

/// After a file could not be opened, none is asked for during this time.
const PAUSE: Duration = Duration::from_secs(60);
/// Checks under way at once, a request: more than processors that check, so that none of them waits for the next one.
const CHECKS: usize = 4;
/// Bytes of one check, unless a layer is larger.
const CHECK_BYTES: usize = 4 << 20;

/// Whether files that the cache service names can be opened here.
#[derive(Debug, Default)]
pub(super) struct Files {
    paused_until: Mutex<Option<Instant>>,
}

impl Files {
    fn paused_until(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        // A panic while the lock was held cannot leave a time that matters.
        self.paused_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether to ask for files.
    pub(super) fn usable(&self) -> bool {
        self.paused_until().is_none_or(|until| until <= Instant::now())
    }

    /// Notes that a file could not be used. The cache service counts it when the chunk is asked for again.
    pub(super) fn note(&self, chunk: &str, error: &Error) {
        if matches!(error, Error::Damaged { .. } | Error::Outside { .. }) {
            warn!(chunk, %error, "a mapped chunk is not as it was written; it is asked for again");
            return;
        }
        let first = self.paused_until().replace(Instant::now() + PAUSE).is_none();
        if first {
            info!(chunk, %error, "files of the cache service cannot be mapped here; chunks come over the wire");
        }
    }
}

/// A file that is mapped when it is first looked at.
struct NamedFile {
    mapping: v1::Mapping,
    mapped: OnceLock<Result<Mapped, Arc<Error>>>,
}

impl NamedFile {
    fn get(&self) -> Result<&Mapped, Arc<Error>> {
        self.mapped.get_or_init(|| Mapped::open(&self.mapping).map_err(Arc::new)).as_ref().map_err(Arc::clone)
    }
}

/// One layer to check.
struct Check {
    file: Arc<NamedFile>,
    range: Range<usize>,
    crc32c: u32,
    source: Source,
}

/// One layer that has been checked.
pub(super) struct Checked {
    pub(super) chunk: usize,
    pub(super) layer: u32,
    pub(super) source: Source,
    pub(super) result: Result<Bytes, Arc<Error>>,
}

/// The mapped layers of one request.
#[derive(Default)]
pub(super) struct Checks {
    files: BTreeMap<usize, Arc<NamedFile>>,
    /// The lowest layer that was named.
    first: u32,
    /// By layer and chunk.
    waiting: BTreeMap<(u32, usize), Check>,
    running: FuturesOrdered<JoinHandle<Vec<Checked>>>,
}

impl Checks {
    /// Queues the layers of chunk `index` that `frame` names.
    pub(super) fn add(
        &mut self,
        index: usize,
        chunk: &Assembly,
        frame: &v1::Frame,
        mapping: &v1::Mapping,
    ) -> Result<(), String> {
        let (layout, tokens) = (chunk.layout(), chunk.tokens());
        let last = (frame.layer as usize).saturating_add(mapping.layer_crc32c.len());
        if mapping.size != layout.object_bytes(tokens) as u64
            || mapping.header_bytes as usize != layout.header_bytes()
            || last > layout.layers as usize
        {
            return Err(format!("foreign: a file of {} bytes and {last} layers does not fit", mapping.size));
        }
        self.first = if self.files.is_empty() { frame.layer } else { self.first.min(frame.layer) };
        let fresh = || Arc::new(NamedFile { mapping: mapping.clone(), mapped: OnceLock::new() });
        let file = self.files.entry(index).or_insert_with(fresh);
        if (file.mapping.inode, file.mapping.modified_ns) != (mapping.inode, mapping.modified_ns) {
            *file = fresh();
        }
        let source = convert::source(&frame.source).unwrap_or(Source::Object);
        for (layer, &crc32c) in (frame.layer..).zip(&mapping.layer_crc32c) {
            if chunk.waits_for(layer) {
                let range = layout.layer_range(layer, tokens);
                self.waiting.insert((layer, index), Check { file: file.clone(), range, crc32c, source });
            }
        }
        Ok(())
    }

    /// Starts checks of chunks that are still open, lowest layer first, as many as may be under way. `expected`: chunks may
    /// still be named whose first layer goes before the second of others.
    pub(super) fn start(&mut self, is_open: impl Fn(usize) -> bool, expected: bool) {
        while self.running.len() < CHECKS && !self.waiting.is_empty() {
            let (mut batch, mut bytes) = (Vec::new(), 0);
            // One layer of several chunks: the next layer of the first chunk is needed later than this one of the last.
            let lowest = self.waiting.first_key_value().map_or(0, |((layer, _), _)| *layer);
            if expected && lowest > self.first && !self.running.is_empty() {
                return;
            }
            while let Some(entry) = self.waiting.first_entry() {
                let (next, first) = (entry.get().range.len(), batch.is_empty());
                if !first && (bytes + next > CHECK_BYTES || entry.key().0 != lowest) {
                    break;
                }
                bytes += next;
                let ((layer, chunk), check) = entry.remove_entry();
                if is_open(chunk) {
                    batch.push((layer, chunk, check));
                }
            }
            if batch.is_empty() {
                return;
            }
            self.running.push_back(tokio::task::spawn_blocking(move || check_all(batch)));
        }
    }

    /// Whether nothing is waiting or under way.
    pub(super) fn idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// What was checked next, in the order in which it was started.
    pub(super) async fn next(&mut self) -> Option<Vec<Checked>> {
        // A check that has panicked brings nothing; its layers then end with the stream.
        self.running.next().await.map(Result::unwrap_or_default)
    }

    /// Forgets a chunk.
    pub(super) fn drop_chunk(&mut self, index: usize) {
        self.files.remove(&index);
        self.waiting.retain(|(_, chunk), _| *chunk != index);
    }
}

fn check_all(batch: Vec<(u32, usize, Check)>) -> Vec<Checked> {
    // The disk reads for all of them at once.
    for (_, _, Check { file, range, .. }) in &batch {
        if let Ok(mapped) = file.get() {
            mapped.read_ahead(range);
        }
    }
    let check = |(layer, chunk, check): (u32, usize, Check)| {
        let Check { file, range, crc32c, source } = check;
        let result = file.get().and_then(|mapped| mapped.layer(range, crc32c).map_err(Arc::new));
        Checked { chunk, layer, source, result }
    };
    batch.into_iter().map(check).collect()
}
