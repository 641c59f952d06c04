//! Scores → rows: top-k over all chunks jointly, windows inside a chunk, remap to primary tokens by byte spans.
//!
//! Pure functions without tensors. Invariants: rows lie in selectable chunks; with `budget=charged` they never exceed
//! round(ratio·N); more candidates never shrink the set (so the largest k is found by bisection); ties go to the smaller
//! slot; a score that is not finite is an error and is never sorted.

use std::ops::Range;

use crate::options::{Budget, Group};
use crate::{Error, Options, RowRanges};

/// One chunk of the prompt as selection sees it.
#[derive(Clone, Copy, Debug)]
pub struct ScoredChunk<'a> {
    /// Slot of its first primary token.
    pub first_slot: u32,
    /// Whether its tokens may be selected: false for fresh chunks, and for the exact first chunk with `budget=charged`.
    pub selectable: bool,
    /// Byte range of each primary token in the chunk's text, ascending.
    pub primary: &'a [(u32, u32)],
    /// Byte range of each auxiliary token in the chunk's text, ascending.
    pub auxiliary: &'a [(u32, u32)],
    /// One score an auxiliary token; empty when the chunk was not scored.
    pub scores: &'a [f32],
}

/// What was picked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Chunk slots to recompute.
    pub rows: RowRanges,
    /// Candidates (auxiliary tokens) before grouping.
    pub candidates: usize,
    /// N: primary tokens that could be selected.
    pub selectable: usize,
}

/// Picks the rows that `options` ask for.
///
/// # Errors
/// [`Error::Scores`] when a score is not finite, or a scored chunk has another number of scores than tokens.
pub fn select(options: &Options, chunks: &[ScoredChunk]) -> Result<Selection, Error> {
    let selectable = chunks.iter().filter(|chunk| chunk.selectable).map(|chunk| chunk.primary.len()).sum();
    if options.ratio >= 1.0 {
        let all = chunks.iter().filter(|chunk| chunk.selectable).map(slots_of);
        return Ok(Selection { rows: RowRanges::from_ranges(all), candidates: 0, selectable });
    }
    let ranking = rank(chunks)?;
    let rows_of = |candidates: usize| pick(chunks, ranking.get(..candidates).unwrap_or(&ranking), options.group);
    let candidates = match options.budget {
        Budget::Nominal => options.budget_rows(ranking.len()),
        Budget::Charged => {
            let budget = options.budget_rows(selectable);
            largest(ranking.len(), |candidates| rows_of(candidates).len() <= budget)
        }
    };
    Ok(Selection { rows: rows_of(candidates), candidates, selectable })
}

/// One score a primary token, in prompt order: an auxiliary token's score is spread evenly over its bytes, and a primary
/// token gets the sum over its own; −1 where not selectable.
pub fn primary_scores(chunks: &[ScoredChunk]) -> Vec<f32> {
    let mut all = Vec::with_capacity(chunks.iter().map(|chunk| chunk.primary.len()).sum());
    for chunk in chunks {
        if !chunk.selectable || chunk.scores.len() != chunk.auxiliary.len() {
            all.extend(std::iter::repeat_n(-1.0, chunk.primary.len()));
            continue;
        }
        let first = all.len();
        all.resize(first + chunk.primary.len(), 0.0_f32);
        for (&span, &score) in chunk.auxiliary.iter().zip(chunk.scores) {
            for index in overlapping(chunk.primary, span) {
                let (start, end) = chunk.primary[index];
                let shared = end.min(span.1) - start.max(span.0);
                all[first + index] += score * shared as f32 / (span.1 - span.0) as f32;
            }
        }
    }
    all
}

/// An auxiliary token: (chunk, token), both as indices.
type Candidate = (usize, usize);

/// Every selectable auxiliary token, the best first.
fn rank(chunks: &[ScoredChunk]) -> Result<Vec<Candidate>, Error> {
    let mut ranking = Vec::new();
    for (index, chunk) in chunks.iter().enumerate().filter(|(_, chunk)| chunk.selectable) {
        if chunk.scores.len() != chunk.auxiliary.len() {
            let detail = format!("{} scores for {} auxiliary tokens", chunk.scores.len(), chunk.auxiliary.len());
            return Err(Error::Scores { chunk: index, detail });
        }
        if let Some(token) = chunk.scores.iter().position(|score| !score.is_finite()) {
            let detail = format!("score of auxiliary token {token} is {}", chunk.scores[token]);
            return Err(Error::Scores { chunk: index, detail });
        }
        ranking.extend((0..chunk.scores.len()).map(|token| (index, token)));
    }
    // The sort is stable and the list is in slot order: equal scores stay in that order.
    ranking.sort_by(|a, b| chunks[b.0].scores[b.1].total_cmp(&chunks[a.0].scores[a.1]));
    Ok(ranking)
}

/// The largest n in 0..=limit that fits. `fits` must be monotone, and hold for 0.
fn largest(limit: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, limit);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Groups candidates and maps them to primary slots.
fn pick(chunks: &[ScoredChunk], candidates: &[Candidate], group: Group) -> RowRanges {
    let mut picked: Vec<Vec<bool>> = chunks.iter().map(|chunk| vec![false; chunk.auxiliary.len()]).collect();
    for &(chunk, token) in candidates {
        picked[chunk][token] = true;
    }
    let mut ranges = Vec::new();
    for (chunk, picked) in chunks.iter().zip(&picked) {
        for run in group_runs(picked, group) {
            for &span in &chunk.auxiliary[run] {
                let slots = overlapping(chunk.primary, span).map(|index| chunk.first_slot.saturating_add(index as u32));
                ranges.extend(slots.map(|slot| slot..slot.saturating_add(1)));
            }
        }
    }
    RowRanges::from_ranges(ranges)
}

/// The auxiliary tokens of one chunk that stay after grouping, as ascending ranges. A window starts at a candidate; a
/// chunk shorter than a window is one window, with a threshold in proportion.
fn group_runs(candidates: &[bool], group: Group) -> Vec<Range<usize>> {
    let tokens = candidates.len();
    let count = |range: Range<usize>| candidates[range].iter().filter(|&&candidate| candidate).count();
    if group.window == 0 {
        return (0..tokens).filter(|&token| candidates[token]).map(|token| token..token + 1).collect();
    }
    let (window, threshold) = (group.window as usize, group.threshold as usize);
    if tokens < window {
        let enough = tokens > 0 && count(0..tokens) >= (threshold * tokens).div_ceil(window);
        return enough.then_some(0..tokens).into_iter().collect();
    }
    let mut runs: Vec<Range<usize>> = Vec::new();
    for start in (0..=tokens - window).filter(|&start| candidates[start]) {
        if count(start..start + window) < threshold {
            continue;
        }
        match runs.last_mut() {
            Some(last) if start <= last.end => last.end = start + window,
            _ => runs.push(start..start + window),
        }
    }
    runs
}

/// Indices of the tokens whose byte range shares at least one byte with `span`.
fn overlapping(tokens: &[(u32, u32)], span: (u32, u32)) -> impl Iterator<Item = usize> + '_ {
    let first = tokens.partition_point(|token| token.1 <= span.0);
    let end = tokens.partition_point(|token| token.0 < span.1);
    (first..end).filter(move |&index| tokens[index].0.max(span.0) < tokens[index].1.min(span.1))
}

fn slots_of(chunk: &ScoredChunk) -> Range<u32> {
    chunk.first_slot..chunk.first_slot.saturating_add(u32::try_from(chunk.primary.len()).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unit_spans(tokens: usize) -> Vec<(u32, u32)> {
        (0..tokens as u32).map(|token| (token, token + 1)).collect()
    }

    fn options(ratio: f32, budget: Budget, group: Group) -> Options {
        Options { ratio, budget, group, ..Options::default() }
    }

    fn runs(candidates: &str, window: u32, threshold: u32) -> Vec<(usize, usize)> {
        let candidates: Vec<bool> = candidates.bytes().map(|byte| byte == b'x').collect();
        let runs = group_runs(&candidates, Group { window, threshold });
        runs.into_iter().map(|run| (run.start, run.end)).collect()
    }

    #[test]
    fn a_window_starts_at_a_candidate_and_stays_in_its_chunk() {
        assert_eq!(runs("x..x....x.", 4, 2), [(0, 4)]);
        assert_eq!(runs(".xx.......x", 4, 2), [(1, 5)]);
        assert_eq!(runs("xx.xx....", 4, 2), [(0, 7)]);
        // The last positions never start a window, but may be covered.
        assert!(runs("......xx", 4, 2).is_empty());
        assert_eq!(runs("....x..x", 4, 2), [(4, 8)]);
    }

    #[test]
    fn a_short_chunk_is_one_window_with_a_threshold_in_proportion() {
        assert_eq!(runs(".xx", 8, 5), [(0, 3)]); // ceil(5·3/8) = 2
        assert!(runs(".x.", 8, 5).is_empty());
        assert!(runs("", 8, 5).is_empty());
    }

    #[test]
    fn ties_go_to_the_smaller_slot() {
        let spans = unit_spans(6);
        let chunk = |first_slot| ScoredChunk {
            first_slot,
            selectable: true,
            primary: &spans,
            auxiliary: &spans,
            scores: &[0.5; 6],
        };
        let selection =
            select(&options(0.25, Budget::Charged, Group::NONE), &[chunk(10), chunk(16)]).expect("scores are finite");
        assert_eq!(selection.rows.slots().collect::<Vec<_>>(), [10, 11, 12]);
    }

    #[test]
    fn a_score_that_is_not_finite_is_an_error() {
        let spans = unit_spans(2);
        for bad in [f32::NAN, f32::INFINITY] {
            let chunk = ScoredChunk {
                first_slot: 0,
                selectable: true,
                primary: &spans,
                auxiliary: &spans,
                scores: &[0.1, bad],
            };
            assert!(matches!(
                select(&options(0.5, Budget::Charged, Group::NONE), &[chunk]),
                Err(Error::Scores { chunk: 0, .. })
            ));
        }
    }

    #[test]
    fn scores_are_spread_over_bytes() {
        // Auxiliary "abcd" + "ef" against primary "ab" + "cde" + "f".
        let chunk = ScoredChunk {
            first_slot: 0,
            selectable: true,
            primary: &[(0, 2), (2, 5), (5, 6)],
            auxiliary: &[(0, 4), (4, 6)],
            scores: &[0.4, 0.2],
        };
        let fresh = ScoredChunk { selectable: false, ..chunk };
        let scores = primary_scores(&[chunk, fresh]);
        for (got, want) in scores.iter().zip([0.2, 0.3, 0.1, -1.0, -1.0, -1.0]) {
            assert!((got - want).abs() < 1e-6, "{scores:?}");
        }
    }

    /// A chunk's two tokenizations of one text whose characters have 1 to 4 bytes.
    #[derive(Clone, Debug)]
    struct Sample {
        selectable: bool,
        primary: Vec<(u32, u32)>,
        auxiliary: Vec<(u32, u32)>,
        scores: Vec<f32>,
    }

    /// Cuts characters into tokens; some characters take two tokens, which share its range, and some tokens are empty.
    fn spans(widths: &[u32], cuts: &[u8]) -> Vec<(u32, u32)> {
        let (mut spans, mut at, mut start) = (Vec::new(), 0, 0);
        for (width, cut) in widths.iter().zip(cuts) {
            at += width;
            match cut % 8 {
                0..3 => {}
                3..6 => spans.push((std::mem::replace(&mut start, at), at)),
                6 => {
                    spans.extend([(start, at); 2]);
                    start = at;
                }
                _ => spans.push((start, start)),
            }
        }
        if start < at {
            spans.push((start, at));
        }
        spans
    }

    fn sample() -> impl Strategy<Value = Sample> {
        (1usize..=300).prop_flat_map(|characters| {
            (
                any::<bool>(),
                prop::collection::vec(1u32..=4, characters),
                prop::collection::vec(any::<u8>(), characters),
                prop::collection::vec(any::<u8>(), characters),
                prop::collection::vec(0u8..20, 2 * characters + 1),
            )
                .prop_map(|(selectable, widths, primary, auxiliary, scores)| {
                    let auxiliary = spans(&widths, &auxiliary);
                    let scores = scores.iter().take(auxiliary.len()).map(|&score| f32::from(score) / 20.0).collect();
                    Sample { selectable, primary: spans(&widths, &primary), auxiliary, scores }
                })
        })
    }

    fn place(samples: &[Sample]) -> Vec<ScoredChunk<'_>> {
        let mut slot = 7;
        samples
            .iter()
            .map(|sample| {
                let first_slot = slot;
                slot += sample.primary.len() as u32;
                ScoredChunk {
                    first_slot,
                    selectable: sample.selectable,
                    primary: &sample.primary,
                    auxiliary: &sample.auxiliary,
                    scores: &sample.scores,
                }
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn rows_are_selectable_within_the_budget_maximal_and_monotone(
            samples in prop::collection::vec(sample(), 1..=12),
            repeat in any::<prop::sample::Index>(),
            ratios in (0f32..=1.0, 0f32..=1.0),
            grouped in any::<bool>(),
        ) {
            let mut samples = samples;
            samples.push(repeat.get(&samples).clone());
            let chunks = place(&samples);
            let group = if grouped { Group::default() } else { Group::NONE };
            let (low, high) = (ratios.0.min(ratios.1), ratios.0.max(ratios.1));
            let options = options(high, Budget::Charged, group);
            let selection = select(&options, &chunks).unwrap();
            let budget = options.budget_rows(selection.selectable);
            prop_assert!(selection.rows.len() <= budget);
            let inside: usize = chunks.iter().filter(|c| c.selectable).map(|c| selection.rows.count_in(slots_of(c))).sum();
            prop_assert_eq!(inside, selection.rows.len());

            let ranking = rank(&chunks).unwrap();
            if high < 1.0 && selection.candidates < ranking.len() {
                prop_assert!(pick(&chunks, &ranking[..=selection.candidates], group).len() > budget);
            }
            let fewer = select(&Options { ratio: low, ..options }, &chunks).unwrap();
            prop_assert_eq!(fewer.rows.union(&selection.rows), selection.rows.clone());
            prop_assert_eq!(primary_scores(&chunks).len(), chunks.iter().map(|c| c.primary.len()).sum::<usize>());
        }

        #[test]
        fn ratio_one_selects_every_selectable_token_and_ratio_zero_none(
            samples in prop::collection::vec(sample(), 1..=12),
            nominal in any::<bool>(),
        ) {
            let chunks = place(&samples);
            let budget = if nominal { Budget::Nominal } else { Budget::Charged };
            let all = select(&options(1.0, budget, Group::default()), &chunks).unwrap();
            prop_assert_eq!(all.rows.len(), all.selectable);
            let none = select(&options(0.0, budget, Group::NONE), &chunks).unwrap();
            // Tokens without bytes cost no row.
            prop_assert!(none.rows.is_empty());
        }
    }
}
