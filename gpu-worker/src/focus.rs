//! Early stop: chunks that the question does not look at are given up in deeper layers (focused chunks, Cache-Craft, arXiv
//! 2502.15734). Where the paper's text is silent: chunks are ranked by the question's attention summed over the layers so
//! far and cut at the largest gap; see [`EarlyStop`].

use kvsplice_kv::options::EarlyStop;

/// What the question has looked at so far.
pub(crate) struct Focus {
    rule: EarlyStop,
    layers: u32,
    /// By chunk: attention mass summed over question rows and layers.
    masses: Vec<f64>,
    /// The upper group of the last layer, and for how many layers it has been the same.
    group: Vec<bool>,
    stable: u32,
}

impl Focus {
    pub(crate) fn new(rule: EarlyStop, layers: u32, chunks: usize) -> Self {
        Self { rule, layers, masses: vec![0.0; chunks], group: Vec::new(), stable: 0 }
    }

    /// Adds a layer's masses, or those of some of its question rows: one a chunk.
    pub(crate) fn look(&mut self, masses: &[f32]) {
        for (sum, mass) in self.masses.iter_mut().zip(masses) {
            *sum += f64::from(*mass);
        }
    }

    /// After `done` layers: by chunk, whether it is focused, once that is decided.
    pub(crate) fn decide(&mut self, done: u32) -> Option<Vec<bool>> {
        let group = self.upper_group().unwrap_or_default();
        self.stable = if group.is_empty() {
            0
        } else if group == self.group {
            self.stable + 1
        } else {
            1
        };
        self.group = group;
        let deep = done as f32 >= self.rule.from * self.layers as f32;
        (deep && self.stable >= self.rule.window).then(|| self.group.clone())
    }

    /// The chunks above the largest gap; none when no gap is large enough.
    fn upper_group(&self) -> Option<Vec<bool>> {
        let mut ranked: Vec<usize> = (0..self.masses.len()).collect();
        ranked.sort_by(|&a, &b| self.masses[b].total_cmp(&self.masses[a]));
        let total: f64 = self.masses.iter().sum();
        let gap = |place: usize| self.masses[ranked[place]] - self.masses[ranked[place + 1]];
        let places = 0..ranked.len().saturating_sub(1);
        // The first of equal gaps: max_by would take the last.
        let cut = places.reduce(|best, place| if gap(place) > gap(best) { place } else { best })?;
        if total <= 0.0 || gap(cut) / total < f64::from(self.rule.gap) {
            return None;
        }
        let mut group = vec![false; ranked.len()];
        for &chunk in &ranked[..=cut] {
            group[chunk] = true;
        }
        Some(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn focus(gap: f32) -> Focus {
        Focus::new(EarlyStop { window: 2, gap, from: 0.5 }, 8, 4)
    }

    #[test]
    fn a_stable_upper_group_is_decided_after_the_window_and_not_too_early() {
        let mut focus = focus(0.1);
        for layer in 1..4 {
            focus.look(&[0.1, 0.9, 0.12, 0.8]);
            assert_eq!(focus.decide(layer), None, "layer {layer}");
        }
        focus.look(&[0.1, 0.9, 0.12, 0.8]);
        assert_eq!(focus.decide(4), Some(vec![false, true, false, true]));
    }

    #[test]
    fn a_changing_group_starts_the_window_anew() {
        let mut focus = focus(0.1);
        for layer in 1..=5 {
            focus.look(&[0.0, 1.0, 0.0, 0.0]);
            if layer < 4 {
                assert_eq!(focus.decide(layer), None);
            }
        }
        focus.look(&[50.0, 0.0, 0.0, 0.0]);
        assert_eq!(focus.decide(6), None);
        focus.look(&[1.0, 0.0, 0.0, 0.0]);
        assert_eq!(focus.decide(7), Some(vec![true, false, false, false]));
    }

    #[test]
    fn an_infinite_gap_never_stops() {
        let mut focus = focus(f32::INFINITY);
        for layer in 1..=8 {
            focus.look(&[0.0, 1.0, 0.0, 0.0]);
            assert_eq!(focus.decide(layer), None);
        }
    }
}
