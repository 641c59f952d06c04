//! Compiles the shim against libtorch's headers.

use std::path::PathBuf;

fn main() {
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
