#!/usr/bin/env bash
# Measures kvsplice on a GPU: needs the folder that `make gpu-folder` makes, a driver, and Python with torch 2.11.0. No
# network, no Rust. Writes gpu-check.json and gpu-check.txt (a table) into the current folder, within 8 minutes.
#
# 1. the kernels against the CPU's, and their share of the measured peak
# 2. time to the first token of a 14B shape with random weights at 4K, 8K and 16K chunk tokens: full, direct, clip at 0.2
#    and at 0.1 of the rows. A tiny auxiliary model picks the rows, so picking costs next to nothing ("given rows").
#    With GPU_CHECK_AUXILIARY=model.gguf that model picks them, and the time of picking counts.
# 3. PyTorch's full prefill of the same shape with scaled_dot_product_attention
#
# Exit codes: 0 ok, 64 set-up, 69 no GPU, 70 a comparison failed or a part did.
set -euo pipefail
# The folder may lie anywhere; in a checkout it is target/gpu-check.
folder=$(cd "$(dirname "$0")" && pwd)
[ -x "$folder/bin/kvsplice" ] || folder=$folder/../target/gpu-check
python=${PYTHON:-python3}
device=${GPU_CHECK_DEVICE:-cuda:0}
lengths=${GPU_CHECK_LENGTHS:-4096 8192 16384}

if [ ! -x "$folder/bin/kvsplice" ]; then
  echo "gpu-check: no prebuilt program in $folder; run make gpu-folder" >&2
  exit 64
fi
if ! ldconfig -p 2> /dev/null | grep -q 'libcuda\.so\.1' && ! ls /usr/lib*/libcuda.so.1 /usr/lib/*/libcuda.so.1 > /dev/null 2>&1; then
  echo "gpu-check: no GPU: libcuda.so.1 is not on this machine; install NVIDIA's driver or run this on a machine with a GPU" >&2
  exit 69
fi
torch=$("$python" -c 'import importlib.util as u, os; s = u.find_spec("torch"); print(os.path.dirname(s.origin) if s else "")')
if [ -z "$torch" ] || ! grep -q "2\.11\.0" "$torch/version.py"; then
  echo "gpu-check: $python has no torch 2.11.0 (found ${torch:-none}); name another with PYTHON=" >&2
  exit 64
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/kvsplice-gpu-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
export KVSPLICE_HOME=$work/home KVSPLICE_LIBTORCH_CUDA=$torch/lib LD_LIBRARY_PATH=$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
mkdir -p "$KVSPLICE_HOME/models"
cp "$folder"/models/*.gguf "$KVSPLICE_HOME/models/"
started=$SECONDS
limit_s=470
failed=0

# Runs a part within its share of the 8 minutes; its JSON goes to $work/NAME.json. A part that fails is left out and told.
part() {
  local name=$1 seconds=$2
  shift 2
  local left=$((limit_s - (SECONDS - started)))
  [ "$seconds" -lt "$left" ] || seconds=$left
  if [ "$seconds" -lt 5 ]; then
    echo "gpu-check: $name left out: $limit_s s are over" >&2
    echo "left out: out of time" > "$work/$name.failed"
    failed=1
    return
  fi
  echo "gpu-check: $name ($((SECONDS - started)) s so far)" >&2
  if ! timeout "$seconds" "$@" > "$work/$name.json" 2> "$work/$name.log"; then
    echo "gpu-check: $name failed: $(tail -1 "$work/$name.log")" >&2
    tail -c 2000 "$work/$name.log" > "$work/$name.failed"
    failed=1
  fi
}


# The program's flags for a 14B prompt; the chunks' store is in memory.
ttft() {
  local name=$1 ratio=$2 tokens=$3
  local auxiliary=(--set head.auxiliary.shape=tiny --set head.auxiliary.random_weights=true)
  [ -n "${GPU_CHECK_AUXILIARY:-}" ] && auxiliary=(--auxiliary "$GPU_CHECK_AUXILIARY")
  part "$name" 110 "$folder/bin/kvsplice" bench ttft --device "$device" --shape qwen2.5-14b --random-weights \
    --object-store memory:// "${auxiliary[@]}" --tokens "$tokens" --chunk-tokens 1024 --question-tokens 64 \
    --ratio "$ratio" --rounds 3 --json
}

part kernels 90 "$folder/bin/kvsplice" bench gpu --device "$device" --keys 16384 --json
for tokens in $lengths; do
  ttft "ttft-$tokens-0.2" 0.2 "$tokens"
  part "torch-$tokens" 60 "$python" "$folder/gpu-check.py" baseline --device "$device" --tokens "$tokens"
done
ttft ttft-16384-0.1 0.1 16384
"$python" "$folder/gpu-check.py" table "$work" gpu-check.json | tee gpu-check.txt
echo "gpu-check: $((SECONDS - started)) s; gpu-check.json and gpu-check.txt are written" >&2
[ "$failed" -eq 0 ] || exit 70
