//! The machine's memory: what the allocator keeps of it for later, and how fast it is read.

use crate::cpu::{isa::Isa, read};

/// Gives memory that is free but held by the allocator back to the system. Loading a model frees as much as it keeps,
/// in pieces that would stay for good. Does nothing where the C library is not glibc.
pub fn release_unused() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` only returns free pages; it takes a number and touches no memory of ours.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The sum of `numbers`, by all threads: with more numbers than caches hold, how fast memory is read at best.
pub fn read(numbers: &[f32]) -> f64 {
    read::sum(Isa::best(), numbers)
}
