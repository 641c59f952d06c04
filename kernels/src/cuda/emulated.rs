//! The CUDA kernels on the CPU, for tests: the same sources, compiled by the C++ compiler with `cuda/emulate.h`.

use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use libloading::{Library, Symbol};

use super::{Grid, Launch};
use crate::Error;

/// In which order threads run and copies arrive: bit 0 descending, bit 1 at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Emulated {
    pub(crate) mode: c_int,
    pub(crate) multiprocessors: usize,
}

impl Emulated {
    /// Every order.
    pub(crate) fn all(multiprocessors: usize) -> [Self; 4] {
        [0, 1, 2, 3].map(|mode| Self { mode, multiprocessors })
    }
}

type Kernel = unsafe extern "C" fn(*const c_void);
type Run = unsafe extern "C" fn(Kernel, *const c_void, *const c_int, c_int, c_int, c_int);

/// Compiles the kernels once a process.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/emulate.cpp");
        let out = Path::new(env!("OUT_DIR")).join(format!("emulated-{}.so", std::process::id()));
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let mut command = Command::new(&compiler);
        command.args(["-std=c++17", "-O2", "-march=native", "-shared", "-fPIC", "-o"]).arg(&out).arg(&sources);
        let status = command.status().expect("a C++ compiler runs");
        assert!(status.success(), "{compiler} cannot compile {}", sources.display());
        // SAFETY: the library is the one just made; it has no initializers but those of its static variables.
        let library = unsafe { Library::new(&out) }.expect("the emulated kernels load");
        std::fs::remove_file(&out).expect("the library's file is there");
        library
    })
}

impl Launch for Emulated {
    unsafe fn launch<A>(&self, kernel: &str, grid: Grid, shared_bytes: usize, arguments: &A) -> Result<(), Error> {
        let name = CString::new(kernel).expect("no zero in a kernel's name");
        let blocks = grid.blocks.map(|count| count as c_int);
        // SAFETY: the symbols have these types (emulate.cpp); the arguments are the caller's promise.
        unsafe {
            let kernel: Symbol<'_, Kernel> = library().get(name.as_bytes_with_nul()).expect("the kernel is there");
            let run: Symbol<'_, Run> = library().get(b"kvsplice_emulate\0").expect("the runner is there");
            let arguments = std::ptr::from_ref(arguments).cast();
            run(*kernel, arguments, blocks.as_ptr(), grid.threads as c_int, shared_bytes as c_int, self.mode);
        }
        Ok(())
    }

    unsafe fn copy(&self, from: *const c_void, to: *mut c_void, bytes: usize) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), bytes) };
        Ok(())
    }

    fn with_staged<R>(
        &self,
        parts: &[&[u8]],
        work: impl FnOnce(&[*const c_void]) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let aligned: Vec<Vec<u128>> = parts
            .iter()
            .map(|part| {
                let mut words = vec![0u128; part.len().div_ceil(16)];
                for (word, bytes) in words.iter_mut().zip(part.chunks(16)) {
                    let mut whole = [0; 16];
                    whole[..bytes.len()].copy_from_slice(bytes);
                    *word = u128::from_ne_bytes(whole);
                }
                words
            })
            .collect();
        work(&aligned.iter().map(|words| words.as_ptr().cast()).collect::<Vec<_>>())
    }

    fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }
}
