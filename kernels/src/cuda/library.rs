//! libtorch's CUDA library, opened at run time.
//!
//! libtorch asks once whether there is a GPU and remembers the answer, so [`load`] must come before the first question.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY, RTLD_NOW};

use crate::Error;

/// Names the library or its folder; the default is the folder of the libtorch_cpu.so in use.
pub(crate) const SETTING: &str = "KVSPLICE_LIBTORCH_CUDA";
const CUDA_LIBRARY: &str = "libtorch_cuda.so";

/// Opens libtorch_cuda.so: `path` (a file or a folder) if given, else what `KVSPLICE_LIBTORCH_CUDA` names, else the folder
/// of libtorch_cpu.so. Once open, it stays. Fails when it is missing or belongs to another build than the libtorch in use.
pub fn load(path: Option<&Path>) -> Result<(), Error> {
    static OPEN: Mutex<bool> = Mutex::new(false);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if *open {
        return Ok(());
    }
    let own = own_folder()?;
    let setting = std::env::var_os(SETTING).map(PathBuf::from);
    let chosen = path.map(Path::to_owned).or(setting).unwrap_or_else(|| own.clone());
    let library = if chosen.is_dir() { chosen.join(CUDA_LIBRARY) } else { chosen };
    if !library.is_file() {
        return Err(refused(&library, "there is no such file"));
    }
    let folder = library.parent().unwrap_or(Path::new("."));
    same_build(&own, folder).map_err(|what| refused(&library, &what))?;
    open_global(&library, RTLD_NOW).map_err(|error| refused(&library, &error.to_string()))?;
    *open = true;
    Ok(())
}

fn refused(path: &Path, what: &str) -> Error {
    Error::CudaLibrary { path: path.display().to_string(), what: what.to_owned() }
}

/// Opens a library for good, its symbols visible to all.
fn open_global(path: &Path, flags: i32) -> Result<(), libloading::Error> {
    // SAFETY: the initializers of these libraries register themselves and touch nothing of ours; nothing is unloaded.
    let library = unsafe { Library::open(Some(path), flags | RTLD_GLOBAL) }?;
    std::mem::forget(library);
    Ok(())
}

/// The folder of the libtorch in use.
fn own_folder() -> Result<PathBuf, Error> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut paths = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..)));
    let library = paths.find(|path| path.ends_with("/libtorch_cpu.so")).map(PathBuf::from);
    match library.as_deref().and_then(Path::parent) {
        Some(folder) => Ok(folder.to_owned()),
        None => Err(refused(Path::new(CUDA_LIBRARY), "this program runs without libtorch_cpu.so")),
    }
}

/// The libraries of one build lie in one wheel: its libc10.so must be ours byte by byte, its libtorch_cpu.so as large.
fn same_build(own: &Path, other: &Path) -> Result<(), String> {
    let size = |folder: &Path, name: &str| {
        let path = folder.join(name);
        std::fs::metadata(&path).map(|file| file.len()).map_err(|error| format!("{}: {error}", path.display()))
    };
    for name in ["libc10.so", "libtorch_cpu.so"] {
        let (mine, found) = (size(own, name)?, size(other, name)?);
        if mine != found {
            return Err(format!(
                "it belongs to another build: {name} has {found} bytes beside it and {mine} in use; install torch 2.11.0"
            ));
        }
    }
    let read = |folder: &Path| std::fs::read(folder.join("libc10.so")).map_err(|error| error.to_string());
    if own != other && read(own)? != read(other)? {
        return Err("it belongs to another build: libc10.so beside it differs; install torch 2.11.0".to_owned());
    }
    Ok(())
}

/// Makes NVRTC known under its plain name, from where PyPI's wheels put it beside torch; a system's own is found anyway.
pub(super) fn load_nvrtc() {
    let setting = std::env::var_os(SETTING).map(PathBuf::from);
    let torch = setting.or_else(|| own_folder().ok());
    let Some(torch) = torch else { return };
    let torch = if torch.is_file() { torch.parent().map(Path::to_owned).unwrap_or_default() } else { torch };
    let wheel = torch.join("../../nvidia/cu13/lib");
    for folder in [torch, wheel] {
        // NVRTC opens its builtins by name alone: they must be open before.
        let builtins = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_builtins = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("libnvrtc-builtins.so"))
        };
        let nvrtc = folder.join("libnvrtc.so.13");
        for path in builtins.filter(is_builtins).chain(nvrtc.is_file().then_some(nvrtc)) {
            // What cannot be opened here is missed by name when NVRTC is asked for.
            let _missing = open_global(&path, RTLD_LAZY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_build_is_refused_by_name() {
        let own = own_folder().unwrap();
        let folder = std::env::temp_dir().join(format!("kvsplice-other-build-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(matches!(load(Some(&folder)), Err(Error::CudaLibrary { what, .. }) if what.contains("no such file")));
        std::fs::write(folder.join(CUDA_LIBRARY), b"not a library").unwrap();
        std::fs::write(folder.join("libc10.so"), b"another").unwrap();
        let refusal = load(Some(&folder)).unwrap_err().to_string();
        assert!(refusal.contains("another build") && refusal.contains("libc10.so"), "{refusal}");
        assert!(same_build(&own, &own).is_ok());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
