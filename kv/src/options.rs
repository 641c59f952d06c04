//! What a request asks for: strategy, selection options and sampling. Names here are the wire and command-line names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// How a prompt's KV comes about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Plain causal prefill of every token; exact.
    Full,
    /// Every chunk as cached, nothing recomputed but the question (PromptCache, arXiv 2311.04934).
    Direct,
    /// An auxiliary model picks the rows to recompute (CacheClip, arXiv 2510.10129).
    #[default]
    Clip,
}

const STRATEGIES: &str = "full, direct, clip";

impl Strategy {
    /// Every strategy, in the order of `STRATEGIES`.
    pub const ALL: [Strategy; 3] = [Strategy::Full, Strategy::Direct, Strategy::Clip];

    /// The wire and command-line name.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::Full => "full",
            Strategy::Direct => "direct",
            Strategy::Clip => "clip",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == name).ok_or_else(|| Error::UnknownName {
            what: "strategy",
            got: name.to_owned(),
            known: STRATEGIES,
        })
    }
}

/// What the ratio counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Budget {
    /// N is the tokens that may be selected (chunk 1 left out when it is exact); k is the largest for which the rows
    /// after grouping and remap are at most round(ratio·N).
    #[default]
    Charged,
    /// The paper: k = round(ratio·N_aux) auxiliary tokens before grouping, chunk 1 included.
    Nominal,
}

impl FromStr for Budget {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "charged" => Ok(Budget::Charged),
            "nominal" => Ok(Budget::Nominal),
            _ => Err(Error::UnknownName { what: "budget", got: name.to_owned(), known: "charged, nominal" }),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Budget::Charged => "charged",
            Budget::Nominal => "nominal",
        })
    }
}

/// Sliding-window grouping (CacheClip, arXiv 2510.10129): a window of `window` auxiliary tokens that starts at a
/// candidate and holds at least `threshold` candidates is selected whole; other candidates are dropped. Text: `8,5`, or
/// `none`. `window` 0 means no grouping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Auxiliary tokens in a window; 0 for no grouping.
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
    fn valid(&self) -> bool {
        *self == Self::NONE || (1 <= self.threshold && self.threshold <= self.window && self.window <= 256)
    }
}

/// Over which keys an auxiliary score is normalized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Softmax {
    /// Each chunk with its own prefix and question (the paper).
    #[default]
    Chunk,
    /// One distribution over all chunks' tokens.
    Joint,
}

impl FromStr for Softmax {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "chunk" => Ok(Softmax::Chunk),
            "joint" => Ok(Softmax::Joint),
            _ => Err(Error::UnknownName { what: "softmax", got: name.to_owned(), known: "chunk, joint" }),
        }
    }
}

impl fmt::Display for Softmax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Softmax::Chunk => "chunk",
            Softmax::Joint => "joint",
        })
    }
}

/// Which layers of the auxiliary model score: the last one, or a range of depth such as `0.5..0.8`, summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum AuxLayers {
    /// The last layer only (the paper).
    #[default]
    Last,
    /// Layers l with start ≤ l/L < end, both in 0..=1.
    Range(f32, f32),
}

impl AuxLayers {
    /// The layer indices of a model of `layers` layers; never empty.
    pub fn indices(self, layers: u32) -> std::ops::Range<u32> {
        match self {
            AuxLayers::Last => layers - 1..layers,
            AuxLayers::Range(start, end) => {
                let first = ((start * layers as f32).round() as u32).min(layers - 1);
                first..((end * layers as f32).round() as u32).clamp(first + 1, layers)
            }
        }
    }
}

impl fmt::Display for AuxLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AuxLayers::Last => f.write_str("last"),
            AuxLayers::Range(start, end) => write!(f, "{start}..{end}"),
        }
    }
}

impl FromStr for AuxLayers {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "last" {
            return Ok(AuxLayers::Last);
        }
        let parse = || {
            let (start, end) = text.split_once("..")?;
            Some((start.trim().parse::<f32>().ok()?, end.trim().parse::<f32>().ok()?))
        };
        match parse() {
            Some((start, end)) if 0.0 <= start && start < end && end <= 1.0 => Ok(AuxLayers::Range(start, end)),
            _ => Err(Error::OutOfRange {
                what: "aux_layers",
                expected: "last or START..END with 0 ≤ start < end ≤ 1",
                got: text.to_owned(),
            }),
        }
    }
}

/// A strategy with all its options. An option that the strategy does not use is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// How the prompt's KV comes about.
    pub strategy: Strategy,
    /// `clip`: share of the chunk tokens to recompute, in 0..=1.
    pub ratio: f32,
    /// `clip`: what the ratio counts.
    pub budget: Budget,
    /// `clip`: windows that make runs of rows.
    pub group: Group,
    /// `clip`: over which keys a score is normalized.
    pub softmax: Softmax,
    /// `clip`: which auxiliary layers score.
    pub aux_layers: AuxLayers,
    /// `direct`: chunks were encoded behind the prompt's prefix (else alone).
    pub shared_prefix: bool,
    /// `direct`: chunk keys move to their slots (else they keep the positions of their encoding).
    pub renumber: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            strategy: Strategy::default(),
            ratio: 0.2,
            budget: Budget::default(),
            group: Group::default(),
            softmax: Softmax::default(),
            aux_layers: AuxLayers::default(),
            shared_prefix: true,
            renumber: true,
        }
    }
}

impl Options {
    /// Checks every number. Called once, where a request enters.
    pub fn validate(&self) -> Result<(), Error> {
        if !(0.0..=1.0).contains(&self.ratio) {
            return Err(Error::OutOfRange { what: "ratio", expected: "in 0..=1", got: self.ratio.to_string() });
        }
        if !self.group.valid() {
            return Err(Error::OutOfRange {
                what: "group",
                expected: "none or WINDOW,THRESHOLD with 1 ≤ threshold ≤ window ≤ 256",
                got: self.group.to_string(),
            });
        }
        if let AuxLayers::Range(..) = self.aux_layers {
            self.aux_layers.to_string().parse::<AuxLayers>()?;
        }
        if self.strategy != Strategy::Direct && !(self.shared_prefix && self.renumber) {
            return Err(Error::OutOfRange {
                what: "shared_prefix and renumber",
                expected: "true unless the strategy is direct",
                got: format!("{} and {} with {}", self.shared_prefix, self.renumber, self.strategy),
            });
        }
        Ok(())
    }

    /// `ratio` × `tokens`, rounded half up, at most `tokens`.
    pub fn budget_rows(&self, tokens: usize) -> usize {
        ((f64::from(self.ratio) * tokens as f64 + 0.5).floor() as usize).min(tokens)
    }
}

/// How output tokens are drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// At most this many output tokens.
    pub max_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus: the smallest set of tokens with at least this probability; 1 is all.
    pub top_p: f32,
    /// Only the k most likely tokens; 0 is all.
    pub top_k: u32,
    /// Seeds the draw; the same seed gives the same text.
    pub seed: u64,
    /// Output ends before the first of these.
    pub stop: Vec<String>,
    /// Go on past the model's end token.
    pub ignore_eos: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { max_tokens: 128, temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, stop: Vec::new(), ignore_eos: false }
    }
}

impl Sampling {
    /// Checks every number. Called once, where a request enters.
    pub fn validate(&self) -> Result<(), Error> {
        let finite_range = |what, value: f32, low: f32, high: f32, expected| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(Error::OutOfRange { what, expected, got: value.to_string() })
            }
        };
        finite_range("temperature", self.temperature, 0.0, 100.0, "in 0..=100")?;
        finite_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0, "above 0 and at most 1")?;
        if self.stop.len() > 16 || self.stop.iter().any(|stop| stop.is_empty() || stop.len() > 256) {
            return Err(Error::OutOfRange {
                what: "stop",
                expected: "at most 16 strings of 1 to 256 bytes",
                got: format!("{} strings", self.stop.len()),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_survives_its_text() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
        }
        for group in [Group::default(), Group::NONE, Group { window: 1, threshold: 1 }] {
            assert_eq!(group.to_string().parse(), Ok(group));
        }
        for layers in [AuxLayers::Last, AuxLayers::Range(0.5, 0.8)] {
            assert_eq!(layers.to_string().parse(), Ok(layers));
        }
    }

    #[test]
    fn numbers_outside_their_range_are_refused() {
        for ratio in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
            assert!(Options { ratio, ..Options::default() }.validate().is_err(), "{ratio}");
        }
        for text in ["9", "0,0", "4,5", "300,2", "a,b", "8,0"] {
            assert!(text.parse::<Group>().is_err(), "{text}");
        }
        for text in ["first", "0.8..0.5", "0.5..1.5", "NaN..1", "0.5"] {
            assert!(text.parse::<AuxLayers>().is_err(), "{text}");
        }
        assert!(Sampling { temperature: f32::NAN, ..Sampling::default() }.validate().is_err());
        assert!(Sampling { top_p: 0.0, ..Sampling::default() }.validate().is_err());
    }

    #[test]
    fn a_budget_rounds_half_up_once() {
        let rows = |ratio, tokens| Options { ratio, ..Options::default() }.budget_rows(tokens);
        assert_eq!(rows(0.5, 5), 3);
        assert_eq!(rows(0.2, 4096), 819);
        assert_eq!(rows(0.0, 7), 0);
        assert_eq!(rows(1.0, 7), 7);
    }

    #[test]
    fn a_depth_range_names_at_least_one_layer() {
        assert_eq!(AuxLayers::Range(0.5, 0.8).indices(30), 15..24);
        assert_eq!(AuxLayers::Range(0.5, 0.51).indices(2), 1..2);
        assert_eq!(AuxLayers::Last.indices(30), 29..30);
        assert_eq!(AuxLayers::Range(0.99, 1.0).indices(2), 1..2);
    }
}
