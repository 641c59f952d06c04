//! Waiting for a condition, always with a deadline. The only place of the tests that lets time pass.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::{Process, cache_stats, worker_status};

const PAUSE: Duration = Duration::from_millis(20);
/// Time until a role serves: it loads its models first.
const SERVE: Duration = Duration::from_secs(120);

/// Asks `condition` until it answers with a value. Fails after `deadline`, or with the condition's own error.
pub fn wait_until<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if start.elapsed() > deadline {
            bail!("{what} did not come within {} s", deadline.as_secs_f32());
        }
        std::thread::sleep(PAUSE);
    }
}

/// Looks again and again, until `stop`.
pub fn watch(stop: &AtomicBool, mut look: impl FnMut()) {
    while !stop.load(Ordering::SeqCst) {
        look();
        std::thread::sleep(PAUSE / 10);
    }
}

/// Waits until the worker at `worker` has nothing in hand, nor memory or chunks for it, and the cache service at `cache` no lease.
pub fn wait_idle(worker: &str, cache: &str, deadline: Duration) -> Result<()> {
    wait_until("an idle worker and no lease", deadline, || {
        let status = worker_status(worker)?;
        let held: u64 = [status.pool, status.device_pool].into_iter().flatten().map(|pool| pool.held).sum();
        let idle = status.running == 0 && status.queued == 0 && status.kv_bytes == 0 && held == 0;
        Ok((idle && cache_stats(cache)?.leases == 0).then_some(()))
    })
}

/// Waits until the role's health service says SERVING. Fails with the role's log.
pub fn wait_serving(process: &Process) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    let served = wait_until(&format!("{} serving", process.role()), SERVE, || {
        Ok(runtime.block_on(is_serving(process.address())).then_some(()))
    });
    match served {
        Ok(()) => Ok(()),
        Err(error) => Err(error.context(process.log_text()?)),
    }
}

async fn is_serving(address: &str) -> bool {
    let Ok(channel) = kvsplice_proto::client::channel(address) else {
        return false;
    };
    let request = kvsplice_proto::client::request(HealthCheckRequest::default(), Duration::from_secs(5));
    match HealthClient::new(channel).check(request).await {
        Ok(response) => response.into_inner().status() == ServingStatus::Serving,
        Err(_) => false,
    }
}
