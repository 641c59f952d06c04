#!/usr/bin/env bash
# Installs cargo-deny of the given version into $KVSPLICE_HOME/tools. Run again, it checks the version and does nothing.
set -euo pipefail
version=$1
tools=${KVSPLICE_HOME:-$HOME/.cache/kvsplice}/tools

if [ "$("$tools/bin/cargo-deny" --version 2>/dev/null || true)" = "cargo-deny $version" ]; then
  exit 0
fi
mkdir -p "$tools"
cd "$tools" # Not in the project: its linker flags are not meant for tools.
cargo install cargo-deny --version "$version" --locked --root "$tools"
