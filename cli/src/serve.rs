//! `kvsplice up | head | worker | cache`: runs roles until a signal.

use clap::Args;
use figment::value::Value;
use serde_json::json;
use tracing::info;

use crate::flags::ConfigFlags;
use crate::roles::{self, Listen, Role};
use crate::{output, signals, telemetry};

/// Flags of the commands that serve.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ServeFlags {
    #[command(flatten)]
    config: ConfigFlags,
    /// HOST:PORT to listen on; port 0 takes a free one. Beyond loopback nothing is encrypted
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// Runs `roles` until SIGTERM or SIGINT. `up` listens with its head at `--listen`.
pub(crate) async fn run(flags: ServeFlags, roles: &[Role]) -> anyhow::Result<()> {
    let mut listen = Vec::new();
    if let (Some(address), Some(role)) = (&flags.listen, roles.first()) {
        listen.push((format!("listen.{role}"), Value::from(address.clone())));
    }
    let mut config = flags.config.load(listen)?;
    let filter = config.log.get_or_insert_with(|| "info".to_owned()).clone();
    if flags.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    let _telemetry = telemetry::start(&filter, config.otlp.as_deref())?;
    let stop = signals::stop_token()?;
    let mut running = roles::start(config.clone(), roles, Listen::Configured).await?;
    for (role, address) in running.addresses() {
        if flags.json {
            output::json(&json!({"event": "listening", "role": role.name(), "address": address.to_string()}))?;
        } else {
            output::line(format_args!("listening role={role} address={address}"))?;
        }
    }
    info!(config = config.to_toml()?, "effective configuration");
    let ended = tokio::select! {
        () = stop.cancelled() => None,
        error = running.ended() => Some(error),
    };
    let stopped = running.stop().await;
    match ended {
        Some(error) => Err(error),
        None => stopped,
    }
}
