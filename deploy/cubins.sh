#!/usr/bin/env bash
# Compiles the CUDA kernels into kernels/cubins, which the next build embeds. No GPU is needed: NVRTC (about 90 MB, pinned
# by digest) is fetched into $KVSPLICE_HOME/nvrtc-13.0.88 from PyPI and unpacked as an archive. Fails when a kernel spills
# registers. Run again, it compiles only what changed.
set -euo pipefail
cd "$(dirname "$0")/.."

home=${KVSPLICE_HOME:-$HOME/.cache/kvsplice}
version=13.0.88
target=$home/nvrtc-$version

if [ ! -f "$target/complete" ]; then
  work=$(mktemp -d "${TMPDIR:-/tmp}/kvsplice-nvrtc.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "cubins: downloading NVRTC $version (about 90 MB)"
  echo "nvidia-cuda-nvrtc==$version --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575" \
    > "$work/requirements.txt"
  python3 -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --disable-pip-version-check \
    --python-version 3.11 --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 \
    --dest "$work" --requirement "$work/requirements.txt" >&2
  rm -rf "$target.part"
  mkdir -p "$target.part"
  python3 - "$work" "$target.part" <<'PY'
import pathlib, shutil, sys, zipfile
work, target = map(pathlib.Path, sys.argv[1:])
for wheel in work.glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = pathlib.PurePosixPath(name)
            if path.name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "License.txt"):
                with archive.open(name) as source, open(target / path.name, "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
PY
  touch "$target.part/complete"
  rm -rf "$target"
  mv "$target.part" "$target"
fi

# The digest of everything that goes in stands beside the cubins.
inputs=$(cat deploy/cubins.py deploy/cubins.sh $(ls kernels/cuda/*.cu kernels/cuda/*.h | grep -v emulate) | sha256sum)
if [ "$(cat kernels/cubins/inputs 2>/dev/null)" = "$inputs" ]; then
  # A checkout makes sources look newer; the build goes by time.
  touch kernels/cubins/*.cubin
  cat kernels/cubins/report.txt
  exit 0
fi
rm -f kernels/cubins/*.cubin kernels/cubins/inputs
python3 deploy/cubins.py "$target/libnvrtc.so.13" kernels/cuda kernels/cubins > kernels/cubins/report.txt || {
  status=$?
  cat kernels/cubins/report.txt
  exit $status
}
echo "$inputs" > kernels/cubins/inputs
cat kernels/cubins/report.txt
