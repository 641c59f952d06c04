//! Rows (slots that are computed) as sorted, disjoint ranges.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A set of slots: sorted, disjoint, non-adjacent, non-empty ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RowRanges(Vec<Range<u32>>);

impl RowRanges {
    /// Builds from slots in any order; repeats count once.
    pub fn from_slots(slots: impl IntoIterator<Item = u32>) -> Self {
        let mut slots: Vec<u32> = slots.into_iter().collect();
        slots.sort_unstable();
        slots.into_iter().fold(Self::default(), |mut rows, slot| {
            rows.push_sorted(slot..slot.saturating_add(1));
            rows
        })
    }

    /// The slots of one range.
    pub fn from_range(range: Range<u32>) -> Self {
        Self::from_ranges(std::iter::once(range))
    }

    /// Builds from ranges in any order; overlaps merge and empty ranges vanish.
    pub fn from_ranges(ranges: impl IntoIterator<Item = Range<u32>>) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().filter(|range| range.start < range.end).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.into_iter().fold(Self::default(), |mut rows, range| {
            rows.push_sorted(range);
            rows
        })
    }

    fn push_sorted(&mut self, range: Range<u32>) {
        match self.0.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => self.0.push(range),
        }
    }

    /// The ranges, ascending.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.0
    }

    /// Every slot, ascending.
    pub fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().cloned().flatten()
    }

    /// How many slots.
    pub fn len(&self) -> usize {
        self.0.iter().map(|range| range.len()).sum()
    }

    /// Whether there is no slot.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `slot` is in the set.
    pub fn contains(&self, slot: u32) -> bool {
        let after = self.0.partition_point(|range| range.end <= slot);
        self.0.get(after).is_some_and(|range| range.contains(&slot))
    }

    /// How many slots of the set lie in `within`.
    pub fn count_in(&self, within: Range<u32>) -> usize {
        self.0.iter().map(|range| (range.start.max(within.start)..range.end.min(within.end)).len()).sum()
    }

    /// The union with another set.
    pub fn union(&self, other: &Self) -> Self {
        Self::from_ranges(self.0.iter().chain(&other.0).cloned())
    }

    /// The slots that are in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let meet = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start)..a.end.min(b.end);
        let (mut ranges, mut mine, mut theirs) = (Vec::new(), self.0.iter().peekable(), other.0.iter().peekable());
        while let (Some(a), Some(b)) = (mine.peek(), theirs.peek()) {
            ranges.push(meet(a, b));
            if a.end < b.end {
                mine.next()
            } else {
                theirs.next()
            };
        }
        Self::from_ranges(ranges)
    }

    /// The slots of this set that are not in another.
    pub fn without(&self, other: &Self) -> Self {
        let mut ranges = Vec::new();
        for range in &self.0 {
            let mut start = range.start;
            for hole in other.0.iter().filter(|hole| hole.start < range.end && hole.end > range.start) {
                ranges.push(start..hole.start);
                start = hole.end;
            }
            ranges.push(start..range.end);
        }
        Self::from_ranges(ranges)
    }

    /// Whether every slot of another set is in this one.
    pub fn covers(&self, other: &Self) -> bool {
        other.without(self).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_become_merged_ascending_ranges() {
        let rows = RowRanges::from_slots([5, 3, 4, 9, 3]);
        assert_eq!(rows.ranges(), &[3..6, 9..10]);
        assert_eq!(rows.slots().collect::<Vec<_>>(), [3, 4, 5, 9]);
        assert_eq!(rows.len(), 4);
        assert!(rows.contains(9) && !rows.contains(8) && !rows.contains(10));
        assert_eq!(rows.count_in(4..10), 3);
        assert_eq!(rows.union(&RowRanges::from_slots([6, 8])).ranges(), &[3..7, 8..10]);
        assert_eq!(rows.intersection(&RowRanges::from_slots([1, 4, 5, 6, 9])).ranges(), &[4..6, 9..10]);
        assert!(rows.intersection(&RowRanges::from_slots([7])).is_empty());
        assert_eq!(rows.without(&RowRanges::from_slots([1, 4, 6, 9])).ranges(), &[3..4, 5..6]);
        assert_eq!(RowRanges::from_range(0..9).without(&rows).ranges(), &[0..3, 6..9]);
        assert_eq!(rows.without(&RowRanges::default()), rows);
        assert!(rows.without(&RowRanges::from_range(2..10)).is_empty());
        assert!(rows.covers(&RowRanges::from_slots([4, 9])) && !rows.covers(&RowRanges::from_slots([4, 6])));
    }

    #[test]
    fn the_last_slot_and_the_empty_set_are_fine() {
        assert!(RowRanges::from_slots([]).is_empty());
        assert_eq!(RowRanges::from_ranges([2..2, Range { start: 7, end: 4 }]).len(), 0);
        assert_eq!(RowRanges::from_slots([u32::MAX]).len(), 0);
    }
}
