//! Which chunks must not be evicted: pinned ones, and those under a lease.
//!
//! Leases end by themselves, by a clock that never jumps, when they are given back, and with the process: nothing is lost. One whose
//! holder is to renew it lapses when it does not, and holds again when it does after all: a pause costs nothing more.
//! Pins are stored (`kept`) and read at the start.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvsplice_kv::ChunkId;

use crate::Error;

/// Longest lease.
pub(crate) const MAX_LEASE: Duration = Duration::from_secs(600);
const MAX_LEASES: usize = 1 << 16;
const MAX_PINS: usize = 1 << 20;
/// Ended leases are swept at most this often.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Pins and leases of one service.
#[derive(Debug)]
pub(crate) struct Protection {
    state: RwLock<State>,
    next: AtomicU64,
    /// Tells the leases of this process from those of another.
    epoch_ms: u64,
}

#[derive(Debug)]
struct State {
    pinned: HashSet<ChunkId>,
    /// When each lease on a chunk ends or lapses, by the lease's number.
    leased: HashMap<ChunkId, HashMap<u64, Instant>>,
    leases: HashMap<u64, Lasting>,
    swept: Instant,
}

/// A lease that has not been given back.
#[derive(Debug)]
struct Lasting {
    ends: Instant,
    /// How long it holds without being renewed.
    renew: Option<Duration>,
    /// When it ends, or lapses.
    until: Instant,
    chunks: Vec<ChunkId>,
}

/// A lease that was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) id: String,
    /// Milliseconds since the Unix epoch.
    pub(crate) expires_ms: u64,
}

/// A lease that ends when this is dropped, if not before.
#[derive(Debug)]
pub(crate) struct Holding {
    protection: Arc<Protection>,
    id: String,
    /// When it ends by itself.
    pub(crate) ends: Instant,
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.protection.release(&self.id);
    }
}

impl Protection {
    pub(crate) fn new() -> Self {
        let state =
            State { pinned: HashSet::new(), leased: HashMap::new(), leases: HashMap::new(), swept: Instant::now() };
        Self { state: RwLock::new(state), next: AtomicU64::new(0), epoch_ms: unix_ms() }
    }

    /// Protects `chunks` for `time`, cut at [`MAX_LEASE`]; with `renew`, while it is not older than this since it was renewed.
    pub(crate) fn lease(
        &self,
        chunks: impl Iterator<Item = ChunkId>,
        time: Duration,
        renew: Option<Duration>,
    ) -> Result<Lease, Error> {
        let time = time.min(MAX_LEASE);
        let now = Instant::now();
        let ends = now + time;
        let until = now + renew.unwrap_or(time).min(time);
        let mut state = self.write();
        if now.duration_since(state.swept) >= SWEEP_INTERVAL || state.leases.len() >= MAX_LEASES {
            state.sweep(now);
        }
        if state.leases.len() >= MAX_LEASES {
            state.leases.retain(|_, lease| lease.until > now);
        }
        if state.leases.len() >= MAX_LEASES {
            return Err(Error::TooMany { what: "leases", limit: MAX_LEASES, advice: "ask for shorter ones" });
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let chunks: Vec<ChunkId> = chunks.collect();
        for chunk in &chunks {
            state.leased.entry(*chunk).or_default().insert(number, until);
        }
        state.leases.insert(number, Lasting { ends, renew, until, chunks });
        let expires_ms = unix_ms().saturating_add(time.as_millis() as u64);
        Ok(Lease { id: format!("{:x}-{number:x}", self.epoch_ms), expires_ms })
    }

    /// Protects `chunks` until what is returned is dropped, for `time` at most.
    pub(crate) fn hold(
        self: &Arc<Self>,
        chunks: impl Iterator<Item = ChunkId>,
        time: Duration,
    ) -> Result<Holding, Error> {
        let Lease { id, .. } = self.lease(chunks, time, None)?;
        Ok(Holding { protection: self.clone(), id, ends: Instant::now() + time.min(MAX_LEASE) })
    }

    /// The number of a lease of this process.
    fn number(&self, id: &str) -> Option<u64> {
        let (epoch, number) = id.split_once('-')?;
        let ours = epoch == format!("{:x}", self.epoch_ms);
        u64::from_str_radix(number, 16).ok().filter(|_| ours)
    }

    /// Keeps a lease from lapsing, or takes it up again. One of another process, or that has ended, changes nothing.
    pub(crate) fn renew(&self, id: &str) {
        let Some(number) = self.number(id) else { return };
        let now = Instant::now();
        let mut state = self.write();
        let State { leased, leases, .. } = &mut *state;
        let Some(lease) = leases.get_mut(&number).filter(|lease| lease.ends > now) else { return };
        let Some(renew) = lease.renew else { return };
        lease.until = lease.ends.min(now + renew);
        for chunk in &lease.chunks {
            leased.entry(*chunk).or_default().insert(number, lease.until);
        }
    }

    /// Ends a lease before its time. One of another process, or that has ended, changes nothing.
    pub(crate) fn release(&self, id: &str) {
        let Some(number) = self.number(id) else { return };
        let mut state = self.write();
        let Some(lease) = state.leases.remove(&number) else { return };
        for chunk in &lease.chunks {
            let Some(ends) = state.leased.get_mut(chunk) else { continue };
            ends.remove(&number);
            if ends.is_empty() {
                state.leased.remove(chunk);
            }
        }
    }

    /// Refuses pins for which there is no room.
    pub(crate) fn check_pins(&self, chunks: &[ChunkId]) -> Result<(), Error> {
        if self.read().pinned.len() + chunks.len() > MAX_PINS {
            return Err(Error::TooMany { what: "pins", limit: MAX_PINS, advice: "unpin some first" });
        }
        Ok(())
    }

    /// Protects `chunks` until they are unpinned.
    pub(crate) fn pin(&self, chunks: &[ChunkId]) -> Result<(), Error> {
        self.check_pins(chunks)?;
        self.write().pinned.extend(chunks);
        Ok(())
    }

    /// Takes pins away.
    pub(crate) fn unpin(&self, chunks: &[ChunkId]) {
        let mut state = self.write();
        for chunk in chunks {
            state.pinned.remove(chunk);
        }
    }

    /// Whether `chunk` is pinned or under a lease now.
    pub(crate) fn covers(&self, chunk: &ChunkId) -> bool {
        let now = Instant::now();
        let state = self.read();
        state.pinned.contains(chunk)
            || state.leased.get(chunk).is_some_and(|leases| leases.values().any(|until| *until > now))
    }

    /// Whether `chunk` is pinned.
    pub(crate) fn pinned(&self, chunk: &ChunkId) -> bool {
        self.read().pinned.contains(chunk)
    }

    /// Leases that have neither ended nor lapsed, and pins.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let now = Instant::now();
        let state = self.read();
        (state.leases.values().filter(|lease| lease.until > now).count(), state.pinned.len())
    }

    // A panic while the lock was held cannot leave the maps half-changed in a way that matters here.
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn sweep(&mut self, now: Instant) {
        self.leases.retain(|_, lease| lease.ends > now);
        self.leased.retain(|_, leases| {
            leases.retain(|_, until| *until > now);
            !leases.is_empty()
        });
        self.swept = now;
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ChunkId = ChunkId::from_bytes([1; 32]);
    const B: ChunkId = ChunkId::from_bytes([2; 32]);

    #[test]
    fn a_lease_ends_by_itself() {
        let protection = Protection::new();
        let ended = protection.lease([A].into_iter(), Duration::ZERO, None).unwrap();
        let held = protection.lease([B].into_iter(), Duration::from_secs(60), None).unwrap();
        assert_ne!(ended.id, held.id);
        assert!(!protection.covers(&A) && protection.covers(&B));
        assert_eq!(protection.counts(), (1, 0));
        protection.write().sweep(Instant::now());
        assert_eq!(protection.read().leased.len(), 1);
    }

    #[test]
    fn a_shorter_lease_does_not_cut_a_longer_one_and_none_is_endless() {
        let protection = Protection::new();
        protection.lease([A].into_iter(), Duration::from_secs(60), None).unwrap();
        protection.lease([A].into_iter(), Duration::ZERO, None).unwrap();
        assert!(protection.covers(&A));
        let longest = protection.lease([A].into_iter(), Duration::from_secs(1 << 40), None).unwrap();
        assert!(longest.expires_ms <= unix_ms() + MAX_LEASE.as_millis() as u64);
    }

    #[test]
    fn a_lease_that_is_not_renewed_lapses_until_it_is() {
        let protection = Protection::new();
        let (long, soon) = (Duration::from_secs(60), Duration::from_millis(1));
        let lapsing = protection.lease([A].into_iter(), long, Some(soon)).unwrap();
        let renewed = protection.lease([B].into_iter(), long, Some(long)).unwrap();
        while protection.covers(&A) {
            std::thread::yield_now();
        }
        assert_eq!(protection.counts().0, 1, "the other one holds");
        // Also after what has lapsed was swept.
        protection.write().sweep(Instant::now());
        assert!(!protection.read().leased.contains_key(&A));
        // One that is to be renewed more often than it lives does not outlive its time.
        let short = protection.lease([A].into_iter(), Duration::ZERO, Some(long)).unwrap();
        protection.renew(&short.id);
        assert!(!protection.covers(&A));
        protection.write().leases.values_mut().for_each(|lease| lease.renew = Some(long));
        protection.renew(&lapsing.id);
        assert!(protection.covers(&A) && protection.counts().0 == 2);
        [&lapsing, &renewed].iter().for_each(|lease| protection.release(&lease.id));
        protection.renew(&lapsing.id);
        assert!(!protection.covers(&A) && !protection.covers(&B) && protection.counts().0 == 0);
    }

    #[test]
    fn a_lease_that_is_given_back_ends_and_the_others_stay() {
        let protection = Protection::new();
        let time = Duration::from_secs(60);
        let [first, second] = [[A, B], [B, B]].map(|chunks| protection.lease(chunks.into_iter(), time, None).unwrap());
        protection.release(&first.id);
        assert!(!protection.covers(&A) && protection.covers(&B));
        // A lease of another process, no lease at all, and one that has ended.
        let (_, number) = second.id.split_once('-').unwrap();
        for id in [&format!("0-{number}"), "", "-", "x", &first.id] {
            protection.release(id);
        }
        assert_eq!(protection.counts(), (1, 0));
        protection.release(&second.id);
        assert!(!protection.covers(&B));
        assert_eq!(protection.counts(), (0, 0));
        assert!(protection.read().leased.is_empty());
    }

    #[test]
    fn what_is_held_is_protected_until_it_is_let_go() {
        let protection = Arc::new(Protection::new());
        let held = protection.hold([A].into_iter(), Duration::from_secs(60)).unwrap();
        assert!(protection.covers(&A) && held.ends > Instant::now());
        drop(held);
        assert!(!protection.covers(&A));
        let ended = protection.hold([A].into_iter(), Duration::ZERO).unwrap();
        assert!(!protection.covers(&A) && ended.ends <= Instant::now());
    }

    #[test]
    fn a_pin_holds_until_it_is_taken_away() {
        let protection = Protection::new();
        protection.pin(&[A, B]).unwrap();
        protection.unpin(&[A]);
        assert!(!protection.covers(&A) && protection.covers(&B));
        assert_eq!(protection.counts(), (0, 1));
    }
}
