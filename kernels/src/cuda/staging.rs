//! Bytes on their way to the device: pinned memory and a copy stream, so that copies run beside what is computed.
//!
//! Two slots take turns. A slot's pinned half is written anew when its last copy has ended, its device half when the work
//! on it has; both are waited for by events, the second on the device only.

use std::ffi::c_void;
use std::sync::MutexGuard;

use cudarc::driver::DriverError;
use cudarc::driver::result::{self, event, stream};
use cudarc::driver::sys;

use crate::{Error, parallel};

/// Parts begin at multiples of this.
const ALIGNMENT: usize = 256;
/// The least size of a slot: most layers of most prompts fit, so that it rarely grows.
const LEAST_BYTES: usize = 32 << 20;
/// Bytes that one thread copies into pinned memory at a time.
const PIECE_BYTES: usize = 1 << 20;

/// One half of the staging memory.
struct Slot {
    pinned: *mut c_void,
    device: sys::CUdeviceptr,
    bytes: usize,
    /// The last copy has ended.
    copied: sys::CUevent,
    /// The work on the last copy has ended.
    used: sys::CUevent,
}

/// Staging memory of a device; lives as long as the process.
pub(super) struct Staging {
    copies: sys::CUstream,
    slots: [Slot; 2],
    turn: usize,
}

// SAFETY: the handles may be used by any thread, and the pinned memory is only touched with the staging borrowed.
unsafe impl Send for Staging {}

/// Bytes of a slot that hold these parts.
fn places(parts: &[&[u8]]) -> (Vec<usize>, usize) {
    let mut end = 0usize;
    let mut places = Vec::with_capacity(parts.len());
    for part in parts {
        places.push(end);
        end = end.saturating_add(part.len()).next_multiple_of(ALIGNMENT);
    }
    (places, end)
}

impl Staging {
    /// Without memory yet. The device's context must be current.
    pub(super) fn new() -> Result<Self, DriverError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let slot = || -> Result<Slot, DriverError> {
            let (copied, used) = (event::create(flags)?, event::create(flags)?);
            Ok(Slot { pinned: std::ptr::null_mut(), device: 0, bytes: 0, copied, used })
        };
        Ok(Self { copies: stream::create(stream::StreamKind::NonBlocking)?, slots: [slot()?, slot()?], turn: 0 })
    }

    /// Copies `parts` to the device; what comes on `current` later finds them. Returns where each is.
    fn send(&mut self, parts: &[&[u8]], current: sys::CUstream) -> Result<Vec<*const c_void>, DriverError> {
        let (places, bytes) = places(parts);
        self.turn = 1 - self.turn;
        let Self { copies, slots, turn } = self;
        let slot = &mut slots[*turn];
        // SAFETY: the events and streams are this device's and live as long as the process. An event that was never
        // recorded counts as done.
        unsafe { event::synchronize(slot.copied)? };
        slot.grow(bytes)?;
        for (part, &place) in parts.iter().zip(&places) {
            copy_in(part, slot.pinned.cast::<u8>().wrapping_add(place));
        }
        let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above; the pinned memory holds `bytes` bytes and is not written before `copied` is done, the device
        // memory is not read before `current` has waited for `copied`.
        unsafe {
            stream::wait_event(*copies, slot.used, wait)?;
            let pinned = std::slice::from_raw_parts(slot.pinned.cast::<u8>(), bytes);
            if bytes > 0 {
                result::memcpy_htod_async(slot.device, pinned, *copies)?;
            }
            event::record(slot.copied, *copies)?;
            stream::wait_event(current, slot.copied, wait)?;
        }
        let start = slot.device as usize;
        Ok(places.iter().map(|place| (start + place) as *const c_void).collect())
    }

    /// What was sent last is in use by what has come on `current` so far.
    fn used(&self, current: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: as in `send`.
        unsafe { event::record(self.slots[self.turn].used, current) }
    }
}

impl Slot {
    /// Makes room for `bytes`; waits for what still uses the old memory.
    fn grow(&mut self, bytes: usize) -> Result<(), DriverError> {
        if bytes <= self.bytes && !self.pinned.is_null() {
            return Ok(());
        }
        let size = bytes.next_multiple_of(LEAST_BYTES).max(LEAST_BYTES);
        // SAFETY: nothing uses the old memory: the caller has waited for its copy, and `used` is waited for here. It is
        // freed once, and forgotten before the new is asked for.
        unsafe {
            event::synchronize(self.used)?;
            if !self.pinned.is_null() {
                let (pinned, device) = (self.pinned, self.device);
                (self.pinned, self.device, self.bytes) = (std::ptr::null_mut(), 0, 0);
                result::free_host(pinned)?;
                result::free_sync(device)?;
            }
            let device = result::malloc_sync(size)?;
            match result::malloc_host(size, 0) {
                Ok(pinned) => (self.pinned, self.device, self.bytes) = (pinned, device, size),
                Err(error) => {
                    result::free_sync(device)?;
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// Copies on all threads: one alone is slower than the bus.
fn copy_in(part: &[u8], to: *mut u8) {
    struct Target(*mut u8);
    // SAFETY: each piece is written by one thread.
    unsafe impl Sync for Target {}
    let target = Target(to);
    let target = &target;
    parallel::for_each(part.len().div_ceil(PIECE_BYTES), |piece| {
        let Some(bytes) = part.chunks(PIECE_BYTES).nth(piece) else { return };
        // SAFETY: the slot has room for the whole part from `to` on, and pieces do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.0.add(piece * PIECE_BYTES), bytes.len()) };
    });
}

/// Sends `parts`, runs `work` on them, and marks them used. `failed` names the driver's errors.
pub(super) fn with_staged<R>(
    mut staging: MutexGuard<'_, Staging>,
    parts: &[&[u8]],
    current: sys::CUstream,
    failed: impl Fn(DriverError) -> Error,
    work: impl FnOnce(&[*const c_void]) -> Result<R, Error>,
) -> Result<R, Error> {
    let staged = staging.send(parts, current).map_err(&failed)?;
    let result = work(&staged);
    // Also after a failure: what was started before it may still read.
    staging.used(current).map_err(failed)?;
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_are_aligned() {
        let parts: [&[u8]; 4] = [&[1; 3], &[], &[2; 256], &[3; 257]];
        let (places, end) = places(&parts);
        assert_eq!((places, end), (vec![0, 256, 256, 512], 1024));
    }

    #[test]
    fn copies_of_every_size_are_whole() {
        for size in [0, 1, PIECE_BYTES, 3 * PIECE_BYTES + 5] {
            let from: Vec<u8> = (0..size).map(|index| (index * 31 % 251) as u8).collect();
            let mut to = vec![0; size];
            copy_in(&from, to.as_mut_ptr());
            assert!(to == from, "{size}");
        }
    }
}
