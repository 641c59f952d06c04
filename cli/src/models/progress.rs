//! Progress of a download: a bar on a terminal, else a plain line every quarter. It writes to standard error only.
use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// Counts bytes of one transfer.
pub(super) struct Progress {
    label: String,
    total: u64,
    done: u64,
    quarters: u64,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// `total`: bytes to come.
    pub(super) fn new(label: impl Into<String>, total: u64) -> Self {
        let label = label.into();
        let bar = std::io::stderr().is_terminal().then(|| bar(&label, total));
        Self { label, total, done: 0, quarters: 0, bar }
    }

    /// `bytes` more have arrived.
    pub(super) fn add(&mut self, bytes: u64) {
        self.done = self.done.saturating_add(bytes);
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
            return;
        }
        let quarters = self.done.saturating_mul(4).checked_div(self.total).unwrap_or(0).min(4);
        if quarters > self.quarters {
            self.quarters = quarters;
            eprintln!("{}: {} % of {} MB", self.label, quarters * 25, self.total / 1_000_000);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(label: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(label.to_owned());
    let template = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Counts the packages of one model.
pub(super) struct Pieces {
    label: &'static str,
    total: usize,
    done: usize,
    bar: Option<ProgressBar>,
}

impl Pieces {
    /// `total`: packages to come.
    pub(super) fn new(label: &'static str, total: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| pieces_bar(label, total));
        eprintln_if(bar.is_none(), label, 0, total);
        Self { label, total, done: 0, bar }
    }

    /// One more is there.
    pub(super) fn next(&mut self) {
        self.done = self.done.saturating_add(1);
        if let Some(bar) = &self.bar {
            bar.set_position(self.done as u64);
        }
        eprintln_if(self.bar.is_none(), self.label, self.done, self.total);
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn eprintln_if(plain: bool, label: &str, done: usize, total: usize) {
    if plain {
        eprintln!("{label}: downloaded {done} of {total} packages");
    }
}

fn pieces_bar(label: &str, total: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64).with_message(format!("{label}: downloading"));
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    match ProgressStyle::with_template("{msg} [{wide_bar}] {pos}/{len} packages {elapsed_precise} {spinner}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
