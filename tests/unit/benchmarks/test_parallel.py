"""The script that measures what layouts cost, once, with blocks so small that its figures mean nothing."""

from pathlib import Path

import pytest

from tests.support.forked_commands import ForkedCommand

ROOT = Path(__file__).parents[3]


def test_the_script_writes_a_dated_result(tmp_path: Path) -> None:
    """In a process of its own: it needs a process group that isn't one."""
    small = ["--widths", "64", "--layers", "2", "--tokens", "8", "--rounds", "1", "--times", "1"]
    script = ForkedCommand(
        [*small, "--out", tmp_path], tmp_path / "said", ROOT, program="benchmarks/parallel.py"
    )
    assert script.wait(120) == 0, script.output
    (result,) = tmp_path.glob("*-parallel.md")
    rows = [
        line.split("|") for line in result.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    calls = {row[1].strip(): int(row[9]) for row in rows[1:]}
    # A block gathers and scatters twice each way; without sequence parallelism it sums twice each way.
    assert calls["tp2"] == 2 * 8
    assert calls["tp2 without sequence parallel"] == 2 * 4
    # Two gathers and a reduction; stage 2 gathers once; stage 1 reduces all at once.
    assert (calls["zero3"], calls["zero2"], calls["zero1"]) == (2 * 3, 2 * 2, 1)
    ratio, with_calls, moved, held, state = (
        {row[1].strip(): float(row[column].strip().strip("*")) for row in rows[1:]}
        for column in (5, 6, 7, 11, 12)
    )
    assert all(ratio[layout] <= with_calls[layout] for layout in ratio)
    # A quarter of the state are gradients: stage 1 reads and writes them once, the others weights, too.
    assert moved["zero1"] == pytest.approx(2 * state["zero2"] / 2, abs=0.1)
    assert moved["zero3"] > moved["zero2"] > moved["zero1"]
    assert held["zero2"] > held["zero3"] > 0, "stage 2 keeps gathered weights"
    assert held["tp2 without sequence parallel"] > held["tp2"]
    assert state["zero1"] > state["zero2"] == state["zero3"], "stage 1 has whole weights"
