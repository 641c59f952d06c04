//! `kvsplice doctor`: what this machine has, and what is missing to run each role.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::config::Config;
use crate::failure::unavailable;
use crate::flags::ConfigFlags;
use crate::roles::{self, Role};
use crate::{output, telemetry};

/// Flags of `doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorFlags {
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    /// Only ask whether the role at this address serves
    #[arg(long, value_name = "ADDR")]
    server: Option<String>,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Good,
    /// It works, but slower or only in part.
    Note,
    Bad,
}

impl Verdict {
    const fn name(self) -> &'static str {
        match self {
            Verdict::Good => "ok",
            Verdict::Note => "note",
            Verdict::Bad => "bad",
        }
    }
}

struct Check {
    what: String,
    verdict: Verdict,
    detail: String,
}

fn check(what: impl Into<String>, verdict: Verdict, detail: impl Into<String>) -> Check {
    Check { what: what.into(), verdict, detail: detail.into() }
}

/// Runs every check; fails when one of them is bad.
pub(crate) async fn run(flags: DoctorFlags) -> anyhow::Result<()> {
    let config = flags.config.load(Vec::new())?;
    if flags.config.print_config {
        return output::line(config.to_toml()?.trim_end());
    }
    let _telemetry = telemetry::start(config.log.as_deref().unwrap_or("error"), config.otlp.as_deref())?;
    let checks = match &flags.server {
        Some(address) => vec![serving(address).await],
        None => machine(config).await,
    };
    for Check { what, verdict, detail } in &checks {
        if flags.json {
            output::json(&json!({"event": "check", "what": what, "verdict": verdict.name(), "detail": detail}))?;
        } else {
            output::line(format_args!("{:4} {what}: {detail}", verdict.name()))?;
        }
    }
    let bad = checks.iter().filter(|check| check.verdict == Verdict::Bad).count();
    if flags.json {
        output::json(&json!({"event": "done", "bad": bad}))?;
    }
    if bad > 0 {
        return Err(unavailable(format!(
            "{bad} of {} checks are bad; the lines marked bad say what to do",
            checks.len()
        )));
    }
    Ok(())
}

/// Whether a role serves.
async fn serving(address: &str) -> Check {
    let what = format!("server {address}");
    match kvsplice_proto::client::channel(address) {
        Err(error) => check(what, Verdict::Bad, error.to_string()),
        Ok(channel) if roles::is_serving(channel.clone()).await => check(what, Verdict::Good, "serves"),
        Ok(_) => check(what, Verdict::Bad, "does not serve; start it, or wait until it has loaded its models"),
    }
}

/// What this machine has for the roles.
async fn machine(config: Config) -> Vec<Check> {
    let mut checks = cpu();
    checks.push(libtorch());
    #[cfg(feature = "worker")]
    checks.push(device(&config).await);
    checks.extend(models(&config).await);
    for role in Role::ALL {
        checks.push(port(role, &config).await);
    }
    #[cfg(feature = "cache")]
    checks.push(store(config).await);
    checks
}

/// The features that decide how fast matrices multiply.
fn cpu() -> Vec<Check> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    let flags = field("flags").unwrap_or_default();
    let has = |flag: &str| flags.split(' ').any(|known| known == flag);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let name = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let feature = |what: &str, flag: &str, without: &str| match has(flag) {
        true => check(what, Verdict::Good, "found"),
        false => check(what, Verdict::Note, format!("not found: {without}")),
    };
    vec![
        check("cpu", Verdict::Good, format!("{name}, {cores} threads")),
        feature("AVX2", "avx2", "expect very slow answers"),
        feature("AVX-512", "avx512f", "f32 runs at AVX2 speed"),
        feature("AVX-512-BF16", "avx512_bf16", "models compute in f32"),
        feature("AMX-BF16", "amx_bf16", "no fast bf16 matrices"),
    ]
}

/// The library that is loaded, and the version in the headers beside it.
fn libtorch() -> Check {
    const WHAT: &str = "libtorch";
    if !cfg!(any(feature = "head", feature = "worker")) {
        return check(WHAT, Verdict::Note, "not part of this build");
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    let Some(library) = paths.into_iter().find(|path| path.contains("libtorch_cpu.so")) else {
        return check(WHAT, Verdict::Bad, "not loaded; run deploy/libtorch.sh and build again");
    };
    let root = std::path::Path::new(library).parent().and_then(|folder| folder.parent());
    let header = root.map(|root| root.join("include/torch/headeronly/version.h"));
    let text = header.and_then(|header| std::fs::read_to_string(header).ok()).unwrap_or_default();
    let version = text.lines().map(str::trim).find_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    match version {
        Some(version) => check(WHAT, Verdict::Good, format!("{version} at {library}")),
        None => check(WHAT, Verdict::Good, format!("loaded from {library}, version unknown (no headers beside it)")),
    }
}

/// Whether the worker's device can be used.
#[cfg(feature = "worker")]
async fn device(config: &Config) -> Check {
    let spec = config.worker.primary.clone();
    let what = format!("device {}", spec.device);
    match tokio::task::spawn_blocking(move || spec.describe_device()).await {
        Ok(Ok(Some(device))) => check(what, Verdict::Good, device),
        Ok(Ok(None)) => check(what, Verdict::Good, "no GPU is used; --device cuda uses one"),
        Ok(Err(error)) => check(what, Verdict::Bad, error.to_string()),
        Err(error) => check(what, Verdict::Bad, format!("asking it failed: {error}")),
    }
}

/// Whether each configured model can be read, and its digest.
#[cfg(any(feature = "head", feature = "worker"))]
async fn models(config: &Config) -> Vec<Check> {
    let mut specs = Vec::new();
    #[cfg(feature = "head")]
    specs.extend([
        ("head primary model", config.head.primary.clone()),
        ("head auxiliary model", config.head.auxiliary.clone()),
    ]);
    #[cfg(feature = "worker")]
    specs.push(("worker primary model", config.worker.primary.clone()));
    let mut checks = Vec::new();
    for (what, spec) in specs {
        let dtype = spec.dtype();
        let read = tokio::task::spawn_blocking(move || kvsplice_model::Description::read(&spec)).await;
        checks.push(match read {
            Ok(Ok(model)) => {
                let detail =
                    format!("{}, {} layers, {dtype}, digest {}", model.name, model.config.layers, model.digest);
                check(what, Verdict::Good, detail)
            }
            Ok(Err(error)) => check(what, Verdict::Bad, error.to_string()),
            Err(error) => check(what, Verdict::Bad, format!("reading it failed: {error}")),
        });
    }
    checks
}

#[cfg(not(any(feature = "head", feature = "worker")))]
async fn models(_: &Config) -> Vec<Check> {
    Vec::new()
}

/// Whether the role's port is free, or a role answers there.
async fn port(role: Role, config: &Config) -> Check {
    let address = match role {
        Role::Head => &config.listen.head,
        Role::Worker => &config.listen.worker,
        Role::Cache => &config.listen.cache,
    };
    let what = format!("{role} port");
    match tokio::net::TcpListener::bind(address).await {
        Ok(_) => check(what, Verdict::Good, format!("{address} is free")),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let serves = match kvsplice_proto::client::channel(address) {
                Ok(channel) => tokio::time::timeout(Duration::from_secs(3), roles::is_serving(channel)).await,
                Err(_) => Ok(false),
            };
            match serves {
                Ok(true) => check(what, Verdict::Good, format!("a role serves at {address}")),
                _ => check(what, Verdict::Bad, format!("another program holds {address}; change [listen] {role}")),
            }
        }
        Err(error) => check(what, Verdict::Bad, format!("cannot listen on {address}: {error}; change [listen] {role}")),
    }
}

/// Whether the configured object store opens.
#[cfg(feature = "cache")]
async fn store(config: Config) -> Check {
    const WHAT: &str = "object store";
    let opened = async {
        let mut running = roles::start(config, &[Role::Cache], roles::Listen::Free).await?;
        let ready = running.ready(Duration::from_secs(20)).await;
        let address = running.addresses().next().map(|(_, address)| address.to_string()).unwrap_or_default();
        let stats = match ready {
            Ok(()) => {
                let channel = kvsplice_proto::client::channel(&address)?;
                let client = kvsplice_proto::cache::CacheClient::new(channel, Duration::from_secs(10));
                client.stats().await.map_err(anyhow::Error::from)
            }
            Err(error) => Err(error),
        };
        let _stopped = running.stop().await;
        stats
    };
    match opened.await {
        Ok(stats) => check(WHAT, Verdict::Good, format!("{} is reachable", stats.store)),
        Err(error) => check(WHAT, Verdict::Bad, crate::failure::one_line(&error)),
    }
}
