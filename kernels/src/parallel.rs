//! Parallel loops on libtorch's thread pool, or on threads of the moment in a build without it.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of the pool.
pub(crate) fn threads() -> usize {
    pool::threads()
}

/// Runs `body` for every index in `0..end`, spread over the pool; returns when all have run. The last index comes first,
/// so that work that grows with the index ends evenly, and a thread that is done takes the next one: which thread does
/// what varies, so results must not depend on it. `body` must not panic: that aborts.
pub(crate) fn for_each<F: Fn(usize) + Sync>(end: usize, body: F) {
    for_each_with(end, || (), |(), index| body(index));
}

/// As [`for_each`], with something of each thread's own.
pub(crate) fn for_each_with<S>(end: usize, new: impl Fn() -> S + Sync, body: impl Fn(&mut S, usize) + Sync) {
    let left = AtomicUsize::new(end);
    pool::start(threads().min(end), &|_thread: usize| {
        let mut own = new();
        while let Ok(index) = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            body(&mut own, index - 1);
        }
    });
}

#[cfg(feature = "libtorch")]
mod pool {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn kvsplice_parallel_for(end: i64, run: extern "C" fn(*mut c_void, i64, i64), context: *mut c_void);
        safe fn kvsplice_threads() -> i32;
    }

    pub(super) fn threads() -> usize {
        kvsplice_threads().max(1) as usize
    }

    /// Runs `body` for `0..pieces`; returns when all have run.
    pub(super) fn start<G: Fn(usize) + Sync>(pieces: usize, body: &G) {
        extern "C" fn call<G: Fn(usize) + Sync>(context: *mut c_void, first: i64, last: i64) {
            // SAFETY: `context` is the `&G` below, which outlives the call; `G: Sync`, so threads may share it.
            let body = unsafe { &*context.cast::<G>() };
            for piece in first..last {
                body(piece as usize);
            }
        }
        let context = std::ptr::from_ref(body).cast_mut().cast::<c_void>();
        // SAFETY: `call::<G>` matches the shim's signature and reads `context` as the `&G` that it is; the shim returns
        // only when every piece has run.
        unsafe { kvsplice_parallel_for(pieces as i64, call::<G>, context) };
    }
}

#[cfg(not(feature = "libtorch"))]
mod pool {
    pub(super) fn threads() -> usize {
        std::thread::available_parallelism().map_or(1, |threads| threads.get().min(4))
    }

    /// As the other one.
    pub(super) fn start<G: Fn(usize) + Sync>(pieces: usize, body: &G) {
        std::thread::scope(|scope| {
            for piece in 1..pieces {
                scope.spawn(move || body(piece));
            }
            if pieces > 0 {
                body(0);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once() {
        for end in [0, 1, 2, 7, 1000] {
            let counts: Vec<AtomicUsize> = (0..end).map(|_| AtomicUsize::new(0)).collect();
            for_each(end, |index| {
                counts[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{end}");
        }
    }
}
