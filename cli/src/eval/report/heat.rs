//! A sweep over grouping as windows × thresholds: which cell is best shows at a glance.

use std::fmt;

use kvsplice_kv::Options;
use kvsplice_kv::options::Group;
use serde::Serialize;

use super::Row;
use super::table::Grid;
use crate::eval::ablation::threshold;

/// Thresholds as tenths of a window: those for which every window was measured become columns.
const TENTHS: std::ops::RangeInclusive<u32> = 1..=10;

/// One strategy's sweep on one set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Heat {
    pub(super) set: String,
    /// The strategy without its grouping.
    pub(super) strategy: String,
    /// Thresholds, as shares of the window.
    pub(super) shares: Vec<f64>,
    pub(super) rows: Vec<HeatRow>,
}

/// One window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct HeatRow {
    pub(super) window: u32,
    /// By share, the mean KL.
    pub(super) kl: Vec<f64>,
}

/// A strategy without its grouping on one set, and the mean KL of each grouping.
type Sweep<'a> = (&'a str, Options, Vec<(Group, f64)>);

/// The sweeps that a report's rows hold: at least two windows and two thresholds.
pub(super) fn of(rows: &[Row]) -> Vec<Heat> {
    let mut sweeps: Vec<Sweep<'_>> = Vec::new();
    for row in rows {
        let (Ok(options), Some(kl)) = (row.strategy.parse::<Options>(), row.kl) else { continue };
        if !options.uses("group") || options.group == Group::NONE {
            continue;
        }
        let base = Options { group: Group::NONE, ..options };
        match sweeps.iter_mut().find(|(set, known, _)| *set == row.set && *known == base) {
            Some((_, _, cells)) => cells.push((options.group, kl.mean)),
            None => sweeps.push((&row.set, base, vec![(options.group, kl.mean)])),
        }
    }
    sweeps.into_iter().filter_map(|(set, base, cells)| heat(set, base, &cells)).collect()
}

fn heat(set: &str, base: Options, cells: &[(Group, f64)]) -> Option<Heat> {
    let mut windows: Vec<u32> = cells.iter().map(|(group, _)| group.window).collect();
    windows.sort_unstable();
    windows.dedup();
    let find = |window: u32, share: f64| {
        let wanted = Group { window, threshold: threshold(window, share) };
        cells.iter().find(|(group, _)| *group == wanted).map(|(_, kl)| *kl)
    };
    let shares: Vec<f64> = TENTHS.map(|tenths| f64::from(tenths) / 10.0).collect();
    // A window that was not swept, such as the default one beside a sweep, has too few cells.
    windows.retain(|&window| shares.iter().filter(|&&share| find(window, share).is_some()).count() > 1);
    let full = |share: &f64| windows.iter().all(|&window| find(window, *share).is_some());
    let mut shares: Vec<f64> = shares.iter().copied().filter(full).collect();
    // Of shares that come to the same thresholds, the last one is the nearest to them.
    let column = |share: f64| windows.iter().map(|&window| threshold(window, share)).collect::<Vec<_>>();
    shares.reverse();
    shares.dedup_by(|next, kept| column(*next) == column(*kept));
    shares.reverse();
    let row = |&window: &u32| HeatRow { window, kl: shares.iter().filter_map(|&share| find(window, share)).collect() };
    let rows: Vec<HeatRow> = windows.iter().map(row).collect();
    let strategy = base.to_string().replace(":group=none", "");
    (rows.len() > 1 && shares.len() > 1).then(|| Heat { set: set.to_owned(), strategy, shares, rows })
}

/// A table under the strategy's name: a row a window, a column a threshold.
impl fmt::Display for Heat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut header = vec!["window".to_owned()];
        header.extend(self.shares.iter().map(ToString::to_string));
        let row = |row: &HeatRow| {
            let cells = row.kl.iter().map(|kl| format!("{kl:.4}"));
            [row.window.to_string()].into_iter().chain(cells).collect()
        };
        let grid = Grid { header, words: 1, rows: self.rows.iter().map(row).collect() };
        let set = if self.set.is_empty() { String::new() } else { format!(", {} tokens", self.set) };
        write!(f, "{}{set} by window and threshold\n{grid}", self.strategy)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Interval;
    use super::*;

    fn row(strategy: &str, mean: f64) -> Row {
        let kl = Some(Interval { mean, low: mean, high: mean });
        Row { strategy: strategy.to_owned(), kl, ..Row::default() }
    }

    #[test]
    fn a_sweep_is_a_table_of_windows_and_thresholds() {
        let rows = [
            row("full", 0.0),
            row("clip:0.2", 9.0),
            row("clip:0.2:group=none", 8.0),
            row("clip:0.2:group=4,2", 1.0),
            row("clip:0.2:group=4,3", 2.0),
            row("clip:0.2:group=16,7", 3.0),
            row("clip:0.2:group=16,8", 4.0),
            row("clip:0.2:group=16,10", 5.0),
            row("clip:0.1:group=16,10", 6.0),
        ];
        // A window of 4 needs 2 for 0.4 and 0.5, and 3 for 0.6: 16 has 7, 8 and 10 there.
        let heats = of(&rows);
        let expected = Heat {
            set: String::new(),
            strategy: "clip:0.2".to_owned(),
            shares: vec![0.4, 0.5, 0.6],
            rows: vec![HeatRow { window: 4, kl: vec![1.0, 1.0, 2.0] }, HeatRow { window: 16, kl: vec![3.0, 4.0, 5.0] }],
        };
        assert_eq!(heats, [expected]);
        assert!(of(&rows[..3]).is_empty());
        let halves = [
            row("clip:0.2:group=4,2", 1.0),
            row("clip:0.2:group=4,4", 2.0),
            row("clip:0.2:group=2,1", 3.0),
            row("clip:0.2:group=2,2", 4.0),
        ];
        assert_eq!(of(&halves)[0].shares, [0.5, 1.0]);
    }
}
