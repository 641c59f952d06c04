//! The crates may depend on each other only along the arrows of ARCHITECTURE.md, and a client- or cache-only build of
//! the program does not link libtorch.
#![allow(missing_docs)]
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use cargo_metadata::MetadataCommand;

/// Every crate of the workspace and the crates that it may use; tests of a crate are held to the same.
const ARROWS: [(&str, &[&str]); 9] = [
    ("kvsplice-kv", &[]),
    ("kvsplice-kernels", &[]),
    ("kvsplice-model", &["kvsplice-kv", "kvsplice-kernels"]),
    ("kvsplice-proto", &["kvsplice-kv"]),
    ("kvsplice-head", &["kvsplice-proto", "kvsplice-kv", "kvsplice-model"]),
    ("kvsplice-gpu-worker", &["kvsplice-proto", "kvsplice-kv", "kvsplice-model", "kvsplice-kernels"]),
    ("kvsplice-cache-service", &["kvsplice-proto", "kvsplice-kv"]),
    (
        "kvsplice",
        &[
            "kvsplice-head",
            "kvsplice-gpu-worker",
            "kvsplice-cache-service",
            "kvsplice-proto",
            "kvsplice-kv",
            "kvsplice-model",
        ],
    ),
    ("kvsplice-tests", &["kvsplice-cache-service", "kvsplice-proto", "kvsplice-kv"]),
];

#[test]
fn crates_depend_on_each_other_only_along_the_arrows() {
    let metadata = MetadataCommand::new().manifest_path(kvsplice_tests::project().join("Cargo.toml")).no_deps().exec();
    let metadata = metadata.unwrap();
    let arrows: BTreeMap<&str, BTreeSet<&str>> =
        ARROWS.iter().map(|&(name, allowed)| (name, allowed.iter().copied().collect())).collect();
    let members: BTreeSet<&str> = metadata.packages.iter().map(|package| package.name.as_str()).collect();
    assert_eq!(members, arrows.keys().copied().collect(), "a crate came or went: change ARCHITECTURE.md and this test");

    for package in &metadata.packages {
        for dependency in &package.dependencies {
            let name = dependency.name.as_str();
            if members.contains(name) {
                assert!(arrows[package.name.as_str()].contains(name), "{} must not depend on {name}", package.name);
            }
        }
    }
}

#[test]
fn a_client_or_cache_build_does_not_reach_libtorch() {
    for feature in ["client", "cache"] {
        let tree = dependencies_with(feature);
        assert!(tree.contains("tonic"), "the tree of {feature} is not a tree:\n{tree}");
        for line in tree.lines() {
            let name = line.split(' ').next().unwrap_or_default();
            assert!(!["tch", "torch-sys", "kvsplice-kernels", "kvsplice-model"].contains(&name), "{feature}: {line}");
        }
    }
}

/// The dependencies of the program built with one feature, a line each.
fn dependencies_with(feature: &str) -> String {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(kvsplice_tests::project()).args(["tree", "--offline", "--package", "kvsplice"]);
    command.args(["--no-default-features", "--features", feature, "--edges", "normal,build", "--prefix", "none"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
