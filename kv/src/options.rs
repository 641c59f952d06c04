//! What a request asks for: strategy, its options, and sampling. Names here are the wire and command-line names.
//!
//! Every option has one text form; [`Options::set`] is the only way in from outside and refuses an option that the
//! strategy does not use.

mod names;
mod sampling;
mod values;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;
pub use names::{BlendMode, Budget, Guide, Mask, Reduce, ScaleForm, Softmax, Strategy};
pub use sampling::Sampling;
pub use values::{Depth, EarlyStop, Group};

use Strategy::{Ape, Blend, Clip, Craft, Direct, Guided, Lego, Prefix};

/// A strategy with all its options. An option that the strategy does not use keeps its default and means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// How the prompt's KV comes about.
    pub strategy: Strategy,
    /// Share of the chunk tokens to recompute, in 0..=1.
    pub ratio: f32,
    /// What the ratio counts.
    pub budget: Budget,
    /// Windows that make runs of rows.
    pub group: Group,
    /// Over which keys an auxiliary score is normalized.
    pub softmax: Softmax,
    /// Which auxiliary layers score.
    pub aux_layers: Depth,
    /// How rows and heads become one score.
    pub reduce: Reduce,
    /// Chunks were encoded behind the prompt's prefix (else alone).
    pub shared_prefix: bool,
    /// Chunk keys move to their slots (else they keep the positions of their encoding).
    pub renumber: bool,
    /// Which keys a recomputed row sees.
    pub mask: Mask,
    /// Tokens that `lego` recomputes at the start of each chunk but the first.
    pub first_tokens: u32,
    /// Which CacheBlend.
    pub blend: BlendMode,
    /// What the question's rows of `guided` see.
    pub guide: Guide,
    /// Which layers of the primary model score for `guided`.
    pub guide_layers: Depth,
    /// T of the two-part attention of question and output rows: below 1 sharpens inside the context. 1 with scale 1 is
    /// ordinary attention.
    pub context_temperature: f32,
    /// S of the two-part attention: below 1 takes mass away from the context.
    pub context_scale: f32,
    /// Whether S or S·T is the exponent of the context's mass.
    pub context_form: ScaleForm,
    /// When rows of chunks that the question does not look at are given up.
    pub early_stop: EarlyStop,
    /// α of Cache-Craft's CFO: more of a chunk is recomputed with a greater one.
    pub alpha: f32,
    /// Compute the prompt in full and keep its chunks' KV as variants captured in this context.
    pub capture: bool,
    /// Reuse what earlier prompts at the same worker began with; exact.
    pub prefix_cache: bool,
}

type Get = fn(&Options) -> String;
type Set = fn(&mut Options, &str) -> Result<(), Error>;

/// An option: its wire name, the strategies that use it, and its text.
struct Entry {
    name: &'static str,
    users: &'static [Strategy],
    get: Get,
    set: Set,
}

macro_rules! entry {
    ($field:ident, $users:expr) => {
        Entry {
            name: stringify!($field),
            users: $users,
            get: |options| options.$field.to_string(),
            set: |options, text| {
                options.$field = parse(stringify!($field), text)?;
                Ok(())
            },
        }
    };
}

/// Strategies that pick rows to recompute.
const SELECTING: &[Strategy] = &[Lego, Blend, Craft, Clip, Guided];
const REUSING: &[Strategy] = &[Direct, Ape, Lego, Blend, Craft, Clip, Guided];

const ENTRIES: &[Entry] = &[
    entry!(ratio, &[Clip, Blend, Guided]),
    entry!(budget, &[Clip, Guided]),
    entry!(group, &[Clip, Guided, Blend]),
    entry!(softmax, &[Clip]),
    entry!(aux_layers, &[Clip]),
    entry!(reduce, &[Clip, Guided]),
    entry!(shared_prefix, &[Direct, Lego, Blend, Clip, Guided]),
    entry!(renumber, &[Direct]),
    entry!(mask, &[Lego, Blend, Clip, Guided]),
    entry!(first_tokens, &[Lego]),
    entry!(blend, &[Blend]),
    entry!(guide, &[Guided]),
    entry!(guide_layers, &[Guided]),
    entry!(context_temperature, REUSING),
    entry!(context_scale, REUSING),
    entry!(context_form, REUSING),
    entry!(early_stop, SELECTING),
    entry!(alpha, &[Craft]),
    entry!(capture, &[Craft]),
    entry!(prefix_cache, &[Prefix, Direct, Ape, Lego, Blend, Craft, Clip, Guided]),
];

fn parse<T: FromStr<Err: fmt::Display>>(name: &'static str, text: &str) -> Result<T, Error> {
    text.parse().map_err(|error: T::Err| Error::Option { name, reason: error.to_string() })
}

impl Default for Options {
    fn default() -> Self {
        Self::of(Strategy::default())
    }
}

impl Options {
    /// A strategy with its defaults. They are its paper's, except where measurements of this project say otherwise: `clip`
    /// scores by the middle of the auxiliary model (docs/strategies.md), of which the paper takes the last layer.
    pub fn of(strategy: Strategy) -> Self {
        let two_part = if strategy == Ape { 0.9 } else { 1.0 };
        Self {
            strategy,
            ratio: if strategy == Blend { 0.15 } else { 0.2 },
            budget: Budget::default(),
            group: if strategy == Blend { Group::NONE } else { Group::default() },
            softmax: Softmax::default(),
            aux_layers: Depth::Range(0.5, 0.8),
            reduce: Reduce::default(),
            shared_prefix: true,
            renumber: true,
            mask: Mask::default(),
            first_tokens: 16,
            blend: BlendMode::default(),
            guide: Guide::default(),
            guide_layers: Depth::Range(0.5, 0.8),
            context_temperature: two_part,
            context_scale: two_part,
            context_form: ScaleForm::default(),
            early_stop: if strategy == Craft { EarlyStop::CRAFT } else { EarlyStop::NONE },
            alpha: 1.0,
            capture: false,
            prefix_cache: true,
        }
    }

    /// Sets the option called `name` (`-` counts as `_`) from its text.
    ///
    /// # Errors
    /// When there is no such option, the strategy does not use it, or the value is not valid; the valid ones are named.
    pub fn set(&mut self, name: &str, text: &str) -> Result<(), Error> {
        let name = name.replace('-', "_");
        let Some(entry) = ENTRIES.iter().find(|entry| entry.name == name) else {
            let known: Vec<&str> = self.used().map(|entry| entry.name).collect();
            let reason = format!("no such option; {} has {}", self.strategy, list(&known));
            return Err(Error::Options { name, reason });
        };
        if !entry.users.contains(&self.strategy) {
            let users: Vec<&str> = entry.users.iter().map(|strategy| strategy.name()).collect();
            let reason = format!("goes with {}, not with {}", list(&users), self.strategy);
            return Err(Error::Options { name, reason });
        }
        let mut changed = *self;
        (entry.set)(&mut changed, text)?;
        changed.validate()?;
        *self = changed;
        Ok(())
    }

    /// Whether the strategy uses the option called `name`.
    pub fn uses(&self, name: &str) -> bool {
        self.used().any(|entry| entry.name == name)
    }

    /// The options that the strategy uses, as (name, text).
    pub fn entries(&self) -> impl Iterator<Item = (&'static str, String)> + '_ {
        self.used().map(|entry| (entry.name, (entry.get)(self)))
    }

    fn used(&self) -> impl Iterator<Item = &'static Entry> + use<> {
        let strategy = self.strategy;
        ENTRIES.iter().filter(move |entry| entry.users.contains(&strategy))
    }

    /// Whether question and output rows attend in two parts.
    pub fn two_part(&self) -> bool {
        self.context_temperature != 1.0 || self.context_scale != 1.0 || self.strategy == Ape
    }

    /// Checks every number.
    pub fn validate(&self) -> Result<(), Error> {
        let range = |what, expected, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(Error::OutOfRange { what, expected, got: value.to_string() })
            }
        };
        range("ratio", "in 0..=1", self.ratio, 0.0, 1.0)?;
        range("context_temperature", "in 0.01..=100", self.context_temperature, 0.01, 100.0)?;
        range("context_scale", "in 0.01..=100", self.context_scale, 0.01, 100.0)?;
        range("alpha", "in 0..=1000", self.alpha, 0.0, 1000.0)?;
        self.group.to_string().parse::<Group>()?;
        self.aux_layers.to_string().parse::<Depth>()?;
        self.guide_layers.to_string().parse::<Depth>()?;
        self.early_stop.to_string().parse::<EarlyStop>()?;
        if self.mask == Mask::BottomRight && self.two_part() {
            return Err(Error::OutOfRange {
                what: "mask",
                expected: "right with context_temperature or context_scale",
                got: self.mask.to_string(),
            });
        }
        Ok(())
    }

    /// `ratio` × `tokens`, rounded half up, at most `tokens`.
    pub fn budget_rows(&self, tokens: usize) -> usize {
        ((f64::from(self.ratio) * tokens as f64 + 0.5).floor() as usize).min(tokens)
    }

    /// Several specifications separated by commas, such as `full,clip:0.2,clip:0.2:group=8,4`. A comma inside a value
    /// is kept: a piece that begins with no strategy's name belongs to the one before.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, Error> {
        let mut pieces: Vec<String> = Vec::new();
        for piece in text.split(',') {
            let name = piece.split(':').next().unwrap_or_default().trim();
            let number = name.parse::<f32>().is_ok() || name.is_empty();
            match pieces.last_mut() {
                Some(last) if number => last.extend([",", piece]),
                _ => pieces.push(piece.to_owned()),
            }
        }
        pieces.iter().map(|piece| piece.trim().parse()).collect()
    }
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// A specification: strategy, the ratio if it has one, and the options that differ from the defaults, such as
/// `clip:0.2:group=none`.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.strategy.name())?;
        let default = Self::of(self.strategy);
        for entry in self.used() {
            let text = (entry.get)(self);
            if entry.name == "ratio" {
                write!(f, ":{text}")?;
            } else if text != (entry.get)(&default) {
                write!(f, ":{}={text}", entry.name)?;
            }
        }
        Ok(())
    }
}

impl FromStr for Options {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut pieces = text.split(':');
        let mut options = Self::of(pieces.next().unwrap_or_default().parse()?);
        for piece in pieces {
            match piece.split_once('=') {
                Some((name, value)) => options.set(name.trim(), value.trim())?,
                None => options.set("ratio", piece.trim())?,
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_their_range_are_refused() {
        for ratio in [-0.1, 1.1, f32::NAN, f32::INFINITY] {
            assert!(Options { ratio, ..Options::default() }.validate().is_err(), "{ratio}");
        }
        let sharp = |context_temperature| Options { context_temperature, ..Options::of(Ape) };
        assert!(sharp(0.0).validate().is_err() && sharp(f32::NAN).validate().is_err());
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
    fn every_option_survives_its_text() {
        for &strategy in Strategy::ALL {
            let options = Options::of(strategy);
            let mut copy = Options::of(strategy);
            for (name, text) in options.entries() {
                copy.set(name, &text).unwrap_or_else(|error| panic!("{strategy}: {error}"));
            }
            assert_eq!(copy, options);
            assert_eq!(options.to_string().parse(), Ok(options));
        }
    }

    #[test]
    fn a_list_keeps_commas_inside_values() {
        let list = Options::parse_list("full, clip:0.1:group=8,4,guided:0.2:early-stop=3,inf,0.5").unwrap();
        let texts: Vec<String> = list.iter().map(Options::to_string).collect();
        assert_eq!(texts, ["full", "clip:0.1:group=8,4", "guided:0.2:early_stop=3,inf,0.5"]);
        assert!(Options::parse_list("").is_err() && Options::parse_list("full,,clip").is_err());
    }

    #[test]
    fn an_option_of_another_strategy_is_refused_with_the_ones_that_use_it() {
        let mut options = Options::of(Strategy::Full);
        let error = options.set("ratio", "0.2").unwrap_err().to_string();
        assert!(error.contains("clip") && error.contains("full"), "{error}");
        let error = Options::of(Clip).set("rato", "0.2").unwrap_err().to_string();
        assert!(error.contains("aux_layers"), "{error}");
        let error = Options::of(Clip).set("group", "3,4").unwrap_err().to_string();
        assert!(error.contains("threshold") && error.contains("group"), "{error}");
    }
}
