//! The service on a real S3 server over HTTP, opened from a URL and the environment as a program does.
//!
//! The environment belongs to a process: each test starts the server and runs itself again as a program of its own.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use kvsplice_cache_service::{Config, check_store};
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{HttpError, HttpRequest, HttpResponse, S3Result, s3_error};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tower::Service;

use crate::conformance::conforms;
use crate::support::Server;

const KEY: &str = "kvsplice";
const SECRET: &str = "not very secret";
const BUCKET: &str = "chunks";
/// Set for the test that runs as a program of its own.
const AGAIN: &str = "KVSPLICE_TEST_S3";

/// An S3 server with one bucket.
struct S3 {
    address: String,
    seen: Arc<Seen>,
    accepting: AbortHandle,
    _folder: TempDir,
}

/// What the server was asked.
#[derive(Default)]
struct Seen(Mutex<BTreeMap<&'static str, usize>>);

impl Seen {
    fn note<B>(&self, request: &HttpRequest<B>) {
        let method = request.method().as_str();
        let query = request.uri().query().unwrap_or("");
        let has = |header: &str| request.headers().contains_key(header);
        let kinds = [
            ("conditional put", method == "PUT" && has("if-none-match")),
            ("range", method == "GET" && has("range")),
            ("range of a known tag", method == "GET" && has("range") && has("if-match")),
            ("next page of a listing", query.contains("continuation-token")),
            ("part of an upload", method == "PUT" && query.contains("uploadId")),
            ("path-style", request.uri().path().starts_with(&format!("/{BUCKET}"))),
        ];
        let mut seen = self.0.lock().unwrap();
        for (kind, _) in kinds.into_iter().filter(|(_, is)| *is) {
            *seen.entry(kind).or_default() += 1;
        }
    }

    fn count(&self, kind: &str) -> usize {
        self.0.lock().unwrap().get(kind).copied().unwrap_or(0)
    }
}

/// The server's way from a request to its answer. Puts go one at a time: the server looks for the object and then writes it,
/// while S3 does both as one.
#[derive(Clone)]
struct Watched {
    inner: S3Service,
    seen: Arc<Seen>,
    puts: Arc<tokio::sync::Mutex<()>>,
}

impl<B> Service<HttpRequest<B>> for Watched
where
    S3Service: Service<HttpRequest<B>, Response = HttpResponse, Error = HttpError>,
    <S3Service as Service<HttpRequest<B>>>::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = HttpResponse;
    type Error = HttpError;
    type Future = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), HttpError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<B>) -> Self::Future {
        self.seen.note(&request);
        let puts = (request.method().as_str() == "PUT").then(|| self.puts.clone());
        let answer = Service::call(&mut self.inner, request);
        Box::pin(async move {
            let _one = match &puts {
                Some(puts) => Some(puts.lock().await),
                None => None,
            };
            answer.await
        })
    }
}

/// Lets those in who signed, to the one bucket: the server makes others when they are written to.
struct OneBucket;

#[async_trait::async_trait]
impl S3Access for OneBucket {
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        if context.credentials().is_none() {
            return Err(s3_error!(AccessDenied));
        }
        if context.s3_path().get_bucket_name() != Some(BUCKET) {
            return Err(s3_error!(NoSuchBucket));
        }
        Ok(())
    }
}

impl S3 {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(folder.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        builder.set_access(OneBucket);
        let seen = Arc::new(Seen::default());
        let service = Watched { inner: builder.build(), seen: seen.clone(), puts: Arc::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(service.clone());
                tokio::spawn(async move {
                    // A caller that goes away is not the server's failure.
                    let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, seen, accepting: accepting.abort_handle(), _folder: folder }
    }

    /// Runs the test `name` of this program again, with this server and `secret` in its environment.
    async fn run_again(&self, name: &str, secret: &str) {
        let output = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(AGAIN, "1")
            .env("AWS_ENDPOINT_URL", format!("http://{}", self.address))
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ACCESS_KEY_ID", KEY)
            .env("AWS_SECRET_ACCESS_KEY", secret)
            .stdin(Stdio::null())
            .output()
            .await
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&text));
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn is_again() -> bool {
    std::env::var_os(AGAIN).is_some()
}

fn store(bucket: &str) -> Config {
    Config { store: format!("s3://{bucket}/a/prefix"), store_timeout_s: 20, ..Config::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_conforms_on_s3() {
    if is_again() {
        let start = async || Server::open(store(BUCKET)).await;
        return conforms("s3://chunks/a/prefix", "object", start).await;
    }
    let s3 = S3::start().await;
    s3.run_again("s3::the_service_conforms_on_s3", SECRET).await;
    let seen = s3.seen.0.lock().unwrap().clone();
    println!("{seen:?}");
    for kind in ["conditional put", "range", "range of a known tag", "part of an upload", "path-style"] {
        assert!(s3.seen.count(kind) > 0, "no {kind}: {seen:?}");
    }
    // 1,005 records are listed three times.
    assert!(s3.seen.count("next page of a listing") >= 3, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_are_named_at_the_start() {
    if is_again() {
        let error = check_store(&store(BUCKET)).await.unwrap_err().to_string();
        assert!(error.starts_with("open the store s3://chunks/a/prefix: "), "{error}");
        assert!(error.contains("SignatureDoesNotMatch") || error.contains("403"), "{error}");
        assert!(error.ends_with("check its permissions and the credentials in the environment"), "{error}");
        assert!(!error.contains("wrong secret"), "{error}");
        return;
    }
    S3::start().await.run_again("s3::wrong_credentials_are_named_at_the_start", "wrong secret").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_not_there_is_named_at_the_start() {
    if is_again() {
        let error = check_store(&store("nothing")).await.unwrap_err().to_string();
        assert!(error.starts_with("open the store s3://nothing/a/prefix: "), "{error}");
        assert!(error.ends_with("create the bucket or container first"), "{error}");
        return;
    }
    S3::start().await.run_again("s3::a_bucket_that_is_not_there_is_named_at_the_start", SECRET).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_there_is_named_in_time() {
    if is_again() {
        let config = Config { store_timeout_s: 2, ..store(BUCKET) };
        let error = check_store(&config).await.unwrap_err().to_string();
        assert!(error.starts_with("open the store s3://chunks/a/prefix: "), "{error}");
        return;
    }
    let s3 = S3::start().await;
    s3.accepting.abort();
    s3.run_again("s3::a_server_that_is_not_there_is_named_in_time", SECRET).await;
}
