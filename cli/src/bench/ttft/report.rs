//! What the runs of `bench ttft` say: times, shares of the peaks, and the line through the ratios.

use kvsplice_kv::{Receipt, Strategy};
use kvsplice_model::measure;
use serde_json::{Map, json};

use super::line::Line;
use super::{Bench, ENCODE_TOKENS, Measured, cpu_name};
use crate::bench::flops::{self, Work, causal_pairs};
use crate::generate::Answer;
use crate::receipt::Stages;
use crate::stats::median;

impl Bench {
    pub(super) fn report(&self, measured: &Measured) -> anyhow::Result<Map<String, serde_json::Value>> {
        let Measured { runs, encode_seconds, order, ceilings, peak_rss_mb } = measured;
        let shape = &self.models.primary.config;
        let peaks: Vec<f64> = ceilings.iter().map(|ceilings| ceilings.gflops).collect();
        let bandwidths: Vec<f64> = ceilings.iter().map(|ceilings| ceilings.gbs).collect();
        let (peak_gflops, bandwidth_gbs) = (median(peaks.iter().copied()), median(bandwidths.iter().copied()));
        let peak = peak_gflops * 1e9;
        let prefix = self.prefix_ids()?.len() as f64;
        let (mut ttft, mut spread, mut rows, mut share, mut stages) =
            (Map::new(), Map::new(), Map::new(), Map::new(), Map::new());
        let (mut gaps, mut full_ms, mut clip_ms) = (Vec::new(), 0.0, 0.0);
        let mut line = Vec::new();
        for run in runs {
            let Some(receipt) = run.answers.last().map(|answer| &answer.receipt) else { continue };
            let name = run.name.clone();
            let times: Vec<f64> = run.answers.iter().map(|answer| answer.first_token.as_secs_f64() * 1e3).collect();
            let middle_ms = median(times.iter().copied());
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
            if run.options.strategy == Strategy::Clip {
                line.push((f64::from(run.options.ratio), middle_ms));
            }
            match name.as_str() {
                "full" => {
                    full_ms = middle_ms;
                    share.insert("full".into(), json!(operations / (middle_ms / 1e3) / peak));
                }
                "clip" => {
                    clip_ms = middle_ms;
                    share.insert("clip".into(), json!(operations / (middle_ms / 1e3) / peak));
                    share.insert("clip_recompute".into(), json!(operations / (recompute_ms / 1e3) / peak));
                }
                _ => {}
            }
            gaps.extend(run.answers.iter().flat_map(Answer::gaps_ms));
            ttft.insert(name.clone(), json!(middle_ms));
            spread.insert(name.clone(), json!(range(&times)));
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
            "ratios": Line::through(&line).map(|line| json!({
                "fixed_ms": line.fixed,
                "ms_per_ratio": line.slope,
                "worst_deviation": line.worst,
            })),
            "rows": rows,
            "stages_ms": stages,
            "matmul_peak_gflops": peak_gflops,
            "matmul_peak_spread_gflops": range(&peaks),
            "order": order,
            "share_of_peak": share,
            "itl_ms": itl_ms,
            "read_bandwidth_gbs": bandwidth_gbs,
            "read_bandwidth_spread_gbs": range(&bandwidths),
            "peak_rss_mb": peak_rss_mb,
            "weight_bytes": weight_bytes,
            "itl_over_bound": itl_ms / bound_ms,
            "encode_tokens_per_s": ENCODE_TOKENS as f64 / encode_seconds,
            "rounds": self.flags.rounds,
            "seed": self.flags.seed,
            "dtype": dtype.to_string(),
            "primary": self.models.primary.name,
            "auxiliary": self.models.auxiliary.name,
            "auxiliary_dtype": self.config.head.auxiliary.dtype().to_string(),
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

/// The least and the greatest.
fn range(values: &[f64]) -> [f64; 2] {
    values.iter().fold([f64::INFINITY, 0.0], |[low, high], value| [low.min(*value), high.max(*value)])
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
