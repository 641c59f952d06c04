//! How alike two attention distributions are: Jaccard of their top positions, and KL, both over the characters of the
//! chunks, the one axis that two tokenizers share (CacheClip, arXiv 2510.10129, table 1).
//!
//! Knows no model and no server. Invariant: a distribution has one value a character, each above zero, and sums to 1.

use kvsplice_proto::v1::LayerAttention;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Share of the characters that counts as the top.
pub(super) const TOP_SHARE: f64 = 0.2;
/// The least that a character counts before KL: its logarithm is finite, and a character that a model ignores does not
/// decide the figure.
pub(super) const FLOOR: f64 = 1e-9;

/// Attention over the characters of all chunks joined.
#[derive(Clone, Debug)]
pub(super) struct Distribution {
    /// One a character, summing to 1.
    weights: Vec<f64>,
    /// The same, at least about [`FLOOR`] each, summing to 1.
    floored: Vec<f64>,
    /// The top characters.
    top: Vec<bool>,
}

impl Distribution {
    /// The attention of a layer to `chunks`, each token's weight spread evenly over the characters that it touches.
    ///
    /// # Errors
    /// A line that says why weights, spans and texts do not fit each other.
    pub(super) fn of(layer: &LayerAttention, chunks: &[String]) -> Result<Self, String> {
        Self::new(spread(layer, chunks)?)
    }

    fn new(mut weights: Vec<f64>) -> Result<Self, String> {
        if !normalize(&mut weights) {
            return Err("no attention on the chunks".to_owned());
        }
        let mut floored: Vec<f64> = weights.iter().map(|weight| weight.max(FLOOR)).collect();
        normalize(&mut floored);
        let top = top(&weights);
        Ok(Self { weights, floored, top })
    }

    /// How many characters there are.
    pub(super) fn characters(&self) -> usize {
        self.weights.len()
    }

    /// Share of the top characters of both that both have in common, 0..=1. Both have the same characters.
    pub(super) fn jaccard(&self, other: &Self) -> f64 {
        jaccard(&self.top, &other.top)
    }

    /// The same after the other's characters were put in a random order: what chance gives.
    pub(super) fn chance(&self, other: &Self, rng: &mut ChaCha8Rng) -> f64 {
        let mut top = other.top.clone();
        top.shuffle(rng);
        jaccard(&self.top, &top)
    }

    /// KL(self ‖ other) in nats, at least 0. Both have the same characters.
    pub(super) fn divergence(&self, other: &Self) -> f64 {
        let terms = self.floored.iter().zip(&other.floored).map(|(own, other)| own * (own / other).ln());
        // Rounding alone can take it below zero.
        terms.sum::<f64>().max(0.0)
    }
}

/// The Jaccard of two independent random sets that hold [`TOP_SHARE`] each: s / (2 - s), 0.111.
pub(super) fn expected_chance() -> f64 {
    TOP_SHARE / (2.0 - TOP_SHARE)
}

/// One weight a character of all chunks joined.
fn spread(layer: &LayerAttention, chunks: &[String]) -> Result<Vec<f64>, String> {
    if layer.chunks.len() != chunks.len() {
        return Err(format!("spans of {} chunks for {}", layer.chunks.len(), chunks.len()));
    }
    let mut characters = Vec::new();
    let mut weights = layer.weights.iter();
    for (text, spans) in chunks.iter().zip(&layer.chunks) {
        if spans.starts.len() != spans.ends.len() {
            return Err(format!("{} starts and {} ends of tokens", spans.starts.len(), spans.ends.len()));
        }
        let starts: Vec<usize> = text.char_indices().map(|(start, _)| start).collect();
        let mut chunk = vec![0.0; starts.len()];
        for (&start, &end) in spans.starts.iter().zip(&spans.ends) {
            let weight = f64::from(*weights.next().ok_or("fewer weights than tokens")?);
            if !weight.is_finite() || weight < 0.0 {
                return Err(format!("an attention weight of {weight}"));
            }
            let (start, end) = (start as usize, end as usize);
            if start > end || end > text.len() {
                return Err(format!("a token at {start}..{end} of {} bytes", text.len()));
            }
            if start == end {
                continue;
            }
            // A token may begin inside a character, whose bytes then belong to several tokens.
            let first = starts.partition_point(|&at| at <= start).saturating_sub(1);
            let last = starts.partition_point(|&at| at < end);
            let touched = chunk.get_mut(first..last).unwrap_or_default();
            let share = weight / touched.len().max(1) as f64;
            touched.iter_mut().for_each(|character| *character += share);
        }
        characters.append(&mut chunk);
    }
    match weights.count() {
        0 => Ok(characters),
        more => Err(format!("{more} weights more than tokens")),
    }
}

/// Scales to a sum of 1. False if the sum is no positive number.
fn normalize(weights: &mut [f64]) -> bool {
    let sum: f64 = weights.iter().sum();
    if !sum.is_finite() || sum <= 0.0 {
        return false;
    }
    weights.iter_mut().for_each(|weight| *weight /= sum);
    true
}

/// Marks the greatest [`TOP_SHARE`] of the values, rounded half up, at least one; of equal ones, those that come first.
fn top(weights: &[f64]) -> Vec<bool> {
    let count = ((TOP_SHARE * weights.len() as f64 + 0.5).floor() as usize).max(1);
    let mut order: Vec<usize> = (0..weights.len()).collect();
    // The sort is stable, so equal values stay in their order.
    order.sort_by(|&left, &right| weights[right].total_cmp(&weights[left]));
    let mut top = vec![false; weights.len()];
    for &place in order.iter().take(count) {
        top[place] = true;
    }
    top
}

fn jaccard(left: &[bool], right: &[bool]) -> f64 {
    let both = left.iter().zip(right).filter(|(left, right)| **left && **right).count();
    let either = left.iter().zip(right).filter(|(left, right)| **left || **right).count();
    both as f64 / either.max(1) as f64
}

#[cfg(test)]
mod tests {
    use kvsplice_proto::v1::TokenSpans;
    use rand::SeedableRng;

    use super::*;

    fn layer(weights: &[f32], chunks: &[&[(u32, u32)]]) -> LayerAttention {
        let spans = |tokens: &&[(u32, u32)]| TokenSpans {
            starts: tokens.iter().map(|token| token.0).collect(),
            ends: tokens.iter().map(|token| token.1).collect(),
        };
        LayerAttention {
            weights: weights.to_vec(),
            chunks: chunks.iter().map(spans).collect(),
            ..LayerAttention::default()
        }
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    fn near(left: f64, right: f64) {
        assert!((left - right).abs() < 1e-9, "{left} is not {right}");
    }

    #[test]
    fn a_weight_is_shared_by_the_characters_of_its_token() {
        let layer = layer(&[0.5, 0.25, 0.75], &[&[(0, 2), (2, 3)], &[(0, 3)]]);
        assert_eq!(spread(&layer, &texts(&["abc", "xyz"])).unwrap(), [0.25, 0.25, 0.25, 0.25, 0.25, 0.25]);
    }

    #[test]
    fn a_character_of_several_tokens_has_the_weight_of_all() {
        // é has the bytes 1..3, each a token of its own; nothing covers the gap's space, and an empty token has none.
        let layer = layer(&[1.0, 0.5, 0.25, 2.0, 4.0], &[&[(0, 1), (1, 2), (2, 3), (4, 5), (5, 5)]]);
        assert_eq!(spread(&layer, &texts(&["né x"])).unwrap(), [1.0, 0.75, 0.0, 2.0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let fails = |layer: LayerAttention, text: &str, part: &str| {
            let error = spread(&layer, &texts(&[text])).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        fails(layer(&[1.0], &[]), "a", "spans of 0 chunks for 1");
        fails(layer(&[], &[&[(0, 1)]]), "a", "fewer weights");
        fails(layer(&[1.0, 1.0], &[&[(0, 1)]]), "a", "1 weights more");
        fails(layer(&[1.0], &[&[(0, 2)]]), "a", "0..2 of 1 bytes");
        fails(layer(&[1.0], &[&[(1, 0)]]), "a", "1..0");
        fails(layer(&[f32::NAN], &[&[(0, 1)]]), "a", "NaN");
        assert!(Distribution::new(vec![0.0; 3]).is_err() && Distribution::new(Vec::new()).is_err());
    }

    #[test]
    fn the_top_takes_the_first_of_equal_values() {
        let marked = |weights: &[f64]| -> Vec<usize> {
            let top = top(weights);
            (0..weights.len()).filter(|&place| top[place]).collect()
        };
        // 0.2 · 10 = 2: the 3.0, then the first of the 2.0s.
        assert_eq!(marked(&[1.0, 2.0, 0.0, 2.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0]), [1, 4]);
        // 0.2 · 7 = 1.4 → 1, 0.2 · 8 = 1.6 → 2, never none.
        assert_eq!(marked(&[1.0; 7]), [0]);
        assert_eq!(marked(&[1.0; 8]), [0, 1]);
        assert_eq!(marked(&[1.0]), [0]);
    }

    #[test]
    fn jaccard_is_the_common_part_of_the_union() {
        let of = |places: &[usize]| {
            let mut weights = vec![0.0; 10];
            places.iter().for_each(|&place| weights[place] = 1.0);
            Distribution::new(weights).unwrap()
        };
        // Two of ten are at the top: {1, 4} and {4, 7} share one of three.
        near(of(&[1, 4]).jaccard(&of(&[4, 7])), 1.0 / 3.0);
        near(of(&[1, 4]).jaccard(&of(&[4, 1])), 1.0);
        near(of(&[1, 4]).jaccard(&of(&[2, 7])), 0.0);
    }

    #[test]
    fn kl_is_that_of_the_normalized_weights() {
        let of = |weights: &[f64]| Distribution::new(weights.to_vec()).unwrap();
        let (even, uneven) = (of(&[1.0, 1.0]), of(&[1.0, 3.0]));
        // 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75), and the other way around.
        near(even.divergence(&uneven), 0.5 * (2f64.ln() + (2f64 / 3.0).ln()));
        near(uneven.divergence(&even), 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln());
        assert_eq!(uneven.divergence(&of(&[10.0, 30.0])), 0.0);
        // What the other ignores counts as the floor: half the mass at ln(0.5 / 1e-9), the rest at ln(0.5).
        let blind = even.divergence(&of(&[1.0, 0.0]));
        assert!((blind - 0.5 * ((0.5 / FLOOR).ln() + 0.5f64.ln())).abs() < 1e-6, "{blind}");
    }

    #[test]
    fn chance_is_about_a_ninth() {
        near(expected_chance(), 1.0 / 9.0);
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let rising = Distribution::new((0..20_000).map(f64::from).collect()).unwrap();
        let measured = rising.chance(&rising, &mut rng);
        assert!((measured - expected_chance()).abs() < 0.01, "{measured} with seed 7");
        assert_eq!(rising.jaccard(&rising), 1.0);
    }
}
