//! Which setting to take, from what each one gave. Measures nothing.

/// What one setting gave, means over the samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// In 0..=1, as the user wants it measured; the mean over the samples.
    pub(super) score: f64,
    /// KL(full ‖ setting) at the gold answer's tokens, nats.
    pub(super) kl: f64,
    /// Share of the chunk tokens that was computed.
    pub(super) computed: f64,
}

/// What makes a setting the best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    /// The least computed of those whose score is at least this; the greater score where two compute the same.
    LeastComputed {
        /// Target × the score of full.
        wanted: f64,
    },
    /// The least KL; the less computed where two have the same.
    LeastKl,
}

/// A score is a mean of sums in another order than full's: so much is rounding.
const ROUNDING: f64 = 1e-9;

/// The place of the best outcome; none if no outcome is good enough. Of equal ones the first.
pub(super) fn choose(outcomes: &[Outcome], rule: Rule) -> Option<usize> {
    let good = |outcome: &Outcome| match rule {
        Rule::LeastComputed { wanted } => outcome.score + ROUNDING >= wanted,
        Rule::LeastKl => outcome.kl.is_finite(),
    };
    let rank = |outcome: &Outcome| match rule {
        Rule::LeastComputed { .. } => (outcome.computed, -outcome.score),
        Rule::LeastKl => (outcome.kl, outcome.computed),
    };
    let compare = |left: &Outcome, right: &Outcome| {
        let ((first, second), (other_first, other_second)) = (rank(left), rank(right));
        first.total_cmp(&other_first).then(second.total_cmp(&other_second))
    };
    let good = outcomes.iter().enumerate().filter(|(_, outcome)| good(outcome));
    good.min_by(|(_, left), (_, right)| compare(left, right)).map(|(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(score: f64, kl: f64, computed: f64) -> Outcome {
        Outcome { score, kl, computed }
    }

    #[test]
    fn the_cheapest_that_is_good_enough_is_taken() {
        let alphas = [outcome(0.5, 0.4, 0.1), outcome(0.8, 0.2, 0.3), outcome(0.9, 0.1, 0.5), outcome(0.9, 0.0, 0.9)];
        let of = |wanted| choose(&alphas, Rule::LeastComputed { wanted });
        assert_eq!(of(0.95 * 0.84), Some(1));
        assert_eq!(of(0.8), Some(1));
        assert_eq!(of(0.81), Some(2));
        assert_eq!(of(0.0), Some(0));
        assert_eq!(of(0.91), None);
        assert_eq!(choose(&[], Rule::LeastKl), None);
    }

    #[test]
    fn ties_go_to_the_better_and_then_to_the_first() {
        let same = [outcome(0.8, 0.3, 0.2), outcome(0.9, 0.3, 0.2), outcome(0.9, 0.3, 0.2)];
        assert_eq!(choose(&same, Rule::LeastComputed { wanted: 0.5 }), Some(1));
        assert_eq!(choose(&same, Rule::LeastKl), Some(0));
        // 0.1 + 0.2 is not 0.3 in binary, and must not fail a target of all of full's score.
        let thirds = [outcome(0.3, 0.0, 0.2)];
        assert_eq!(choose(&thirds, Rule::LeastComputed { wanted: 0.1 + 0.2 }), Some(0));
    }

    #[test]
    fn the_least_kl_is_taken_and_no_number_never() {
        let scales = [outcome(0.1, f64::NAN, 0.0), outcome(0.2, 0.5, 0.0), outcome(0.1, 0.4, 0.0)];
        assert_eq!(choose(&scales, Rule::LeastKl), Some(2));
        assert_eq!(choose(&scales[..1], Rule::LeastKl), None);
    }
}
