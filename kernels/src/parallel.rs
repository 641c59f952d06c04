//! Parallel loops on libtorch's thread pool.

use std::ffi::c_void;

unsafe extern "C" {
    fn kvsplice_parallel_for(end: i64, run: extern "C" fn(*mut c_void, i64, i64), context: *mut c_void);
    safe fn kvsplice_threads() -> i32;
}

/// Runs `body` for every index in `0..end`, spread over the pool; returns when all have run. Index i goes to thread
/// i mod threads, so that work that grows with the index is balanced. `body` must not panic: that aborts.
pub(crate) fn for_each<F: Fn(usize) + Sync>(end: usize, body: F) {
    let stride = (kvsplice_threads().max(1) as usize).min(end.max(1));
    let spread = |piece: usize| {
        let mut index = piece;
        while index < end {
            body(index);
            index += stride;
        }
    };
    extern "C" fn call<G: Fn(usize) + Sync>(context: *mut c_void, first: i64, last: i64) {
        // SAFETY: `context` is the `&G` below, which outlives the call; `G: Sync`, so threads may share it.
        let body = unsafe { &*context.cast::<G>() };
        for piece in first..last {
            body(piece as usize);
        }
    }
    fn start<G: Fn(usize) + Sync>(end: usize, body: &G) {
        let context = std::ptr::from_ref(body).cast_mut().cast::<c_void>();
        // SAFETY: `call::<G>` matches the shim's signature and reads `context` as the `&G` that it is; the shim returns
        // only when every piece has run.
        unsafe { kvsplice_parallel_for(end as i64, call::<G>, context) };
    }
    start(stride, &spread);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
