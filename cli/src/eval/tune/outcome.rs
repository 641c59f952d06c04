//! What the settings gave: means over the samples of a plan, as a table and as JSON.

use comfy_table::{CellAlignment, Table, presets};
use kvsplice_kv::Options;
use serde_json::{Value, json};

use super::choose::Outcome;
use crate::eval::plan::Plan;
use crate::eval::store::{Record, Store};

/// Means over the samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Means {
    /// Score of the answers, if there are any.
    pub(super) answer: Option<f64>,
    /// Share of answers that are full attention's, if there are any.
    pub(super) same_text: Option<f64>,
    /// Share of the gold tokens where the most likely token is full attention's.
    pub(super) argmax: f64,
    /// KL(full ‖ setting), nats.
    pub(super) kl: f64,
    /// Share of the selectable tokens that was recomputed.
    pub(super) charged: f64,
    /// Share of all chunk tokens that was computed. This is the cost: a chunk that is computed whole, as craft does where
    /// a repair would take as much, is not selectable.
    pub(super) computed: f64,
    /// How many samples were carried out under another strategy, such as full when no chunk could be reused.
    pub(super) replaced: usize,
}

/// One setting with what it gave.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tuned {
    pub(super) options: Options,
    pub(super) means: Means,
    pub(super) outcome: Outcome,
}

/// Every strategy of the plan, in its order; all of its pairs must be in the store. `score` says what counts.
pub(super) fn all(plan: &Plan, store: &Store, score: impl Fn(&Means) -> f64) -> anyhow::Result<Vec<Tuned>> {
    let mut tuned = Vec::with_capacity(plan.strategies.len());
    let mut chunk_tokens = None;
    for &options in &plan.strategies {
        let name = options.to_string();
        let mut records = Vec::with_capacity(plan.items.len());
        for item in &plan.items {
            let missing = || anyhow::anyhow!("{name} is not measured on {}", item.sample.id);
            records.push(store.find(item, &name)?.ok_or_else(missing)?);
        }
        // Full attention comes first, and computes every chunk token.
        let chunk_tokens = *chunk_tokens.get_or_insert_with(|| rows(&records));
        let means = means(&records, chunk_tokens);
        let outcome = Outcome { score: score(&means), kl: means.kl, computed: means.computed };
        tuned.push(Tuned { options, means, outcome });
    }
    Ok(tuned)
}

/// Chunk tokens that were computed.
fn rows(records: &[&Record]) -> f64 {
    records.iter().map(|record| record.rows as f64).sum()
}

fn means(records: &[&Record], chunk_tokens: f64) -> Means {
    let mean = |value: fn(&Record) -> f64| {
        records.iter().map(|record| value(record)).sum::<f64>() / records.len().max(1) as f64
    };
    let answered = records.iter().all(|record| record.answer.is_some());
    let of_answers = |value: fn(&Record) -> f64| answered.then(|| mean(value));
    Means {
        answer: of_answers(|record| record.answer.as_ref().map_or(0.0, |answer| answer.score)),
        same_text: of_answers(|record| record.answer.as_ref().map_or(0.0, |answer| f64::from(answer.same_text))),
        argmax: mean(|record| record.agreement.as_ref().map_or(0.0, |agreement| agreement.argmax)),
        kl: mean(|record| record.agreement.as_ref().map_or(f64::NAN, |agreement| agreement.kl)),
        charged: mean(|record| record.ratio_charged),
        computed: rows(records) / chunk_tokens.max(1.0),
        replaced: records.iter().filter(|record| !record.effective_reason.is_empty()).count(),
    }
}

impl Tuned {
    /// Share of the score of full attention; none when that has none.
    fn retained(&self, full: &Self) -> Option<f64> {
        (full.outcome.score > 0.0).then(|| self.outcome.score / full.outcome.score)
    }

    pub(super) fn to_json(&self, full: &Self) -> Value {
        json!({
            "strategy": self.options.to_string(),
            "score": self.outcome.score,
            "retained": self.retained(full),
            "answer": self.means.answer,
            "same_text": self.means.same_text,
            "argmax": self.means.argmax,
            "kl": self.means.kl,
            "ratio_charged": self.means.charged,
            "computed": self.means.computed,
            "replaced": self.means.replaced,
        })
    }
}

/// One row a setting below full attention; a star marks the chosen one.
pub(super) fn table(full: &Tuned, settings: &[Tuned], chosen: Option<&Tuned>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(["setting", "score", "of full", "answer", "same text", "argmax", "KL", "charged", "computed"]);
    for tuned in std::iter::once(full).chain(settings) {
        let star = if chosen == Some(tuned) { " *" } else { "" };
        let replaced = match tuned.means.replaced {
            0 => String::new(),
            count => format!(" ({count} as another)"),
        };
        let share = |value: f64| format!("{value:.3}");
        let known = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), share);
        table.add_row([
            format!("{}{star}{replaced}", tuned.options),
            share(tuned.outcome.score),
            tuned.retained(full).map_or_else(|| "-".to_owned(), |retained| format!("{:.0} %", retained * 100.0)),
            known(tuned.means.answer),
            known(tuned.means.same_text),
            share(tuned.means.argmax),
            format!("{:.4}", tuned.means.kl),
            format!("{:.1} %", tuned.means.charged * 100.0),
            format!("{:.1} %", tuned.means.computed * 100.0),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::store::{Agreement, Answered};

    fn record(score: f64, same_text: bool, kl: f64, ratio_charged: f64) -> Record {
        let agreement = Agreement { kl, argmax: 0.5, ..Agreement::default() };
        let answer = Answered { score, same_text, ..Answered::default() };
        Record { ratio_charged, rows: 30, agreement: Some(agreement), answer: Some(answer), ..Record::default() }
    }

    #[test]
    fn means_are_over_all_samples() {
        let records = [record(1.0, true, 0.2, 0.1), record(0.5, false, 0.4, 0.3)];
        let means = means(&records.iter().collect::<Vec<_>>(), 240.0);
        let near = |left: f64, right: f64| assert!((left - right).abs() < 1e-12, "{left} is not {right}");
        near(means.answer.unwrap(), 0.75);
        near(means.same_text.unwrap(), 0.5);
        near(means.argmax, 0.5);
        near(means.kl, 0.3);
        near(means.charged, 0.2);
        near(means.computed, 0.25);
        assert_eq!(means.replaced, 0);
    }

    #[test]
    fn what_was_not_measured_is_unknown_and_what_was_replaced_is_counted() {
        let mut records = [record(1.0, true, 0.2, 0.1), record(1.0, true, 0.2, 1.0)];
        records[0].answer = None;
        records[1].effective_reason = "no chunk could be reused".to_owned();
        let means = means(&records.iter().collect::<Vec<_>>(), 240.0);
        assert_eq!((means.answer, means.same_text, means.replaced), (None, None, 1));
    }

    #[test]
    fn the_chosen_setting_has_a_star() {
        let tuned = |text: &str, score| {
            let (kl, computed) = (0.25, 0.125);
            let (answer, same_text) = (Some(score), None);
            let replaced = usize::from(score > 0.7);
            let means = Means { answer, same_text, argmax: 0.75, kl, charged: 0.5, computed, replaced };
            Tuned { options: text.parse().unwrap(), means, outcome: Outcome { score, kl, computed } }
        };
        let settings = [tuned("craft:alpha=0.5", 0.5), tuned("craft:alpha=2", 0.75)];
        let full = tuned("full", 0.8);
        let text = table(&full, &settings, Some(&settings[1])).to_string();
        assert!(text.contains("craft:alpha=2 * (1 as another) |") && !text.contains("craft:alpha=0.5 *"), "{text}");
        assert!(text.contains("94 %") && text.contains("12.5 %") && text.contains("0.2500"), "{text}");
        assert_eq!(settings[0].to_json(&full)["retained"], 0.625);
        assert_eq!(settings[0].to_json(&tuned("full", 0.0))["retained"], Value::Null);
    }
}
