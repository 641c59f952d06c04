//! Option values that are more than a name: windows, depths, early stop.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Sliding-window grouping (CacheClip, arXiv 2510.10129): a window of `window` tokens that starts at a
/// candidate and holds at least `threshold` candidates is selected whole; other candidates are dropped. Text: `8,5`, or
/// `none`. `window` 0 means no grouping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Tokens in a window (of the auxiliary model for `clip`, of the primary model else); 0 for no grouping.
    pub window: u32,
    /// Candidates that a window needs.
    pub threshold: u32,
}

impl Default for Group {
    fn default() -> Self {
        Self { window: 8, threshold: 5 }
    }
}

impl Group {
    /// No grouping: the candidates are the rows.
    pub const NONE: Self = Self { window: 0, threshold: 0 };
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.window == 0 { f.write_str("none") } else { write!(f, "{},{}", self.window, self.threshold) }
    }
}

impl FromStr for Group {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "none" {
            return Ok(Self::NONE);
        }
        let parse = || {
            let (window, threshold) = text.split_once(',')?;
            Some(Self { window: window.trim().parse().ok()?, threshold: threshold.trim().parse().ok()? })
        };
        parse().filter(|group| *group != Self::NONE && group.valid()).ok_or_else(|| Error::OutOfRange {
            what: "group",
            expected: "none or WINDOW,THRESHOLD with 1 ≤ threshold ≤ window ≤ 256",
            got: text.to_owned(),
        })
    }
}

impl Group {
    pub(super) fn valid(&self) -> bool {
        *self == Self::NONE || (1 <= self.threshold && self.threshold <= self.window && self.window <= 256)
    }
}

/// Which layers of a model score: the last one, or a range of depth such as `0.5..0.8`, summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Depth {
    /// The last layer only (the paper).
    #[default]
    Last,
    /// Layers l with start ≤ l/L < end, both in 0..=1.
    Range(f32, f32),
}

impl Depth {
    /// The layer indices of a model of `layers` layers; never empty.
    pub fn indices(self, layers: u32) -> std::ops::Range<u32> {
        match self {
            Depth::Last => layers - 1..layers,
            Depth::Range(start, end) => {
                let first = ((start * layers as f32).round() as u32).min(layers - 1);
                first..((end * layers as f32).round() as u32).clamp(first + 1, layers)
            }
        }
    }
}

impl fmt::Display for Depth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Depth::Last => f.write_str("last"),
            Depth::Range(start, end) => write!(f, "{start}..{end}"),
        }
    }
}

impl FromStr for Depth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "last" {
            return Ok(Depth::Last);
        }
        let parse = || {
            let (start, end) = text.split_once("..")?;
            Some((start.trim().parse::<f32>().ok()?, end.trim().parse::<f32>().ok()?))
        };
        match parse() {
            Some((start, end)) if 0.0 <= start && start < end && end <= 1.0 => Ok(Depth::Range(start, end)),
            _ => Err(Error::OutOfRange {
                what: "layers",
                expected: "last or START..END with 0 ≤ start < end ≤ 1",
                got: text.to_owned(),
            }),
        }
    }
}

/// Cache-Craft's focused-chunk early termination (arXiv 2502.15734, section 4; algorithm where the text is silent: our
/// own): chunks are ranked by the question's attention summed over layers and cut at the largest gap between
/// neighbors; when the upper group is the same for `window` layers in a row, the other chunks' rows are not computed in
/// deeper layers. Text: `WINDOW,GAP,FROM` such as `3,0.05,0.3`, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EarlyStop {
    /// Layers in a row with the same upper group; 0 for no early stop.
    pub window: u32,
    /// The gap must be at least this share of the attention to all chunks; infinite: never stops.
    pub gap: f32,
    /// Not before this share of the depth, 0..=1.
    pub from: f32,
}

impl EarlyStop {
    /// Every row goes through every layer.
    pub const NONE: Self = Self { window: 0, gap: 0.0, from: 0.0 };
    /// The setting of `craft`.
    pub const CRAFT: Self = Self { window: 3, gap: 0.05, from: 0.3 };
}

impl fmt::Display for EarlyStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.window == 0 { f.write_str("none") } else { write!(f, "{},{},{}", self.window, self.gap, self.from) }
    }
}

impl FromStr for EarlyStop {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "none" {
            return Ok(Self::NONE);
        }
        let parse = || {
            let mut numbers = text.split(',').map(str::trim);
            let stop = Self {
                window: numbers.next()?.parse().ok()?,
                gap: numbers.next()?.parse().ok()?,
                from: numbers.next()?.parse().ok()?,
            };
            let valid = (1..=1024).contains(&stop.window) && stop.gap >= 0.0 && (0.0..=1.0).contains(&stop.from);
            (numbers.next().is_none() && valid).then_some(stop)
        };
        parse().ok_or_else(|| Error::OutOfRange {
            what: "early_stop",
            expected: "none or WINDOW,GAP,FROM with 1 ≤ window ≤ 1024, gap ≥ 0, 0 ≤ from ≤ 1",
            got: text.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_survives_its_text() {
        for group in [Group::default(), Group::NONE, Group { window: 1, threshold: 1 }] {
            assert_eq!(group.to_string().parse(), Ok(group));
        }
        for layers in [Depth::Last, Depth::Range(0.5, 0.8)] {
            assert_eq!(layers.to_string().parse(), Ok(layers));
        }
        let infinite = EarlyStop { window: 1, gap: f32::INFINITY, from: 0.0 };
        for stop in [EarlyStop::NONE, EarlyStop::CRAFT, infinite] {
            assert_eq!(stop.to_string().parse(), Ok(stop));
        }
    }

    #[test]
    fn values_outside_their_range_are_refused() {
        for text in ["9", "0,0", "4,5", "300,2", "a,b", "8,0"] {
            assert!(text.parse::<Group>().is_err(), "{text}");
        }
        for text in ["first", "0.8..0.5", "0.5..1.5", "NaN..1", "0.5"] {
            assert!(text.parse::<Depth>().is_err(), "{text}");
        }
        for text in ["3", "0,1,0", "3,NaN,0.3", "3,0.1,1.5", "3,0.1,0.3,4"] {
            assert!(text.parse::<EarlyStop>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_depth_range_names_at_least_one_layer() {
        assert_eq!(Depth::Range(0.5, 0.8).indices(30), 15..24);
        assert_eq!(Depth::Range(0.5, 0.51).indices(2), 1..2);
        assert_eq!(Depth::Last.indices(30), 29..30);
        assert_eq!(Depth::Range(0.99, 1.0).indices(2), 1..2);
    }
}
