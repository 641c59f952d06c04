//! What a run's pairs say of each strategy: numbers, then the same as text, JSON and one HTML page.
//!
//! Invariant: a strategy is compared with another only over the samples that both have finished.

mod heat;
mod interval;
mod page;
mod plot;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use self::heat::Heat;
use self::interval::Interval;
use super::store::{Header, Model, Record};
use crate::failure::usage;
use crate::output;
use crate::stats::median;

/// Everything that a run says.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) command: String,
    pub(super) settings: Value,
    pub(super) seed: u64,
    pub(super) version: String,
    pub(super) models: Vec<Model>,
    /// Tasks in the order in which they were measured.
    pub(super) tasks: Vec<String>,
    /// By set, then in the order in which the strategies were measured.
    pub(super) rows: Vec<Row>,
    /// Sweeps over windows and thresholds among the rows.
    pub(super) heats: Vec<Heat>,
}

/// One strategy on one set of samples.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Row {
    /// Such as the prompts' length; empty where there is one set.
    pub(super) set: String,
    pub(super) strategy: String,
    /// The command line that measures this row again.
    pub(super) command: String,
    /// Finished samples.
    pub(super) samples: usize,
    /// Mean over tasks of the mean over samples, 0..=1.
    pub(super) score: Option<Interval>,
    /// Score ÷ full attention's on the same samples.
    pub(super) retained: Option<f64>,
    /// Share of answers that are full attention's text.
    pub(super) same_text: Option<f64>,
    /// KL(full ‖ strategy), mean over samples, nats.
    pub(super) kl: Option<Interval>,
    /// KL ÷ that of `direct` on the same samples.
    pub(super) kl_of_direct: Option<f64>,
    /// Share of gold tokens with full attention's most likely token.
    pub(super) argmax: Option<f64>,
    /// Share of samples whose most likely tokens are all the gold ones.
    pub(super) right: Option<f64>,
    /// Mean log-probability of the gold tokens.
    pub(super) gold_logprob: Option<f64>,
    pub(super) ratio_nominal: f64,
    pub(super) ratio_charged: f64,
    /// Chunk tokens that were computed, and all tokens of the prompt, means.
    pub(super) rows: f64,
    pub(super) prompt_tokens: f64,
    /// Median, from the client's send to its first token; over pairs with cached chunks if there are any.
    pub(super) ttft_ms: Option<f64>,
    /// Full attention's median ÷ this one, on the same samples.
    pub(super) speed_up: Option<f64>,
    /// Mean megabytes (10⁶) of KV loaded.
    pub(super) mb_loaded: f64,
    /// Pairs whose time includes encoding.
    pub(super) cold: usize,
    /// What was carried out instead of what was asked, with the reason, and how often.
    pub(super) replaced: Vec<(String, usize)>,
    pub(super) tasks: Vec<TaskRow>,
}

/// One task of a row.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TaskRow {
    pub(super) task: String,
    pub(super) samples: usize,
    pub(super) score: Option<f64>,
    pub(super) kl: Option<f64>,
}

/// The name of the strategy that KL is compared with.
const DIRECT: &str = "direct";
const FULL: &str = "full";

type Records<'a> = Vec<&'a Record>;

impl Report {
    /// The numbers of these pairs.
    pub(super) fn of(header: &Header, records: &[Record]) -> Self {
        let (mut tasks, mut sets): (Vec<String>, Vec<&str>) = (Vec::new(), Vec::new());
        let mut groups: Vec<((&str, &str), Records<'_>)> = Vec::new();
        for record in records {
            if !tasks.contains(&record.task) {
                tasks.push(record.task.clone());
            }
            if !sets.contains(&record.set.as_str()) {
                sets.push(&record.set);
            }
            let key = (record.set.as_str(), record.strategy.as_str());
            match groups.iter_mut().find(|(known, _)| *known == key) {
                Some((_, group)) => group.push(record),
                None => groups.push((key, vec![record])),
            }
        }
        let find = |set: &str, strategy: &str| {
            groups.iter().find(|(key, _)| *key == (set, strategy)).map(|(_, group)| group.as_slice())
        };
        let mut rows = Vec::new();
        for set in sets {
            for ((_, strategy), group) in groups.iter().filter(|((known, _), _)| *known == set) {
                let mut row = Row::of(group, &tasks, header.seed);
                row.command = header.command_line(set, strategy);
                row.compare(group, find(set, FULL), find(set, DIRECT), &tasks);
                rows.push(row);
            }
        }
        Self {
            command: header.command.clone(),
            settings: header.settings.clone(),
            seed: header.seed,
            version: header.version.clone(),
            models: header.models.clone(),
            tasks,
            heats: heat::of(&rows),
            rows,
        }
    }
}

impl Row {
    fn of(group: &[&Record], tasks: &[String], seed: u64) -> Self {
        let Some(first) = group.first() else { return Self::default() };
        let mean_of =
            |value: &dyn Fn(&Record) -> f64| mean(group.iter().map(|record| value(record))).unwrap_or_default();
        let some_mean = |value: &dyn Fn(&Record) -> Option<f64>| mean(group.iter().filter_map(|record| value(record)));
        let kls: Vec<f64> = group.iter().filter_map(|record| kl(record)).collect();
        let mut replaced: Vec<(String, usize)> = Vec::new();
        for record in group.iter().filter(|record| !record.effective_reason.is_empty()) {
            let text = format!("{}: {}", record.effective, record.effective_reason);
            match replaced.iter_mut().find(|(known, _)| *known == text) {
                Some((_, count)) => *count += 1,
                None => replaced.push((text, 1)),
            }
        }
        Self {
            set: first.set.clone(),
            strategy: first.strategy.clone(),
            command: String::new(),
            samples: group.len(),
            score: interval::of_mean(&scores_by_task(group, tasks), seed),
            retained: None,
            same_text: some_mean(&|record| record.answer.as_ref().map(|answer| share(answer.same_text))),
            kl: interval::of_mean(std::slice::from_ref(&kls), seed),
            kl_of_direct: None,
            argmax: some_mean(&|record| record.agreement.map(|agreement| agreement.argmax)),
            right: some_mean(&|record| record.agreement.map(|agreement| share(agreement.right))),
            gold_logprob: some_mean(&|record| record.agreement.map(|agreement| agreement.gold_logprob)),
            ratio_nominal: mean_of(&|record| record.ratio_nominal),
            ratio_charged: mean_of(&|record| record.ratio_charged),
            rows: mean_of(&|record| record.rows as f64),
            prompt_tokens: mean_of(&|record| record.prompt_tokens as f64),
            ttft_ms: ttft(group),
            speed_up: None,
            mb_loaded: mean_of(&|record| record.bytes as f64 / 1e6),
            cold: group.iter().filter(|record| record.answer.as_ref().is_some_and(|answer| answer.cold)).count(),
            replaced,
            tasks: tasks.iter().filter_map(|task| TaskRow::of(task, group)).collect(),
        }
    }

    /// Compares with full attention and direct reuse.
    fn compare(&mut self, own: &[&Record], full: Option<&[&Record]>, direct: Option<&[&Record]>, tasks: &[String]) {
        if let Some((own, full)) = full.map(|full| common(own, full)) {
            let score = |records: &[&Record]| {
                let tasks = scores_by_task(records, tasks);
                mean(tasks.iter().filter_map(|scores| mean(scores.iter().copied())))
            };
            self.retained = quotient(score(&own), score(&full));
            self.speed_up = quotient(ttft(&full), ttft(&own));
        }
        if let Some((own, direct)) = direct.map(|direct| common(own, direct)) {
            let kl_mean = |records: &[&Record]| mean(records.iter().filter_map(|record| kl(record)));
            self.kl_of_direct = quotient(kl_mean(&own), kl_mean(&direct));
        }
    }
}

impl TaskRow {
    fn of(task: &str, group: &[&Record]) -> Option<Self> {
        let group: Records<'_> = group.iter().filter(|record| record.task == task).copied().collect();
        (!group.is_empty()).then(|| Self {
            task: task.to_owned(),
            samples: group.len(),
            score: mean(group.iter().filter_map(|record| score(record))),
            kl: mean(group.iter().filter_map(|record| kl(record))),
        })
    }
}

/// The records of samples that both have, in the same order.
fn common<'a>(own: &[&'a Record], other: &[&'a Record]) -> (Records<'a>, Records<'a>) {
    let others: HashMap<&str, &Record> = other.iter().map(|record| (record.sample.as_str(), *record)).collect();
    own.iter().filter_map(|record| Some((*record, *others.get(record.sample.as_str())?))).unzip()
}

fn scores_by_task(group: &[&Record], tasks: &[String]) -> Vec<Vec<f64>> {
    let of = |task: &String| {
        let group = group.iter().filter(|record| record.task == *task);
        group.filter_map(|record| score(record)).collect()
    };
    tasks.iter().map(of).collect()
}

fn score(record: &Record) -> Option<f64> {
    record.answer.as_ref().map(|answer| answer.score)
}

fn kl(record: &Record) -> Option<f64> {
    record.agreement.map(|agreement| agreement.kl)
}

/// The median time; those with encoding count only when there are no others.
fn ttft(group: &[&Record]) -> Option<f64> {
    let times = |cold: bool| -> Vec<f64> {
        let answers = group.iter().filter_map(|record| record.answer.as_ref());
        answers.filter(|answer| answer.cold == cold).map(|answer| answer.ttft_ms).collect()
    };
    let warm = times(false);
    let times = if warm.is_empty() { times(true) } else { warm };
    (!times.is_empty()).then(|| median(times))
}

fn share(yes: bool) -> f64 {
    f64::from(u8::from(yes))
}

fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0u32);
    for value in values {
        sum += value;
        count += 1;
    }
    (count > 0).then(|| sum / f64::from(count))
}

fn quotient(part: Option<f64>, whole: Option<f64>) -> Option<f64> {
    let (part, whole) = (part?, whole?);
    (whole > 0.0).then(|| part / whole)
}

/// Writes `report.json` and `report.html` into the folder of the results.
pub(super) fn write(folder: &Path, report: &Report) -> anyhow::Result<()> {
    let save = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|error| usage(format!("write {}: {error}", path.display())))
    };
    save("report.json", serde_json::to_string_pretty(report)?)?;
    save("report.html", page::render(report)?)
}

/// The report as text on stdout.
pub(super) fn show(report: &Report) -> anyhow::Result<()> {
    output::line(table::overview(report))?;
    if let Some(tasks) = table::by_task(report) {
        output::line(format_args!("\n{tasks}"))?;
    }
    for heat in &report.heats {
        output::line(format_args!("\nKL of {heat}"))?;
    }
    for row in &report.rows {
        for (text, count) in &row.replaced {
            output::line(format_args!("{}: {count} of {} carried out as {text}", row.strategy, row.samples))?;
        }
    }
    if let Some(row) = report.rows.last() {
        let shown = row.command.replace(&format!("full,{}", row.strategy), "full,STRATEGY");
        output::line(format_args!("\none row again: {shown}"))?;
    }
    Ok(())
}
