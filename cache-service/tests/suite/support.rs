//! A service on a loopback port, chunk objects, a checked reader, and a store that misbehaves on request.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use kvsplice_cache_service::{Config, run, run_with_store};
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, KvLayout, ModelDigest, Variant, object};
use kvsplice_proto::cache::{CacheClient, intact};
use kvsplice_proto::v1::{Frame, Want};
use kvsplice_proto::{client, server};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tonic::Status;
use tonic::transport::Channel;

pub(crate) const VARIANT: Variant = Variant::clean(Encoding::Bf16);
const DEADLINE: Duration = Duration::from_secs(20);

/// A running service and a client of it.
pub(crate) struct Server {
    pub(crate) client: CacheClient,
    pub(crate) channel: Channel,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<std::result::Result<(), kvsplice_cache_service::Error>>,
}

impl Server {
    pub(crate) async fn start(store: Arc<dyn ObjectStore>) -> Self {
        Self::start_with(store, Config::default()).await
    }

    pub(crate) async fn start_with(store: Arc<dyn ObjectStore>, config: Config) -> Self {
        let config = Config { store: "memory://test".into(), grace_s: 5, ..config };
        Self::serve(|listener, shutdown| run_with_store(store, config, listener, shutdown)).await
    }

    /// Like a program does: on the store that the URL names.
    pub(crate) async fn open(config: Config) -> Self {
        let config = Config { grace_s: 5, ..config };
        Self::serve(|listener, shutdown| run(config, listener, shutdown)).await
    }

    async fn serve<F>(run: impl FnOnce(TcpListener, BoxFuture<'static, ()>) -> F) -> Self
    where
        F: Future<Output = std::result::Result<(), kvsplice_cache_service::Error>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async move {
            let _ = stopped.await;
        };
        let task = tokio::spawn(run(listener, shutdown.boxed()));
        let channel = client::channel(&address.to_string()).unwrap();
        Self { client: CacheClient::new(channel.clone(), DEADLINE), channel, stop, task }
    }

    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        drop((self.client, self.channel));
        self.task.await.unwrap().unwrap();
    }
}

/// A chunk object with its parts.
#[derive(Clone)]
pub(crate) struct Chunk {
    pub(crate) id: ChunkId,
    pub(crate) object: Bytes,
    /// K, then V of each layer.
    pub(crate) layers: Vec<Vec<u8>>,
}

/// A chunk of `layers` layers with 2 KiB a row, whose bytes depend on `seed`.
pub(crate) fn chunk(seed: u32, layers: u32, tokens: u32) -> Chunk {
    chunk_of(&ChunkKey::new(MODEL, &PREFIX, &[seed, tokens, layers], "default"), seed, layers, tokens)
}

pub(crate) const MODEL: ModelDigest = ModelDigest::from_bytes([5; 32]);
/// The prefix of every [`chunk`].
pub(crate) const PREFIX: [u32; 2] = [1, 2];

/// Like [`chunk`], of another key.
pub(crate) fn chunk_of(key: &ChunkKey, seed: u32, layers: u32, tokens: u32) -> Chunk {
    let layout = KvLayout { layers, kv_heads: 8, head_dim: 128, encoding: Encoding::Bf16 };
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as u8
    };
    let data: Vec<Vec<u8>> = (0..layers).map(|_| (0..layout.layer_bytes(tokens)).map(|_| next()).collect()).collect();
    let object = object::write(key, &layout, VARIANT, tokens, "f32", &data).unwrap();
    Chunk { id: key.id(), object: object.into(), layers: data }
}

pub(crate) async fn put(client: &CacheClient, chunk: &Chunk) -> std::result::Result<bool, Status> {
    client.put_chunk(chunk.id, VARIANT, chunk.object.clone()).await
}

pub(crate) fn want(chunks: &[ChunkId]) -> Want {
    Want { chunks: chunks.iter().map(ChunkId::to_string).collect(), variant: VARIANT.to_string(), ..Want::default() }
}

/// What came of one chunk.
#[derive(Debug, Default)]
pub(crate) struct Got {
    /// K and V of each layer.
    pub(crate) layers: BTreeMap<u32, [Vec<u8>; 2]>,
    pub(crate) sources: Vec<String>,
    pub(crate) error: Option<String>,
}

impl Got {
    /// Takes a frame in, checking all that a receiver relies on.
    fn add(&mut self, frame: &Frame) {
        assert_eq!(self.error, None, "a frame after the error");
        if !frame.error.is_empty() {
            assert!(frame.data.is_empty());
            self.error = Some(frame.error.clone());
            return;
        }
        assert!(intact(frame));
        assert!(frame.data.len() < server::FRAME_BYTES);
        if let Some((&last, _)) = self.layers.last_key_value() {
            assert!(frame.layer >= last, "layer {} after {last}", frame.layer);
        }
        let part = &mut self.layers.entry(frame.layer).or_default()[frame.part as usize];
        assert_eq!(frame.data.len() % frame.rows as usize, 0);
        let row_bytes = frame.data.len() / frame.rows as usize;
        assert_eq!(part.len(), frame.first_row as usize * row_bytes);
        part.extend_from_slice(&frame.data);
        self.sources.push(frame.source.clone());
    }

    pub(crate) fn assert_is(&self, chunk: &Chunk) {
        assert_eq!(self.error, None);
        assert_eq!(self.layers.len(), chunk.layers.len());
        for (layer, parts) in &self.layers {
            assert!(parts.concat() == chunk.layers[*layer as usize], "layer {layer} differs");
        }
    }
}

/// Reads a stream to its end; what came, by place.
pub(crate) async fn get(client: &CacheClient, want: Want) -> std::result::Result<BTreeMap<u32, Got>, Status> {
    let (_requests, mut frames) = client.get_chunks(want).await?;
    let mut got: BTreeMap<u32, Got> = BTreeMap::new();
    while let Some(frame) = frames.message().await? {
        got.entry(frame.chunk).or_default().add(&frame);
    }
    Ok(got)
}

/// Waits until `holds`.
pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Like [`eventually`], for what has to be asked for.
pub(crate) async fn eventually_so(what: &str, holds: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// What a read of the store does.
#[derive(Clone)]
pub(crate) enum Read {
    Pass,
    /// Goes on once the semaphore has a permit for it.
    Wait(Arc<Semaphore>),
    Fail,
    FlipBit,
}

type OnRead = Box<dyn Fn(&Path, &GetOptions) -> Read + Send + Sync>;
type OnWrite = Box<dyn Fn(&Path) -> Option<std::io::ErrorKind> + Send + Sync>;

/// A store that misbehaves on request.
pub(crate) struct Faulty {
    inner: Arc<dyn ObjectStore>,
    on_read: OnRead,
    on_write: OnWrite,
    /// Reads begun, and reads under way.
    pub(crate) reads: AtomicUsize,
    pub(crate) reading: AtomicUsize,
}

impl Faulty {
    pub(crate) fn on_read(
        inner: Arc<dyn ObjectStore>,
        on_read: impl Fn(&Path, &GetOptions) -> Read + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::new(inner, on_read, |_| None)
    }

    pub(crate) fn new(
        inner: Arc<dyn ObjectStore>,
        on_read: impl Fn(&Path, &GetOptions) -> Read + Send + Sync + 'static,
        on_write: impl Fn(&Path) -> Option<std::io::ErrorKind> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            inner,
            on_read: Box::new(on_read),
            on_write: Box::new(on_write),
            reads: AtomicUsize::new(0),
            reading: AtomicUsize::new(0),
        })
    }

    fn refuse_write(&self, path: &Path) -> Result<()> {
        match (self.on_write)(path) {
            Some(kind) => Err(Error::Generic { store: "faulty", source: std::io::Error::from(kind).into() }),
            None => Ok(()),
        }
    }
}

/// Counts a read as under way until it is done or dropped.
struct UnderWay<'a>(&'a AtomicUsize);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.refuse_write(location)?;
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.refuse_write(location)?;
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.reading.fetch_add(1, Ordering::SeqCst);
        let _under_way = UnderWay(&self.reading);
        let read = (self.on_read)(location, &options);
        match &read {
            Read::Fail => return Err(Error::Generic { store: "faulty", source: "injected fault".into() }),
            Read::Wait(gate) => gate.acquire().await.unwrap().forget(),
            Read::Pass | Read::FlipBit => {}
        }
        let mut result = self.inner.get_opts(location, options).await?;
        if matches!(read, Read::FlipBit) {
            let (meta, range, attributes) = (result.meta.clone(), result.range.clone(), result.attributes.clone());
            let extensions = result.extensions.clone();
            let mut bytes = result.bytes().await?.to_vec();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 4;
            let payload = GetResultPayload::Stream(futures::stream::once(async { Ok(Bytes::from(bytes)) }).boxed());
            result = GetResult { payload, meta, range, attributes, extensions };
        }
        Ok(result)
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
        self.inner.copy_opts(from, to, options).await
    }
}
