//! A lease of the cache service that a request holds. It is given back when the request is over, however it ends; a head
//! that dies lets it end by itself.

use kvsplice_proto::cache::CacheClient;
use tokio::runtime::Handle;
use tracing::debug;

/// A lease in hand.
#[derive(Debug)]
pub(crate) struct Lease {
    id: String,
    cache: CacheClient,
}

impl Lease {
    pub(crate) fn new(id: String, cache: CacheClient) -> Self {
        Self { id, cache }
    }

    /// As the cache service names it.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let (id, cache) = (std::mem::take(&mut self.id), self.cache.clone());
        // Without a runtime the process is at its end.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(status) = cache.release(id).await {
                debug!(error = status.message(), "a lease is not given back: it ends by itself");
            }
        });
    }
}
