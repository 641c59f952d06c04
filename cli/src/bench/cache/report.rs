//! Figures beside their ceilings, as a table or as JSON.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;

use super::measure::Spread;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) what: String,
    pub(super) unit: &'static str,
    pub(super) value: Spread,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ceiling: Option<Ceiling>,
    /// What the ratio (or, without a ceiling, the value) should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) goal: Option<Goal>,
    /// More that was measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<(&'static str, Value)>,
}

/// What a figure is compared with.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Ceiling {
    pub(super) what: &'static str,
    pub(super) value: Spread,
    /// Median of the figure ÷ median of the ceiling.
    pub(super) ratio: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Ceiling {
    pub(super) fn over(what: &'static str, ceiling: &[f64], value: Spread) -> Self {
        let ceiling = Spread::of(ceiling);
        Self { what, value: ceiling, ratio: value.median / ceiling.median }
    }
}

impl Figure {
    fn compared(&self) -> f64 {
        self.ceiling.as_ref().map_or(self.value.median, |ceiling| ceiling.ratio)
    }

    fn reached(&self) -> Option<bool> {
        Some(match self.goal? {
            Goal::AtLeast(least) => self.compared() >= least,
            Goal::AtMost(most) => self.compared() <= most,
        })
    }
}

/// All figures of a run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    event: &'static str,
    figures: Vec<Figure>,
    cpu: String,
    threads: usize,
    unix_time: u64,
    command: String,
}

impl Report {
    pub(super) fn new(figures: Vec<Figure>) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            event: "done",
            figures,
            cpu: super::super::ttft::cpu_name(),
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            unix_time: now.map_or(0, |age| age.as_secs()),
            command: std::env::args().collect::<Vec<_>>().join(" "),
        }
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

fn spread(spread: &Spread) -> String {
    if spread.low == spread.high {
        return number(spread.median);
    }
    format!("{} ({}..{})", number(spread.median), number(spread.low), number(spread.high))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["figure", "measured", "unit", "ceiling", "of it", "goal"]);
        for figure in &self.figures {
            let ceiling = figure.ceiling.as_ref();
            let beside = ceiling.map_or(String::new(), |it| format!("{}: {}", it.what, spread(&it.value)));
            let ratio = ceiling.map_or(String::new(), |it| format!("{:.1} %", 100.0 * it.ratio));
            let goal = match (figure.goal, figure.reached()) {
                (Some(goal), Some(reached)) => {
                    let share =
                        |bound: f64| if ceiling.is_some() { format!("{:.0} %", 100.0 * bound) } else { number(bound) };
                    let bound = match goal {
                        Goal::AtLeast(least) => format!("≥ {}", share(least)),
                        Goal::AtMost(most) => format!("≤ {}", share(most)),
                    };
                    format!("{bound}: {}", if reached { "yes" } else { "no" })
                }
                _ => String::new(),
            };
            table.add_row([figure.what.clone(), spread(&figure.value), figure.unit.into(), beside, ratio, goal]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        writeln!(f, "{table}")?;
        for figure in &self.figures {
            for (name, value) in &figure.notes {
                writeln!(f, "{}: {name}: {value}", figure.name)?;
            }
        }
        write!(f, "median (lowest..highest) of the rounds; {}, {} threads", self.cpu, self.threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_shown_beside_its_ceiling_and_its_goal() {
        let value = Spread::of(&[1.0, 3.0, 2.0]);
        let ceiling = Some(Ceiling::over("memcpy", &[4.0, 4.0, 4.0], value));
        let figure = |goal| Figure {
            name: "mapped",
            what: "mapped".into(),
            unit: "GB/s",
            value,
            ceiling: ceiling.clone(),
            goal: Some(goal),
            notes: vec![("wire bytes", 0.into())],
        };
        let report = Report::new(vec![figure(Goal::AtLeast(0.8)), figure(Goal::AtMost(0.5))]);
        let text = report.to_string();
        for part in
            ["2.00 (1.00..3.00)", "memcpy: 4.00", "50.0 %", "≥ 80 %: no", "≤ 50 %: yes", "mapped: wire bytes: 0"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["figures"][0]["ceiling"]["ratio"], 0.5);
        assert_eq!(json["figures"][0]["goal"]["at_least"], 0.8);
    }
}
