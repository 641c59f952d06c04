//! Carries out a plan, sample by sample with the strategies in turns, so that an interrupt leaves sets that can be compared.
//!
//! Each finished pair is on disk before the next begins; pairs that are there are not measured again.

use std::path::Path;
use std::sync::Arc;

use figment::value::Value;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{Options, Receipt, Strategy};
use serde_json::json;

use super::agree::agreement;
use super::client::{Client, Scored};
use super::flags::CommonFlags;
use super::plan::{Item, Plan};
use super::progress::Progress;
use super::report::{self, Report};
use super::score::score;
use super::store::{Answered, Header, Record, Store};
use super::tune::capture;
use crate::failure::interrupted;
use crate::roles::Role;
use crate::{output, session, signals, telemetry};

/// The object store of embedded roles lies in the results' folder under this name, for as long as the command runs.
const CHUNKS: &str = "chunks-";

/// Starts or reaches the server, has `plan` made for it, and measures it.
pub(super) async fn carry_out(
    flags: &CommonFlags,
    command: &'static str,
    make: impl AsyncFnOnce(&Client) -> anyhow::Result<Plan>,
) -> anyhow::Result<()> {
    let folder = flags.folder(command);
    let Some(opened) = open(flags, &folder).await? else { return Ok(()) };
    let client = &opened.client;
    let result = async {
        let plan = make(client).await?;
        plan.check()?;
        let mut store = Store::open(&folder, Header::new(&plan, client.models().await?))?;
        let measured = async {
            if plan.strategies.iter().any(|options| options.strategy == Strategy::Craft) {
                // What craft reuses comes from earlier prompts; without any it would be direct.
                capture::all(client, &plan, &store, flags.json).await?;
            }
            Runner { client, plan: &plan, json: flags.json }.measure(&mut store).await
        };
        if let Err(error) = measured.await {
            let (done, all) = (store.records().len(), plan.pairs());
            let kept =
                format!("{done} of {all} pairs are kept in {}; the same command goes on there", folder.display());
            return Err(error.context(kept));
        }
        let report = Report::of(store.header(), store.records());
        report::write(&folder, &report)?;
        if flags.json {
            return output::json(&json!({"event": "done", "report": report}));
        }
        report::show(&report)?;
        output::note(format_args!("results, report.json and report.html are in {}", folder.display()));
        Ok(())
    };
    let result = result.await;
    let closed = opened.close().await;
    result.and(closed)
}

/// A head to ask, and what ends with the command.
pub(super) struct Opened {
    pub(super) client: Client,
    /// Goes after the roles that use it.
    _chunks: Option<tempfile::TempDir>,
    _telemetry: telemetry::Telemetry,
}

/// Reads the configuration and connects; none when the user only wants to see the configuration. Embedded roles get an
/// object store of their own, which goes with the command, unless the flags name one.
pub(super) async fn open(flags: &CommonFlags, folder: &Path) -> anyhow::Result<Option<Opened>> {
    let server = flags.server();
    if flags.config.print_config {
        output::line(flags.config.load(Vec::new())?.to_toml()?.trim_end())?;
        return Ok(None);
    }
    let mut settings = Vec::new();
    let mut chunks = None;
    if server.server.is_none() && !flags.config.names_store() {
        let made = chunks_folder(folder)?;
        settings.push(("cache.store".to_owned(), Value::from(format!("file://{}", made.path().display()))));
        chunks = Some(made);
    }
    let config = flags.config.load(settings)?;
    let telemetry = telemetry::start(config.log.as_deref().unwrap_or("warn"), config.otlp.as_deref())?;
    let stop = signals::stop_token()?;
    let session = tokio::select! {
        session = session::open(&server, config, &Role::ALL) => session?,
        () = stop.cancelled() => return Err(interrupted()),
    };
    let client = Client { session: Arc::new(session), timeout: server.timeout(), stop };
    Ok(Some(Opened { client, _chunks: chunks, _telemetry: telemetry }))
}

/// A new folder in `folder`. Those that killed commands left behind go.
fn chunks_folder(folder: &Path) -> anyhow::Result<tempfile::TempDir> {
    let shown = folder.display();
    let make = || {
        std::fs::create_dir_all(folder)?;
        let folder = folder.canonicalize()?;
        tempfile::Builder::new().prefix(CHUNKS).tempdir_in(folder)
    };
    make().map_err(|error| crate::failure::usage(format!("--out: make the folder {shown}: {error}")))
}

impl Opened {
    /// Stops roles that are ours.
    pub(super) async fn close(self) -> anyhow::Result<()> {
        match Arc::try_unwrap(self.client.session) {
            Ok(session) => session.close().await,
            // A generator that was given up still holds it for a moment; the roles end with the process.
            Err(_) => Ok(()),
        }
    }
}

/// Carries out one plan.
pub(super) struct Runner<'a> {
    pub(super) client: &'a Client,
    pub(super) plan: &'a Plan,
    pub(super) json: bool,
}

/// What full attention gave for the sample in hand.
#[derive(Default)]
struct Reference {
    scored: Option<Scored>,
    text: Option<String>,
}

impl Runner<'_> {
    /// Measures every pair that `store` does not have.
    pub(super) async fn measure(&self, store: &mut Store) -> anyhow::Result<()> {
        let plan = self.plan;
        let mut before = 0;
        for item in &plan.items {
            for options in &plan.strategies {
                before += usize::from(store.find(item, &options.to_string())?.is_some());
            }
        }
        let mut progress = Progress::new(self.json, before, plan.pairs());
        let measured = self.items(store, &mut progress).await;
        progress.clear();
        measured
    }

    async fn items(&self, store: &mut Store, progress: &mut Progress) -> anyhow::Result<()> {
        for item in &self.plan.items {
            let mut reference = Reference::default();
            for &options in &self.plan.strategies {
                let name = options.to_string();
                if let Some(record) = store.find(item, &name)? {
                    if options.strategy == Strategy::Full {
                        reference.text = record.answer.as_ref().map(|answer| answer.text.clone());
                    }
                    continue;
                }
                let pair = self.pair(item, options, &mut reference).await;
                let record = pair.map_err(|error| error.context(format!("sample {}, {name}", item.sample.id)))?;
                progress.finished(summary(&record));
                if self.json {
                    output::json(&event(&record)?)?;
                }
                store.add(record)?;
            }
        }
        Ok(())
    }

    async fn pair(&self, item: &Item, options: Options, reference: &mut Reference) -> anyhow::Result<Record> {
        let sent = self.plan.sent(options);
        let is_full = options.strategy == Strategy::Full;
        let mut record = Record {
            set: item.set.clone(),
            sample: item.sample.id.clone(),
            digest: item.digest.clone(),
            task: item.sample.task.clone(),
            strategy: options.to_string(),
            ..Record::default()
        };
        if self.plan.measures.agreement {
            if is_full || reference.scored.is_none() {
                // After an interrupt, full attention may be known to the store, but its distributions are not kept there.
                reference.scored = Some(self.client.score(&item.sample, Options::of(Strategy::Full)).await?);
            }
            let own = if is_full { None } else { Some(self.client.score(&item.sample, sent).await?) };
            if let Some(full) = &reference.scored {
                let scored = own.as_ref().unwrap_or(full);
                record.agreement = Some(agreement(full, scored)?);
                add_receipt(&mut record, &scored.receipt);
            }
        }
        if self.plan.measures.text {
            let (answered, receipt) = self.answer(item, sent).await?;
            if is_full {
                reference.text = Some(answered.text.clone());
            }
            let same_text = reference.text.as_ref() == Some(&answered.text);
            record.answer = Some(Answered { same_text, ..answered });
            add_receipt(&mut record, &receipt);
        }
        Ok(record)
    }

    /// The answer, with the time that it takes once its chunks are cached.
    async fn answer(&self, item: &Item, options: Options) -> anyhow::Result<(Answered, Receipt)> {
        let sample = &item.sample;
        let answer = self.client.answer(sample, options, sample.max_tokens).await?;
        let said = if sample.stop_at_newline { first_line(&answer.text) } else { &answer.text };
        let mut answered = Answered {
            score: score(sample.metric, said, &sample.answers),
            text: answer.text.clone(),
            same_text: false,
            ttft_ms: answer.first_token.as_secs_f64() * 1e3,
            cold: is_cold(&answer.receipt),
            output_tokens: u64::from(answer.receipt.tokens.output),
        };
        let mut receipt = answer.receipt;
        if answered.cold {
            let again = self.client.answer(sample, options, 1).await?;
            answered.ttft_ms = again.first_token.as_secs_f64() * 1e3;
            answered.cold = is_cold(&again.receipt);
            receipt = again.receipt;
        }
        Ok((answered, receipt))
    }
}

/// Whether a request computed what the next one finds in the cache.
fn is_cold(receipt: &Receipt) -> bool {
    let stored = receipt.span("store").is_some() || receipt.auxiliary_source == "computed";
    let repaired = receipt.chunks.iter().any(|chunk| chunk.source == Source::Repaired);
    stored || repaired
}

fn add_receipt(record: &mut Record, receipt: &Receipt) {
    let tokens = receipt.tokens;
    record.effective = receipt.effective.name().to_owned();
    record.effective_reason.clone_from(&receipt.effective_reason);
    record.ratio_nominal = receipt.ratio_nominal;
    record.ratio_charged = receipt.ratio_charged;
    record.rows = receipt.chunks.iter().map(|chunk| u64::from(chunk.rows)).sum();
    record.prompt_tokens = u64::from(tokens.prefix) + u64::from(tokens.chunk) + u64::from(tokens.question);
    record.bytes = receipt.chunks.iter().map(|chunk| chunk.bytes).sum();
}

/// The first line that is not empty, as the benchmarks take it.
fn first_line(text: &str) -> &str {
    text.trim_start_matches('\n').lines().next().unwrap_or_default()
}

fn summary(record: &Record) -> String {
    let mut text = format!("{} {}", record.sample, record.strategy);
    if let Some(agreement) = &record.agreement {
        text.push_str(&format!(", KL {:.4}", agreement.kl));
    }
    if let Some(answer) = &record.answer {
        text.push_str(&format!(", score {:.2}, first token after {:.0} ms", answer.score, answer.ttft_ms));
    }
    text
}

/// The line of a pair with `--json`.
pub(super) fn event(record: &Record) -> anyhow::Result<serde_json::Value> {
    let mut value = serde_json::to_value(record)?;
    if let Some(fields) = value.as_object_mut() {
        fields.insert("event".to_owned(), "result".into());
    }
    Ok(value)
}
