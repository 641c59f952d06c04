//! The kernels as machine code: embedded cubins where they fit the device, else NVRTC's translation at start.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::{result, sys};

use super::library::load_nvrtc;
use crate::Error;

/// Name and text of each source.
pub(super) const SOURCES: [(&str, &str); 3] = [
    ("attention", include_str!("../../cuda/attention.cu")),
    ("elementwise", include_str!("../../cuda/elementwise.cu")),
    ("place", include_str!("../../cuda/place.cu")),
];
const HEADERS: [(&str, &str); 3] = [
    ("arguments.h", include_str!("../../cuda/arguments.h")),
    ("device.h", include_str!("../../cuda/device.h")),
    ("rotate.h", include_str!("../../cuda/rotate.h")),
];

// `CUBINS`: source, major and minor version of the multiprocessors, code. Empty if `make cubins` did not run before.
include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// Architectures that cubins are embedded for, as `8.0`.
pub fn embedded() -> Vec<String> {
    let mut found: Vec<String> = CUBINS.iter().map(|(_, major, minor, _)| format!("{major}.{minor}")).collect();
    found.sort();
    found.dedup();
    found
}

/// The code of `source` for a device. Code for 8.0 runs on 8.x, better if made for a version nearer to it.
pub(super) fn code(source: &str, text: &str, major: i32, minor: i32) -> Result<Vec<u8>, Error> {
    let fitting = CUBINS.iter().filter(|cubin| cubin.0 == source && cubin.1 == major && cubin.2 <= minor);
    match fitting.max_by_key(|cubin| cubin.2) {
        Some(cubin) => Ok(cubin.3.to_vec()),
        None => compile(source, text, major, minor),
    }
}

/// Translates `text` with NVRTC.
pub(super) fn compile(source: &str, text: &str, major: i32, minor: i32) -> Result<Vec<u8>, Error> {
    load_nvrtc();
    // SAFETY: opening NVRTC runs its initializers, which touch nothing of ours.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoNvrtc { major, minor });
    }
    let failed = |what: String| Error::Cuda { op: "compile", what: format!("{source} for {major}.{minor}: {what}") };
    let c = |text: &str| CString::new(text).map_err(|error| failed(error.to_string()));
    let (text, name) = (c(text)?, c(&format!("{source}.cu"))?);
    let (mut names, mut headers) = (Vec::new(), Vec::new());
    for (name, text) in HEADERS {
        names.push(c(name)?);
        headers.push(c(text)?);
    }
    let pointers = |texts: &[CString]| -> Vec<*const c_char> { texts.iter().map(|text| text.as_ptr()).collect() };
    let (name_pointers, header_pointers) = (pointers(&names), pointers(&headers));
    let mut program = std::ptr::null_mut();
    // SAFETY: the lists have `HEADERS.len()` texts each, which live to the end of this function.
    let created = unsafe {
        let (headers, names) = (header_pointers.as_ptr(), name_pointers.as_ptr());
        sys::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), HEADERS.len() as i32, headers, names)
    };
    created.result().map_err(|error| failed(format!("{error:?}")))?;
    let options = [format!("--gpu-architecture=sm_{major}{minor}"), "--std=c++17".to_owned()];
    // SAFETY: the program is the one just made; it is destroyed once, after its last use.
    unsafe {
        let cubin = result::compile_program(program, &options).and_then(|()| {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size).result()?;
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()).result()?;
            Ok(cubin)
        });
        let log = result::get_program_log(program).unwrap_or_default();
        let _unneeded = result::destroy_program(program);
        cubin.map_err(|error| {
            let bytes: Vec<u8> = log.iter().map(|&byte| byte as u8).collect();
            let log = CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned();
            failed(format!("{error:?} {}", log.trim()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVRTC is not part of the set-up that every test run has; cubins made with it are compared with the sources' names.
    #[test]
    fn embedded_code_covers_every_source() {
        for architecture in embedded() {
            for (source, text) in SOURCES {
                let (major, minor) = architecture.split_once('.').unwrap();
                let code = code(source, text, major.parse().unwrap(), minor.parse().unwrap()).unwrap();
                assert!(code.starts_with(b"\x7fELF"), "{source} for {architecture}");
            }
        }
    }

    #[test]
    fn every_header_of_the_sources_is_there() {
        for (_, text) in SOURCES.iter().chain(&HEADERS) {
            for name in text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"')) {
                assert!(name == "emulate.h" || HEADERS.iter().any(|(header, _)| *header == name), "{name}");
            }
        }
    }
}
