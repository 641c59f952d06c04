//! What the rest of the worker knows of the engine: a handle that sends it commands, and what Status reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use kvsplice_kv::RowRanges;
use kvsplice_model::{Compute, Model};
use kvsplice_proto::load::{Loaded, Loader};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;
use tracing::{Span, info_span};

use crate::active::{Events, chunks};
use crate::beginning::Beginnings;
use crate::encode::Call;
use crate::engine::{Engine, token_bytes};
use crate::pool::{Limits, Pool};
use crate::request::Request;
use crate::{Config, Error};

/// News that may wait for the engine.
const WAITING_COMMANDS: usize = 256;

/// What the engine is told.
pub(crate) enum Command {
    Start {
        request: Box<Request>,
        events: Events,
        accepted: oneshot::Sender<Result<u64, Error>>,
        span: Span,
    },
    Rows {
        id: u64,
        rows: RowRanges,
        complete_below: u32,
    },
    Loaded {
        id: u64,
        news: Loaded,
    },
    /// A caller left, or has an error to report.
    Cancel {
        id: u64,
        status: Option<Status>,
    },
    Encode(Box<Call>),
    /// Something changed that the engine was waiting for.
    Wake,
}

/// What Status reports.
#[derive(Debug, Default)]
pub(crate) struct Load {
    pub(crate) running: AtomicU32,
    pub(crate) queued: AtomicU32,
    pub(crate) kv_bytes: AtomicU64,
}

/// A handle to the engine; clones share it.
#[derive(Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    pub(crate) load: Arc<Load>,
    pub(crate) beginnings: Beginnings,
    pub(crate) pool: Pool,
}

impl Handle {
    /// Starts the engine. It ends when the last handle is gone.
    pub(crate) fn start(config: &Config, model: Model, compute: Compute, loader: Loader) -> Self {
        let (commands, inbox) = mpsc::channel(WAITING_COMMANDS);
        let load = Arc::new(Load::default());
        let beginnings = Beginnings::new(config.beginning_policy, config.beginning_bytes, token_bytes(&model));
        let limits =
            Limits { host_bytes: config.pool_bytes, device_bytes: config.device_pool_bytes.unwrap_or_default() };
        let pool = Pool::new(limits, model.config.layers);
        pool.watch();
        let handle = Self { commands, load, beginnings, pool };
        tokio::spawn(Engine::new(&handle, config, model, compute, loader).run(inbox));
        handle
    }

    /// Where the engine hears of itself; it does not keep the engine alive.
    pub(crate) fn downgrade(&self) -> mpsc::WeakSender<Command> {
        self.commands.downgrade()
    }

    /// Hands in a request; events follow. Refused when the queue is full or the request can never fit.
    pub(crate) async fn submit(&self, request: Request, events: Events) -> Result<u64, Error> {
        let (accepted, answer) = oneshot::channel();
        let span = info_span!("prefill", tokens = request.tokens(), chunks = chunks(&request));
        self.send(Command::Start { request: Box::new(request), events, accepted, span }).await?;
        answer.await.map_err(|_| Error::Stopping)?
    }

    /// Rows of a request.
    pub(crate) async fn rows(&self, id: u64, rows: RowRanges, complete_below: u32) -> Result<(), Error> {
        self.send(Command::Rows { id, rows, complete_below }).await
    }

    /// Drops a request. A status is told to its caller first.
    pub(crate) async fn cancel(&self, id: u64, status: Option<Status>) {
        // An engine that is gone has no requests.
        drop(self.send(Command::Cancel { id, status }).await);
    }

    /// Hands in an Encode call; its events follow.
    pub(crate) async fn encode(&self, call: Call) -> Result<(), Error> {
        self.send(Command::Encode(Box::new(call))).await
    }

    async fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).await.map_err(|_| Error::Stopping)
    }
}
