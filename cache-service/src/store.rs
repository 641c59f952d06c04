//! The object store: opened from one URL, proved at the start, and every call under one time limit.
//!
//! Paths: `kv/{chunk id}/{variant}` and `records/{key}`. Nothing else of the service names a path or a backend.

use std::future::Future;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use kvsplice_kv::{ChunkId, object};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig, WriteMultipart,
};
use tokio::sync::Semaphore;
use url::Url;

use crate::error::{Fault, root};
use crate::lookups::{Lookups, Outcome};
use crate::tier::ObjectKey;
use crate::{Config, Error, kept, records};

/// Reads under way at once, over all requests.
const MAX_READS: usize = 128;
/// Parts of large uploads.
const PART_BYTES: usize = 8 << 20;

/// A store with its public name and time limit.
pub(crate) struct Store {
    inner: Arc<dyn ObjectStore>,
    name: String,
    timeout: Duration,
    reads: Semaphore,
    lookups: Arc<Lookups>,
    /// Where its objects lie as files of this host.
    folder: Option<PathBuf>,
}

/// Opens the store that `config` names and proves that it can be written.
pub(crate) async fn open(config: &Config) -> Result<Store, Error> {
    let timeout = Duration::from_secs(config.store_timeout_s);
    let name = public_name(&config.store);
    let failed = |detail: String, advice| Error::Open { store: name.clone(), detail, advice };
    let url = Url::parse(&config.store).map_err(|error| {
        failed(error.to_string(), "use file:///folder, memory://, or a bucket's URL such as s3://bucket/prefix")
    })?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(failed("credentials in the URL".into(), "put them in the environment instead"));
    }
    let mut store = Store::new(connect(&url, timeout, &failed)?, name.clone(), timeout);
    if url.scheme() == "file" {
        store.folder = url.to_file_path().ok().and_then(|folder| folder.canonicalize().ok());
    }
    store.probe().await.map_err(|error| {
        let (detail, advice) = match &error {
            Error::Store { source, .. } => {
                let advice = match error.fault() {
                    Fault::Full => "free some space",
                    Fault::Refused => "check its permissions and the credentials in the environment",
                    Fault::NotFound => "create the bucket or container first",
                    _ => "check that it exists, is reachable and that credentials are in the environment",
                };
                (root(source), advice)
            }
            other => (other.to_string(), "check that it is reachable and that credentials are in the environment"),
        };
        failed(detail, advice)
    })?;
    Ok(store)
}

/// The URL without user, password, query and fragment.
pub(crate) fn public_name(url: &str) -> String {
    let Ok(mut url) = Url::parse(url) else {
        return "(not a URL)".to_owned();
    };
    // Both fail only for URLs that cannot have a user at all.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.set_query(None);
    url.set_fragment(None);
    url.to_string()
}

fn connect(
    url: &Url,
    timeout: Duration,
    failed: &dyn Fn(String, &'static str) -> Error,
) -> Result<Arc<dyn ObjectStore>, Error> {
    // Without a bound of its own, one read of an unreachable store is tried for three minutes.
    let retry = RetryConfig { retry_timeout: timeout, ..RetryConfig::default() };
    let wrong = |error: object_store::Error| failed(root(&error), "check the URL and the environment");
    let prefix = |url: &Url| Path::from_url_path(url.path()).map_err(|error| wrong(error.into()));
    match url.scheme() {
        "memory" => Ok(Arc::new(InMemory::new())),
        "file" => {
            let folder = url
                .to_file_path()
                .map_err(|()| failed("not an absolute path on this machine".into(), "use file:///folder"))?;
            std::fs::create_dir_all(&folder)
                .map_err(|error| failed(error.to_string(), "name a folder that can be created and written"))?;
            // Records are not derived data: they must survive a power failure.
            let store = LocalFileSystem::new_with_prefix(&folder).map_err(wrong)?.with_fsync(true);
            Ok(Arc::new(store))
        }
        "s3" | "s3a" => {
            let bucket = bucket(url, failed)?;
            let store =
                AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry).build().map_err(wrong)?;
            Ok(Arc::new(PrefixStore::new(store, prefix(url)?)))
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env();
            let store = builder.with_bucket_name(bucket(url, failed)?).with_retry(retry).build().map_err(wrong)?;
            Ok(Arc::new(PrefixStore::new(store, prefix(url)?)))
        }
        "az" | "azure" => {
            let builder = MicrosoftAzureBuilder::from_env();
            let store = builder.with_container_name(bucket(url, failed)?).with_retry(retry).build().map_err(wrong)?;
            Ok(Arc::new(PrefixStore::new(store, prefix(url)?)))
        }
        scheme => Err(failed(format!("unknown scheme {scheme:?}"), "use file, memory, s3, gs or az")),
    }
}

fn bucket<'a>(url: &'a Url, failed: &dyn Fn(String, &'static str) -> Error) -> Result<&'a str, Error> {
    url.host_str().ok_or_else(|| failed("no bucket".into(), "name one, such as s3://bucket/prefix"))
}

impl Store {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, name: String, timeout: Duration) -> Self {
        Self { inner, name, timeout, reads: Semaphore::new(MAX_READS), lookups: Arc::default(), folder: None }
    }

    /// Counts failed calls in `lookups` from now on.
    pub(crate) fn count_in(&mut self, lookups: Arc<Lookups>) {
        self.lookups = lookups;
    }

    /// The URL without credentials.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Where an object lies as a file of this host, if there is one. Such a store never writes into an object's file: it
    /// writes another one and renames it.
    pub(crate) fn file(&self, key: &ObjectKey) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(object_path(key).as_ref()))
    }

    /// The folders of this host that the service writes objects into; none when the store is no folder.
    pub(crate) fn own_folders(&self) -> Vec<PathBuf> {
        let Some(folder) = &self.folder else { return Vec::new() };
        [KV, records::ROOT, kept::PINS, kept::COSTS, PROBE].iter().map(|name| folder.join(name)).collect()
    }

    /// Writes, reads and removes a small object.
    async fn probe(&self) -> Result<(), Error> {
        let path = Path::from(format!("{PROBE}/{}", std::process::id()));
        self.replace("write a probe", &path, Bytes::from_static(b"kvsplice").into()).await?;
        self.within("read a probe", self.inner.head(&path)).await?;
        self.delete(&path).await.map(|_| ())
    }

    async fn within<T>(
        &self,
        action: &'static str,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Error> {
        let result = match tokio::time::timeout(self.timeout, call).await {
            Ok(result) => result.map_err(|source| Error::Store { action, source }),
            Err(_elapsed) => Err(Error::StoreTimeout { action, seconds: self.timeout.as_secs() }),
        };
        if let Err(error) = &result {
            self.count(error);
        }
        result
    }

    fn count(&self, error: &Error) {
        let outcome = match (error, error.fault()) {
            // Answers, not failures.
            (_, Fault::NotFound | Fault::Exists | Fault::Changed) => return,
            (_, Fault::Full) => Outcome::StoreFull,
            (_, Fault::Refused) => Outcome::StoreRefused,
            (Error::StoreTimeout { .. }, _) => Outcome::StoreTimeout,
            (_, Fault::Broken | Fault::Other) => Outcome::StoreError,
        };
        self.lookups.count(outcome);
    }

    async fn read(&self, action: &'static str, path: &Path, options: GetOptions) -> Result<(ObjectMeta, Bytes), Error> {
        // The semaphore is never closed; if it were, reading without a permit is still right.
        let _permit = self.reads.acquire().await.ok();
        let call = async {
            let result = self.inner.get_opts(path, options).await?;
            let (meta, range) = (result.meta.clone(), result.range.clone());
            Ok((meta, range, result.bytes().await?))
        };
        let (meta, range, bytes) = self.within(action, call).await?;
        let (got, need) = (bytes.len() as u64, range.end.saturating_sub(range.start));
        if got != need {
            self.lookups.count(Outcome::StoreShort);
            return Err(Error::ShortRead { action, got, need });
        }
        Ok((meta, bytes))
    }

    /// Counts what was read and is not as it was written.
    pub(crate) fn count_fault(&self, error: &object::Error) {
        self.lookups.count(match error {
            object::Error::Truncated { .. } => Outcome::StoreTruncated,
            object::Error::Foreign { .. } | object::Error::OutOfRange { .. } => Outcome::StoreForeign,
            object::Error::DamagedHeader | object::Error::DamagedLayer { .. } => Outcome::StoreDamaged,
        });
    }

    /// The first `bytes` bytes of an object, fewer if it is shorter, and what the store knows of it.
    pub(crate) async fn start_of(&self, path: &Path, bytes: usize) -> Result<(ObjectMeta, Bytes), Error> {
        let range = GetRange::Bounded(0..bytes as u64);
        match self.read("read a header", path, GetOptions { range: Some(range), ..GetOptions::default() }).await {
            Err(error) if matches!(error, Error::Store { .. }) && error.fault() == Fault::Other => {
                // A range of an empty object is an error in every store.
                let meta = self.within("look up an object", self.inner.head(path)).await?;
                if meta.size == 0 { Ok((meta, Bytes::new())) } else { Err(error) }
            }
            other => other,
        }
    }

    /// A range of an object that still has the tag it had when its header was read. May be short if the object is.
    pub(crate) async fn range(&self, path: &Path, e_tag: Option<&str>, range: Range<usize>) -> Result<Bytes, Error> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.start as u64..range.end as u64)),
            if_match: e_tag.map(str::to_owned),
            ..GetOptions::default()
        };
        Ok(self.read("read a layer", path, options).await?.1)
    }

    /// A whole object of at most `limit` bytes; none if there is none.
    pub(crate) async fn get(&self, path: &Path, limit: usize) -> Result<Option<Bytes>, Error> {
        let meta = match self.within("look up an object", self.inner.head(path)).await {
            Ok(meta) => meta,
            Err(error) if error.fault() == Fault::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if meta.size > limit as u64 {
            let detail = format!("must be at most {limit} bytes, has {}", meta.size);
            return Err(Error::Request { field: "record", detail });
        }
        match self.read("read an object", path, GetOptions::default()).await {
            Ok((_, bytes)) => Ok(Some(bytes)),
            Err(error) if error.fault() == Fault::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Stores a new object; false if there is one already.
    pub(crate) async fn create(&self, action: &'static str, path: &Path, payload: PutPayload) -> Result<bool, Error> {
        let put = || self.within(action, self.inner.put_opts(path, payload.clone(), PutMode::Create.into()));
        let result = match put().await {
            // A server that refuses before it has read the body may close the connection under the writer: the next try
            // hears why. The library does not try again, for it cannot know whether the first one was carried out.
            Err(error) if error.fault() == Fault::Broken => put().await,
            result => result,
        };
        match result {
            Ok(_) => Ok(true),
            Err(error) if error.fault() == Fault::Exists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Stores an object whether or not there is one, atomically.
    pub(crate) async fn replace(&self, action: &'static str, path: &Path, payload: PutPayload) -> Result<(), Error> {
        self.within(action, self.inner.put_opts(path, payload, PutMode::Overwrite.into())).await.map(|_| ())
    }

    /// Begins an upload in parts. It becomes visible when it is finished, and replaces what is there.
    pub(crate) async fn upload(&self, path: &Path) -> Result<Upload<'_>, Error> {
        let upload = self.within("begin an upload", self.inner.put_multipart(path)).await?;
        Ok(Upload { store: self, inner: WriteMultipart::new_with_chunk_size(upload, PART_BYTES) })
    }

    /// Removes an object; false if there was none, as far as the store tells.
    pub(crate) async fn delete(&self, path: &Path) -> Result<bool, Error> {
        match self.within("remove an object", self.inner.delete(path)).await {
            Ok(()) => Ok(true),
            Err(error) if error.fault() == Fault::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether there is such an object, and its tag.
    pub(crate) async fn tag(&self, path: &Path) -> Result<Option<Option<String>>, Error> {
        match self.within("look up an object", self.inner.head(path)).await {
            Ok(meta) => Ok(Some(meta.e_tag)),
            Err(error) if error.fault() == Fault::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The paths below `prefix`, ascending.
    pub(crate) async fn list(&self, prefix: &Path) -> Result<Vec<Path>, Error> {
        Ok(self.list_objects(prefix).await?.into_iter().map(|meta| meta.location).collect())
    }

    /// What is below `prefix`, by ascending path. The time limit holds for each step of the listing.
    pub(crate) async fn list_objects(&self, prefix: &Path) -> Result<Vec<ObjectMeta>, Error> {
        let mut entries = self.inner.list(Some(prefix));
        let mut metas = Vec::new();
        while let Some(meta) = self.within("list", entries.try_next()).await? {
            metas.push(meta);
        }
        metas.sort_unstable_by(|a, b| a.location.cmp(&b.location));
        Ok(metas)
    }
}

/// An upload in parts. Dropping it without [`Upload::abort`] may leave parts behind in a bucket.
pub(crate) struct Upload<'a> {
    store: &'a Store,
    inner: WriteMultipart,
}

impl Upload<'_> {
    /// Parts under way at once.
    pub(crate) const PARTS: usize = 3;

    /// Adds bytes; waits while too many parts are under way.
    pub(crate) async fn write(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.store.within("write a part", self.inner.wait_for_capacity(Self::PARTS)).await?;
        self.inner.put(bytes);
        Ok(())
    }

    /// Makes the object visible.
    pub(crate) async fn finish(self) -> Result<(), Error> {
        self.store.within("finish an upload", self.inner.finish()).await.map(|_| ())
    }

    /// Removes what was written.
    pub(crate) async fn abort(self) -> Result<(), Error> {
        self.store.within("abort an upload", self.inner.abort()).await
    }
}

/// Bytes that an upload holds beside those it is given.
pub(crate) const UPLOAD_BYTES: usize = (Upload::PARTS + 1) * PART_BYTES;

/// The folder of what is written at the start to see whether it can be.
const PROBE: &str = "probe";

/// The folder of all chunk KV.
pub(crate) const KV: &str = "kv";

/// The path of one variant of a chunk.
pub(crate) fn object_path(key: &ObjectKey) -> Path {
    Path::from_iter([KV.to_owned(), key.chunk.to_string(), key.variant.to_string()])
}

/// The chunk and variant of a path; none for what is not chunk KV of a known form.
pub(crate) fn object_key(path: &Path) -> Option<ObjectKey> {
    let (chunk, variant) = path.as_ref().strip_prefix(KV)?.strip_prefix('/')?.split_once('/')?;
    let key = ObjectKey { chunk: chunk.parse().ok()?, variant: variant.parse().ok()? };
    (object_path(&key) == *path).then_some(key)
}

/// The folder of all variants of a chunk.
pub(crate) fn chunk_path(chunk: &ChunkId) -> Path {
    Path::from_iter([KV.to_owned(), chunk.to_string()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stores_name_holds_no_secret() {
        assert_eq!(public_name("s3://key:secret@bucket/a?token=x#y"), "s3://bucket/a");
        assert_eq!(public_name("file:///a/b"), "file:///a/b");
        assert_eq!(public_name("nonsense"), "(not a URL)");
    }

    async fn refused(store: String) -> String {
        let config = Config { store, store_timeout_s: 5, ..Config::default() };
        match open(&config).await {
            Ok(_) => panic!("opened {}", config.store),
            Err(error) => error.to_string(),
        }
    }

    #[tokio::test]
    async fn a_store_that_cannot_be_used_is_refused_at_the_start() {
        assert!(refused("ftp://host/a".into()).await.contains("unknown scheme"));
        for scheme in ["s3", "gs", "az"] {
            assert!(refused(format!("{scheme}:///prefix")).await.contains("no bucket"), "{scheme}");
        }
        assert!(refused("s3://key:secret@bucket".into()).await.contains("credentials in the URL"));
        assert!(!refused("s3://key:secret@bucket".into()).await.contains("secret"));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        assert!(refused(Url::from_file_path(file.join("below")).unwrap().into()).await.contains("name a folder"));
    }

    #[tokio::test]
    async fn a_missing_folder_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("a/b");
        let config = Config { store: Url::from_file_path(&below).unwrap().into(), ..Config::default() };
        let store = open(&config).await.unwrap();
        assert!(store.list(&Path::default()).await.unwrap().is_empty());
        assert!(below.is_dir());
    }
}
