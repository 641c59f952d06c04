#!/usr/bin/env bash
# Puts safetensors and numpy into $KVSPLICE_HOME/tools/python, for tests that read our objects from Python with
# PYTHONPATH set to that folder. A plain folder works where Debian's python3 lacks venv. Run again, it does nothing.
set -euo pipefail
target=${KVSPLICE_HOME:-$HOME/.cache/kvsplice}/tools/python

if PYTHONPATH=$target python3 -c 'import numpy, safetensors' 2>/dev/null; then
  exit 0
fi
rm -rf "$target"
mkdir -p "$(dirname "$target")"
if ! python3 -m pip install --quiet --disable-pip-version-check --only-binary=:all: --target "$target" 'safetensors>=0.5,<1' numpy; then
  echo "python: cannot install safetensors and numpy with python3 -m pip; check the network or pip's index setting" >&2
  exit 69
fi
