//! The gRPC service: checks each request, hands it to the file that does the work, and maps errors to statuses.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use kvsplice_kv::ChunkId;
use kvsplice_proto::convert;
use kvsplice_proto::v1::cache_server::Cache;
use kvsplice_proto::v1::{
    CollectOrphansRequest, CollectOrphansResponse, ContainsRequest, ContainsResponse, DeleteRequest, DeleteResponse,
    Frame, GetChunksRequest, GetRecordRequest, GetRecordResponse, ListRecordsRequest, ListRecordsResponse, PinRequest,
    PinResponse, PutChunkRequest, PutChunkResponse, PutRecordRequest, PutRecordResponse, ReleaseRequest,
    ReleaseResponse, RenewRequest, RenewResponse, StatsRequest, StatsResponse, Tier as TierStats, VerifyRequest,
    VerifyResponse, get_chunks_request,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::{Instrument, warn};

use crate::admission::Gate;
use crate::disk::{Disk, Usage};
use crate::fetch::{FIRST_HEADER_BYTES, Fetcher, Miss};
use crate::lookups::Lookups;
use crate::mapping::Maps;
use crate::memory::Memory;
use crate::protect::Protection;
use crate::put::{self, Uploads};
use crate::records;
use crate::store::{Store, chunk_path, object_path};
use crate::stream::{self as chunks, Wanted};
use crate::tier::{Costs, ObjectKey, Removal};
use crate::{Config, Error, gc, kept, verify};

/// Items in one list of a request.
const MAX_ITEMS: usize = 1 << 16;
/// Objects that one request looks up or removes at once.
pub(crate) const PARALLEL: usize = 32;
/// How long the first message of a stream may take.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);

/// Shared by all requests.
pub(crate) struct Service {
    fetcher: Arc<Fetcher>,
    protection: Arc<Protection>,
    uploads: Arc<Uploads>,
}

impl Service {
    /// Opens the tiers above `store`; reads the folder of the disk tier.
    pub(crate) async fn open(mut store: Store, config: &Config) -> Result<Self, Error> {
        let protection = Arc::new(Protection::new());
        let lookups = Arc::new(Lookups::default());
        let costs = Costs::new(config);
        store.count_in(lookups.clone());
        // What is not known of them costs speed only: orphans are collected with the pins of that moment.
        match kept::pins(&store).await.and_then(|pins| protection.pin(&pins)) {
            Ok(()) => {}
            Err(error) => warn!(%error, "stored pins are not known; pinned chunks may leave the tiers"),
        }
        match kept::costs(&store).await {
            Ok(stored) => stored.into_iter().for_each(|(model, cost)| costs.remember(model, cost)),
            Err(error) => warn!(%error, "measured recompute costs are not known until they are measured again"),
        }
        let memory = Memory::new(config.memory_bytes, config.eviction, protection.clone());
        let gate = Gate::new(config.admission, protection.clone());
        let disk = {
            let (config, protection) = (config.clone(), protection.clone());
            let (lookups, costs) = (lookups.clone(), costs.clone());
            let open = move || Disk::open(&config, protection, lookups, costs);
            tokio::task::spawn_blocking(open)
                .await
                .map_err(|error| Error::Config { field: "disk_dir", detail: format!("cannot be read: {error}") })?
        };
        let maps = Arc::new(Maps::new(config.hand_out_paths, protection.clone()));
        let header_bytes = AtomicUsize::new(FIRST_HEADER_BYTES);
        let fetcher = Arc::new(Fetcher { store, memory, disk, maps, gate, costs, lookups, header_bytes });
        Ok(Self { fetcher, protection, uploads: Arc::new(Uploads::new()) })
    }

    /// What all requests read through.
    pub(crate) fn fetcher(&self) -> Arc<Fetcher> {
        self.fetcher.clone()
    }
}

/// Refuses a list that is too long to be honest.
pub(crate) fn check_count(field: &'static str, count: usize) -> Result<(), Error> {
    if count > MAX_ITEMS {
        return Err(Error::Request { field, detail: format!("must have at most {MAX_ITEMS} items, has {count}") });
    }
    Ok(())
}

fn chunk_ids(field: &'static str, texts: &[String]) -> Result<Vec<ChunkId>, Error> {
    check_count(field, texts.len())?;
    texts.iter().map(|text| convert::chunk_id(field, text).map_err(Error::from)).collect()
}

#[tonic::async_trait]
impl Cache for Service {
    async fn contains(&self, request: Request<ContainsRequest>) -> Result<Response<ContainsResponse>, Status> {
        let request = request.into_inner();
        let chunks = chunk_ids("chunks", &request.chunks)?;
        let variant = convert::variant("variant", &request.variant)?;
        let look_up = |chunk: ChunkId| async move {
            let key = ObjectKey { chunk, variant };
            match self.fetcher.object(&key).await {
                Ok(_) => Ok(true),
                Err(Miss::Store(detail)) => Err(Status::unavailable(detail)),
                Err(Miss::Missing) => Ok(false),
                Err(miss) => {
                    warn!(%chunk, reason = %miss, "a chunk object cannot be used");
                    Ok(false)
                }
            }
        };
        let lookups: Vec<_> = chunks.iter().copied().map(look_up).collect();
        let found: Vec<bool> = stream::iter(lookups).buffered(PARALLEL).try_collect().await?;
        let mut response = ContainsResponse { found, lease: String::new(), lease_expires_ms: 0 };
        if request.lease_ms > 0 {
            let covered = chunks.iter().zip(&response.found).filter(|(_, found)| **found).map(|(chunk, _)| *chunk);
            let [time, renew] = [request.lease_ms, request.renew_ms].map(|ms| Duration::from_millis(ms.into()));
            let lease = self.protection.lease(covered, time, (!renew.is_zero()).then_some(renew))?;
            response.lease = lease.id;
            response.lease_expires_ms = lease.expires_ms;
        }
        Ok(Response::new(response))
    }

    type GetChunksStream = ReceiverStream<Result<Frame, Status>>;

    async fn get_chunks(
        &self,
        request: Request<Streaming<GetChunksRequest>>,
    ) -> Result<Response<Self::GetChunksStream>, Status> {
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(FIRST_MESSAGE, messages.message())
            .await
            .map_err(|_elapsed| Status::deadline_exceeded("no Want within 30 s"))??;
        let Some(get_chunks_request::Message::Want(want)) = first.and_then(|message| message.message) else {
            let detail = "must be the first message".to_owned();
            return Err(Error::Request { field: "want", detail }.into());
        };
        let protect = Duration::from_millis(want.lease_ms.into());
        let wanted = Wanted::try_from(want)?;
        let held = (!protect.is_zero()).then(|| self.protection.hold(wanted.ids(), protect)).transpose()?;
        let (out, frames) = mpsc::channel(chunks::FRAMES);
        tokio::spawn(chunks::send(self.fetcher.clone(), wanted, held, messages, out).in_current_span());
        Ok(Response::new(ReceiverStream::new(frames)))
    }

    async fn put_chunk(
        &self,
        request: Request<Streaming<PutChunkRequest>>,
    ) -> Result<Response<PutChunkResponse>, Status> {
        // A task of its own: when the caller goes away it sees the broken stream, and cleans up what it has written.
        let work = put::put(self.fetcher.clone(), self.uploads.clone(), request.into_inner());
        let created = tokio::spawn(work.in_current_span())
            .await
            .map_err(|error| Status::internal(format!("put a chunk: {error}")))??;
        Ok(Response::new(PutChunkResponse { created }))
    }

    async fn put_record(&self, request: Request<PutRecordRequest>) -> Result<Response<PutRecordResponse>, Status> {
        let PutRecordRequest { key, value } = request.into_inner();
        records::put(&self.fetcher.store, &key, value).await?;
        Ok(Response::new(PutRecordResponse {}))
    }

    async fn get_record(&self, request: Request<GetRecordRequest>) -> Result<Response<GetRecordResponse>, Status> {
        let value = records::get(&self.fetcher.store, &request.into_inner().key).await?;
        Ok(Response::new(GetRecordResponse { value: value.into() }))
    }

    type ListRecordsStream = stream::Iter<std::vec::IntoIter<Result<ListRecordsResponse, Status>>>;

    async fn list_records(
        &self,
        request: Request<ListRecordsRequest>,
    ) -> Result<Response<Self::ListRecordsStream>, Status> {
        let keys = records::list(&self.fetcher.store, &request.into_inner().prefix).await?;
        let page = |keys: &[String]| Ok(ListRecordsResponse { keys: keys.to_vec() });
        let pages: Vec<_> = keys.chunks(records::PAGE_KEYS).map(page).collect();
        Ok(Response::new(stream::iter(pages)))
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<Response<DeleteResponse>, Status> {
        let request = request.into_inner();
        let chunks = chunk_ids("chunks", &request.chunks)?;
        check_count("records", request.records.len())?;
        check_count("variants", request.variants.len())?;
        let mut paths = Vec::new();
        let mut single = Vec::with_capacity(request.variants.len());
        for named in &request.variants {
            let chunk = convert::chunk_id("variants.chunk", &named.chunk)?;
            let variant = convert::variant("variants.variant", &named.variant)?;
            single.push(ObjectKey { chunk, variant });
        }
        paths.extend(single.iter().map(object_path));
        for key in &request.records {
            paths.push(records::path("records", key)?);
        }
        let store = &self.fetcher.store;
        for chunk in &chunks {
            paths.extend(store.list(&chunk_path(chunk)).await?);
            if self.protection.pinned(chunk) {
                paths.push(kept::pin_path(chunk));
            }
        }
        let remove = |path: object_store::path::Path| async move {
            // A bucket says yes to the removal of what is not there: look first.
            let there = store.tag(&path).await?.is_some();
            Ok::<_, Error>((there && store.delete(&path).await?).then(|| path.to_string()))
        };
        let removals: Vec<_> = paths.into_iter().map(remove).collect();
        let removed: Vec<Option<String>> = stream::iter(removals).buffered(PARALLEL).try_collect().await?;
        self.protection.unpin(&chunks);
        let gone = Removal { chunks: chunks.into_iter().collect(), objects: single.into_iter().collect() };
        self.fetcher.remove(gone).await;
        Ok(Response::new(DeleteResponse { removed: removed.into_iter().flatten().collect() }))
    }

    async fn pin(&self, request: Request<PinRequest>) -> Result<Response<PinResponse>, Status> {
        let request = request.into_inner();
        let chunks = chunk_ids("chunks", &request.chunks)?;
        let store = &self.fetcher.store;
        if request.unpin {
            kept::unpin(store, &chunks).await?;
            self.protection.unpin(&chunks);
        } else {
            self.protection.check_pins(&chunks)?;
            kept::pin(store, &chunks).await?;
            self.protection.pin(&chunks)?;
        }
        Ok(Response::new(PinResponse {}))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseResponse>, Status> {
        self.protection.release(&request.into_inner().lease);
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        self.protection.renew(&request.into_inner().lease);
        Ok(Response::new(RenewResponse {}))
    }

    async fn collect_orphans(
        &self,
        request: Request<CollectOrphansRequest>,
    ) -> Result<Response<CollectOrphansResponse>, Status> {
        Ok(Response::new(gc::collect(&self.fetcher, &self.protection, request.into_inner()).await?))
    }

    async fn verify(&self, request: Request<VerifyRequest>) -> Result<Response<VerifyResponse>, Status> {
        let chunks = chunk_ids("chunks", &request.into_inner().chunks)?;
        Ok(Response::new(verify::verify(&self.fetcher, &chunks).await?))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        let (bytes, entries, limit_bytes) = self.fetcher.memory.usage();
        let mut tiers = vec![TierStats { name: "memory".into(), bytes, limit_bytes, entries }];
        if let Some(Usage { bytes, limit_bytes, layers }) = self.fetcher.disk.usage() {
            tiers.push(TierStats { name: "disk".into(), bytes, limit_bytes, entries: layers });
        }
        tiers.push(TierStats { name: "object".into(), ..TierStats::default() });
        let (leases, pins) = self.protection.counts();
        Ok(Response::new(StatsResponse {
            tiers,
            leases: leases as u32,
            pins: pins as u32,
            lookups: self.fetcher.lookups.snapshot(),
            store: self.fetcher.store.name().to_owned(),
            encode_us_per_token: self.fetcher.costs.snapshot(),
        }))
    }
}
