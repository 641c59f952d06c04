//! What takes care of stored chunks: verifying, removing orphans, pinning. The cache service does the work; this asks and tells.

use std::time::Duration;

use kvsplice_kv::ChunkId;
use kvsplice_kv::record::Document;
use kvsplice_proto::v1;
use serde_json::json;

use super::View;
use crate::failure::data;
use crate::output;

/// Chunks of one Verify call: each has the deadline of the command for itself.
const VERIFY_CHUNKS: usize = 64;

impl View<'_> {
    /// Asks for every chunk to be read and checked. Fails if one cannot be used, after naming them all.
    pub(super) async fn verify(&self, mut chunks: Vec<ChunkId>) -> anyhow::Result<()> {
        chunks.sort_unstable();
        chunks.dedup();
        let mut total = v1::VerifyResponse::default();
        for batch in chunks.chunks(VERIFY_CHUNKS) {
            let found = self.cache.verify(batch).await.map_err(|status| self.refused(status))?;
            total.objects += found.objects;
            total.bytes += found.bytes;
            for v1::ObjectFault { path, fault } in &found.faults {
                if self.json {
                    output::json(&json!({"event": "fault", "path": path, "fault": fault}))?;
                } else {
                    output::line(format_args!("{path}: {fault}"))?;
                }
            }
            total.faults.extend(found.faults);
        }
        let bad = total.faults.len();
        if self.json {
            let (objects, bytes) = (total.objects, total.bytes);
            let done = json!({"event": "done", "chunks": chunks.len(), "objects": objects, "bytes": bytes, "bad": bad});
            output::json(&done)?;
        } else {
            let (count, objects, bytes) = (chunks.len(), total.objects, output::bytes(total.bytes));
            output::line(format_args!("{count} chunks in {objects} objects, {bytes} whole; {bad} cannot be used"))?;
        }
        if bad > 0 {
            return Err(data(format!("{bad} chunk objects cannot be used; they are repaired when they are asked for")));
        }
        Ok(())
    }

    /// The chunks that the documents below a prefix name.
    pub(super) async fn named(&self, prefix: &str) -> anyhow::Result<Vec<ChunkId>> {
        let keys = self.cache.list_records(prefix).await.map_err(|status| self.refused(status))?;
        let mut chunks = Vec::new();
        for key in keys.iter().filter(|key| key.contains("/documents/")) {
            // Removed since it was listed: nothing to look at.
            let Some(record) = self.cache.get_record(key).await.map_err(|status| self.refused(status))? else {
                continue;
            };
            let document: Document = serde_json::from_slice(&record)
                .map_err(|error| data(format!("record {key}: {error}; ingest the document again")))?;
            for chunk in &document.chunks {
                chunks.extend(chunk.ids.values().chain(chunk.auxiliary_ids.values()).copied());
            }
        }
        Ok(chunks)
    }

    /// Removes chunk KV that no document names and what killed puts have left, older than `min_age`; or says what it would
    /// remove.
    pub(super) async fn collect(&self, dry_run: bool, min_age: Duration) -> anyhow::Result<()> {
        let (mut removed, mut bytes) = (0usize, 0u64);
        let (mut staging, mut staging_bytes) = (0, 0);
        let last = loop {
            let found = self.cache.collect_orphans(dry_run, min_age).await.map_err(|status| self.refused(status))?;
            removed += found.removed.len();
            bytes += found.bytes;
            staging += found.staging;
            staging_bytes += found.staging_bytes;
            for path in &found.removed {
                if self.json {
                    output::json(&json!({"event": "orphan", "path": path, "removed": !dry_run}))?;
                } else {
                    output::line(path)?;
                }
            }
            // Without a removal the next call would find the same ones.
            if dry_run || !found.more || found.removed.is_empty() {
                break found;
            }
        };
        if self.json {
            return output::json(&json!({
                "event": "done",
                "dry_run": dry_run,
                "orphans": removed,
                "bytes": bytes,
                "named": last.named,
                "young": last.young,
                "protected": last.protected,
                "more": last.more,
                "staging": staging,
                "staging_bytes": staging_bytes,
                "staging_young": last.staging_young,
            }));
        }
        let what = match (dry_run, last.more) {
            (true, true) => "would be removed, and there are more",
            (true, false) => "would be removed",
            (false, _) => "removed",
        };
        let (bytes, staging_bytes) = (output::bytes(bytes), output::bytes(staging_bytes));
        let v1::CollectOrphansResponse { named, young, protected, .. } = last;
        output::line(format_args!("{removed} objects ({bytes}) {what}"))?;
        if staging > 0 {
            output::line(format_args!(
                "{staging} files ({staging_bytes}) of killed puts {}",
                if dry_run { "would be removed" } else { "removed" }
            ))?;
        }
        output::line(format_args!("{named} stay for a document, {young} are too young, {protected} pinned or leased"))
    }

    pub(super) async fn pin(&self, chunks: &[ChunkId]) -> anyhow::Result<()> {
        self.cache.pin(chunks).await.map_err(|status| self.refused(status))?;
        self.tell_pins("pinned", chunks).await
    }

    pub(super) async fn unpin(&self, chunks: &[ChunkId]) -> anyhow::Result<()> {
        self.cache.unpin(chunks).await.map_err(|status| self.refused(status))?;
        self.tell_pins("unpinned", chunks).await
    }

    async fn tell_pins(&self, what: &str, chunks: &[ChunkId]) -> anyhow::Result<()> {
        let pins = self.cache.stats().await.map_err(|status| self.refused(status))?.pins;
        if self.json {
            return output::json(&json!({"event": "done", what: chunks.len(), "pins": pins}));
        }
        output::line(format_args!("{} chunks {what}; {pins} pins now", chunks.len()))
    }
}
