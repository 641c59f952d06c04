//! What the compute thread does next. Pure: it looks at states and names a unit of work.
//!
//! A running request waits at most one slice of one layer of another's prefill between two of its tokens. Among
//! prefills the oldest that has its data goes first, so that one slow load does not hold up the others. Encoding for
//! ingest fills the gaps, and gets a unit at least once a second.

use std::time::{Duration, Instant};

/// A request as the schedule sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Waits for rows or data.
    Waiting,
    /// One of its chunks must be encoded anew before it can go on.
    Repair,
    /// The first layer could run, but would soon wait for one that is still being loaded.
    Early,
    /// The next slice of rows can run.
    Prefill,
    /// Generates.
    Decode,
}

/// A unit of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// One token for every generating request.
    Decode,
    /// One slice of the request at this place.
    Prefill(usize),
    /// One layer of a repair for the request at this place.
    Repair(usize),
    /// One layer of an ingest batch.
    Encode,
}

/// Longest time that encoding waits while requests keep the thread busy.
const ENCODE_PATIENCE: Duration = Duration::from_secs(1);

/// Remembers what ran last.
#[derive(Debug)]
pub(crate) struct Schedule {
    decoded_last: bool,
    encoded_at: Instant,
}

impl Schedule {
    pub(crate) fn new(now: Instant) -> Self {
        Self { decoded_last: false, encoded_at: now }
    }

    /// The next unit; none when everything waits. `states` in order of arrival.
    pub(crate) fn next(&mut self, states: &[State], encode_ready: bool, now: Instant) -> Option<Unit> {
        let decoding = states.contains(&State::Decode);
        if decoding && !self.decoded_last {
            self.decoded_last = true;
            return Some(Unit::Decode);
        }
        let prefill = states.iter().enumerate().find_map(|(index, state)| match state {
            State::Prefill => Some(Unit::Prefill(index)),
            State::Repair => Some(Unit::Repair(index)),
            State::Waiting | State::Early | State::Decode => None,
        });
        let early = || states.iter().position(|state| *state == State::Early).map(Unit::Prefill);
        let prefill = prefill.or_else(early);
        let patient = now.duration_since(self.encoded_at) < ENCODE_PATIENCE;
        let unit = match prefill {
            Some(unit) if patient || !encode_ready => Some(unit),
            _ if encode_ready && (!decoding || !patient) => Some(Unit::Encode),
            Some(unit) => Some(unit),
            None if decoding => Some(Unit::Decode),
            None => None,
        };
        if unit == Some(Unit::Encode) || !encode_ready {
            self.encoded_at = now;
        }
        self.decoded_last = unit == Some(Unit::Decode);
        unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use State::{Decode, Early, Prefill, Repair, Waiting};

    #[test]
    fn decoding_alternates_with_prefill() {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        let units: Vec<_> = (0..4).map(|_| schedule.next(&[Decode, Waiting, Prefill], false, now)).collect();
        let expected = [Unit::Decode, Unit::Prefill(2), Unit::Decode, Unit::Prefill(2)];
        assert_eq!(units, expected.map(Some));
        assert_eq!(schedule.next(&[Decode], false, now), Some(Unit::Decode));
        assert_eq!(schedule.next(&[Decode], false, now), Some(Unit::Decode));
    }

    #[test]
    fn the_oldest_request_with_data_goes_first() {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.next(&[Waiting, Repair, Prefill], false, now), Some(Unit::Repair(1)));
        assert_eq!(schedule.next(&[Waiting, Waiting], false, now), None);
    }

    #[test]
    fn a_request_that_would_wait_for_its_load_lets_others_go_first() {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.next(&[Early, Waiting, Prefill], false, now), Some(Unit::Prefill(2)));
        assert_eq!(schedule.next(&[Early, Waiting], false, now), Some(Unit::Prefill(0)));
    }

    #[test]
    fn encoding_fills_gaps_and_is_not_starved() {
        let start = Instant::now();
        let mut schedule = Schedule::new(start);
        assert_eq!(schedule.next(&[Waiting], true, start), Some(Unit::Encode));
        assert_eq!(schedule.next(&[Prefill], true, start), Some(Unit::Prefill(0)));
        let later = start + ENCODE_PATIENCE;
        assert_eq!(schedule.next(&[Prefill], true, later), Some(Unit::Encode));
        assert_eq!(schedule.next(&[Prefill], true, later), Some(Unit::Prefill(0)));
        assert_eq!(schedule.next(&[Decode], true, later), Some(Unit::Decode));
        assert_eq!(schedule.next(&[Decode], true, later + ENCODE_PATIENCE), Some(Unit::Encode));
    }
}
