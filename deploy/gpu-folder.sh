#!/usr/bin/env bash
# Makes target/gpu-check: what deploy/gpu-check.sh needs on a machine with a GPU and neither Rust nor a network. The
# program is stripped; of the models only tokenizers come along, the weights are random. Fails above 60 MiB.
set -euo pipefail
cd "$(dirname "$0")/.."

models=${KVSPLICE_HOME:-$HOME/.cache/kvsplice}/models
folder=target/gpu-check
limit=$((60 << 20))

if ! ls kernels/cubins/*.cubin > /dev/null 2>&1; then
  echo "gpu-folder: no cubins; run make cubins first" >&2
  exit 64
fi
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/models"
cp target/release/kvsplice "$folder/bin/"
strip "$folder/bin/kvsplice"
cp deploy/gpu-check.sh deploy/gpu-check.py "$folder/"
cp kernels/cubins/report.txt "$folder/cubins.txt"
cp LICENSE "$folder/"
for name in qwen2.5-coder-0.5b-instruct smollm2-135m-instruct; do
  python3 deploy/tokenizer.py "$models/$name.gguf" "$folder/models/$name.gguf"
done
size=$(du -sb "$folder" | cut -f1)
if [ "$size" -gt "$limit" ]; then
  echo "gpu-folder: $folder has $size bytes, more than $limit" >&2
  exit 70
fi
echo "gpu-folder: $folder, $size bytes; copy it and run gpu-check.sh in it"
