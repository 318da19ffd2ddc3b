#!/usr/bin/env bash
# All that needs a GPU: the tests marked `gpu`, then the decoders' speed, into benchmarks/results/DATE-gpu.md, with what
# failed. With the torch that is there: a bare machine with CUDA, python3 and torch is enough, and without a network one
# that has the other packages. PYTHON=python3.12 takes another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-gpu
run=$venv/bin/python
result=benchmarks/results/$(date +%F)-gpu.md
[ -x "$run" ] || "${PYTHON:-python3}" -m venv --system-site-packages "$venv" || {
  rm -rf "$venv"
  echo "make gpu: can't make $venv: on Debian, apt-get install python3-venv" >&2
  exit 1
}
torch=$("$run" -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__)') || {
  echo "make gpu: no torch with CUDA in ${PYTHON:-python3}, or no GPU that it sees" >&2
  exit 1
}
{ grep -v '^torch==' constraints.txt; echo "torch==$torch"; } >"$venv/constraints.txt"
export OMP_NUM_THREADS=4 PYTHONPATH=.
timeout 120 "$run" -m pip install --disable-pip-version-check -q -c "$venv/constraints.txt" \
  -e . pytest pytest-timeout hypothesis transformers ||
  "$run" -c 'import hypothesis, megatfm.cli, megatfm.engines, pytest, pytest_timeout, transformers' || {
  echo "make gpu: packages can't be installed into $venv, and are not there" >&2
  exit 1
}
tests=0 speed=0
timeout 150 "$run" -m pytest -q -m gpu tests/gpu 2>&1 | tee "$venv/tests.txt" || tests=$?
timeout 200 "$run" benchmarks/gpu.py --out benchmarks/results 2>&1 | tee "$venv/speed.txt" || speed=$?
[ "$speed" = 0 ] || {
  printf '\n`python benchmarks/gpu.py` ended with %s (124: its time was up):\n\n```text\n' "$speed"
  tail -n 30 "$venv/speed.txt"
  printf '```\n'
} >>"$result"
{
  printf '\n`pytest -m gpu` ended with %s:\n\n```text\n' "$tests"
  tail -n 30 "$venv/tests.txt"
  printf '```\n'
} >>"$result"
exit $((tests ? tests : speed))
