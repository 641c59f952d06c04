//! Compiles the shim against libtorch's headers, and embeds the cubins that `make cubins` has made.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

fn main() {
    shim();
    embed_cubins();
}

fn shim() {
    println!("cargo:rerun-if-changed=src/shim.cpp");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let libtorch =
        PathBuf::from(std::env::var_os("LIBTORCH").expect("LIBTORCH is set by .cargo/config.toml; run `make setup`"));
    let include = libtorch.join("include");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(false)
        .opt_level(2)
        .flag("-fopenmp")
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .file("src/shim.cpp")
        .compile("kvsplice_shim");
    println!("cargo:rustc-link-lib=gomp");
}

/// Writes `CUBINS`, a list of (source, major, minor, code): empty without cubins, then NVRTC serves at start.
fn embed_cubins() {
    println!("cargo:rerun-if-changed=cubins");
    println!("cargo:rerun-if-changed=cuda");
    let mut stale = false;
    let mut text = "const CUBINS: &[(&str, i32, i32, &[u8])] = &[\n".to_owned();
    let sources = newest(Path::new("cuda"));
    let folder = std::fs::canonicalize("cubins").unwrap_or_default();
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        // attention.sm_90.cubin
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parts: Vec<&str> = name.split('.').collect();
        let [source, architecture, "cubin"] = parts[..] else { continue };
        let Some((major, minor)) = architecture.strip_prefix("sm_").and_then(|digits| digits.split_at_checked(1))
        else {
            continue;
        };
        if modified(&path) < sources {
            stale = true;
            continue;
        }
        writeln!(text, "    ({source:?}, {major}, {minor}, include_bytes!({path:?})),").expect("a string takes text");
    }
    if stale {
        println!("cargo:warning=cubins that are older than the kernels' sources are left out; run `make cubins`");
    }
    text.push_str("];\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("cubins.rs");
    std::fs::write(out, text).expect("OUT_DIR can be written");
}

fn modified(path: &Path) -> SystemTime {
    std::fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// When the last kernel source was changed; what only the tests use does not count.
fn newest(folder: &Path) -> SystemTime {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let kernels = entries.filter(|path| path.file_stem().is_none_or(|name| name != "emulate"));
    kernels.map(|path| modified(&path)).max().unwrap_or(SystemTime::UNIX_EPOCH)
}
