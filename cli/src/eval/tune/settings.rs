//! Settings of one strategy: every combination of some options' values, and a setting as flags.

use kvsplice_kv::{Options, Strategy};

use crate::failure::usage;

/// Every combination; of the last option the values change first. Each once.
///
/// # Errors
/// A usage failure for a value that the option cannot have, or no value.
pub(super) fn grid(strategy: Strategy, values: &[(&str, &[String])]) -> anyhow::Result<Vec<Options>> {
    let mut grid = vec![Options::of(strategy)];
    for (name, texts) in values {
        let mut wider: Vec<Options> = Vec::new();
        for options in &grid {
            for text in *texts {
                let mut options = *options;
                options.set(name, text.trim()).map_err(|error| usage(error.to_string()))?;
                if !wider.contains(&options) {
                    wider.push(options);
                }
            }
        }
        grid = wider;
    }
    if grid.is_empty() {
        return Err(usage(format!("no setting of {strategy}: name at least one value")));
    }
    Ok(grid)
}

/// The flags of `kvsplice ask` that ask for these options.
pub(super) fn flags(options: &Options) -> String {
    let default = Options::of(options.strategy);
    let mut flags = format!("--strategy {}", options.strategy);
    for ((name, text), (_, usual)) in options.entries().zip(default.entries()) {
        if text != usual {
            flags.push_str(&format!(" --{} {text}", name.replace('_', "-")));
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn every_combination_is_there_once() {
        let (scales, temperatures) = (texts(&["0.9", "1", "1.0"]), texts(&["0.8", "0.9"]));
        let values: [(&str, &[String]); 2] = [("context_temperature", &temperatures), ("context_scale", &scales)];
        let found: Vec<String> = grid(Strategy::Ape, &values).unwrap().iter().map(Options::to_string).collect();
        assert_eq!(
            found,
            [
                "ape:context_temperature=0.8",
                "ape:context_temperature=0.8:context_scale=1",
                "ape",
                "ape:context_scale=1"
            ]
        );
    }

    #[test]
    fn a_value_that_cannot_be_is_named() {
        let fails = |text: &str, part: &str| {
            let error = grid(Strategy::Craft, &[("alpha", &texts(&["1", text]))]).unwrap_err();
            assert_eq!(crate::failure::exit_code(&error), 64);
            assert!(error.to_string().contains(part), "{error}");
        };
        fails("much", "alpha");
        fails("-1", "alpha");
        assert!(grid(Strategy::Craft, &[("alpha", &texts(&[]))]).is_err());
    }

    #[test]
    fn flags_are_what_differs_from_the_default() {
        let of = |text: &str| flags(&text.parse().unwrap());
        assert_eq!(of("craft:alpha=2"), "--strategy craft --alpha 2");
        assert_eq!(of("craft"), "--strategy craft");
        assert_eq!(of("clip:0.1:aux_layers=last"), "--strategy clip --ratio 0.1 --aux-layers last");
        assert_eq!(of("ape:context_scale=1"), "--strategy ape --context-scale 1");
    }
}
