//! Runs the program again, once, with the environment that its libraries read when they are loaded, before `main`. Values
//! that the user set are respected.

use std::os::unix::process::CommandExt;
use std::process::Command;

const VARIABLES: [(&str, &str); 3] = [
    // libgomp: else its threads spin for some milliseconds after each parallel region and take the CPU from everything
    // else in the process.
    ("OMP_WAIT_POLICY", "PASSIVE"),
    // But for a moment they do: within a layer the next region follows at once, and waking a thread takes longer.
    ("GOMP_SPINCOUNT", "2000"),
    // glibc: memory in huge pages, and blocks of a layer's size kept for the next layer instead of given back. Weights
    // and intermediate results are walked through once a layer: with pages of 4 KiB that is slower by a quarter where the
    // machine is virtual, and faulting the same pages in again costs as much. One arena, for others give back on their own.
    (
        "GLIBC_TUNABLES",
        "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=134217728:glibc.malloc.trim_threshold=536870912:\
         glibc.malloc.arena_max=1",
    ),
];

/// Does not return when the program was started again.
pub(crate) fn ensure() {
    let missing = VARIABLES.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let missing: Vec<(&str, &str)> = missing.copied().collect();
    if missing.is_empty() {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let error = Command::new(program).args(std::env::args_os().skip(1)).envs(missing).exec();
    // exec returns only when it failed; the program works without, only slower.
    eprintln!("kvsplice: running on without its settings of memory and threads, expect slower answers: {error}");
}
