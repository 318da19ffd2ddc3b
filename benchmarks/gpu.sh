#!/usr/bin/env bash
# What needs a GPU, part by part, each within nine minutes, with the torch that is there: a bare machine with CUDA,
# python3 and torch is enough.
#
#   bash benchmarks/gpu.sh                  # all parts
#   bash benchmarks/gpu.sh facts tests      # some: facts tests 124m 350m 1.3b fp8 6.7b run
#
# Each part writes OUT/DATE-gpu-PART.md, anew after every row. Set PYTHON=python3.12 for another interpreter (one of a
# virtual environment too), OUT=FOLDER for the results (benchmarks/results), WHEELS=FOLDER for packages where there is
# no network, TINY=--tiny to try the scripts on a CPU. Ends with 1 where a part failed; the others are run all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
run=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
site=${SITE:-$PWD/.gpu-packages}
parts=("$@")
[ $# -gt 0 ] || parts=(facts tests 124m 350m 1.3b fp8 6.7b run)
mkdir -p "$out" "$site"
out=$(cd "$out" && pwd)
device=cuda
[ -z "${TINY:-}" ] || device=cpu
"$run" -c "import torch; assert '$device' == 'cpu' or torch.cuda.is_available()" || {
  echo "make gpu: no torch with CUDA in $run, or no GPU that it sees" >&2
  exit 1
}
"$run" benchmarks/gpu_packages.py "$site" ${WHEELS:+--wheels "$WHEELS"} || exit 1
export OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
# The older name of it is still read by every torch, and not set here where the other is.
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

tests() {
  local log
  log=$(mktemp)
  timeout 540 "$run" -m pytest -q -m gpu -p no:cacheprovider tests/gpu >"$log" 2>&1
  local code=$?
  tail -n 3 "$log"
  {
    printf '# Tests marked gpu, %s\n\n`pytest -m gpu` ended with %s:\n\n```text\n' "$(date +%F)" "$code"
    tail -n 60 "$log"
    printf '```\n'
  } >"$out/$(date +%F)-gpu-tests.md"
  rm -f "$log"
  return "$code"
}

failed=()
for part in "${parts[@]}"; do
  echo "== $part"
  case $part in
    facts) timeout 540 "$run" benchmarks/gpu_facts.py --out "$out" ${TINY:-} ;;
    tests) tests ;;
    run) timeout 540 "$run" benchmarks/gpu_run.py --out "$out" ${TINY:-} ;;
    *) timeout 540 "$run" benchmarks/gpu.py --case "$part" --out "$out" ${TINY:-} ;;
  esac
  code=$?
  [ "$code" = 0 ] || failed+=("$part ($([ "$code" = 124 ] && echo "its nine minutes were up" || echo "exit $code"))")
done
[ "${#failed[@]}" = 0 ] || {
  echo "failed: ${failed[*]}"
  exit 1
}
