//! Limits, deadlines and shutdown of the one way to serve, over a loopback connection.

use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use kvsplice_proto::server::{Limits, serve};
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_proto::v1::worker_server::{Worker, WorkerServer};
use kvsplice_proto::v1::{
    EncodeEvent, EncodeRequest, PrefillEvent, PrefillRequest, ScoreRequest, ScoreResponse, WorkerStatusRequest,
    WorkerStatusResponse,
};
use kvsplice_proto::{client, context};
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tonic::service::Routes;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

const SOON: Duration = Duration::from_secs(20);
const LIMITS: Limits = Limits { max_in_flight: 8, default_deadline: SOON, grace: SOON };

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Encode sends "first", then "last" once released; Score never answers; Status tells the request id it sees.
struct Scripted {
    released: watch::Receiver<bool>,
}

#[tonic::async_trait]
impl Worker for Scripted {
    type PrefillStream = Events<PrefillEvent>;
    type EncodeStream = Events<EncodeEvent>;

    async fn prefill(&self, _: Request<Streaming<PrefillRequest>>) -> Result<Response<Self::PrefillStream>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn encode(&self, _: Request<EncodeRequest>) -> Result<Response<Self::EncodeStream>, Status> {
        let mut released = self.released.clone();
        let event = |chunk: &str| Ok(EncodeEvent { chunk: chunk.into(), ..Default::default() });
        let last = async move {
            released.wait_for(|released| *released).await.map_err(|_| Status::internal("test is over"))?;
            Ok(EncodeEvent { chunk: "last".into(), ..Default::default() })
        };
        Ok(Response::new(Box::pin(stream::iter([event("first")]).chain(stream::once(last)))))
    }

    async fn score(&self, _: Request<ScoreRequest>) -> Result<Response<ScoreResponse>, Status> {
        std::future::pending().await
    }

    async fn attention(
        &self,
        _: Request<kvsplice_proto::v1::WorkerAttentionRequest>,
    ) -> Result<Response<kvsplice_proto::v1::WorkerAttentionResponse>, Status> {
        Err(Status::unimplemented("not scripted"))
    }

    async fn status(&self, _: Request<WorkerStatusRequest>) -> Result<Response<WorkerStatusResponse>, Status> {
        let epoch = context::spawn(async { context::request_id().to_string() }).await;
        Ok(Response::new(WorkerStatusResponse { epoch: epoch.unwrap(), ..Default::default() }))
    }
}

struct Server {
    channel: Channel,
    release: watch::Sender<bool>,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<Result<(), kvsplice_proto::server::Error>>,
}

async fn start(limits: Limits) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let channel = client::channel(&listener.local_addr().unwrap().to_string()).unwrap();
    let (release, released) = watch::channel(false);
    let (stop, stopped) = oneshot::channel();
    let routes = Routes::new(WorkerServer::new(Scripted { released }));
    let served = tokio::spawn(async move {
        serve(routes, &["kvsplice.v1.Worker"], listener, limits, async {
            let _stop_or_dropped = stopped.await;
        })
        .await
    });
    Server { channel, release, stop, served }
}

impl Server {
    fn worker(&self) -> WorkerClient<Channel> {
        WorkerClient::new(self.channel.clone())
    }

    async fn stream(&self) -> Streaming<EncodeEvent> {
        let mut stream = self.worker().encode(Request::new(EncodeRequest::default())).await.unwrap().into_inner();
        assert_eq!(stream.message().await.unwrap().unwrap().chunk, "first");
        stream
    }

    async fn health(&self) -> Streaming<HealthCheckResponse> {
        let request = HealthCheckRequest { service: "kvsplice.v1.Worker".into() };
        HealthClient::new(self.channel.clone()).watch(request).await.unwrap().into_inner()
    }
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("took too long")
}

#[tokio::test]
async fn a_request_above_the_limit_is_refused_at_once_and_probes_are_not() {
    in_time(async {
        let server = start(Limits { max_in_flight: 1, ..LIMITS }).await;
        let mut running = server.stream().await;
        let refused = server.worker().status(WorkerStatusRequest {}).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        assert!(server.health().await.message().await.is_ok());
        server.release.send(true).unwrap();
        assert_eq!(running.message().await.unwrap().unwrap().chunk, "last");
        assert_eq!(running.message().await.unwrap(), None);
        while server.worker().status(WorkerStatusRequest {}).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn the_deadline_ends_a_call_and_a_running_stream() {
    in_time(async {
        let server = start(Limits { default_deadline: Duration::from_millis(200), ..LIMITS }).await;
        let late = client::request(ScoreRequest::default(), Duration::from_millis(50));
        let late = client::explain(server.worker().score(late).await.unwrap_err());
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        let mut running = server.stream().await;
        let late = running.message().await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    })
    .await;
}

#[tokio::test]
async fn the_request_id_reaches_the_handler_and_what_it_spawns() {
    in_time(async {
        let server = start(LIMITS).await;
        let request = context::with_request_id("r-42".into(), async { client::request(WorkerStatusRequest {}, SOON) });
        let status = server.worker().status(request.await).await.unwrap().into_inner();
        assert_eq!(status.epoch, "r-42");
    })
    .await;
}

#[tokio::test]
async fn a_shutdown_lets_a_running_stream_finish() {
    in_time(async {
        let server = start(LIMITS).await;
        let mut health = server.health().await;
        assert_eq!(health.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
        let mut running = server.stream().await;
        server.stop.send(()).unwrap();
        assert_eq!(health.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
        assert_eq!(health.message().await.unwrap_err().code(), Code::Unavailable);
        server.release.send(true).unwrap();
        assert_eq!(running.message().await.unwrap().unwrap().chunk, "last");
        assert_eq!(running.message().await.unwrap(), None);
        server.served.await.unwrap().unwrap();
    })
    .await;
}

#[tokio::test]
async fn what_runs_past_the_grace_time_is_canceled() {
    in_time(async {
        let server = start(Limits { grace: Duration::from_millis(50), ..LIMITS }).await;
        let mut running = server.stream().await;
        server.stop.send(()).unwrap();
        assert_eq!(running.message().await.unwrap_err().code(), Code::Unavailable);
        server.served.await.unwrap().unwrap();
    })
    .await;
}
