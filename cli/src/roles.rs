//! Starts and stops roles in this process: for `up`, for one role alone, and for commands without `--server`.
//!
//! Every listener is bound before any work starts. Roles stop in the order head, worker, cache, so that what runs can
//! finish. All roles share one compute thread.

use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
#[cfg(any(feature = "client", feature = "cache"))]
use tracing::info;
use tracing::warn;

use crate::config::Config;
use crate::failure::{unavailable, usage};

/// A part of the system that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Scores, selects, plans.
    Head,
    /// Loads, recomputes, decodes.
    Worker,
    /// Keeps chunk KV and records.
    Cache,
}

impl Role {
    /// Every role, in the order in which they stop.
    pub(crate) const ALL: [Role; 3] = [Role::Head, Role::Worker, Role::Cache];

    /// Its name on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Role::Head => "head",
            Role::Worker => "worker",
            Role::Cache => "cache",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where roles listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listen {
    /// At the configured addresses.
    Configured,
    /// On free loopback ports.
    #[cfg(any(feature = "client", feature = "cache"))]
    Free,
}

/// Roles that run in this process.
pub(crate) struct Running {
    parts: Vec<Part>,
}

struct Part {
    role: Role,
    address: SocketAddr,
    stop: CancellationToken,
    /// Taken once it has ended.
    task: Option<JoinHandle<anyhow::Result<()>>>,
}

/// Binds every listener, then starts the roles. Roles that start together are told each other's addresses.
pub(crate) async fn start(mut config: Config, roles: &[Role], listen: Listen) -> anyhow::Result<Running> {
    let mut bound = Vec::new();
    for &role in roles {
        let listener = bind(role, &config, listen).await?;
        let address = listener.local_addr().with_context(|| format!("read the address of the {role}"))?;
        if !address.ip().is_loopback() {
            warn!(%role, %address, "listening beyond loopback without encryption or access control");
        }
        introduce(&mut config, role, address);
        bound.push((role, address, listener));
    }
    #[cfg(any(feature = "head", feature = "worker"))]
    let compute = if roles.iter().any(|&role| role != Role::Cache) {
        Some(kvsplice_model::Compute::start().context("start the compute thread")?)
    } else {
        None
    };
    let mut running = Running { parts: Vec::new() };
    for (role, address, listener) in bound {
        let stop = CancellationToken::new();
        let stopped = stop.clone().cancelled_owned();
        let config = config.clone();
        #[cfg(any(feature = "head", feature = "worker"))]
        let compute = compute.clone();
        let task = tokio::spawn(async move {
            match role {
                #[cfg(feature = "head")]
                Role::Head => match compute {
                    Some(compute) => as_result(kvsplice_head::run(config.head, compute, listener, stopped)).await,
                    None => Err(anyhow::anyhow!("no compute thread for the head")),
                },
                #[cfg(feature = "worker")]
                Role::Worker => match compute {
                    Some(compute) => {
                        as_result(kvsplice_gpu_worker::run(config.worker, compute, listener, stopped)).await
                    }
                    None => Err(anyhow::anyhow!("no compute thread for the worker")),
                },
                #[cfg(feature = "cache")]
                Role::Cache => as_result(kvsplice_cache_service::run(config.cache, listener, stopped)).await,
                #[cfg(not(all(feature = "head", feature = "worker", feature = "cache")))]
                missing => {
                    drop((listener, stopped, config));
                    Err(usage(format!("this build has no {missing}; build it with --features {missing}")))
                }
            }
        });
        running.parts.push(Part { role, address, stop, task: Some(task) });
    }
    Ok(running)
}

#[cfg(any(feature = "head", feature = "worker", feature = "cache"))]
async fn as_result<E>(run: impl Future<Output = Result<(), E>>) -> anyhow::Result<()>
where
    E: std::error::Error + Send + Sync + 'static,
{
    run.await.map_err(anyhow::Error::from)
}

async fn bind(role: Role, config: &Config, listen: Listen) -> anyhow::Result<TcpListener> {
    let configured = match role {
        Role::Head => &config.listen.head,
        Role::Worker => &config.listen.worker,
        Role::Cache => &config.listen.cache,
    };
    let address = match listen {
        Listen::Configured => configured.as_str(),
        #[cfg(any(feature = "client", feature = "cache"))]
        Listen::Free => "127.0.0.1:0",
    };
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => unavailable(format!(
            "{role}: {address} is in use by another program; stop it, or choose another with --listen or [listen] {role}"
        )),
        _ => usage(format!("{role}: listen on {address:?}: {error}; --listen needs HOST:PORT of this machine")),
    })
}

/// Tells the other roles of this process where `role` listens.
fn introduce(config: &mut Config, role: Role, address: SocketAddr) {
    let address = address.to_string();
    match role {
        Role::Head => {}
        Role::Worker => {
            #[cfg(feature = "head")]
            config.head.worker.clone_from(&address);
        }
        Role::Cache => {
            #[cfg(feature = "head")]
            config.head.cache.clone_from(&address);
            #[cfg(feature = "worker")]
            config.worker.cache.clone_from(&address);
        }
    }
    #[cfg(not(any(feature = "head", feature = "worker")))]
    let _no_peer = (config, address);
}

impl Running {
    /// Every role with its address.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = (Role, SocketAddr)> + '_ {
        self.parts.iter().map(|part| (part.role, part.address))
    }

    /// Waits until each role answers health checks; fails with the error of a role that ends before.
    #[cfg(any(feature = "client", feature = "cache"))]
    pub(crate) async fn ready(&mut self, deadline: Duration) -> anyhow::Result<()> {
        let addresses: Vec<(Role, SocketAddr)> = self.addresses().collect();
        let serving = async {
            for (role, address) in addresses {
                let channel = kvsplice_proto::client::channel(&address.to_string())?;
                while !is_serving(channel.clone()).await {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                info!(%role, %address, "serving");
            }
            anyhow::Ok(())
        };
        tokio::select! {
            ready = tokio::time::timeout(deadline, serving) => ready.map_err(|_| {
                unavailable(format!("the roles did not come up within {} s; see the log", deadline.as_secs()))
            })?,
            error = self.ended() => Err(error),
        }
    }

    /// Resolves when a role ends without being asked to. Safe to drop while it waits.
    pub(crate) async fn ended(&mut self) -> anyhow::Error {
        let (role, result) = std::future::poll_fn(|cx| {
            for part in &mut self.parts {
                if let Some(task) = &mut part.task
                    && let Poll::Ready(result) = Pin::new(task).poll(cx)
                {
                    part.task = None;
                    return Poll::Ready((part.role, result));
                }
            }
            Poll::Pending
        })
        .await;
        match result {
            Ok(Err(error)) => error.context(format!("the {role} cannot run")),
            Ok(Ok(())) => anyhow::anyhow!("the {role} ended without being asked to"),
            Err(error) => anyhow::anyhow!("the {role} failed: {error}"),
        }
    }

    /// Stops one role after the other; each finishes what it runs within its grace time.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let mut failed = None;
        self.parts.sort_by_key(|part| Role::ALL.iter().position(|known| *known == part.role));
        for Part { role, stop, task, .. } in self.parts {
            stop.cancel();
            let Some(task) = task else { continue };
            match task.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    failed.get_or_insert(error.context(format!("stop the {role}")));
                }
                Err(error) => {
                    failed.get_or_insert(anyhow::anyhow!("the {role} failed: {error}"));
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Whether the server behind `channel` says that it serves.
pub(crate) async fn is_serving(channel: tonic::transport::Channel) -> bool {
    let request =
        kvsplice_proto::client::request(HealthCheckRequest { service: String::new() }, Duration::from_secs(2));
    let answer = HealthClient::new(channel).check(request).await;
    answer.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving)
}
