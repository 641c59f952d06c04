//! How output tokens are drawn.

use serde::{Deserialize, Serialize};

use crate::Error;

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
    fn numbers_outside_their_range_are_refused() {
        assert!(Sampling { temperature: f32::NAN, ..Sampling::default() }.validate().is_err());
        assert!(Sampling { top_p: 0.0, ..Sampling::default() }.validate().is_err());
        assert!(Sampling { stop: vec![String::new()], ..Sampling::default() }.validate().is_err());
    }
}
