//! A door in front of a role: while it is shut, what its callers send waits; what the role answers goes through.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

/// The door. It stands open at first.
#[derive(Debug)]
pub struct Gate {
    address: String,
    open: watch::Sender<bool>,
    waiting: Arc<AtomicUsize>,
    /// Its connections end with it.
    runtime: Option<Runtime>,
}

impl Gate {
    /// A door to the role at `target`, which is called anew for each connection.
    pub fn start(target: &str) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().context("start tokio")?;
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).context("listen")?;
        let address = listener.local_addr().context("read the address")?.to_string();
        let (open, watched) = watch::channel(true);
        let waiting = Arc::new(AtomicUsize::new(0));
        let (target, count) = (target.to_owned(), Arc::clone(&waiting));
        runtime.spawn(async move {
            while let Ok((caller, _)) = listener.accept().await {
                // A role that is down: the caller's connection breaks.
                let Ok(role) = TcpStream::connect(&target).await else { continue };
                let ((from_caller, to_caller), (from_role, to_role)) = (caller.into_split(), role.into_split());
                tokio::spawn(pass(from_caller, to_role, Some((watched.clone(), Arc::clone(&count)))));
                tokio::spawn(pass(from_role, to_caller, None));
            }
        });
        Ok(Self { address, open, waiting, runtime: Some(runtime) })
    }

    /// `HOST:PORT` for the callers.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// From now on what is sent waits.
    pub fn shut(&self) {
        self.open.send_replace(false);
    }

    /// Lets everything through, what has waited first.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// How many connections have something that waits.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Copies until either end is gone.
async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    door: Option<(watch::Receiver<bool>, Arc<AtomicUsize>)>,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer).await {
        if let Some((open, waiting)) = &door
            && !*open.borrow()
        {
            waiting.fetch_add(1, Ordering::SeqCst);
            // Fails when the door itself is gone, and its connections with it.
            let opened = open.clone().wait_for(|open| *open).await.is_ok();
            waiting.fetch_sub(1, Ordering::SeqCst);
            if !opened {
                return;
            }
        }
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
    }
    // The other end may have closed already.
    let _ = to.shutdown().await;
}
