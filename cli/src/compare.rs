//! `kvsplice compare`: the same question under several strategies, in turns, side by side.

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use kvsplice_kv::Options;
use kvsplice_proto::v1;
use kvsplice_proto::v1::generate_event::Event;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::failure::usage;
use crate::flags::{ConfigFlags, ServerFlags};
use crate::generate::{Answer, generate};
use crate::prompt::{OptionFlags, PromptFlags, SamplingFlags};
use crate::receipt::{self, Stages};
use crate::roles::Role;
use crate::session::Session;
use crate::stats::median;
use crate::{output, session, signals, telemetry};

/// Flags of `compare`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompareFlags {
    #[command(flatten)]
    prompt: PromptFlags,
    /// Strategies to compare, each NAME, NAME:RATIO or NAME:OPTION=VALUE, such as full,clip:0.1,guided:0.2:group=none
    #[arg(long, value_name = "LIST", default_value = "full,direct,clip")]
    strategies: String,
    /// Ask each this often, in turns; the table has medians
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    #[command(flatten)]
    options: OptionFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

impl CompareFlags {
    /// Whether models run in this process.
    #[cfg(any(feature = "head", feature = "worker"))]
    pub(crate) fn is_embedded(&self) -> bool {
        self.server.server.is_none()
    }

    fn contenders(&self) -> anyhow::Result<Vec<Options>> {
        let mut contenders = Options::parse_list(&self.strategies).map_err(|error| usage(error.to_string()))?;
        self.options.add_to(&mut contenders)?;
        Ok(contenders)
    }
}

/// Asks every strategy in turns and prints one table.
pub(crate) async fn run(flags: CompareFlags) -> anyhow::Result<()> {
    let config = flags.config.load(Vec::new())?;
    if flags.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    let contenders = flags.contenders()?;
    let prompt = flags.prompt.read()?;
    let sampling = flags.sampling.read()?;
    let _telemetry = telemetry::start(config.log.as_deref().unwrap_or("warn"), config.otlp.as_deref())?;
    let stop = signals::stop_token()?;
    let session = tokio::select! {
        session = session::open(&flags.server, config, &Role::ALL) => session?,
        () = stop.cancelled() => return Err(crate::failure::interrupted()),
    };
    let result = ask_all(&session, &flags, &contenders, (prompt, sampling), &stop).await;
    let result = result.and_then(|answers| {
        let rows = Row::of_all(&answers);
        if flags.json {
            let last = answers.last().and_then(|answers| answers.last());
            let receipt = last.map(|answer| receipt::json(&answer.receipt)).transpose()?;
            return output::json(&json!({
                "event": "done",
                "rows": rows.iter().map(Row::to_json).collect::<Vec<_>>(),
                "receipt": receipt,
            }));
        }
        output::line(table(&rows))
    });
    let closed = session.close().await;
    result.and(closed)
}

/// The answers of each contender, one a round.
async fn ask_all(
    session: &Session,
    flags: &CompareFlags,
    contenders: &[Options],
    (prompt, sampling): (v1::Prompt, v1::Sampling),
    stop: &CancellationToken,
) -> anyhow::Result<Vec<Vec<Answer>>> {
    let mut answers: Vec<Vec<Answer>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..flags.rounds {
        for (options, answers) in contenders.iter().zip(&mut answers) {
            let request = v1::GenerateRequest {
                prompt: Some(prompt.clone()),
                options: Some((*options).into()),
                sampling: Some(sampling.clone()),
                dump: false,
            };
            let show_text = round == 0 && !flags.json;
            let mut labeled = !show_text;
            let answer = generate(session, request, flags.server.timeout(), stop, |event| {
                // Not before the first event: a server that is down gets one line, without a heading.
                if !labeled {
                    labeled = true;
                    output::note(options);
                }
                match event {
                    Event::Delta(delta) if show_text => output::text(&delta.text),
                    _ => Ok(()),
                }
            })
            .await?;
            if show_text {
                output::text("\n\n")?;
            }
            if flags.json {
                output::json(&json!({
                    "event": "answer",
                    "round": round,
                    "strategy": options.strategy.name(),
                    "ratio": receipt::as_typed(options.ratio),
                    "text": answer.text,
                    "ttft_ms": answer.first_token.as_secs_f64() * 1e3,
                    "receipt": receipt::json(&answer.receipt)?,
                }))?;
            }
            answers.push(answer);
        }
    }
    Ok(answers)
}

/// One line of the table; times are medians in milliseconds.
struct Row {
    strategy: String,
    effective: String,
    ratio: f64,
    ttft_ms: f64,
    stages: Stages,
    exact: u32,
    approximate: u32,
    recomputed: u32,
    speed_up: Option<f64>,
}

impl Row {
    fn of_all(answers: &[Vec<Answer>]) -> Vec<Self> {
        let mut rows: Vec<Self> = answers.iter().filter_map(|answers| Self::of(answers)).collect();
        let full = rows.iter().find(|row| row.strategy == "full").map(|row| row.ttft_ms);
        for row in &mut rows {
            row.speed_up = full.filter(|_| row.ttft_ms > 0.0).map(|full| full / row.ttft_ms);
        }
        rows
    }

    fn of(answers: &[Answer]) -> Option<Self> {
        let receipt = &answers.last()?.receipt;
        let middle = |value: &dyn Fn(&Answer) -> f64| median(answers.iter().map(value));
        Some(Self {
            strategy: receipt.requested.strategy.to_string(),
            effective: receipt.effective.to_string(),
            ratio: receipt.ratio_charged,
            ttft_ms: middle(&|answer| answer.first_token.as_secs_f64() * 1e3),
            stages: Stages {
                score_ms: middle(&|answer| Stages::of(&answer.receipt).score_ms),
                load_ms: middle(&|answer| Stages::of(&answer.receipt).load_ms),
                recompute_ms: middle(&|answer| Stages::of(&answer.receipt).recompute_ms),
            },
            exact: receipt.tokens.reused_exact,
            approximate: receipt.tokens.reused_approximate,
            recomputed: receipt.tokens.recomputed,
            speed_up: None,
        })
    }

    fn to_json(&self) -> Value {
        json!({
            "strategy": self.strategy,
            "effective": self.effective,
            "ratio_charged": self.ratio,
            "ttft_ms": self.ttft_ms,
            "score_ms": self.stages.score_ms,
            "load_ms": self.stages.load_ms,
            "recompute_ms": self.stages.recompute_ms,
            "reused_exact": self.exact,
            "reused_approximate": self.approximate,
            "recomputed": self.recomputed,
            "speed_up": self.speed_up,
        })
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "strategy",
        "ratio",
        "TTFT ms",
        "score",
        "load",
        "recompute",
        "reused exactly",
        "approximately",
        "recomputed",
        "speed-up",
    ]);
    for row in rows {
        let strategy = if row.strategy == row.effective {
            row.strategy.clone()
        } else {
            format!("{} (as {})", row.strategy, row.effective)
        };
        table.add_row([
            strategy,
            format!("{:.2}", row.ratio),
            format!("{:.0}", row.ttft_ms),
            format!("{:.0}", row.stages.score_ms),
            format!("{:.0}", row.stages.load_ms),
            format!("{:.0}", row.stages.recompute_ms),
            row.exact.to_string(),
            row.approximate.to_string(),
            row.recomputed.to_string(),
            row.speed_up.map_or_else(|| "-".to_owned(), |factor| format!("{factor:.2}x")),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
