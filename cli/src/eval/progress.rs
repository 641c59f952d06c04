//! How far a run is, on stderr: a bar on a terminal, a line now and then otherwise. Says nothing with `--json`.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::output;

/// Without a terminal, a line at most this often.
const LINE_GAP: Duration = Duration::from_secs(10);

/// Progress over pairs.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    silent: bool,
    done: usize,
    all: usize,
    /// Pairs of earlier runs cost this one nothing.
    before: usize,
    started: Instant,
    told: Option<Instant>,
}

impl Progress {
    /// `before` of `all` are finished already.
    pub(super) fn new(silent: bool, before: usize, all: usize) -> Self {
        let bar = (!silent && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {msg}, about {eta} left");
            let bar = ProgressBar::new(all as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.with_position(before as u64)
        });
        if let Some(bar) = &bar {
            bar.reset_eta();
        } else if !silent && before > 0 {
            output::note(format_args!("{before} of {all} pairs are finished already"));
        }
        Self { bar, silent, done: before, all, before, started: Instant::now(), told: None }
    }

    /// Another pair is finished.
    pub(super) fn finished(&mut self, what: impl std::fmt::Display) {
        self.done += 1;
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_string());
            bar.set_position(self.done as u64);
            return;
        }
        let due = self.done == self.all || self.told.is_none_or(|told| told.elapsed() >= LINE_GAP);
        if self.silent || !due {
            return;
        }
        self.told = Some(Instant::now());
        output::note(format_args!("{} of {}: {what}, about {} left", self.done, self.all, HumanDuration(self.left())));
    }

    /// Takes the bar away, so that what follows stands alone.
    pub(super) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn left(&self) -> Duration {
        let measured = self.done.saturating_sub(self.before).max(1) as u32;
        let rest = self.all.saturating_sub(self.done) as u32;
        (self.started.elapsed() / measured).saturating_mul(rest)
    }
}
