#!/usr/bin/env bash
# All that needs a GPU: the tests marked `gpu`, then the decoders' speed, into benchmarks/results/DATE-gpu.md.
# With the torch that is there: a bare machine with CUDA, python3 and torch is enough. PYTHON=python3.12 takes another.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-gpu
run=$venv/bin/python
[ -x "$run" ] || "${PYTHON:-python3}" -m venv --system-site-packages "$venv"
torch=$("$run" -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__)') || {
  echo "make gpu: no torch with CUDA in ${PYTHON:-python3}, or no GPU that it sees" >&2
  exit 1
}
{ grep -v '^torch==' constraints.txt; echo "torch==$torch"; } >"$venv/constraints.txt"
"$run" -m pip install --disable-pip-version-check -q -c "$venv/constraints.txt" \
  -e . pytest pytest-timeout hypothesis transformers
export OMP_NUM_THREADS=4 PYTHONPATH=.
tests=0
timeout 200 "$run" -m pytest -q -m gpu tests/gpu | tee "$venv/tests.txt" || tests=$?
timeout 240 "$run" benchmarks/gpu.py --out benchmarks/results
{
  printf '\n`pytest -m gpu`:\n\n```text\n'
  tail -n 12 "$venv/tests.txt"
  printf '```\n'
} >>"benchmarks/results/$(date +%F)-gpu.md"
exit "$tests"
