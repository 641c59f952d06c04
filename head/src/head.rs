//! Everything that a request needs, made once at the start.

use std::sync::Arc;
use std::time::Duration;

use kvsplice_kv::{Encoding, KvLayout};
use kvsplice_model::{Compute, Description, Model};
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::client::channel;
use kvsplice_proto::load::Loader;
use tracing::{info, warn};

use crate::auxiliary::Auxiliary;
use crate::corpus::{Corpora, blocking};
use crate::craft::Captures;
use crate::plan::Planner;
use crate::text::TextModel;
use crate::worker::Worker;
use crate::{Config, Error};

/// The head's state. Requests share it.
pub(crate) struct Head {
    pub(crate) config: Config,
    pub(crate) primary: TextModel,
    pub(crate) auxiliary_text: TextModel,
    pub(crate) auxiliary: Arc<Auxiliary>,
    pub(crate) cache: CacheClient,
    pub(crate) worker: Worker,
    pub(crate) corpora: Corpora,
    pub(crate) captures: Arc<Captures>,
}

impl Head {
    /// Reads the models and makes the clients. Peers that are down are no error: they are called on first use.
    pub(crate) async fn start(config: Config, compute: Compute) -> Result<Self, Error> {
        config.validate()?;
        let call_deadline = Duration::from_secs(config.call_deadline_s);
        let cache = CacheClient::new(channel(&config.cache)?, call_deadline);
        let spec = config.primary.clone();
        let description = blocking("read the primary model's description", move || Description::read(&spec)).await??;
        let primary = TextModel { role: "primary", description };
        let spec = config.auxiliary.clone();
        let model = compute.run(move || Model::load(&spec)).await??;
        let auxiliary_text = TextModel { role: "auxiliary", description: model.description.clone() };
        // Whole chunks travel: they may take longer than a short call.
        let transfers = cache.with_deadline(Duration::from_secs(config.deadline_s));
        let transfers = Loader::over(transfers, config.map_files);
        let corpora = Corpora::new(cache.clone(), config.owner.clone(), primary.digest, auxiliary_text.digest);
        let worker = Worker::new(&config.worker, primary.digest, call_deadline)?;
        info!(
            primary = primary.name,
            primary_digest = %primary.digest.short(),
            auxiliary = auxiliary_text.name,
            auxiliary_digest = %auxiliary_text.digest.short(),
            "models ready"
        );
        if let Err(error) = worker.check().await {
            warn!(%error, "the worker is not usable yet");
        }
        let auxiliary = Arc::new(Auxiliary::new(model, compute, transfers, &config)?);
        let captures = Arc::new(Captures::new(cache.clone(), &config));
        Ok(Self { primary, auxiliary_text, auxiliary, cache, worker, corpora, captures, config })
    }

    /// What plans prompts.
    pub(crate) fn planner(&self) -> Planner<'_> {
        Planner { primary: &self.primary, auxiliary: &self.auxiliary_text, owner: &self.config.owner }
    }

    /// The layout of the primary's KV.
    pub(crate) fn primary_layout(&self, encoding: Encoding) -> KvLayout {
        self.primary.layout(encoding)
    }
}
