//! `kvsplice bench gpu`: the CUDA kernels against the CPU's, and what they reach of the device's measured peak.

use clap::Args;
use kvsplice_model::{Compute, Spec, gpu};
use serde_json::{Value, json};

use crate::failure::{Failure, Kind};
use crate::output;

/// Flags of `bench gpu`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GpuFlags {
    /// Which device, such as cuda or cuda:1
    #[arg(long, default_value = "cuda")]
    device: String,
    /// Keys of the measured attention
    #[arg(long, default_value_t = 16384, value_parser = clap::value_parser!(u32).range(64..=131_072))]
    keys: u32,
    /// Print one JSON object on one line, else on several
    #[arg(long)]
    json: bool,
}

struct Measured {
    device: String,
    parity: Vec<gpu::Parity>,
    peak: gpu::Figure,
    figures: Vec<gpu::Figure>,
    read_bandwidth: f64,
}

/// Compares, measures, prints one JSON object; fails when a comparison does.
pub(crate) async fn run(flags: GpuFlags) -> anyhow::Result<()> {
    let spec = Spec { device: flags.device.clone(), ..Spec::default() };
    let keys = flags.keys;
    let measured = Compute::start()?.run(move || measure(&spec, keys)).await??;
    let worst = measured.parity.iter().filter(|parity| !parity.holds());
    let failed: Vec<&str> = worst.map(|parity| parity.what.as_str()).collect();
    let peak = measured.peak.rate();
    let figure = |figure: &gpu::Figure| -> Value {
        json!({
            "what": figure.what,
            "median_ms": figure.median() * 1e3,
            "spread_ms": [figure.seconds.first().map(|time| time * 1e3), figure.seconds.last().map(|time| time * 1e3)],
            "tflops": figure.rate() / 1e12,
            "share_of_peak": figure.rate() / peak,
        })
    };
    let parity = |parity: &gpu::Parity| -> Value {
        json!({"what": parity.what, "error": parity.error, "bound": parity.bound, "holds": parity.holds()})
    };
    let report = json!({
        "event": "done",
        "device": measured.device,
        "parity_failed": failed,
        "parity": measured.parity.iter().map(parity).collect::<Vec<_>>(),
        "peak": figure(&measured.peak),
        "read_bandwidth_gbs": measured.read_bandwidth / 1e9,
        "figures": measured.figures.iter().map(figure).collect::<Vec<_>>(),
        "command": std::env::args().collect::<Vec<_>>().join(" "),
    });
    if flags.json {
        output::json(&report)?
    } else {
        output::line(serde_json::to_string_pretty(&report)?)?
    }
    if !failed.is_empty() {
        let message = format!("{} of {} comparisons with the CPU fail", failed.len(), measured.parity.len());
        return Err(Failure::new(Kind::Internal, message).into());
    }
    Ok(())
}

fn measure(spec: &Spec, keys: u32) -> Result<Measured, kvsplice_model::Error> {
    let Some(device) = spec.describe_device()? else {
        return Err(kvsplice_model::Error::Option("bench gpu needs --device cuda or cuda:N".to_owned()));
    };
    let index = spec.cuda_index()?.unwrap_or(0);
    Ok(Measured {
        device,
        parity: gpu::parity(spec.device()?)?,
        peak: gpu::peak(index)?,
        figures: gpu::figures(index, keys)?,
        read_bandwidth: gpu::read_bandwidth(index)?,
    })
}
