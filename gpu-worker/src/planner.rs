//! Load or compute: which cached chunks of a prompt are computed in context instead, because loading them takes longer.
//!
//! Pure: it compares times that are estimated from what was measured. With loading and computing side by side, layer by
//! layer, a prompt takes max(load + compute / L, compute + load / L) (the pipeline bound of layer-wise loading). It decides
//! before layer 0 only; afterwards a chunk that cannot be loaded is repaired.

/// A chunk that is being loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Bytes that it takes, skipped rows left out.
    pub(crate) bytes: f64,
    /// How many of them have come.
    pub(crate) arrived: f64,
    /// Whether its first layer has.
    pub(crate) begun: bool,
    /// Operations that its selected rows take.
    pub(crate) selected: f64,
    /// Operations that all its rows take.
    pub(crate) whole: f64,
}

/// What is known of a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Situation {
    /// Seconds since its loading began.
    pub(crate) elapsed: f64,
    /// Bytes that have come since then.
    pub(crate) came: f64,
    /// Seconds until the rows of loaded chunks are known; computing every chunk needs none.
    pub(crate) rows_in: f64,
    pub(crate) chunks: Vec<Candidate>,
    /// Operations of the rows that are computed whatever is decided.
    pub(crate) rest: f64,
    /// Operations a second.
    pub(crate) compute: f64,
    /// Bytes a second of earlier loads, if there were any.
    pub(crate) link: Option<f64>,
    pub(crate) layers: u32,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// Places in [`Situation::chunks`] of those to compute.
    pub(crate) fresh: Vec<usize>,
    /// Seconds that loading would have taken from now on, and that the plan takes.
    pub(crate) seconds: (f64, f64),
    /// Layers that should have come before the first is computed, so that computing never waits for one (Cache-Craft, arXiv
    /// 2502.15734, layer-wise preloading).
    pub(crate) preload: u32,
}

/// A gain below this share of the time is not worth a change.
const WORTH: f64 = 0.03;
/// Nor is one of fewer seconds: estimates are not that good.
const WORTH_SECONDS: f64 = 0.05;
/// What computing everything takes is known. A plan that loads hangs on the link, on the head's rows and on the speed of sparse
/// rows, and is taken to last longer than estimated by this share.
const RISK: f64 = 0.1;

/// Chooses the chunks to compute; none where loading is as fast.
pub(crate) fn plan(situation: &Situation) -> Plan {
    let layers = f64::from(situation.layers.max(1));
    let rate = rate(situation);
    let remaining = |chunk: &Candidate| (chunk.bytes - chunk.arrived).max(0.0);
    // The chunk that frees most loading for its computing goes first.
    let mut order: Vec<usize> = (0..situation.chunks.len()).collect();
    let freed = |&place: &usize| {
        let chunk = &situation.chunks[place];
        remaining(chunk) / (chunk.whole - chunk.selected).max(1.0)
    };
    order.sort_by(|one, other| freed(other).total_cmp(&freed(one)));
    let estimate = |fresh: &[usize]| {
        let (mut bytes, mut operations, mut begun) = (0.0, situation.rest, true);
        for (place, chunk) in situation.chunks.iter().enumerate() {
            if fresh.contains(&place) {
                operations += chunk.whole;
            } else {
                bytes += remaining(chunk);
                operations += chunk.selected;
                begun &= chunk.begun;
            }
        }
        let (load, compute) = (bytes / rate, operations / situation.compute);
        if fresh.len() == situation.chunks.len() {
            return (compute, load, compute);
        }
        let first = if begun { 0.0 } else { load / layers };
        let seconds = (load + compute / layers).max(compute + first.max(situation.rows_in));
        (seconds, load, compute)
    };
    let risk = |count: usize| if count == order.len() { 1.0 } else { 1.0 + RISK };
    let (loaded, load, compute) = estimate(&[]);
    // Seconds with the risk, and how many chunks are computed.
    let as_is = loaded * risk(0);
    let mut best = (as_is, 0);
    for count in 1..=order.len() {
        let seconds = estimate(&order[..count]).0 * risk(count);
        if seconds < best.0 {
            best = (seconds, count);
        }
    }
    if best.0 > as_is * (1.0 - WORTH) || best.0 > as_is - WORTH_SECONDS {
        best = (as_is, 0);
    }
    let mut fresh = order[..best.1].to_vec();
    fresh.sort_unstable();
    Plan { fresh, seconds: (loaded, best.0 / risk(best.1)), preload: preload(situation.layers, compute, load) }
}

/// Bytes a second: of this load, and of earlier ones for as long as this one has brought less than a layer.
fn rate(situation: &Situation) -> f64 {
    let total: f64 = situation.chunks.iter().map(|chunk| chunk.bytes).sum();
    let prior = total / f64::from(situation.layers.max(1));
    let before = situation.link.map_or(0.0, |link| prior / link.max(1.0));
    ((situation.came + prior) / (situation.elapsed + before).max(1e-9)).max(1.0)
}

/// ⌈(L − 1)(1 − T_p / T_l) + 1⌉ where a layer loads slower than it is computed, else 1.
fn preload(layers: u32, compute: f64, load: f64) -> u32 {
    if load <= compute || load <= 0.0 {
        return 1;
    }
    let ahead = f64::from(layers.saturating_sub(1)) * (1.0 - compute / load);
    (ahead.ceil() as u32 + 1).min(layers.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16 chunks of 1 MB; all rows of all take 1 s, the selected ones 0.2 s.
    fn situation(elapsed: f64, arrived_share: f64, link: Option<f64>) -> Situation {
        let chunk = Candidate {
            bytes: 1e6,
            arrived: 1e6 * arrived_share,
            begun: arrived_share > 0.0,
            selected: 0.2 / 16.0 * 1e9,
            whole: 1.0 / 16.0 * 1e9,
        };
        let came = 16e6 * arrived_share;
        Situation { elapsed, came, rows_in: 0.0, chunks: vec![chunk; 16], rest: 0.0, compute: 1e9, link, layers: 24 }
    }

    #[test]
    fn fast_loads_are_waited_for_and_slow_ones_are_not() {
        assert!(plan(&situation(0.001, 0.0, None)).fresh.is_empty());
        assert!(plan(&situation(0.02, 0.05, None)).fresh.is_empty());
        // A few may still come while the others are computed.
        assert!(plan(&situation(0.3, 0.01, None)).fresh.len() >= 14);
        assert_eq!(plan(&situation(0.01, 0.0, Some(1e5))).fresh.len(), 16);
    }

    #[test]
    fn a_load_that_brings_nothing_costs_at_most_the_share_of_one_layer() {
        for link in [None, Some(1e9)] {
            let mut elapsed = 0.0;
            while plan(&situation(elapsed, 0.0, link)).fresh.is_empty() {
                elapsed += 0.001;
            }
            assert!(elapsed <= 0.05, "waited {elapsed} s of 1 s with a link of {link:?}");
        }
    }

    #[test]
    fn a_load_near_the_balance_is_shared() {
        // 16 MB at 20 MB/s take 0.8 s; computing everything takes 1 s.
        let plan = plan(&situation(0.0, 0.0, Some(2e7)));
        assert!((1..16).contains(&plan.fresh.len()), "{plan:?}");
        assert!(plan.seconds.1 < 0.8 && plan.seconds.1 > 0.2, "{plan:?}");
    }

    #[test]
    fn rows_that_take_long_to_be_known_are_weighed() {
        // Loading a few would gain a little, waiting for rows loses more.
        let shared = situation(0.0, 0.0, Some(2e7));
        let late = Situation { rows_in: 0.9, ..shared };
        assert_eq!(plan(&late).fresh.len(), 16);
    }

    #[test]
    fn what_has_come_is_not_thrown_away() {
        let mut situation = situation(0.1, 0.0, None);
        situation.came = 1e6;
        situation.chunks[3] = Candidate { arrived: 1e6, begun: true, ..situation.chunks[3] };
        let plan = plan(&situation);
        assert!(!plan.fresh.contains(&3), "{plan:?}");
    }

    #[test]
    fn as_many_layers_come_first_as_the_paper_says() {
        assert_eq!(preload(5, 1.0, 2.0), 3);
        assert_eq!(preload(28, 0.07, 0.5), 25);
        assert_eq!(preload(28, 0.5, 0.07), 1);
        assert_eq!(preload(1, 0.0, 1.0), 1);
    }
}
