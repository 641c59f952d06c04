#!/usr/bin/env bash
# The demo: three services on free loopback ports with a folder as the object store, the sample corpus, three questions
# with `full` and with `clip`, one table. It uses the public command line only, and stops what it started.
# Needs the built program and the models (`make demo` sees to both).
set -euo pipefail
cd "$(dirname "$0")/.."

export KVSPLICE_HOME=${KVSPLICE_HOME:-$HOME/.cache/kvsplice}
program=$PWD/target/release/kvsplice
folder=$KVSPLICE_HOME/demo
mkdir -p "$folder/store" "$folder/logs"
answers=$(mktemp "$folder/answers.XXXXXX")
pids=()

stop() {
  # Callers before those they call, each by its own id; they finish what runs and exit.
  trap - EXIT
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill -TERM "${pids[i]}" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -f "$answers"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start ROLE ARGUMENTS...: starts a role in the background; its address is in $address afterward.
start() {
  local role=$1 log=$folder/logs/$1.log
  shift
  "$program" "$role" --listen 127.0.0.1:0 "$@" > "$log" 2>&1 < /dev/null &
  local pid=$!
  pids+=("$pid")
  address=
  for _ in $(seq 600); do
    address=$(sed -n "s/^listening role=$role address=\([^ ]*\).*/\1/p" "$log" | head -n 1)
    [ -n "$address" ] && break
    if ! kill -0 "$pid" 2>/dev/null; then
      echo "demo: $role did not start:" >&2
      tail -n 20 "$log" >&2
      exit 70
    fi
    sleep 0.1
  done
  if [ -z "$address" ]; then
    echo "demo: $role printed no address within 60 s; see $log" >&2
    exit 70
  fi
  echo "demo: $role at $address"
}

start cache --object-store "file://$folder/store"
cache=$address
start worker --set "worker.cache=$cache"
worker=$address
start head --set "head.cache=$cache" --set "head.worker=$worker"
head=$address

echo "demo: waiting until all three serve"
for attempt in $(seq 120); do
  if "$program" doctor --server "$head" > "$folder/logs/doctor.log" 2>&1; then break; fi
  if [ "$attempt" = 120 ]; then
    echo "demo: the head does not serve; see $folder/logs" >&2
    exit 69
  fi
  sleep 1
done

echo "demo: ingesting the sample corpus (what is stored already is skipped)"
"$program" ingest --server "$head" --corpus demo --chunk-tokens 250 --overlap 25 demo/corpus

python3 deploy/demo.py ask "$program" "$head" demo/questions.jsonl "$answers"
python3 deploy/demo.py table "$answers"
