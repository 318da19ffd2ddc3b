"""Kills in each phase of a step and of a save; `make soak` does a hundred, and trains under fire."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.kill_series import LAYOUTS, PHASES, shares


def run_series(corpus: Path, folder: Path, kills: dict[str, int]) -> dict[str, Any]:
    """In a process of its own: it forks, and so must have no thread."""
    command = [sys.executable, "-m", "tests.support.kill_series", str(corpus), str(folder), json.dumps(kills)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["kills"] == sum(kills.values())
    assert report["compared"] >= len(kills)
    return report


def test_a_run_killed_in_each_phase_ends_as_if_it_never_had_been(corpus: Path, tmp_path: Path) -> None:
    report = run_series(corpus, tmp_path / "runs", {"zero 3 on 2": len(PHASES)})
    assert report["hits"] == dict.fromkeys(PHASES, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine; it takes a tenth
def test_killed_runs_of_all_layouts_and_engines_end_alike(corpus: Path, tmp_path: Path) -> None:
    report = run_series(corpus, tmp_path / "runs", shares(23))
    assert {phase: report["hits"].get(phase, 0) >= 3 for phase in PHASES} == dict.fromkeys(PHASES, True)
    by_layout = report["hits by layout"]
    assert all(sum(by_layout[layout].values()) >= 3 for layout in LAYOUTS)
    for world in (1, 2, 4):
        hit = {
            phase for layout, (ranks, _) in LAYOUTS.items() if ranks == world for phase in by_layout[layout]
        }
        assert hit == set(PHASES), f"on {world} ranks"
