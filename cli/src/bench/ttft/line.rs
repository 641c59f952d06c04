//! A straight line through times, by least squares.

/// time = fixed + slope · share
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    /// The time at share 0.
    pub(super) fixed: f64,
    /// Time a share of 1.
    pub(super) slope: f64,
    /// The greatest distance of a time from the line, as a share of what the line says.
    pub(super) worst: f64,
}

impl Line {
    /// Through `(share, time)`; none through fewer than three, for two always lie on one.
    pub(super) fn through(points: &[(f64, f64)]) -> Option<Self> {
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (share, time) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - share).powi(2)).sum();
        if points.len() < 3 || spread < 1e-12 {
            return None;
        }
        let slope = points.iter().map(|point| (point.0 - share) * (point.1 - time)).sum::<f64>() / spread;
        let fixed = time - slope * share;
        let distance = |point: &(f64, f64)| (point.1 / (fixed + slope * point.0) - 1.0).abs();
        Some(Self { fixed, slope, worst: points.iter().map(distance).fold(0.0, f64::max) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_and_distances_are_shares_of_it() {
        let exact = Line::through(&[(0.1, 12.0), (0.2, 14.0), (0.8, 26.0)]).unwrap();
        assert!((exact.fixed - 10.0).abs() < 1e-9 && (exact.slope - 20.0).abs() < 1e-9 && exact.worst < 1e-9);
        let off = Line::through(&[(0.0, 10.0), (0.5, 22.0), (1.0, 30.0)]).unwrap();
        assert!((off.worst - (22.0 / (62.0 / 3.0) - 1.0)).abs() < 1e-9, "{off:?}");
    }

    #[test]
    fn two_points_are_no_evidence() {
        assert_eq!(Line::through(&[(0.1, 1.0), (0.2, 2.0)]), None);
        assert_eq!(Line::through(&[(0.1, 1.0), (0.1, 2.0), (0.1, 3.0)]), None);
    }
}
