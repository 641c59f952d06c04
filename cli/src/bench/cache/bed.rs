//! What the tiers are measured with: chunk objects of a large model's shape, a cache service, and the worker's loader.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use kvsplice_cache_service::Config;
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, KvLayout, ModelDigest, RowRanges, Variant, object};
use kvsplice_proto::load::{Loaded, Loader, Wanted, WantedChunk};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::super::prompt::Random;
use super::CacheFlags;
use super::measure::processor_time;
use crate::failure::interrupted;
use crate::output;

const VARIANT: Variant = Variant::clean(Encoding::Bf16);
const DEADLINE: Duration = Duration::from_secs(600);
/// Longest that something may take that is waited for.
const WAIT: Duration = Duration::from_secs(120);
/// A disk tier that has taken nothing in for so long has written all that was queued.
const QUIET: Duration = Duration::from_secs(2);
/// The longest lease.
const LEASE: Duration = Duration::from_secs(600);

/// Chunk objects, and where files go.
pub(super) struct Bed {
    pub(super) layout: KvLayout,
    pub(super) tokens: u32,
    pub(super) rounds: u32,
    pub(super) chunks: Vec<(ChunkId, Bytes)>,
    folder: PathBuf,
}

/// One measured load of all chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) seconds: f64,
    /// Until layer 0 of every chunk was there.
    pub(super) first_layer_seconds: f64,
    pub(super) processor_seconds: f64,
    pub(super) wire_bytes: u64,
}

impl Bed {
    /// Makes the chunks.
    pub(super) async fn make(flags: &CacheFlags, folder: &Path, stop: &CancellationToken) -> anyhow::Result<Self> {
        let layout = KvLayout { layers: 48, kv_heads: 8, head_dim: 128, encoding: Encoding::Bf16 };
        let (count, tokens, stop) = (flags.chunks, flags.tokens, stop.clone());
        let bytes = u64::from(count) * layout.object_bytes(tokens) as u64;
        output::note(format_args!("making {count} chunks of {tokens} tokens, {layout}: {}", output::bytes(bytes)));
        let make = move || -> anyhow::Result<Vec<(ChunkId, Bytes)>> {
            let mut chunks = Vec::new();
            for seed in 0..count {
                if stop.is_cancelled() {
                    return Err(interrupted());
                }
                let key = ChunkKey::new(ModelDigest::from_bytes([7; 32]), &[], &[seed], "bench");
                let mut random = Random(u64::from(seed) + 1);
                let layer = |_| -> Vec<u8> {
                    let mut bytes = vec![0; layout.layer_bytes(tokens)];
                    for word in bytes.chunks_exact_mut(8) {
                        word.copy_from_slice(&random.next().to_le_bytes());
                    }
                    bytes
                };
                let layers = (0..layout.layers).map(layer);
                let object = object::write(&key, &layout, VARIANT, tokens, "bf16", layers)?;
                chunks.push((key.id(), object.into()));
            }
            Ok(chunks)
        };
        let chunks = tokio::task::spawn_blocking(make).await??;
        Ok(Self { layout, tokens, rounds: flags.rounds, chunks, folder: folder.to_owned() })
    }

    /// Bytes of KV of all chunks, headers aside.
    pub(super) fn kv_bytes(&self) -> f64 {
        (self.chunks.len() * self.layout.layers as usize * self.layout.layer_bytes(self.tokens)) as f64
    }

    /// A subfolder for files.
    pub(super) fn folder(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Starts a cache service and stores the chunks in it, under a lease.
    pub(super) async fn serve(&self, config: Config) -> anyhow::Result<Service> {
        let service = Service::start(config).await?;
        let client = Loader::new(&service.address, 1, false, DEADLINE)?.client();
        for (id, object) in &self.chunks {
            client.put_chunk(*id, VARIANT, object.clone()).await.context("store a chunk")?;
        }
        self.lease(&service).await?;
        Ok(service)
    }

    /// Takes a lease on the chunks, as a head does for each request.
    pub(super) async fn lease(&self, service: &Service) -> anyhow::Result<()> {
        let client = Loader::new(&service.address, 1, false, DEADLINE)?.client();
        let ids: Vec<ChunkId> = self.chunks.iter().map(|(id, _)| *id).collect();
        let contained = client.contains(&ids, VARIANT, LEASE).await.context("lease the chunks")?;
        anyhow::ensure!(contained.found.iter().all(|found| *found), "the cache service lost a chunk");
        Ok(())
    }

    /// The worker's loader.
    pub(super) fn loader(&self, service: &Service, connections: u32, map_files: bool) -> anyhow::Result<Loader> {
        Ok(Loader::new(&service.address, connections, map_files, DEADLINE)?)
    }

    /// Loads all chunks once, as the worker does for a request.
    pub(super) async fn load(&self, loader: &Loader) -> anyhow::Result<Load> {
        let chunk = |(place, (id, _)): (usize, &(ChunkId, Bytes))| WantedChunk {
            place,
            id: *id,
            tokens: self.tokens,
            layers: Vec::new(),
            have: RowRanges::default(),
        };
        let chunks = self.chunks.iter().enumerate().map(chunk).collect();
        let wanted =
            Wanted { chunks, layout: self.layout, variant: VARIANT, lease: String::new(), protect: Duration::ZERO };
        let (_never, said) = mpsc::channel(1);
        let (mut layers, mut first_layers, mut wire_bytes) = (0, 0, 0);
        let (mut first_layer_seconds, mut failure) = (0.0, None);
        let (started, processor) = (Instant::now(), processor_time());
        let sink = async |news| match news {
            Loaded::Layer { layer, bytes, .. } => {
                layers += 1;
                wire_bytes += bytes;
                first_layers += usize::from(layer == 0);
                if layer == 0 && first_layers == self.chunks.len() {
                    first_layer_seconds = started.elapsed().as_secs_f64();
                }
                true
            }
            Loaded::Failed { reason, .. } => {
                failure = Some(reason);
                false
            }
        };
        loader.load(wanted, said, sink).await;
        let seconds = started.elapsed().as_secs_f64();
        if let Some(reason) = failure {
            anyhow::bail!("load a chunk: {reason}");
        }
        anyhow::ensure!(layers == self.chunks.len() * self.layout.layers as usize, "{layers} layers came");
        let processor_seconds = (processor_time() - processor).as_secs_f64();
        Ok(Load { seconds, first_layer_seconds, processor_seconds, wire_bytes })
    }
}

/// A cache service in this process. Dropping it ends it.
pub(super) struct Service {
    pub(super) address: String,
    stop: CancellationToken,
    task: JoinHandle<Result<(), kvsplice_cache_service::Error>>,
}

impl Service {
    pub(super) async fn start(config: Config) -> anyhow::Result<Self> {
        let run = |listener, stopped| kvsplice_cache_service::run(config, listener, stopped);
        Self::serve(run).await
    }

    /// Runs a service on a free port, and waits until it answers.
    pub(super) async fn serve<F>(
        run: impl FnOnce(TcpListener, tokio_util::sync::WaitForCancellationFutureOwned) -> F,
    ) -> anyhow::Result<Self>
    where
        F: Future<Output = Result<(), kvsplice_cache_service::Error>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listen on loopback")?;
        let address = listener.local_addr()?.to_string();
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(listener, stop.clone().cancelled_owned()));
        let service = Self { address, stop, task };
        let client = Loader::new(&service.address, 1, false, DEADLINE)?.client();
        client.stats().await.context("ask the cache service")?;
        Ok(service)
    }

    /// Waits until the disk tier takes nothing more in. Whether layers of `bed` are missing in it.
    pub(super) async fn settle(&self, bed: &Bed) -> anyhow::Result<bool> {
        let client = Loader::new(&self.address, 1, false, DEADLINE)?.client();
        let need = bed.chunks.len() as u64 * u64::from(bed.layout.layers);
        let (started, mut changed, mut last) = (Instant::now(), Instant::now(), 0);
        while started.elapsed() < WAIT {
            let stats = client.stats().await?;
            let held = stats.tiers.iter().find(|tier| tier.name == "disk").map_or(0, |tier| tier.entries);
            if held == need {
                return Ok(false);
            }
            if held != last {
                (changed, last) = (Instant::now(), held);
            }
            if changed.elapsed() > QUIET {
                return Ok(true);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::bail!("the disk tier did not take all chunks in {} s", WAIT.as_secs())
    }

    /// Ends it.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.cancel();
        (&mut self.task).await?.context("stop the cache service")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Every plain file below `folder`, in order of their names.
pub(super) fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(self::files(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
