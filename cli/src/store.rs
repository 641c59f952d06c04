//! `kvsplice cache stats | ls | get | verify`: looks into the cache service. Changes nothing.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use kvsplice_kv::ChunkId;
use kvsplice_kv::record::Document;
use kvsplice_proto::cache::{CacheClient, intact};
use kvsplice_proto::v1;
use serde_json::json;
use tonic::Status;

use crate::failure::{data, refused, unavailable};
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
    /// Reads chunks in full and checks every frame; by default all chunks of all documents
    #[command(after_help = "Example: kvsplice cache verify --prefix default/wiki --server 127.0.0.1:7402")]
    Verify {
        /// Hexadecimal chunk ids
        chunks: Vec<ChunkId>,
        /// Only documents of records below this prefix, such as default/wiki
        #[arg(long, default_value = "", value_name = "PREFIX", conflicts_with = "chunks")]
        prefix: String,
        /// Stored form of the chunks
        #[arg(long, default_value = "bf16-clean-1")]
        variant: kvsplice_kv::Variant,
        #[command(flatten)]
        common: Common,
    },
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
        Command::Stats(common) => common,
        Command::Ls { common, .. } | Command::Get { common, .. } | Command::Verify { common, .. } => common,
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
        Command::Verify { chunks, prefix, variant, .. } => {
            view.verify(chunks, &prefix, variant, common.server.timeout()).await
        }
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
        if self.json {
            let tier = |tier: &v1::Tier| json!({"name": tier.name, "bytes": tier.bytes, "limit_bytes": tier.limit_bytes, "entries": tier.entries});
            return output::json(&json!({
                "event": "done",
                "store": stats.store,
                "tiers": stats.tiers.iter().map(tier).collect::<Vec<_>>(),
                "leases": stats.leases,
                "pins": stats.pins,
                "lookups": lookups,
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

    async fn verify(
        &self,
        mut chunks: Vec<ChunkId>,
        prefix: &str,
        variant: kvsplice_kv::Variant,
        timeout: Duration,
    ) -> anyhow::Result<()> {
        if chunks.is_empty() {
            chunks = self.chunks_of_documents(prefix).await?;
        }
        let (mut bad, mut bytes) = (0usize, 0u64);
        for chunk in &chunks {
            let checked = tokio::time::timeout(timeout, self.check(*chunk, variant)).await;
            let checked = checked.map_err(|_| unavailable("reading a chunk took too long; raise --timeout"))??;
            let fault = match checked {
                Ok(read) => {
                    bytes += read;
                    None
                }
                Err(fault) => {
                    bad += 1;
                    Some(fault)
                }
            };
            if self.json {
                output::json(&json!({"event": "chunk", "chunk": chunk.to_string(), "fault": fault}))?;
            } else if let Some(fault) = fault {
                output::line(format_args!("{chunk}: {fault}"))?;
            }
        }
        let good = chunks.len() - bad;
        if self.json {
            output::json(&json!({"event": "done", "good": good, "bad": bad, "bytes": bytes}))?;
        } else {
            output::line(format_args!("{good} chunks are whole ({}), {bad} are not", output::bytes(bytes)))?;
        }
        if bad > 0 {
            return Err(data(format!("{bad} of {} chunks cannot be used; asking repairs them", chunks.len())));
        }
        Ok(())
    }

    async fn chunks_of_documents(&self, prefix: &str) -> anyhow::Result<Vec<ChunkId>> {
        let keys = self.cache.list_records(prefix).await.map_err(|status| self.refused(status))?;
        let mut chunks = Vec::new();
        for key in keys.iter().filter(|key| key.contains("/documents/")) {
            let Some(record) = self.cache.get_record(key).await.map_err(|status| self.refused(status))? else {
                continue;
            };
            let document: Document = serde_json::from_slice(&record)
                .map_err(|error| data(format!("record {key}: {error}; ingest the document again")))?;
            chunks.extend(document.chunks.iter().flat_map(|chunk| chunk.ids.values().copied()));
        }
        chunks.sort_unstable();
        chunks.dedup();
        Ok(chunks)
    }

    /// Bytes of the chunk's KV, or what is wrong with it.
    async fn check(&self, chunk: ChunkId, variant: kvsplice_kv::Variant) -> anyhow::Result<Result<u64, String>> {
        let want = v1::Want { chunks: vec![chunk.to_string()], variant: variant.to_string(), ..Default::default() };
        let (_requests, mut frames) = self.cache.get_chunks(want).await.map_err(|status| self.refused(status))?;
        let mut bytes = 0;
        while let Some(frame) = frames.message().await.map_err(|status| self.refused(status))? {
            if !frame.error.is_empty() {
                return Ok(Err(frame.error));
            }
            if !intact(&frame) {
                return Ok(Err(format!("layer {} does not match its checksum on arrival", frame.layer)));
            }
            bytes += frame.data.len() as u64;
        }
        Ok(Ok(bytes))
    }
}
