//! What came out: by length, each pair of layers with its mean Jaccard and KL, as a table and as JSON.

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use super::overlap;

/// One layer of one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layer {
    /// primary | auxiliary.
    pub(super) role: String,
    /// As asked.
    pub(super) name: String,
    pub(super) index: u32,
}

/// How well one layer tells where another one looks, in one prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Pair {
    pub(super) guess: Layer,
    /// Of the primary model.
    pub(super) reference: Layer,
    pub(super) jaccard: f64,
    /// KL(reference ‖ guess), nats.
    pub(super) kl: f64,
    /// Jaccard with the guess in a random order.
    pub(super) chance: f64,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) sample: String,
    /// As asked.
    pub(super) length: u32,
    /// Chunk tokens of each model.
    pub(super) primary_tokens: usize,
    pub(super) auxiliary_tokens: usize,
    pub(super) characters: usize,
    pub(super) pairs: Vec<Pair>,
}

/// A mean with its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Mean {
    pub(super) mean: f64,
    /// 0 for a single value.
    pub(super) error: f64,
}

impl Mean {
    fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        let count = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let error = if values.len() > 1 { (squares / (count - 1.0) / count).sqrt() } else { 0.0 };
        Self { mean, error }
    }
}

/// One pair of layers over the prompts of a length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) guess: Layer,
    pub(super) reference: Layer,
    pub(super) jaccard: Mean,
    pub(super) kl: Mean,
}

/// The prompts of one length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Length {
    pub(super) length: u32,
    pub(super) samples: usize,
    /// Means, chunks alone.
    pub(super) primary_tokens: f64,
    pub(super) auxiliary_tokens: f64,
    pub(super) characters: f64,
    /// Jaccard of random orders, over all pairs.
    pub(super) chance: Mean,
    pub(super) rows: Vec<Row>,
}

/// By length, in the order of `lengths`; a length without a prompt is left out.
pub(super) fn by_length(lengths: &[u32], measured: &[Measured]) -> Vec<Length> {
    let mut report = Vec::new();
    for &length in lengths {
        let prompts: Vec<&Measured> = measured.iter().filter(|prompt| prompt.length == length).collect();
        let Some(first) = prompts.first() else { continue };
        let over = |value: &dyn Fn(&Measured) -> f64| Mean::of(prompts.iter().map(|prompt| value(prompt)));
        let rows = first.pairs.iter().enumerate().map(|(place, pair)| {
            let of = |value: fn(&Pair) -> f64| {
                Mean::of(prompts.iter().filter_map(|prompt| prompt.pairs.get(place)).map(value))
            };
            Row {
                guess: pair.guess.clone(),
                reference: pair.reference.clone(),
                jaccard: of(|pair| pair.jaccard),
                kl: of(|pair| pair.kl),
            }
        });
        report.push(Length {
            length,
            samples: prompts.len(),
            primary_tokens: over(&|prompt| prompt.primary_tokens as f64).mean,
            auxiliary_tokens: over(&|prompt| prompt.auxiliary_tokens as f64).mean,
            characters: over(&|prompt| prompt.characters as f64).mean,
            // Pairs of one prompt are no independent draws, so the error is that over prompts.
            chance: over(&|prompt| Mean::of(prompt.pairs.iter().map(|pair| pair.chance)).mean),
            rows: rows.collect(),
        });
    }
    report
}

/// One row a pair, one column of each figure a length, and chance below.
pub(super) fn table(report: &[Length]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let figures =
        report.iter().flat_map(|length| [format!("Jaccard {}", length.length), format!("KL {}", length.length)]);
    table.set_header(["guess".to_owned(), "of".to_owned()].into_iter().chain(figures));
    let pairs = report.first().map(|length| length.rows.as_slice()).unwrap_or_default();
    for (place, pair) in pairs.iter().enumerate() {
        let rows = report.iter().filter_map(|length| length.rows.get(place));
        let cells = rows.flat_map(|row| [figure(row.jaccard), figure(row.kl)]);
        table.add_row([name(&pair.guess), name(&pair.reference)].into_iter().chain(cells));
    }
    let chance = report.iter().flat_map(|length| [figure(length.chance), "-".to_owned()]);
    let expected = format!("expected {:.3}", overlap::expected_chance());
    table.add_row(["random order".to_owned(), expected].into_iter().chain(chance));
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn name(layer: &Layer) -> String {
    format!("{} {} ({})", layer.role, layer.name, layer.index)
}

fn figure(mean: Mean) -> String {
    format!("{:.3} ±{:.3}", mean.mean, mean.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(role: &str, name: &str) -> Layer {
        Layer { role: role.to_owned(), name: name.to_owned(), index: 0 }
    }

    fn measured(length: u32, figures: [(f64, f64); 2]) -> Measured {
        let pair = |guess, (jaccard, kl)| Pair { guess, reference: layer("primary", "last"), jaccard, kl, chance: 0.1 };
        let [auxiliary, primary] = figures;
        let pairs = vec![pair(layer("auxiliary", "last"), auxiliary), pair(layer("primary", "first"), primary)];
        let sample = format!("hop-0@{length}");
        Measured { sample, length, primary_tokens: 10, auxiliary_tokens: 12, characters: 50, pairs }
    }

    #[test]
    fn means_are_by_length_and_pair() {
        let prompts = [
            measured(1000, [(0.2, 1.0), (0.4, 3.0)]),
            measured(2000, [(0.5, 2.0), (0.6, 2.0)]),
            measured(1000, [(0.4, 2.0), (0.4, 5.0)]),
        ];
        let report = by_length(&[1000, 2000, 4000], &prompts);
        let [short, long] = &report[..] else { panic!("{report:?}") };
        assert_eq!((short.length, short.samples, long.length, long.samples), (1000, 2, 2000, 1));
        let [auxiliary, primary] = &short.rows[..] else { panic!("{short:?}") };
        // Two values that differ by d have the standard error d / 2.
        assert!((auxiliary.jaccard.mean - 0.3).abs() < 1e-12 && (auxiliary.jaccard.error - 0.1).abs() < 1e-12);
        assert!((primary.kl.mean - 4.0).abs() < 1e-12 && (primary.kl.error - 1.0).abs() < 1e-12);
        assert_eq!(long.rows[0].kl, Mean { mean: 2.0, error: 0.0 });
        let text = table(&report).to_string();
        assert!(text.contains("auxiliary last (0)") && text.contains("expected 0.111"), "{text}");
        assert!(text.contains("0.300 ±0.100") && text.contains("KL 2000"), "{text}");
    }
}
