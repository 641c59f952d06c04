//! The loader against a scripted cache service on loopback: files that are mapped, files that cannot be, skips, and several
//! connections.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{ChunkId, ChunkKey, Encoding, KvLayout, ModelDigest, Part, RowRanges, Variant, object};
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::frames::ChunkServer;
use kvsplice_proto::load::{Form, Loaded, Loader, Skips, Wanted, WantedChunk};
use kvsplice_proto::mmap::Identity;
use kvsplice_proto::server::{self, Limits};
use kvsplice_proto::v1::cache_server::{Cache, CacheServer};
use kvsplice_proto::v1::get_chunks_request::Message;
use kvsplice_proto::{client, convert, v1};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status, Streaming};

const LAYOUT: KvLayout = KvLayout { layers: 5, kv_heads: 2, head_dim: 16, encoding: Encoding::Bf16 };
const VARIANT: Variant = Variant::clean(Encoding::Bf16);
const TOKENS: u32 = 70;

/// What the service does with the files that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    Right,
    /// As if they lay on another host.
    Elsewhere,
    /// Another file has taken the name.
    Replaced,
    /// Layer 3 of the second chunk is not as it was verified.
    Rotten,
    /// A file of another size.
    Misfit,
}

struct Shared {
    naming: Naming,
    objects: BTreeMap<String, (PathBuf, Bytes)>,
    /// What was asked for: whether mapped, whether again, and which chunks.
    asked: Mutex<Vec<(bool, bool, Vec<String>)>>,
    /// Of each of those, the layers.
    layers: Mutex<Vec<Vec<u32>>>,
    skips: Mutex<Vec<v1::Skip>>,
}

#[derive(Clone)]
struct Peer(Arc<Shared>);

impl Peer {
    fn named(&self, place: u32, path: &PathBuf, object: &Bytes) -> Vec<v1::Frame> {
        let Identity { device, inode, size, modified_ns } = Identity::of(&std::fs::metadata(path).unwrap());
        let mut path = path.display().to_string();
        let (mut inode, mut size) = (inode, size);
        match self.0.naming {
            Naming::Elsewhere => path.push_str(".elsewhere"),
            Naming::Replaced => inode += 1,
            Naming::Misfit => size += 1,
            Naming::Right | Naming::Rotten => {}
        }
        let layer = |layer: u32| {
            let mut crc = crc32c::crc32c(&object[LAYOUT.layer_range(layer, TOKENS)]);
            if self.0.naming == Naming::Rotten && (place, layer) == (1, 3) {
                crc ^= 1;
            }
            let mapping = v1::Mapping {
                path: path.clone(),
                device,
                inode,
                size,
                modified_ns,
                header_bytes: LAYOUT.header_bytes() as u32,
                layer_crc32c: vec![crc],
            };
            v1::Frame { chunk: place, layer, source: "disk".into(), mapping: Some(mapping), ..Default::default() }
        };
        (0..LAYOUT.layers).map(layer).collect()
    }
}

fn sent(place: u32, object: &Bytes) -> Vec<v1::Frame> {
    let frame = |(layer, part): (u32, Part)| {
        let bytes = object.slice(LAYOUT.layer_range(layer, TOKENS));
        let data = bytes.slice(LAYOUT.part_range(part, TOKENS));
        v1::Frame {
            chunk: place,
            layer,
            part: convert::wire_part(part).into(),
            rows: TOKENS,
            crc32c: crc32c::crc32c(&data),
            data,
            source: "memory".into(),
            ..Default::default()
        }
    };
    (0..LAYOUT.layers).flat_map(|layer| LAYOUT.parts().iter().map(move |part| (layer, *part))).map(frame).collect()
}

#[tonic::async_trait]
impl Cache for Peer {
    type GetChunksStream = ReceiverStream<Result<v1::Frame, Status>>;
    type ListRecordsStream = ReceiverStream<Result<v1::ListRecordsResponse, Status>>;

    async fn get_chunks(
        &self,
        request: Request<Streaming<v1::GetChunksRequest>>,
    ) -> Result<Response<Self::GetChunksStream>, Status> {
        let mut requests = request.into_inner();
        let Some(Message::Want(want)) = requests.message().await?.and_then(|request| request.message) else {
            return Err(Status::invalid_argument("no Want"));
        };
        self.0.asked.lock().unwrap().push((want.mapped, want.unmappable, want.chunks.clone()));
        self.0.layers.lock().unwrap().push(want.layers.clone());
        let mut frames = Vec::new();
        for (place, chunk) in (0..).zip(&want.chunks) {
            let (path, object) = &self.0.objects[chunk];
            frames.extend(if want.mapped { self.named(place, path, object) } else { sent(place, object) });
        }
        frames.retain(|frame| want.layers.is_empty() || want.layers.contains(&frame.layer));
        // Lower layers first.
        frames.sort_by_key(|frame| frame.layer);
        let (sender, receiver) = mpsc::channel(4);
        let shared = self.0.clone();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                if let Some(Message::Skip(skip)) = request.message {
                    shared.skips.lock().unwrap().push(skip);
                }
            }
        });
        tokio::spawn(async move {
            for frame in frames {
                if sender.send(Ok(frame)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn put_chunk(
        &self,
        _: Request<Streaming<v1::PutChunkRequest>>,
    ) -> Result<Response<v1::PutChunkResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn list_records(
        &self,
        _: Request<v1::ListRecordsRequest>,
    ) -> Result<Response<Self::ListRecordsStream>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn contains(&self, _: Request<v1::ContainsRequest>) -> Result<Response<v1::ContainsResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn put_record(&self, _: Request<v1::PutRecordRequest>) -> Result<Response<v1::PutRecordResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn get_record(&self, _: Request<v1::GetRecordRequest>) -> Result<Response<v1::GetRecordResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn delete(&self, _: Request<v1::DeleteRequest>) -> Result<Response<v1::DeleteResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn renew(&self, _: Request<v1::RenewRequest>) -> Result<Response<v1::RenewResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn pin(&self, _: Request<v1::PinRequest>) -> Result<Response<v1::PinResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn release(&self, _: Request<v1::ReleaseRequest>) -> Result<Response<v1::ReleaseResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn collect_orphans(
        &self,
        _: Request<v1::CollectOrphansRequest>,
    ) -> Result<Response<v1::CollectOrphansResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn verify(&self, _: Request<v1::VerifyRequest>) -> Result<Response<v1::VerifyResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn stats(&self, _: Request<v1::StatsRequest>) -> Result<Response<v1::StatsResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }
}

struct Fixture {
    shared: Arc<Shared>,
    chunks: Vec<(ChunkId, Bytes)>,
    loader: Loader,
    _folder: TempDir,
    _stop: oneshot::Sender<()>,
}

async fn fixture(naming: Naming, chunks: u32, connections: u32, map_files: bool) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let mut objects = BTreeMap::new();
    let mut list = Vec::new();
    for seed in 0..chunks {
        let key = ChunkKey::new(ModelDigest::from_bytes([3; 32]), &[1], &[seed], "default");
        let layer = |layer: u32| -> Vec<u8> {
            let byte = |i: usize| (i as u32).wrapping_mul(2_654_435_761 + seed * 7 + layer).to_be_bytes()[0];
            (0..LAYOUT.layer_bytes(TOKENS)).map(byte).collect()
        };
        let data: Vec<Vec<u8>> = (0..LAYOUT.layers).map(layer).collect();
        let object = Bytes::from(object::write(&key, &LAYOUT, VARIANT, TOKENS, "f32", &data).unwrap());
        let path = folder.path().join(key.id().to_string());
        std::fs::write(&path, &object).unwrap();
        objects.insert(key.id().to_string(), (path, object.clone()));
        list.push((key.id(), object));
    }
    let shared = Arc::new(Shared {
        naming,
        objects,
        asked: Mutex::default(),
        layers: Mutex::default(),
        skips: Mutex::default(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (stop, stopped) = oneshot::channel::<()>();
    let second = Duration::from_secs(1);
    let limits = Limits { max_in_flight: 64, default_deadline: 20 * second, grace: second };
    let routes = Routes::new(CacheServer::new(Peer(shared.clone())));
    tokio::spawn(server::serve(routes, &["kvsplice.v1.Cache"], listener, limits, async {
        drop(stopped.await);
    }));
    let loader = Loader::new(&address, connections, map_files, 20 * second).unwrap();
    Fixture { shared, chunks: list, loader, _folder: folder, _stop: stop }
}

/// Chunks are sent without copies to a client that knows nothing of it, and everything else of the service is as generated.
#[tokio::test]
async fn a_generated_client_reads_what_is_sent_without_copies() {
    let fixture = fixture(Naming::Right, 2, 1, false).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let channel = client::channel(&listener.local_addr().unwrap().to_string()).unwrap();
    let second = Duration::from_secs(1);
    let limits = Limits { max_in_flight: 64, default_deadline: 20 * second, grace: second };
    let (_stop, stopped) = oneshot::channel::<()>();
    let routes = Routes::new(ChunkServer::new(Peer(fixture.shared.clone())));
    tokio::spawn(server::serve(routes, &["kvsplice.v1.Cache"], listener, limits, async { drop(stopped.await) }));
    let chunks: Vec<String> = fixture.shared.objects.keys().cloned().collect();
    let message = |message| v1::GetChunksRequest { message: Some(message) };
    let want = v1::Want { chunks: chunks.clone(), variant: VARIANT.to_string(), ..v1::Want::default() };
    let expected: Vec<v1::Frame> = {
        let objects = || (0..).zip(chunks.iter().map(|chunk| &fixture.shared.objects[chunk].1));
        let mut frames: Vec<v1::Frame> = objects().flat_map(|(place, object)| sent(place, object)).collect();
        frames.sort_by_key(|frame| frame.layer);
        frames
    };

    let mut generated = v1::cache_client::CacheClient::new(channel.clone());
    let ask = client::request(tokio_stream::once(message(Message::Want(want.clone()))), 20 * second);
    let mut frames = generated.get_chunks(ask).await.unwrap().into_inner();
    for frame in &expected {
        assert_eq!(frames.message().await.unwrap().as_ref(), Some(frame));
    }
    assert_eq!(frames.message().await.unwrap(), None);
    let nothing = client::request(tokio_stream::once(message(Message::Drop(v1::Drop { chunk: 0 }))), 20 * second);
    assert_eq!(generated.get_chunks(nothing).await.unwrap_err().code(), Code::InvalidArgument);
    let refused = generated.stats(client::request(v1::StatsRequest {}, 20 * second)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);

    // Both ends of ours.
    let (_requests, mut frames) = CacheClient::new(channel, 20 * second).get_chunks(want).await.unwrap();
    for frame in &expected {
        assert_eq!(frames.message().await.unwrap().as_ref(), Some(frame));
    }
    assert_eq!(frames.message().await.unwrap(), None);
}

/// What came: by (chunk, layer) the layer's bytes, and by chunk the bytes over the wire and the last source.
struct Got {
    layers: BTreeMap<(usize, u32), Bytes>,
    wire: BTreeMap<usize, u64>,
    sources: BTreeMap<usize, Source>,
    failed: BTreeMap<usize, String>,
    forms: BTreeSet<&'static str>,
    /// In order of arrival.
    order: Vec<u32>,
}

impl Fixture {
    async fn load(&self, skips: Option<Skips>) -> Got {
        self.load_layers(skips, |_| Vec::new()).await
    }

    /// Loads of each chunk, by its place, the layers that `layers` gives.
    async fn load_layers(&self, skips: Option<Skips>, layers: impl Fn(usize) -> Vec<u32>) -> Got {
        let chunk = |(place, (id, _)): (usize, &(ChunkId, Bytes))| {
            let layers = layers(place);
            WantedChunk { place, id: *id, tokens: TOKENS, layers, have: RowRanges::default() }
        };
        let chunks = self.chunks.iter().enumerate().map(chunk).collect();
        let wanted =
            Wanted { chunks, layout: LAYOUT, variant: VARIANT, lease: "lease".into(), protect: Duration::from_secs(7) };
        let (say, said) = mpsc::channel(1);
        if let Some(skips) = skips {
            say.send(skips).await.unwrap();
        }
        drop(say);
        let (news, mut arrived) = mpsc::unbounded_channel();
        let sink = async move |loaded| news.send(loaded).is_ok();
        tokio::time::timeout(Duration::from_secs(20), self.loader.load(wanted, said, sink)).await.unwrap();
        let mut got = Got {
            layers: BTreeMap::new(),
            wire: BTreeMap::new(),
            sources: BTreeMap::new(),
            failed: BTreeMap::new(),
            forms: BTreeSet::new(),
            order: Vec::new(),
        };
        while let Some(loaded) = arrived.recv().await {
            match loaded {
                Loaded::Layer { chunk, layer, data, form, source, bytes } => {
                    assert!(got.layers.insert((chunk, layer), data).is_none(), "layer {layer} comes twice");
                    got.forms.insert(match form {
                        Form::Whole => "whole",
                        Form::Gapped(_) => "gapped",
                        Form::Mapped => "mapped",
                    });
                    *got.wire.entry(chunk).or_default() += bytes;
                    got.sources.insert(chunk, source);
                    got.order.push(layer);
                }
                Loaded::Failed { chunk, reason, .. } => drop(got.failed.insert(chunk, reason)),
            }
        }
        got
    }

    fn assert_whole(&self, got: &Got) {
        assert!(got.failed.is_empty(), "{:?}", got.failed);
        assert_eq!(got.layers.len(), self.chunks.len() * LAYOUT.layers as usize);
        for ((chunk, layer), bytes) in &got.layers {
            assert!(
                *bytes == self.chunks[*chunk].1[LAYOUT.layer_range(*layer, TOKENS)],
                "chunk {chunk}, layer {layer}"
            );
        }
    }

    fn asked(&self) -> Vec<(bool, bool, Vec<String>)> {
        self.shared.asked.lock().unwrap().clone()
    }
}

const CHUNK_BYTES: u64 = LAYOUT.object_bytes(TOKENS) as u64 - LAYOUT.header_bytes() as u64;

#[tokio::test]
async fn mapped_layers_are_those_that_would_be_sent_and_cost_no_byte() {
    let fixture = fixture(Naming::Right, 3, 1, true).await;
    let got = fixture.load(None).await;
    fixture.assert_whole(&got);
    assert!(got.wire.values().all(|bytes| *bytes == 0));
    assert_eq!(got.forms, BTreeSet::from(["mapped"]));
    assert!(got.sources.values().all(|source| *source == Source::Disk));
    assert!(got.order.is_sorted(), "lower layers first: {:?}", got.order);
    assert_eq!(fixture.asked().len(), 1);
}

#[tokio::test]
async fn a_worker_that_does_not_map_is_sent_everything() {
    let fixture = fixture(Naming::Right, 3, 1, false).await;
    let got = fixture.load(None).await;
    fixture.assert_whole(&got);
    assert!(got.wire.values().all(|bytes| *bytes == CHUNK_BYTES));
    assert_eq!(got.forms, BTreeSet::from(["whole"]));
    assert_eq!(fixture.asked().len(), 1);
}

#[tokio::test]
async fn only_the_layers_that_are_missing_are_asked_for_and_come() {
    // Chunks that miss the same layers share a stream; past a few sets of layers, chunks are asked for whole.
    let missing = |place: usize| match place {
        0 | 3 => vec![],
        1 | 4 => vec![2, 4],
        _ => vec![place as u32 % 5],
    };
    for map_files in [true, false] {
        let fixture = fixture(Naming::Right, 7, 1, map_files).await;
        let got = fixture.load_layers(None, missing).await;
        assert!(got.failed.is_empty(), "{:?}", got.failed);
        for place in 0..7 {
            let came: Vec<u32> =
                got.layers.keys().filter(|(chunk, _)| *chunk == place).map(|(_, layer)| *layer).collect();
            let all = (0..LAYOUT.layers).collect();
            assert_eq!(came, if missing(place).is_empty() { all } else { missing(place) }, "chunk {place}");
        }
        for ((chunk, layer), bytes) in &got.layers {
            assert!(*bytes == fixture.chunks[*chunk].1[LAYOUT.layer_range(*layer, TOKENS)], "chunk {chunk}, {layer}");
        }
        let mut asked = fixture.shared.layers.lock().unwrap().clone();
        asked.sort();
        assert_eq!(asked, [vec![], vec![0], vec![2], vec![2, 4]]);
        let whole = fixture.shared.layers.lock().unwrap().iter().position(Vec::is_empty).unwrap();
        assert_eq!(fixture.asked()[whole].2.len(), 3, "two are wanted whole, and one has a set too many");
    }
}

#[tokio::test]
async fn files_that_cannot_be_opened_are_asked_for_once_and_sent() {
    for naming in [Naming::Elsewhere, Naming::Replaced] {
        let fixture = fixture(naming, 3, 1, true).await;
        let got = fixture.load(None).await;
        fixture.assert_whole(&got);
        assert!(got.wire.values().all(|bytes| *bytes == CHUNK_BYTES));
        let asked = fixture.asked();
        assert_eq!((asked[0].0, asked[0].1), (true, false));
        let mut again: Vec<String> = asked[1..].iter().flat_map(|(_, _, chunks)| chunks.clone()).collect();
        again.sort();
        let mut all: Vec<String> = fixture.chunks.iter().map(|(id, _)| id.to_string()).collect();
        all.sort();
        assert_eq!(again, all, "each is asked for again once");
        assert!(asked[1..].iter().all(|(mapped, again, _)| !mapped && *again));
        let before = fixture.asked().len();
        fixture.assert_whole(&fixture.load(None).await);
        assert_eq!(
            fixture.asked()[before..].iter().map(|asked| asked.0).collect::<Vec<_>>(),
            [false],
            "not at once again"
        );
    }
}

#[tokio::test]
async fn a_damaged_layer_makes_its_chunk_be_sent_and_no_other() {
    let fixture = fixture(Naming::Rotten, 3, 1, true).await;
    let got = fixture.load(None).await;
    fixture.assert_whole(&got);
    assert_eq!(fixture.asked()[1..], [(false, true, vec![fixture.chunks[1].0.to_string()])]);
    assert_eq!((got.wire[&0], got.wire[&2]), (0, 0));
    assert!(got.wire[&1] > 0);
    fixture.load(None).await;
    assert!(fixture.asked()[2].0, "other files may be mapped");
}

#[tokio::test]
async fn a_file_that_does_not_fit_fails_its_chunk() {
    let fixture = fixture(Naming::Misfit, 2, 1, true).await;
    let got = fixture.load(None).await;
    assert!(got.layers.is_empty());
    assert!(got.failed.len() == 2 && got.failed.values().all(|reason| reason.starts_with("foreign: ")));
}

#[tokio::test]
async fn skips_reach_every_stream_and_a_chunk_of_which_nothing_is_needed_is_not_read() {
    for (naming, map_files) in [(Naming::Right, true), (Naming::Elsewhere, true), (Naming::Right, false)] {
        let fixture = fixture(naming, 2, 1, map_files).await;
        let skips = Skips::from([(0, RowRanges::from_range(0..TOKENS)), (1, RowRanges::from_range(3..20))]);
        let got = fixture.load(Some(skips)).await;
        assert!(got.failed.is_empty());
        assert_eq!(got.layers.len(), 5, "of a chunk without needed rows nothing comes");
        let row = LAYOUT.row_bytes(Part::Keys);
        for layer in 0..LAYOUT.layers {
            let (bytes, right) = (&got.layers[&(1, layer)], &fixture.chunks[1].1[LAYOUT.layer_range(layer, TOKENS)]);
            for needed in [0..3 * row, 20 * row..70 * row, 90 * row..140 * row] {
                assert!(bytes[needed.clone()] == right[needed], "layer {layer}");
            }
        }
        let skips = || fixture.shared.skips.lock().unwrap().len();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !map_files && skips() < 1 {
            assert!(Instant::now() < deadline, "the service heard {} skips", skips());
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn chunks_are_spread_over_the_connections() {
    for map_files in [true, false] {
        let fixture = fixture(Naming::Right, 5, 3, map_files).await;
        let got = fixture.load(None).await;
        fixture.assert_whole(&got);
        let mut shares: Vec<usize> = fixture.asked().iter().map(|(_, _, chunks)| chunks.len()).collect();
        shares.sort_unstable();
        assert_eq!(shares, [1, 2, 2]);
    }
}
