"""23 kills over the phases of a step and a save; `make soak` does a hundred, and trains under fire."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.crashes import LAYOUTS, PHASES


@pytest.mark.timeout(900)  # on a busy machine; it takes a tenth
def test_a_run_killed_at_any_moment_ends_as_if_it_never_had_been(corpus: Path, tmp_path: Path) -> None:
    # In a process of its own: it forks, and so must have no thread.
    command = [
        sys.executable,
        "-m",
        "tests.e2e.crashes",
        str(corpus),
        str(tmp_path / "runs"),
        "--kills",
        "23",
    ]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["kills"] == 23
    assert {phase: report["hits"].get(phase, 0) >= 3 for phase in PHASES} == dict.fromkeys(PHASES, True)
    by_layout = report["hits by layout"]
    assert all(sum(by_layout[layout].values()) >= 3 for layout in LAYOUTS)
    for world in (1, 2, 4):
        hit = {
            phase for layout, (ranks, _) in LAYOUTS.items() if ranks == world for phase in by_layout[layout]
        }
        assert hit == set(PHASES), f"on {world} ranks"
    assert report["compared"] >= len(LAYOUTS)
