//! The report as text tables that also read well in Markdown.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::{Interval, Report, Row, TaskRow};

/// Texts in rows and columns.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Grid {
    pub(super) header: Vec<String>,
    /// How many columns from the left are words; the others are numbers.
    pub(super) words: usize,
    pub(super) rows: Vec<Vec<String>>,
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(&self.header);
        table.add_rows(&self.rows);
        for column in table.column_iter_mut().skip(self.words) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        write!(f, "{table}")
    }
}

/// One row a strategy.
pub(super) fn overview(report: &Report) -> Grid {
    let has_sets = report.rows.iter().any(|row| !row.set.is_empty());
    let has_kl = report.rows.iter().any(|row| row.kl.is_some());
    let has_text = report.rows.iter().any(|row| row.score.is_some());
    let mut header = vec!["strategy", "n"];
    if has_sets {
        header.insert(0, "set");
    }
    if has_text {
        header.extend(["score", "95 %", "of full", "same text"]);
    }
    if has_kl {
        header.extend(["KL", "95 %", "of direct", "argmax", "right", "gold lp"]);
    }
    header.extend(["charged", "rows"]);
    if has_text {
        header.extend(["TTFT ms", "speed-up"]);
    }
    header.push("MB loaded");
    let mut rows = Vec::new();
    for row in &report.rows {
        let mut cells = vec![row.strategy.clone(), row.samples.to_string()];
        if has_sets {
            cells.insert(0, row.set.clone());
        }
        if has_text {
            cells.extend(score_cells(row));
        }
        if has_kl {
            cells.extend(kl_cells(row));
        }
        cells.extend([format!("{:.3}", row.ratio_charged), format!("{:.0}", row.rows)]);
        if has_text {
            let cold = if row.cold > 0 { " (cold)" } else { "" };
            cells.push(row.ttft_ms.map_or_else(none, |ms| format!("{ms:.0}{cold}")));
            cells.push(row.speed_up.map_or_else(none, |factor| format!("{factor:.2}x")));
        }
        cells.push(format!("{:.1}", row.mb_loaded));
        rows.push(cells);
    }
    Grid { header: owned(&header), words: if has_sets { 2 } else { 1 }, rows }
}

fn score_cells(row: &Row) -> [String; 4] {
    let hundred = |value: f64| format!("{:.1}", value * 100.0);
    let bounds = |score: Interval| format!("{}-{}", hundred(score.low), hundred(score.high));
    [
        row.score.map_or_else(none, |score| hundred(score.mean)),
        row.score.map_or_else(none, bounds),
        percent(row.retained),
        percent(row.same_text),
    ]
}

fn kl_cells(row: &Row) -> [String; 6] {
    [
        row.kl.map_or_else(none, |kl| format!("{:.4}", kl.mean)),
        row.kl.map_or_else(none, |kl| format!("{:.4}-{:.4}", kl.low, kl.high)),
        percent(row.kl_of_direct),
        percent(row.argmax),
        percent(row.right),
        row.gold_logprob.map_or_else(none, |logprob| format!("{logprob:.3}")),
    ]
}

/// Score (×100) and KL of each task; none when there is one task only.
pub(super) fn by_task(report: &Report) -> Option<Grid> {
    if report.tasks.len() < 2 {
        return None;
    }
    let has_sets = report.rows.iter().any(|row| !row.set.is_empty());
    let mut header = vec!["strategy", "of"];
    if has_sets {
        header.insert(0, "set");
    }
    header.extend(report.tasks.iter().map(String::as_str));
    let mut rows = Vec::new();
    let mut add = |row: &Row, of: &str, cell: &dyn Fn(&TaskRow) -> Option<String>| {
        let find = |task: &String| row.tasks.iter().find(|known| known.task == *task);
        let cells: Vec<Option<String>> = report.tasks.iter().map(|task| find(task).and_then(cell)).collect();
        if cells.iter().all(Option::is_none) {
            return;
        }
        let names = if has_sets { vec![row.set.clone()] } else { Vec::new() };
        let names = names.into_iter().chain([row.strategy.clone(), of.to_owned()]);
        rows.push(names.chain(cells.into_iter().map(|cell| cell.unwrap_or_else(none))).collect::<Vec<_>>());
    };
    for row in &report.rows {
        add(row, "score", &|task| task.score.map(|score| format!("{:.1}", score * 100.0)));
        add(row, "KL", &|task| task.kl.map(|kl| format!("{kl:.4}")));
    }
    Some(Grid { header: owned(&header), words: if has_sets { 3 } else { 2 }, rows })
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn none() -> String {
    "-".to_owned()
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(none, |share| format!("{:.1} %", share * 100.0))
}
