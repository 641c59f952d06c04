//! Memory that the allocator keeps for later.

/// Gives memory that is free but held by the allocator back to the system. Loading a model frees as much as it keeps,
/// in pieces that would stay for good. Does nothing where the C library is not glibc.
pub fn release_unused() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` only returns free pages; it takes a number and touches no memory of ours.
    unsafe {
        libc::malloc_trim(0);
    }
}
