//! `kvsplice bench kernels`: what the kernels reach of this machine's matrix-product peak and memory bandwidth.
//!
//! Ceilings and kernels run in turns, in one process. Shapes are those of the demo's answering model.

use clap::Args;
use kvsplice_model::measure::kernels::{Figure, REPEATS, Work, figures, layer_operations};
use kvsplice_model::{Compute, measure};
use serde_json::{Map, Value, json};

use crate::stats::median;
use crate::{output, signals};

/// Flags of `bench kernels`.
#[derive(Args, Clone, Debug)]
pub(crate) struct KernelFlags {
    /// Measured runs of each kernel, after one that does not count
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(3..=1000))]
    rounds: u32,
    /// Print one JSON object on one line, else a table
    #[arg(long)]
    json: bool,
}

/// Measures and prints.
pub(crate) async fn run(flags: KernelFlags) -> anyhow::Result<()> {
    let stop = signals::stop_token()?;
    let rounds = flags.rounds;
    let compute = Compute::start()?;
    let measured = compute.run(move || {
        figures(rounds, |round| match round {
            0 => output::note("warming up"),
            round => output::note(format_args!("round {round} of {rounds}")),
        })
    });
    let figures = tokio::select! {
        figures = measured => figures??,
        () = stop.cancelled() => return Err(crate::failure::interrupted()),
    };
    let report = Report::of(&figures);
    if flags.json { output::json(&report.json(&figures, rounds)) } else { report.table(&figures) }
}

/// Giga operations or bytes a second.
struct Rate {
    median: f64,
    low: f64,
    high: f64,
}

impl Rate {
    fn of(figure: &Figure) -> Self {
        let (Work::Operations(work) | Work::Bytes(work)) = figure.work;
        let rates: Vec<f64> = figure.seconds.iter().map(|seconds| work / seconds / 1e9).collect();
        Self {
            median: median(rates.iter().copied()),
            low: rates.iter().copied().fold(f64::INFINITY, f64::min),
            high: rates.iter().copied().fold(0.0, f64::max),
        }
    }
}

/// Figures beside their ceilings.
struct Report {
    peak_gflops: f64,
    shares: Vec<(&'static str, f64)>,
}

impl Report {
    fn of(figures: &[Figure]) -> Self {
        let rate = |name: &str| {
            figures.iter().find(|figure| figure.name == name).map_or(0.0, |figure| Rate::of(figure).median)
        };
        let seconds = |name: &str| {
            let runs = figures.iter().find(|figure| figure.name == name).map(|figure| figure.seconds.iter().copied());
            runs.map_or(0.0, median)
        };
        let product = |name: &str| name.starts_with("product_") || name.starts_with("panels_");
        let products = figures.iter().filter(|figure| product(&figure.name));
        let peak_gflops = products.map(|figure| Rate::of(figure).median).fold(0.0, f64::max);
        let (read, copy) = (rate("read"), rate("copy"));
        // A run of an element-wise operation is that of as many layers.
        let layer_seconds = REPEATS as f64 * layer_operations() / (peak_gflops * 1e9);
        let mut shares = vec![
            ("attention_share_of_peak", rate("attention") / peak_gflops),
            ("attention_over_tiled_library", rate("attention") / rate("attention_tiled_library")),
            ("full_share_of_peak", rate("full") / peak_gflops),
            ("full_over_library", rate("full") / rate("full_library")),
            ("panels_1024_896_9728_over_library", rate("panels_1024_896_9728") / rate("product_1024_896_9728")),
            ("decode_f32_share_of_read", rate("decode_f32") / read),
            ("decode_bf16_share_of_read", rate("decode_bf16") / read),
            ("rows_1_f32_share_of_read", rate("rows_1_f32") / read),
            ("rows_1_f32_panels_share_of_read", rate("rows_1_f32_panels") / read),
            ("rows_1_bf16_share_of_read", rate("rows_1_bf16") / read),
            ("rows_1_bf16_panels_share_of_read", rate("rows_1_bf16_panels") / read),
            ("rows_8_f32_over_library", rate("rows_8_f32") / rate("rows_8_f32_library")),
            ("rows_8_bf16_over_library", rate("rows_8_bf16") / rate("rows_8_bf16_library")),
            ("place_f32_share_of_copy", rate("place_f32") / copy),
            ("place_bf16_share_of_copy", rate("place_bf16") / copy),
            ("place_int8_share_of_copy", rate("place_int8") / copy),
            ("place_fp8_share_of_copy", rate("place_fp8") / copy),
            ("place_int4_share_of_copy", rate("place_int4") / copy),
            ("rms_norms_share_of_layer", 2.0 * seconds("rms_norm") / layer_seconds),
            ("rms_norms_library_share_of_layer", 2.0 * seconds("rms_norm_library") / layer_seconds),
            ("silu_mul_share_of_layer", seconds("silu_mul") / layer_seconds),
            ("silu_mul_library_share_of_layer", seconds("silu_mul_library") / layer_seconds),
        ];
        // What this CPU does in another way was not measured.
        shares.retain(|(_, share)| *share > 0.0);
        Self { peak_gflops, shares }
    }

    fn json(&self, figures: &[Figure], rounds: u32) -> Value {
        let mut rates = Map::new();
        for figure in figures {
            let Rate { median, low, high } = Rate::of(figure);
            rates.insert(figure.name.clone(), json!({ "unit": unit(figure), "median": median, "spread": [low, high] }));
        }
        let shares: Map<String, Value> =
            self.shares.iter().map(|(name, share)| ((*name).to_owned(), json!(share))).collect();
        let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |age| age.as_secs());
        json!({
            "event": "done",
            "matmul_peak_gflops": self.peak_gflops,
            "figures": rates,
            "shares": shares,
            "rounds": rounds,
            "threads": measure::threads(),
            "cpu": super::ttft::cpu_name(),
            "unix_time": seconds,
            "command": std::env::args().collect::<Vec<_>>().join(" "),
        })
    }

    fn table(&self, figures: &[Figure]) -> anyhow::Result<()> {
        for figure in figures {
            let Rate { median, low, high } = Rate::of(figure);
            output::line(format_args!("{:28} {median:9.2} {} ({low:.2}–{high:.2})", figure.name, unit(figure)))?;
        }
        output::line("")?;
        output::line(format_args!("{:34} {:7.1} GFLOPS", "matrix-product peak", self.peak_gflops))?;
        for (name, share) in &self.shares {
            output::line(format_args!("{:34} {share:7.3}", name.replace('_', " ")))?;
        }
        Ok(())
    }
}

fn unit(figure: &Figure) -> &'static str {
    match figure.work {
        Work::Operations(_) => "GFLOPS",
        Work::Bytes(_) => "GB/s",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(name: &str, work: Work, seconds: &[f64]) -> Figure {
        Figure { name: name.to_owned(), work, seconds: seconds.to_vec() }
    }

    #[test]
    fn shares_are_of_the_best_product_and_of_the_bandwidth() {
        let figures = [
            figure("product_1", Work::Operations(1e9), &[1.0, 2.0, 4.0]),
            figure("product_2", Work::Operations(1e9), &[0.2, 0.25, 0.5]),
            figure("attention", Work::Operations(3e9), &[1.0]),
            figure("attention_tiled_library", Work::Operations(3e9), &[1.5]),
            figure("read", Work::Bytes(8e9), &[1.0]),
            figure("decode_bf16", Work::Bytes(4e9), &[1.0]),
        ];
        let report = Report::of(&figures);
        let share = |name: &str| report.shares.iter().find(|(known, _)| *known == name).unwrap().1;
        assert_eq!(report.peak_gflops, 4.0);
        assert_eq!((share("attention_share_of_peak"), share("attention_over_tiled_library")), (0.75, 1.5));
        assert_eq!(share("decode_bf16_share_of_read"), 0.5);
        let json = report.json(&figures, 3);
        assert_eq!(json["figures"]["product_1"]["spread"], json!([0.25, 1.0]));
        assert_eq!(json["event"], "done");
    }
}
