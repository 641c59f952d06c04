//! The report as one HTML page that needs nothing else: tables, plots, and every row's command line.

use minijinja::{Environment, Value};
use serde_json::json;

use super::heat::Heat;
use super::plot::{self, Bar, Point};
use super::{Interval, Report, Row, table};

const PAGE: &str = include_str!("page.html");

/// The page.
///
/// # Errors
/// Only if the template is wrong.
pub(super) fn render(report: &Report) -> anyhow::Result<String> {
    let mut names: Vec<&str> = Vec::new();
    for row in &report.rows {
        if !names.contains(&row.strategy.as_str()) {
            names.push(&row.strategy);
        }
    }
    // Points of many strategies have the numbers of the legend.
    let numbered = names.len() > plot::DISTINCT;
    let name = |place: usize, row: &Row| if numbered { (place + 1).to_string() } else { row.strategy.clone() };
    let color = |row: &Row| names.iter().position(|name| *name == row.strategy).unwrap_or_default();
    let mut sets: Vec<&str> = Vec::new();
    for row in &report.rows {
        if !sets.contains(&row.set.as_str()) {
            sets.push(&row.set);
        }
    }
    let mut plots = Vec::new();
    for set in sets {
        let rows: Vec<(usize, &Row)> =
            report.rows.iter().filter(|row| row.set == set).map(|row| (color(row), row)).collect();
        let suffix = if set.is_empty() { String::new() } else { format!(", {set} tokens") };
        let mut add = |title: &str, svg: Option<String>| {
            plots.extend(svg.map(|svg| json!({"title": format!("{title}{suffix}"), "svg": svg})));
        };
        add(
            "KL to full attention against time to first token (lower and further left is better)",
            by_time("KL, nats", &rows, name, |row| row.kl)?,
        );
        let score = |row: &Row| row.score.map(|score| score.scaled(100.0));
        add(
            "Score against time to first token (higher and further left is better)",
            by_time("score", &rows, name, score)?,
        );
        add("KL by task", by_task(report, "KL, nats", &rows, |row, task| row.kl_of(task))?);
        add("Score by task", by_task(report, "score", &rows, |row, task| row.score_of(task))?);
    }
    let legend: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(index, name)| json!({"name": name, "number": numbered.then_some(index + 1), "color": plot::css(index)}))
        .collect();
    let mut environment = Environment::new();
    environment.add_template("report.html", PAGE)?;
    let page = environment.get_template("report.html")?;
    let values = serde_json::from_value::<Value>(json!({
        "command": report.command,
        "settings": serde_json::to_string(&report.settings)?,
        "seed": report.seed,
        "version": report.version,
        "models": report.models,
        "overview": table::overview(report),
        "by_task": table::by_task(report),
        "heats": report.heats.iter().map(heat).collect::<Vec<_>>(),
        "legend": legend,
        "plots": plots,
        "rows": report.rows,
    }))?;
    Ok(page.render(values)?)
}

fn by_time(
    what: &str,
    rows: &[(usize, &Row)],
    name: impl Fn(usize, &Row) -> String,
    value: impl Fn(&Row) -> Option<Interval>,
) -> anyhow::Result<Option<String>> {
    let mut points = Vec::new();
    for (color, row) in rows {
        if let (Some(ttft_ms), Some(interval)) = (row.ttft_ms, value(row)) {
            let Interval { mean, low, high } = interval;
            points.push(Point { name: name(*color, row), color: *color, ttft_ms, value: mean, low, high });
        }
    }
    if points.is_empty() { Ok(None) } else { plot::against_time(what, &points).map(Some) }
}

fn by_task(
    report: &Report,
    what: &str,
    rows: &[(usize, &Row)],
    value: impl Fn(&Row, &str) -> Option<f64>,
) -> anyhow::Result<Option<String>> {
    let bars =
        |task: &str| rows.iter().map(|(color, row)| Bar { color: *color, value: value(row, task) }).collect::<Vec<_>>();
    let tasks: Vec<(&str, _)> = report.tasks.iter().map(|task| (task.as_str(), bars(task))).collect();
    let known = tasks.iter().any(|(_, bars)| bars.iter().any(|bar| bar.value.is_some()));
    if known { plot::bars(what, &tasks).map(Some) } else { Ok(None) }
}

impl Row {
    fn kl_of(&self, task: &str) -> Option<f64> {
        self.tasks.iter().find(|known| known.task == task).and_then(|task| task.kl)
    }

    fn score_of(&self, task: &str) -> Option<f64> {
        self.tasks.iter().find(|known| known.task == task).and_then(|task| task.score).map(|score| score * 100.0)
    }
}

/// Cells with the strength of their color, 0 (best) to 1.
fn heat(heat: &Heat) -> serde_json::Value {
    let all = || heat.rows.iter().flat_map(|row| row.kl.iter().copied());
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    let strength = |kl: f64| if high > low { (kl - low) / (high - low) } else { 0.0 };
    let rows: Vec<_> = heat
        .rows
        .iter()
        .map(|row| {
            let cell = |&kl: &f64| json!({"text": format!("{kl:.4}"), "strength": format!("{:.2}", strength(kl))});
            json!({"window": row.window, "cells": row.kl.iter().map(cell).collect::<Vec<_>>()})
        })
        .collect();
    json!({"set": heat.set, "strategy": heat.strategy, "shares": heat.shares, "rows": rows})
}
