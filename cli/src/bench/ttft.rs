//! `kvsplice bench ttft`: full, direct and clip on the same prompt, in turns, on cached chunks, in one process.
//!
//! Time to first token runs from the client's send to its first token, selection included. The peaks that figures are
//! compared with are measured in the same run. Nothing is subtracted.

mod line;
mod report;

use std::time::{Duration, Instant};

use clap::Args;
use figment::value::Value;
use futures::TryStreamExt;
use kvsplice_kv::receipt::Source;
use kvsplice_kv::{ChunkKey, Options, Receipt, Strategy, Variant};
use kvsplice_model::{Compute, Description, Spec, gpu, measure};
use kvsplice_proto::v1::worker_client::WorkerClient;
use kvsplice_proto::{client, v1};
use tokio_util::sync::CancellationToken;

use super::prompt::{self, Random};
use crate::config::Config;
use crate::failure::{interrupted, refused, usage};
use crate::flags::{ConfigFlags, ServerFlags};
use crate::generate::{Answer, generate};
use crate::roles::Role;
use crate::session::Session;
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
    /// More shares to recompute, such as 0.05,0.1,0.4,0.8: clip is measured at each, and a straight line laid through
    #[arg(long, value_name = "RATIO,...", value_delimiter = ',', value_parser = crate::prompt::ratio)]
    ratios: Vec<f32>,
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

/// What one way to answer gave in its measured runs.
struct Runs {
    name: String,
    options: Options,
    answers: Vec<Answer>,
}

/// What was measured.
struct Measured {
    runs: Vec<Runs>,
    encode_seconds: f64,
    /// The ways to answer, in the order of their runs.
    order: Vec<String>,
    /// Once a round.
    ceilings: Vec<Ceilings>,
    /// The most memory that the process held until every way to answer had run once: before the ceilings took more.
    peak_rss_mb: f64,
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
    let closed = session.close().await;
    let measured = measured?;
    closed?;
    let report = serde_json::Value::Object(bench.report(&measured)?);
    if flags.json { output::json(&report) } else { output::line(serde_json::to_string_pretty(&report)?) }
}

async fn on_compute_thread<R: Send + 'static>(
    job: impl FnOnce() -> anyhow::Result<R> + Send + 'static,
) -> anyhow::Result<R> {
    Compute::start()?.run(job).await?
}

/// What the worker's device can do.
#[derive(Clone, Copy)]
struct Ceilings {
    /// Of the matrix product.
    gflops: f64,
    /// Of reading memory.
    gbs: f64,
}

impl Ceilings {
    fn measure(spec: &Spec) -> Result<Self, kvsplice_model::Error> {
        Ok(match spec.cuda_index()? {
            None => Self { gflops: measure::matmul_gflops(spec.dtype())?, gbs: measure::read_bandwidth_gbs()? },
            Some(index) => {
                spec.open_device()?;
                Self { gflops: gpu::peak(index)?.rate() / 1e9, gbs: gpu::read_bandwidth(index)? / 1e9 }
            }
        })
    }
}

/// Every run computes all that its strategy computes: nothing is kept from the run before.
fn options(strategy: Strategy) -> Options {
    Options { prefix_cache: false, ..Options::of(strategy) }
}

fn clip(ratio: f32) -> Options {
    Options { ratio, ..options(Strategy::Clip) }
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

    /// What is measured: every strategy, and clip at each further ratio.
    fn contestants(&self) -> Vec<Runs> {
        let of_strategy = |&strategy: &Strategy| {
            let options = if strategy == Strategy::Clip { clip(self.flags.ratio) } else { options(strategy) };
            Runs { name: strategy.to_string(), options, answers: Vec::new() }
        };
        let of_ratio = |&ratio: &f32| Runs { name: format!("clip:{ratio}"), options: clip(ratio), answers: Vec::new() };
        STRATEGIES.iter().map(of_strategy).chain(self.flags.ratios.iter().map(of_ratio)).collect()
    }

    async fn answer(&self, session: &Session, options: Options, stop: &CancellationToken) -> anyhow::Result<Answer> {
        let request = v1::GenerateRequest {
            prompt: Some(self.prompt.clone()),
            options: Some(options.into()),
            sampling: Some(v1::Sampling {
                max_tokens: Some(OUTPUT_TOKENS),
                ignore_eos: Some(true),
                ..Default::default()
            }),
            dump: false,
        };
        generate(session, request, self.timeout, stop, |_| Ok(())).await
    }

    /// Stores the chunks, warms up, then measures: in each round the ceilings, then every way to answer.
    async fn measure(&self, session: &Session, stop: &CancellationToken) -> anyhow::Result<Measured> {
        output::note("encoding the chunks (not timed)");
        self.answer(session, clip(self.flags.ratio), stop).await?;
        output::note("measuring encoding");
        let encode_seconds = self.encode(session).await?;
        let mut runs = self.contestants();
        for runs in &runs {
            output::note(format_args!("warm-up: {}", runs.name));
            self.answer(session, runs.options, stop).await?;
        }
        let peak_rss_mb = peak_rss_mb();
        let mut random = Random(self.flags.seed);
        let (mut order, mut ceilings) = (Vec::new(), Vec::new());
        for round in 1..=self.flags.rounds {
            let spec = self.config.worker.primary.clone();
            let ceiling = on_compute_thread(move || Ok(Ceilings::measure(&spec)?)).await?;
            let Ceilings { gflops, gbs } = ceiling;
            output::note(format_args!("round {round}: matrix product {gflops:.0} GFLOPS, reading {gbs:.0} GB/s"));
            ceilings.push(ceiling);
            let count = runs.len();
            let first = random.below(count);
            for turn in 0..count {
                let Some(runs) = runs.get_mut((first + turn) % count) else { continue };
                let answer = self.answer(session, runs.options, stop).await?;
                self.check(&answer.receipt)?;
                let ttft_ms = answer.first_token.as_secs_f64() * 1e3;
                output::note(format_args!("round {round}: {} {ttft_ms:.0} ms", runs.name));
                order.push(runs.name.clone());
                runs.answers.push(answer);
            }
        }
        Ok(Measured { runs, encode_seconds, order, ceilings, peak_rss_mb })
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
