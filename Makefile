# The two commands of a newcomer are `make demo` and `make test`. `make check` is all of CI.
# Every target does the set-up it needs, and a second run skips what is done. One cargo profile (release) serves all.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
export KVSPLICE_HOME ?= $(HOME)/.cache/kvsplice
CARGO_DENY_VERSION := 0.20.2

.PHONY: demo test storm check build models setup libtorch cubins gpu-folder python fmt clippy features doc fuzz sanitize deny clean-demo

demo: models
	@deploy/demo.sh

test: setup
	cargo test --release --workspace

# 10,000 seeded faults below the cache service, and as many below a whole system; about half an hour on two cores.
storm: setup
	KVSPLICE_FAULTS=10000 cargo test --release -p kvsplice-cache-service storm -- --nocapture
	KVSPLICE_FAULTS=10000 cargo test --release -p kvsplice-tests --test storm -- --nocapture

check: fmt cubins clippy features doc test fuzz sanitize deny

build: libtorch
	cargo build --release -p kvsplice

# Fetches the demo models by pinned digest; those that are there are only checked.
models: build
	target/release/kvsplice models pull all

setup: models python

libtorch:
	@deploy/libtorch.sh

# Machine code of the CUDA kernels for compute capability 8.0, 8.9 and 9.0; fails when a kernel spills registers. A build
# without it works: on a GPU, NVRTC then compiles at start.
cubins:
	@deploy/cubins.sh

# A folder for a machine with a GPU and no Rust; deploy/gpu-check.sh says what it measures there.
gpu-folder: cubins models
	@deploy/gpu-folder.sh

# Python packages for the test that opens a chunk object from Python. Nothing else needs them.
python:
	@deploy/python.sh

fmt:
	cargo fmt --all -- --check

clippy: libtorch
	cargo clippy --release --workspace --all-targets -- -D warnings

# Builds without libtorch: a client or a cache service alone.
features:
	cargo clippy --release -p kvsplice --no-default-features --features client -- -D warnings
	cargo clippy --release -p kvsplice --no-default-features --features cache -- -D warnings

doc: libtorch
	RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps

# A minute of hostile bytes for the parser of chunk objects; prints its seed, which KVSPLICE_FUZZ_SEED repeats.
fuzz: libtorch
	KVSPLICE_FUZZ_SECONDS=60 cargo test --release -p kvsplice-cache-service --test suite fuzz:: -- --nocapture

# The kernels' tests on slices under valgrind: a read or write outside of a buffer, or a number that nobody wrote, fails.
# (The stable toolchain has no sanitizers. Valgrind has no AVX-512: it runs the AVX2 and the portable kernels.)
sanitize:
	@command -v valgrind > /dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 1; }
	cargo test --release -p kvsplice-kernels --no-default-features --lib \
	  --config "target.'cfg(all())'.runner='valgrind -q --error-exitcode=9'" -- --skip long_

deny:
	@deploy/cargo-deny.sh $(CARGO_DENY_VERSION)
	"$$KVSPLICE_HOME/tools/bin/cargo-deny" --log-level error check licenses bans sources

# Forgets the demo's object store and logs; the models stay.
clean-demo:
	rm -rf "$$KVSPLICE_HOME/demo"
