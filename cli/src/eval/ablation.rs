//! `kvsplice eval ablation`: the agreement prompts under a strategy's design choices, one by one and together.
//!
//! It is a list of strategies built from flags and carried out by the same runner.

use clap::Args;
use kvsplice_kv::Options;
use kvsplice_kv::options::Group;
use serde_json::json;

use super::agreement::PromptFlags;
use super::flags::{CommonFlags, with_full};
use super::plan::{Item, Plan};
use super::run::carry_out;
use crate::failure::usage;

pub(super) const EXAMPLES: &str = "Examples:\n  kvsplice eval ablation --samples 12\n  \
    kvsplice eval ablation --no-factors --windows 4,8,16,24 --thresholds 0.4,0.5,0.6,0.7,0.8 --ratios 0.2 --no-text\n  \
    kvsplice eval ablation --base guided --lengths 1300,2600";

/// Windows and shares of the sweep when only the other is named.
const WINDOWS: [u32; 4] = [4, 8, 16, 24];
const SHARES: [f64; 5] = [0.4, 0.5, 0.6, 0.7, 0.8];

/// Flags of `eval ablation`.
#[derive(Args, Clone, Debug)]
pub(crate) struct AblationFlags {
    /// The strategy that is taken apart, with the options that stay as they are: clip, guided or blend
    #[arg(long, value_name = "SPEC", default_value = "clip")]
    base: String,
    /// Leave out shared_prefix × group (none, 8,5) × mask (right, bottom-right)
    #[arg(long)]
    no_factors: bool,
    /// Windows of a grouping sweep, in tokens
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    windows: Vec<u32>,
    /// Thresholds of a grouping sweep, as shares of the window
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    thresholds: Vec<f64>,
    /// Ratios, each with all of the above [default: the strategy's]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    ratios: Vec<String>,
    /// Tokens of the prompts; each length is reported apart
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1300")]
    lengths: Vec<usize>,
    /// Prompts of each length, the kinds in turn
    #[arg(long, value_name = "N", default_value_t = 24)]
    samples: usize,
    #[command(flatten)]
    prompts: PromptFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

impl AblationFlags {
    /// `full`, `direct` with and without the shared prefix, then every combination.
    fn strategies(&self) -> anyhow::Result<Vec<Options>> {
        let wrong = |error: kvsplice_kv::Error| usage(error.to_string());
        let base: Options = self.base.parse().map_err(|error| usage(format!("--base: {error}")))?;
        if let Some(name) = ["ratio", "group", "mask", "shared_prefix"].into_iter().find(|name| !base.uses(name)) {
            return Err(usage(format!("--base {base}: has no option {name}; valid are clip, guided and blend")));
        }
        let mut ratios = Vec::new();
        for text in &self.ratios {
            let mut options = base;
            options.set("ratio", text).map_err(wrong)?;
            ratios.push(options);
        }
        if ratios.is_empty() {
            ratios.push(base);
        }
        let groups = self.sweep()?;
        if self.no_factors && groups.is_empty() {
            return Err(usage("--no-factors leaves nothing to measure; name --windows or --thresholds"));
        }
        let mut strategies: Vec<Options> = Vec::new();
        for text in ["direct", "direct:shared_prefix=false"] {
            strategies.push(text.parse().map_err(wrong)?);
        }
        for options in ratios {
            if !self.no_factors {
                for (shared, group, mask) in factors() {
                    let mut options = options;
                    for (name, text) in [("shared_prefix", shared), ("group", group), ("mask", mask)] {
                        options.set(name, text).map_err(wrong)?;
                    }
                    strategies.push(options);
                }
            }
            strategies.extend(groups.iter().map(|&group| Options { group, ..options }));
        }
        Ok(with_full(strategies))
    }

    /// Windows × thresholds, when one of the two is asked for.
    fn sweep(&self) -> anyhow::Result<Vec<Group>> {
        if self.windows.is_empty() && self.thresholds.is_empty() {
            return Ok(Vec::new());
        }
        let windows = if self.windows.is_empty() { &WINDOWS[..] } else { &self.windows };
        let shares = if self.thresholds.is_empty() { &SHARES[..] } else { &self.thresholds };
        let mut groups = Vec::new();
        for &window in windows {
            for &share in shares {
                if !(share > 0.0 && share <= 1.0) {
                    return Err(usage(format!(
                        "--thresholds: {share} is no share of a window; it must be above 0 and at most 1"
                    )));
                }
                let text = format!("{window},{}", threshold(window, share));
                groups.push(text.parse().map_err(|error| usage(format!("--windows: {error}")))?);
            }
        }
        Ok(groups)
    }
}

/// Candidates that a window needs: the share of it, rounded up. Rounding in the product does not count.
pub(super) fn threshold(window: u32, share: f64) -> u32 {
    ((f64::from(window) * share - 1e-9).ceil() as u32).max(1)
}

fn factors() -> Vec<(&'static str, &'static str, &'static str)> {
    let mut factors = Vec::new();
    for shared in ["true", "false"] {
        for group in ["none", "8,5"] {
            for mask in ["right", "bottom-right"] {
                factors.push((shared, group, mask));
            }
        }
    }
    factors
}

/// Measures, and reports.
pub(crate) async fn run(flags: AblationFlags) -> anyhow::Result<()> {
    let strategies = flags.strategies()?;
    let kinds = flags.prompts.kinds()?;
    if flags.samples == 0 || flags.lengths.is_empty() {
        return Err(usage("zero samples: nothing to measure; ask for at least one with --samples"));
    }
    let (common, prompts, samples) = (&flags.common, &flags.prompts, flags.samples);
    carry_out(common, "ablation", async |client| {
        let mut items = Vec::new();
        for &length in &flags.lengths {
            let generated = prompts.generate(client, &kinds, (samples, common.seed, length)).await?;
            for sample in generated {
                items.push(Item::new(length.to_string(), sample)?);
            }
        }
        let mut settings = prompts.settings(&kinds);
        settings.insert("prefix_cache".to_owned(), json!(common.prefix_cache));
        let mut words = prompts.words(&kinds, samples);
        words.extend(common.words());
        Ok(Plan {
            command: "ablation",
            settings: settings.into(),
            seed: common.seed,
            items,
            strategies,
            measures: prompts.measures(),
            prefix_cache: common.prefix_cache,
            words,
            set_flag: "--tokens",
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: AblationFlags,
    }

    fn listed(arguments: &[&str]) -> anyhow::Result<Vec<String>> {
        let line = Line::try_parse_from([&["ablation"], arguments].concat())?;
        Ok(line.flags.strategies()?.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_threshold_is_the_share_of_its_window_rounded_up() {
        assert_eq!([0.4, 0.5, 0.6, 0.7, 0.8].map(|share| threshold(8, share)), [4, 4, 5, 6, 7]);
        // 0.7 · 10 is 7.000000000000001 or less, never 8.
        assert_eq!((threshold(10, 0.7), threshold(4, 0.01), threshold(24, 1.0)), (7, 1, 24));
    }

    #[test]
    fn flags_become_a_list_without_repeats() {
        let factors = listed(&[]).unwrap();
        assert_eq!(factors.len(), 3 + 8);
        assert_eq!(factors[..3], ["full", "direct", "direct:shared_prefix=false"]);
        assert!(
            factors.contains(&"clip:0.2:group=none:shared_prefix=false:mask=bottom-right".to_owned()),
            "{factors:?}"
        );
        let sweep =
            listed(&["--no-factors", "--windows", "4,8", "--thresholds", "0.4,0.5", "--ratios", "0.1,0.2"]).unwrap();
        let expected = ["clip:0.1:group=4,2", "clip:0.1:group=8,4", "clip:0.2:group=4,2", "clip:0.2:group=8,4"];
        assert_eq!(sweep[3..], expected);
        assert!(listed(&["--base", "guided:guide=question"]).unwrap()[3].contains("guide=question"));
    }

    #[test]
    fn what_cannot_be_taken_apart_is_refused() {
        for arguments in [
            &["--base", "direct"][..],
            &["--base", "magic"],
            &["--no-factors"],
            &["--thresholds", "1.5"],
            &["--windows", "1000"],
            &["--ratios", "2"],
        ] {
            let error = listed(arguments).unwrap_err();
            assert_eq!(crate::failure::exit_code(&error), 64, "{arguments:?}: {error}");
        }
    }
}
