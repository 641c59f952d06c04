//! Runs the program again, once, with `OMP_WAIT_POLICY=PASSIVE`.
//!
//! libgomp reads the variable when it is loaded, before `main`. Without it its threads spin for some milliseconds after
//! each parallel region and take the CPU from everything else in the process. A value that the user set is respected.

use std::os::unix::process::CommandExt;
use std::process::Command;

const POLICY: &str = "OMP_WAIT_POLICY";

/// Does not return when the program was started again.
pub(crate) fn ensure() {
    if std::env::var_os(POLICY).is_some() {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let error = Command::new(program).args(std::env::args_os().skip(1)).env(POLICY, "PASSIVE").exec();
    // exec returns only when it failed; the program works without, only slower.
    eprintln!("kvsplice: running on without {POLICY}=PASSIVE, expect slower answers: {error}");
}
