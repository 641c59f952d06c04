//! `kvsplice bench ttft`: full, direct and clip on the same prompt, in turns, on cached chunks, in one process.
//!
//! Time to first token runs from the client's send to its first token, selection included. The peaks that figures are
//! compared with are measured in the same run. Nothing is subtracted.

use std::time::{Duration, Instant};

use clap::Args;
use figment::value::Value;
use futures::TryStreamExt;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{ChunkKey, Options, Receipt, Strategy, Variant};
use kvsplice_model::{Compute, Description, Spec, gpu, measure};
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_proto::{client, v1};
use serde_json::{Map, json};
use tokio_util::sync::CancellationToken;

use super::flops::{self, Work, causal_pairs};
use super::prompt::{self, Random};
use crate::config::Config;
use crate::failure::{interrupted, refused, usage};
use crate::flags::{ConfigFlags, ServerFlags};
use crate::generate::{Answer, generate};
use crate::receipt::Stages;
use crate::roles::Role;
use crate::session::Session;
use crate::stats::median;
use crate::{output, session, signals, telemetry};

const STRATEGIES: [Strategy; 3] = [Strategy::Full, Strategy::Direct, Strategy::Clip];
/// Output tokens of each answer; their gaps are the inter-token latency.
const OUTPUT_TOKENS: u32 = 16;
/// Tokens that are encoded to measure encoding.
const ENCODE_TOKENS: usize = 2048;

/// Flags of `bench ttft`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TtftFlags {
    /// Chunk tokens of the prompt, in the primary model
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    tokens: u32,
    /// Tokens a chunk
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    chunk_tokens: u32,
    /// Tokens of the question with the template's tail, in both models
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(8..=4096))]
    question_tokens: u32,
    /// Share of the chunk tokens that clip recomputes
    #[arg(long, default_value_t = 0.2, value_parser = crate::prompt::ratio)]
    ratio: f32,
    /// Measured runs of each strategy
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Seeds the text and the order of the strategies in each round
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object on one line, else on several
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Both models' tokenizers and shapes.
struct Models {
    primary: Description,
    auxiliary: Description,
}

/// What one strategy's measured runs gave.
struct Runs {
    strategy: Strategy,
    answers: Vec<Answer>,
}

/// Measures and prints one JSON object.
pub(crate) async fn run(flags: TtftFlags) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut settings = Vec::new();
    if !flags.config.names_store() {
        // An empty store of its own: what lies in the default one must not change a figure.
        settings.push(("cache.store".to_owned(), Value::from(format!("file://{}", folder.path().display()))));
    }
    let config = flags.config.load(settings)?;
    if flags.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    let _telemetry = telemetry::start(config.log.as_deref().unwrap_or("warn"), config.otlp.as_deref())?;
    let stop = signals::stop_token()?;
    let (head, worker) = (config.head.clone(), config.worker.clone());
    let models = tokio::task::spawn_blocking(move || -> anyhow::Result<Models> {
        Ok(Models { primary: Description::read(&worker.primary)?, auxiliary: Description::read(&head.auxiliary)? })
    })
    .await??;
    let bench = Bench::prepare(&flags, config.clone(), models)?;
    let server = ServerFlags::embedded();
    let session = tokio::select! {
        session = session::open(&server, config, &Role::ALL) => session?,
        () = stop.cancelled() => return Err(interrupted()),
    };
    let measured = tokio::select! {
        measured = bench.measure(&session, &stop) => measured,
        () = stop.cancelled() => Err(interrupted()),
    };
    let peak_rss_mb = peak_rss_mb();
    let closed = session.close().await;
    let (runs, encode_seconds, order, peak_before) = measured?;
    closed?;
    let spec = bench.config.worker.primary.clone();
    let (peak_after, bandwidth) = on_compute_thread(move || Ok((matmul_gflops(&spec)?, bandwidth_gbs(&spec)?))).await?;
    let mut report = bench.report(&runs, encode_seconds, peak_before.max(peak_after), bandwidth)?;
    report.insert("peak_rss_mb".into(), json!(peak_rss_mb));
    report.insert("order".into(), json!(order));
    let report = serde_json::Value::Object(report);
    if flags.json { output::json(&report) } else { output::line(serde_json::to_string_pretty(&report)?) }
}

async fn on_compute_thread<R: Send + 'static>(
    job: impl FnOnce() -> anyhow::Result<R> + Send + 'static,
) -> anyhow::Result<R> {
    Compute::start()?.run(job).await?
}

/// The matrix-product peak of what the worker computes on.
fn matmul_gflops(spec: &Spec) -> Result<f64, kvsplice_model::Error> {
    match spec.cuda_index()? {
        None => measure::matmul_gflops(spec.dtype()),
        Some(index) => {
            spec.open_device()?;
            Ok(gpu::peak(index)?.rate() / 1e9)
        }
    }
}

/// GB/s of reading its memory.
fn bandwidth_gbs(spec: &Spec) -> Result<f64, kvsplice_model::Error> {
    match spec.cuda_index()? {
        None => measure::read_bandwidth_gbs(),
        Some(index) => Ok(gpu::read_bandwidth(index)? / 1e9),
    }
}

struct Bench {
    flags: TtftFlags,
    config: Config,
    models: Models,
    prompt: v1::Prompt,
    timeout: Duration,
}

impl Bench {
    fn prepare(flags: &TtftFlags, config: Config, models: Models) -> anyhow::Result<Self> {
        let (tokens, chunk_tokens) = (flags.tokens as usize, flags.chunk_tokens as usize);
        let chunks = prompt::chunks(&models.primary, tokens, chunk_tokens, flags.seed)?;
        let system = &config.head.system_prompt;
        let question_tokens = flags.question_tokens as usize;
        let question = prompt::question(&models.primary, &models.auxiliary, system, question_tokens, flags.seed)?;
        let inline = v1::InlineSource { chunks, store: true, ..Default::default() };
        let prompt = v1::Prompt { source: Some(v1::prompt::Source::Inline(inline)), question, ..Default::default() };
        Ok(Self { flags: flags.clone(), config, models, prompt, timeout: Duration::from_secs(3600) })
    }

    fn options(&self, strategy: Strategy) -> Options {
        // Every run computes all that its strategy computes: nothing is kept from the run before.
        let ratio = if strategy == Strategy::Clip { self.flags.ratio } else { Options::of(strategy).ratio };
        Options { ratio, prefix_cache: false, ..Options::of(strategy) }
    }

    async fn answer(&self, session: &Session, strategy: Strategy, stop: &CancellationToken) -> anyhow::Result<Answer> {
        let request = v1::GenerateRequest {
            prompt: Some(self.prompt.clone()),
            options: Some(self.options(strategy).into()),
            sampling: Some(v1::Sampling {
                max_tokens: Some(OUTPUT_TOKENS),
                ignore_eos: Some(true),
                ..Default::default()
            }),
            dump: false,
        };
        generate(session, request, self.timeout, stop, |_| Ok(())).await
    }

    /// Stores the chunks, warms up, then measures. Gives the runs, seconds of encoding, the order, and the peak before.
    async fn measure(
        &self,
        session: &Session,
        stop: &CancellationToken,
    ) -> anyhow::Result<(Vec<Runs>, f64, Vec<String>, f64)> {
        let spec = self.config.worker.primary.clone();
        output::note("measuring the matrix-product peak");
        let peak = on_compute_thread(move || Ok(matmul_gflops(&spec)?)).await?;
        output::note("encoding the chunks (not timed)");
        self.answer(session, Strategy::Clip, stop).await?;
        output::note("measuring encoding");
        let encode_seconds = self.encode(session).await?;
        for strategy in STRATEGIES {
            output::note(format_args!("warm-up: {strategy}"));
            self.answer(session, strategy, stop).await?;
        }
        let mut runs: Vec<Runs> = STRATEGIES.iter().map(|&strategy| Runs { strategy, answers: Vec::new() }).collect();
        let mut random = Random(self.flags.seed);
        let mut order = Vec::new();
        for round in 1..=self.flags.rounds {
            let first = random.below(STRATEGIES.len());
            for turn in 0..STRATEGIES.len() {
                let Some(runs) = runs.get_mut((first + turn) % STRATEGIES.len()) else { continue };
                let answer = self.answer(session, runs.strategy, stop).await?;
                self.check(&answer.receipt)?;
                let ttft_ms = answer.first_token.as_secs_f64() * 1e3;
                output::note(format_args!("round {round}: {} {ttft_ms:.0} ms", runs.strategy));
                order.push(runs.strategy.to_string());
                runs.answers.push(answer);
            }
        }
        Ok((runs, encode_seconds, order, peak))
    }

    /// A run counts only if the prompt has the promised lengths and its chunks came from the cache.
    fn check(&self, receipt: &Receipt) -> anyhow::Result<()> {
        let (chunk, question) = (receipt.tokens.chunk, receipt.tokens.question);
        if (chunk, question) != (self.flags.tokens, self.flags.question_tokens) {
            anyhow::bail!(
                "the prompt has {chunk} chunk and {question} question tokens, not {} and {}",
                self.flags.tokens,
                self.flags.question_tokens
            );
        }
        if receipt.requested.strategy == Strategy::Full {
            return Ok(());
        }
        let computed = |source| matches!(source, Source::Fresh | Source::Repaired);
        if let Some(chunk) = receipt.chunks.iter().find(|chunk| computed(chunk.source)) {
            anyhow::bail!("chunk {} was not cached: {}", chunk.id, chunk.reason);
        }
        Ok(())
    }

    /// Encodes chunks that nobody has seen before; gives the seconds that it took, storing included.
    async fn encode(&self, session: &Session) -> anyhow::Result<f64> {
        let address = session.address(Role::Worker).ok_or_else(|| usage("bench ttft runs its own roles"))?;
        let mut worker = WorkerClient::new(client::channel(&address)?);
        let primary = &self.models.primary;
        let texts = prompt::chunks(primary, ENCODE_TOKENS, self.flags.chunk_tokens as usize, self.flags.seed ^ 0x5eed)?;
        let prefix_ids = self.prefix_ids()?;
        let owner = self.config.head.owner.clone();
        let mut chunks = Vec::new();
        for text in texts {
            let token_ids = primary.tokenizer.encode(&text)?.ids;
            let chunk = ChunkKey::new(primary.digest, &prefix_ids, &token_ids, &owner).id().to_string();
            chunks.push(v1::EncodeChunk { chunk, token_ids });
        }
        let request = v1::EncodeRequest {
            model: primary.digest.to_string(),
            owner,
            prefix_ids,
            chunks,
            variant: Variant::clean(self.config.head.encoding).to_string(),
        };
        let started = Instant::now();
        let events = worker.encode(client::request(request, self.timeout)).await;
        let events = events.map_err(|status| refused(status, &address))?.into_inner();
        let created: Vec<v1::EncodeEvent> = events.try_collect().await.map_err(|status| refused(status, &address))?;
        let seconds = started.elapsed().as_secs_f64();
        if created.iter().any(|event| !event.created) {
            return Err(usage("chunks to measure encoding with were in the store already; change --seed"));
        }
        Ok(seconds)
    }

    fn prefix_ids(&self) -> anyhow::Result<Vec<u32>> {
        let parts = self.models.primary.template.split(&self.config.head.system_prompt, None, &self.prompt.question)?;
        Ok(self.models.primary.tokenizer.encode_special(&parts.prefix)?)
    }

    fn report(
        &self,
        runs: &[Runs],
        encode_seconds: f64,
        peak_gflops: f64,
        bandwidth_gbs: f64,
    ) -> anyhow::Result<Map<String, serde_json::Value>> {
        let shape = &self.models.primary.config;
        let peak = peak_gflops * 1e9;
        let prefix = self.prefix_ids()?.len() as f64;
        let (mut ttft, mut spread, mut rows, mut share, mut stages) =
            (Map::new(), Map::new(), Map::new(), Map::new(), Map::new());
        let (mut gaps, mut full_ms, mut clip_ms) = (Vec::new(), 0.0, 0.0);
        for run in runs {
            let Some(receipt) = run.answers.last().map(|answer| &answer.receipt) else { continue };
            let name = run.strategy.to_string();
            let times: Vec<f64> = run.answers.iter().map(|answer| answer.first_token.as_secs_f64() * 1e3).collect();
            let middle_ms = median(times.iter().copied());
            let low = times.iter().copied().fold(f64::INFINITY, f64::min);
            let high = times.iter().copied().fold(0.0, f64::max);
            let stage =
                |value: fn(Stages) -> f64| median(run.answers.iter().map(|answer| value(Stages::of(&answer.receipt))));
            let recompute_ms = stage(|stages| stages.recompute_ms);
            stages.insert(
                name.clone(),
                json!({
                    "score": stage(|stages| stages.score_ms),
                    "load": stage(|stages| stages.load_ms),
                    "recompute": recompute_ms,
                }),
            );
            let operations = flops::prefill(shape, work(receipt));
            match run.strategy {
                Strategy::Full => {
                    full_ms = middle_ms;
                    share.insert("full".into(), json!(operations / (middle_ms / 1e3) / peak));
                }
                Strategy::Clip => {
                    clip_ms = middle_ms;
                    share.insert("clip".into(), json!(operations / (middle_ms / 1e3) / peak));
                    share.insert("clip_recompute".into(), json!(operations / (recompute_ms / 1e3) / peak));
                }
                _ => {}
            }
            gaps.extend(run.answers.iter().flat_map(Answer::gaps_ms));
            ttft.insert(name.clone(), json!(middle_ms));
            spread.insert(name.clone(), json!([low, high]));
            rows.insert(name, json!(receipt.tokens.recomputed));
        }
        let encode_flops = encode_flops(shape, prefix, f64::from(self.flags.chunk_tokens));
        share.insert("encode".into(), json!(encode_flops / encode_seconds / peak));
        let dtype = self.config.worker.primary.dtype();
        let weight_bytes = flops::weights(shape) * dtype.bytes() as f64;
        let (itl_ms, bound_ms) = (median(gaps), weight_bytes / (bandwidth_gbs * 1e9) * 1e3);
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let report = json!({
            "event": "done",
            "ttft_ms": ttft,
            "ttft_spread_ms": spread,
            "full_over_clip": full_ms / clip_ms,
            "rows": rows,
            "stages_ms": stages,
            "matmul_peak_gflops": peak_gflops,
            "share_of_peak": share,
            "itl_ms": itl_ms,
            "read_bandwidth_gbs": bandwidth_gbs,
            "weight_bytes": weight_bytes,
            "itl_over_bound": itl_ms / bound_ms,
            "encode_tokens_per_s": ENCODE_TOKENS as f64 / encode_seconds,
            "rounds": self.flags.rounds,
            "seed": self.flags.seed,
            "dtype": dtype.to_string(),
            "primary": self.models.primary.name,
            "auxiliary": self.models.auxiliary.name,
            "device": self.config.worker.primary.device,
            "threads": measure::threads(),
            "cpu": cpu_name(),
            "unix_time": seconds,
            "command": std::env::args().collect::<Vec<_>>().join(" "),
        });
        match report {
            serde_json::Value::Object(report) => Ok(report),
            _ => Ok(Map::new()),
        }
    }
}

/// What the primary model computed for a receipt. Rows of a chunk count as spread evenly over it.
fn work(receipt: &Receipt) -> Work {
    let tokens = receipt.tokens;
    let total = f64::from(tokens.prefix) + f64::from(tokens.chunk) + f64::from(tokens.question);
    let rows = f64::from(tokens.recomputed);
    if receipt.requested.strategy == Strategy::Full {
        return Work { rows, pairs: causal_pairs(total - rows, rows), outputs: 1.0, output_pairs: total };
    }
    let mut pairs = causal_pairs(total - f64::from(tokens.question), f64::from(tokens.question));
    let mut start = f64::from(tokens.prefix);
    for chunk in &receipt.chunks {
        pairs += f64::from(chunk.rows) * (start + (f64::from(chunk.tokens) + 1.0) / 2.0);
        start += f64::from(chunk.tokens);
    }
    Work { rows, pairs, outputs: 1.0, output_pairs: total }
}

/// Encoding computes the prefix once, then each chunk behind it; no logits.
fn encode_flops(shape: &kvsplice_model::Config, prefix: f64, chunk_tokens: f64) -> f64 {
    let mut work = Work { rows: prefix, pairs: causal_pairs(0.0, prefix), ..Work::default() };
    let mut left = ENCODE_TOKENS as f64;
    while left > 0.0 {
        let rows = left.min(chunk_tokens);
        work.rows += rows;
        work.pairs += causal_pairs(prefix, rows);
        left -= rows;
    }
    flops::prefill(shape, work)
}

/// The most memory that this process has held, in MB; 0 where the system does not tell.
fn peak_rss_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = field.and_then(|text| text.trim().trim_end_matches("kB").trim().parse::<f64>().ok());
    kilobytes.unwrap_or(0.0) * 1024.0 / 1e6
}

pub(super) fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let names = text.lines().filter(|line| line.starts_with("model name")).filter_map(|line| line.split_once(':'));
    names.map(|(_, name)| name.trim().to_owned()).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_in_chunks_costs_less_than_one_long_prompt() {
        let shape = kvsplice_model::Config::tiny(100);
        let short = encode_flops(&shape, 10.0, 256.0);
        let long = encode_flops(&shape, 10.0, 4096.0);
        assert!(short < long);
        assert_eq!(long, encode_flops(&shape, 10.0, ENCODE_TOKENS as f64));
    }
}
