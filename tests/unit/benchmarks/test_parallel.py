"""The script that measures what layouts cost, once, with blocks so small that its figures mean nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_it_writes_a_dated_result(tmp_path: Path) -> None:
    """In a process of its own: it needs a process group that isn't one."""
    small = ["--widths", "64", "--layers", "2", "--tokens", "8", "--rounds", "1", "--times", "1"]
    command = [sys.executable, "benchmarks/parallel.py", *small, "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (result,) = tmp_path.glob("*-parallel.md")
    rows = [
        line.split("|") for line in result.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    calls = {row[1].strip(): int(row[6]) for row in rows[1:]}
    # A block gathers and scatters twice each way; without sequence parallelism it sums twice each way.
    assert calls["tp2"] == 2 * 8
    assert calls["tp2 without sequence parallel"] == 2 * 4
    # Two gathers and a reduction; stage 2 gathers once; stage 1 reduces all at once.
    assert (calls["zero3"], calls["zero2"], calls["zero1"]) == (2 * 3, 2 * 2, 1)
