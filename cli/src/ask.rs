//! `kvsplice ask`: one question, its answer as it comes, and the receipt.

use std::path::PathBuf;

use clap::Args;
use kvsplice_kv::Strategy;
use kvsplice_proto::v1;
use kvsplice_proto::v1::generate_event::Event;
use serde_json::json;

use crate::flags::{ConfigFlags, ServerFlags};
use crate::generate::generate;
use crate::prompt::{OptionFlags, PromptFlags, SamplingFlags};
use crate::roles::Role;
use crate::{dump, output, receipt, session, signals, stats, telemetry};

/// Flags of `ask`.
#[derive(Args, Clone, Debug)]
pub(crate) struct AskFlags {
    #[command(flatten)]
    prompt: PromptFlags,
    /// full, direct or clip
    #[arg(long, default_value_t)]
    strategy: Strategy,
    #[command(flatten)]
    options: OptionFlags,
    #[command(flatten)]
    sampling: SamplingFlags,
    /// Write DIR/request.safetensors: token ids, rows, scores, logits
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Print one JSON object a line; the last has "event":"done" and the receipt
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

#[cfg(any(feature = "head", feature = "worker"))]
impl AskFlags {
    /// Whether models run in this process.
    pub(crate) fn is_embedded(&self) -> bool {
        self.server.server.is_none()
    }
}

/// Asks. The answer goes to stdout, everything else to stderr.
pub(crate) async fn run(flags: AskFlags) -> anyhow::Result<()> {
    let config = flags.config.load(Vec::new())?;
    if flags.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    let request = v1::GenerateRequest {
        options: Some(flags.options.of(flags.strategy)?.into()),
        sampling: Some(flags.sampling.read()?),
        prompt: Some(flags.prompt.read()?),
        dump: flags.dump.is_some(),
    };
    let _telemetry = telemetry::start(config.log.as_deref().unwrap_or("warn"), config.otlp.as_deref())?;
    let stop = signals::stop_token()?;
    let opening = session::open(&flags.server, config, &Role::ALL);
    let session = tokio::select! {
        session = opening => session?,
        () = stop.cancelled() => return Err(crate::failure::interrupted()),
    };
    let answer = generate(&session, request, flags.server.timeout(), &stop, |event| show(event, flags.json)).await;
    let result = answer.and_then(|answer| {
        if let Some(folder) = &flags.dump {
            let dump = answer.dump.as_ref().ok_or_else(|| anyhow::anyhow!("the server sent no dump"))?;
            dump::write(folder, dump)?;
        }
        if flags.json {
            return output::json(&json!({
                "event": "done",
                "text": answer.text,
                "ttft_ms": answer.first_token.as_secs_f64() * 1e3,
                "itl_ms": stats::median(answer.gaps_ms()),
                "receipt": receipt::json(&answer.receipt)?,
            }));
        }
        output::text("\n")?;
        output::note(receipt::summary(&answer));
        Ok(())
    });
    let closed = session.close().await;
    result.and(closed)
}

fn show(event: &Event, as_json: bool) -> anyhow::Result<()> {
    match event {
        Event::Planned(planned) if as_json => {
            output::json(&json!({"event": "planned", "chunks": planned.chunks, "prompt_tokens": planned.prompt_tokens}))
        }
        Event::Delta(delta) if as_json => {
            output::json(&json!({"event": "delta", "text": delta.text, "token_ids": delta.token_ids}))
        }
        Event::Delta(delta) => output::text(&delta.text),
        _ => Ok(()),
    }
}
