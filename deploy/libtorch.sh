#!/usr/bin/env bash
# Fetches libtorch (the CPU part of the PyPI wheel torch 2.11.0, which tch 0.24 is built for) into
# $KVSPLICE_HOME/libtorch-2.11.0 and links ./libtorch to it. Run again, it checks and does nothing.
#
# The wheel is pinned by digest and unpacked as an archive: none of its code runs. The CUDA runtime and CUPTI
# libraries come along because libtorch_cpu.so of this wheel links them; no GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

home=${KVSPLICE_HOME:-$HOME/.cache/kvsplice}
version=2.11.0
target=$home/libtorch-$version

if [ "$(uname -m)" != x86_64 ]; then
  echo "libtorch: no pinned wheel for $(uname -m); only x86_64 is supported" >&2
  exit 64
fi

if [ ! -f "$target/complete" ]; then
  work=$(mktemp -d "${TMPDIR:-/tmp}/kvsplice-libtorch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "libtorch: downloading torch $version and two CUDA runtime libraries (about 545 MB)"
  cat > "$work/requirements.txt" <<'PINS'
torch==2.11.0 --hash=sha256:7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8
PINS
  bar=off
  [ -t 1 ] && bar=on
  python3 -m pip download --no-deps --require-hashes --only-binary=:all: --progress-bar "$bar" --disable-pip-version-check \
    --python-version 3.11 --implementation cp --abi cp311 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    --dest "$work" --requirement "$work/requirements.txt" >&2
  echo "libtorch: unpacking"
  rm -rf "$target.part"
  mkdir -p "$target.part/lib" "$home"
  python3 - "$work" "$target.part" <<'PY'
import pathlib, shutil, sys, zipfile
work, target = map(pathlib.Path, sys.argv[1:])
keep = {"libtorch_cpu.so", "libc10.so"}
for wheel in work.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = pathlib.PurePosixPath(name)
            if name.startswith("torch/include/") and not name.endswith("/"):
                out = target / "include" / path.relative_to("torch/include")
            elif path.name in keep or path.name.startswith(("libgomp", "libcudart.so", "libcupti.so")):
                out = target / "lib" / path.name
            else:
                continue
            out.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(out, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
PY
  ln -s libtorch_cpu.so "$target.part/lib/libtorch.so"
  touch "$target.part/complete"
  rm -rf "$target"
  mv "$target.part" "$target"
fi
ln -sfn "$target" libtorch
echo "libtorch: ready at $target"
