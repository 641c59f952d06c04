//! A lease of the cache service that a request holds. It is given back when the request is over, however it ends. It is renewed
//! as long as the request lasts: that of a head that dies lapses within [`LAPSES`].

use std::time::Duration;

use kvsplice_proto::cache::CacheClient;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::Code;
use tracing::debug;

/// A lease that is not renewed for so long protects nothing until it is.
pub(crate) const LAPSES: Duration = Duration::from_secs(4);
/// Often enough that a pause of a few seconds does no harm.
const RENEWED: Duration = Duration::from_secs(1);

/// A lease in hand.
#[derive(Debug)]
pub(crate) struct Lease {
    id: String,
    cache: CacheClient,
    renewing: JoinHandle<()>,
}

impl Lease {
    /// Must be called within a tokio runtime.
    pub(crate) fn new(id: String, cache: CacheClient) -> Self {
        let renewing = tokio::spawn(renew(id.clone(), cache.with_deadline(LAPSES)));
        Self { id, cache, renewing }
    }

    /// As the cache service names it.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }
}

async fn renew(id: String, cache: CacheClient) {
    loop {
        tokio::time::sleep(RENEWED).await;
        match cache.renew(id.clone()).await {
            Ok(()) => {}
            // An older service, whose leases do not lapse.
            Err(status) if status.code() == Code::Unimplemented => return,
            Err(status) => debug!(error = status.message(), "a lease is not renewed this time"),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewing.abort();
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
