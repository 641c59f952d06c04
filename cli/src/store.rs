//! `kvsplice cache stats | ls | get | verify | gc | pin | unpin`: the commands, and those that only look. What takes care of
//! the stored chunks is in `upkeep`.

mod upkeep;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use kvsplice_kv::ChunkId;
use kvsplice_proto::cache::CacheClient;
use kvsplice_proto::v1;
use serde_json::json;
use tonic::Status;

use crate::failure::{data, refused};
use crate::flags::{ConfigFlags, ServerFlags};
use crate::roles::Role;
use crate::session::Session;
use crate::{output, session, telemetry};

/// What to look at.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Sizes of the tiers, and how lookups went
    #[command(after_help = "Example: kvsplice cache stats --server 127.0.0.1:7402")]
    Stats(Common),
    /// Records below a prefix, such as default/wiki/documents
    #[command(after_help = "Example: kvsplice cache ls default/wiki --server 127.0.0.1:7402")]
    Ls {
        /// Whole segments; none for all
        #[arg(default_value = "")]
        prefix: String,
        #[command(flatten)]
        common: Common,
    },
    /// One record, as it is stored
    #[command(after_help = "Example: kvsplice cache get default/wiki/manifest --server 127.0.0.1:7402")]
    Get {
        /// As ls prints it
        key: String,
        /// Write it here instead of to stdout
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        #[command(flatten)]
        common: Common,
    },
    /// Reads chunks whole from the object store, past every tier, and checks each layer of every stored form
    #[command(
        group(ArgGroup::new("what").args(["chunks", "all", "prefix"]).required(true)),
        after_help = "Examples:\n  kvsplice cache verify --all --server 127.0.0.1:7402\n  \
                      kvsplice cache verify --prefix default/wiki --server 127.0.0.1:7402\n  \
                      kvsplice cache verify $(kvsplice ask ... --json | jq -r '.receipt.chunks[]?.id')"
    )]
    Verify {
        /// Hexadecimal chunk ids
        #[arg(value_name = "ID")]
        chunks: Vec<ChunkId>,
        /// Chunks of all documents of all corpora
        #[arg(long)]
        all: bool,
        /// Chunks of documents whose records lie below this prefix, such as default/wiki
        #[arg(long, value_name = "PREFIX")]
        prefix: Option<String>,
        #[command(flatten)]
        common: Common,
    },
    /// Removes chunk KV that no document names; pinned, leased and young chunks stay
    #[command(after_help = "Examples:\n  kvsplice cache gc --dry-run --server 127.0.0.1:7402\n  \
                      kvsplice cache gc --older-than 7d --server 127.0.0.1:7402")]
    Gc {
        /// Remove nothing, only say what would be removed
        #[arg(long)]
        dry_run: bool,
        /// Only what was stored longer ago than this, such as 90s, 12h or 7d; an ingest that runs needs its chunks
        #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = humantime::parse_duration)]
        older_than: Duration,
        #[command(flatten)]
        common: Common,
    },
    /// Protects chunks from eviction and removal until unpinned
    #[command(after_help = "Example: kvsplice cache pin 6f0c...e1 --server 127.0.0.1:7402")]
    Pin(Pins),
    /// Takes pins away
    #[command(after_help = "Example: kvsplice cache unpin 6f0c...e1 --server 127.0.0.1:7402")]
    Unpin(Pins),
}

/// Which chunks to pin or unpin.
#[derive(Args, Clone, Debug)]
pub(crate) struct Pins {
    /// Hexadecimal chunk ids, as a receipt shows them
    #[arg(required = true, value_name = "ID")]
    chunks: Vec<ChunkId>,
    #[command(flatten)]
    common: Common,
}

/// Flags of each.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Runs one of them against `--server` (a cache service), or against the configured store.
pub(crate) async fn run(command: Command) -> anyhow::Result<()> {
    let common = match &command {
        Command::Stats(common) | Command::Pin(Pins { common, .. }) | Command::Unpin(Pins { common, .. }) => common,
        Command::Ls { common, .. }
        | Command::Get { common, .. }
        | Command::Verify { common, .. }
        | Command::Gc { common, .. } => common,
    }
    .clone();
    let config = common.config.load(Vec::new())?;
    if common.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    let _telemetry = telemetry::start(config.log.as_deref().unwrap_or("warn"), config.otlp.as_deref())?;
    let session = session::open(&common.server, config, &[Role::Cache]).await?;
    let view = View { cache: session.cache(common.server.timeout()), session: &session, json: common.json };
    let result = match command {
        Command::Stats(_) => view.stats().await,
        Command::Ls { prefix, .. } => view.list(&prefix).await,
        Command::Get { key, output, .. } => view.get(&key, output).await,
        Command::Verify { chunks, prefix, .. } if chunks.is_empty() => {
            match view.named(&prefix.unwrap_or_default()).await {
                Ok(chunks) => view.verify(chunks).await,
                Err(error) => Err(error),
            }
        }
        Command::Verify { chunks, .. } => view.verify(chunks).await,
        Command::Gc { dry_run, older_than, .. } => view.collect(dry_run, older_than).await,
        Command::Pin(Pins { chunks, .. }) => view.pin(&chunks).await,
        Command::Unpin(Pins { chunks, .. }) => view.unpin(&chunks).await,
    };
    let closed = session.close().await;
    result.and(closed)
}

struct View<'a> {
    cache: CacheClient,
    session: &'a Session,
    json: bool,
}

impl View<'_> {
    fn refused(&self, status: Status) -> anyhow::Error {
        refused(status, &self.session.server)
    }

    async fn stats(&self) -> anyhow::Result<()> {
        let stats = self.cache.stats().await.map_err(|status| self.refused(status))?;
        let lookups: BTreeMap<_, _> = stats.lookups.into_iter().collect();
        let costs: BTreeMap<_, _> = stats.encode_us_per_token.into_iter().collect();
        if self.json {
            let tier = |tier: &v1::Tier| json!({"name": tier.name, "bytes": tier.bytes, "limit_bytes": tier.limit_bytes, "entries": tier.entries});
            return output::json(&json!({
                "event": "done",
                "store": stats.store,
                "tiers": stats.tiers.iter().map(tier).collect::<Vec<_>>(),
                "leases": stats.leases,
                "pins": stats.pins,
                "lookups": lookups,
                "encode_us_per_token": costs,
            }));
        }
        output::line(format_args!("store {}, {} leases, {} pins", stats.store, stats.leases, stats.pins))?;
        for tier in &stats.tiers {
            let limit = match tier.limit_bytes {
                0 => "no limit".to_owned(),
                limit => format!("at most {}", output::bytes(limit)),
            };
            let held = output::bytes(tier.bytes);
            output::line(format_args!("tier {}: {held} in {} entries, {limit}", tier.name, tier.entries))?;
        }
        for (result, count) in lookups {
            output::line(format_args!("lookups {result}: {count}"))?;
        }
        for (model, cost) in costs {
            output::line(format_args!("model {model}: {cost:.1} µs a token to compute, as measured"))?;
        }
        Ok(())
    }

    async fn list(&self, prefix: &str) -> anyhow::Result<()> {
        let keys = self.cache.list_records(prefix).await.map_err(|status| self.refused(status))?;
        for key in &keys {
            if self.json {
                output::json(&json!({"event": "record", "key": key}))?;
            } else {
                output::line(key)?;
            }
        }
        if self.json {
            output::json(&json!({"event": "done", "records": keys.len()}))?;
        }
        Ok(())
    }

    async fn get(&self, key: &str, file: Option<PathBuf>) -> anyhow::Result<()> {
        let record = self.cache.get_record(key).await.map_err(|status| self.refused(status))?;
        let record = record.ok_or_else(|| data(format!("no record {key:?}; kvsplice cache ls lists them")))?;
        match file {
            Some(file) => {
                std::fs::write(&file, &record).map_err(|error| data(format!("write {}: {error}", file.display())))?
            }
            None if !self.json => std::io::stdout().lock().write_all(&record)?,
            None => {}
        }
        if self.json {
            let value = serde_json::from_slice::<serde_json::Value>(&record).ok();
            output::json(&json!({"event": "done", "key": key, "bytes": record.len(), "value": value}))?;
        }
        Ok(())
    }
}
