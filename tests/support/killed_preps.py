"""Preparations that are killed at a chosen moment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from megatfm.config.prep import PrepConfig

KILLED = -signal.SIGKILL
NEVER = 10**9
SIGNAL_SCRIPT = Path(__file__).with_name("signal_prep.py")
"""A preparation that is hit by a signal on the way."""


def count_moments(folder: Path, config: PrepConfig) -> int:
    """Number of moments of a run that nobody kills."""
    return int(kill(folder, config, [("counted", NEVER)]).stderr.splitlines()[-1])


def run_killed_at(folder: Path, config: PrepConfig, runs: list[tuple[str, int]]) -> list[int]:
    """Exit statuses of runs (out, moment at which it is killed), one after the other."""
    statuses: list[int] = json.loads(kill(folder, config, runs).stdout)
    return statuses


def kill(folder: Path, config: PrepConfig, runs: list[tuple[str, int]]) -> subprocess.CompletedProcess[str]:
    """Run `kill_prep.py`: a preparation for each of these (out, moment at which it is killed)."""
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    script = Path(__file__).with_name("kill_prep.py")
    return subprocess.run(
        [sys.executable, str(script), str(path), *(f"{folder / out}:{last}" for out, last in runs)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
