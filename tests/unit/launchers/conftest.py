"""A SLURM that answers from files, runs that were watched, and folders to launch from."""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import load_config, to_toml
from megatfm.launchers import snapshot
from tests.support.files import write_lines
from tests.support.launch_jobs import RUNNING, FakeSlurm, MakeRun

COMMANDS = ("sbatch", "scontrol", "scancel", "squeue", "sinfo", "sacct", "srun")
STAND_IN = """#!/bin/bash
name=${0##*/}
printf '%s' "$name" >>"$SLURM_FAKE/calls"
printf ' %q' "$@" >>"$SLURM_FAKE/calls"
echo >>"$SLURM_FAKE/calls"
key=$name
[ "$name" != scontrol ] || { [ "$1" = -o ] && key=$name-$2 || key=$name-$1; }
[ ! -e "$SLURM_FAKE/$key.fails" ] || { cat "$SLURM_FAKE/$key.fails" >&2; exit 1; }
[ ! -e "$SLURM_FAKE/$key" ] || cat "$SLURM_FAKE/$key"
"""


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "fake-slurm"
    folder.mkdir()
    for name in COMMANDS:
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(STAND_IN)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_FAKE", str(folder))
    return FakeSlurm(folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[int], None]:
    """`checkpoint(step)`: the run in tmp_path/run has committed one."""

    def commit(step: int) -> None:
        (tmp_path / "run" / "checkpoints" / f"step-{step:08}").mkdir(parents=True)

    return commit


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Paths of the quickstart's config, as far as a launch looks at them."""
    result = tmp_path / "corpora" / "quickstart"
    for name in ("train", "validation"):
        (result / name).mkdir(parents=True)
        (result / name / "manifest.json").touch()
    (result / "tokenizer.model").touch()
    return result


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """`make("name", launcher="slurm", jobs=["7"])`: a run of 100 steps that came to step 40."""
    monkeypatch.chdir(tmp_path)

    def run(name: str = "mine", steps: int = 40, **note: Any) -> Path:
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "config.toml").write_text('name = "mine"\n[train]\nsteps = 100\n')
        lines = [
            {"step": n, "loss": 5 - n / 50, "tokens_per_second": 1000.0 + (n == 2) * 9e9, "step_seconds": 2.0}
            for n in range(1, steps + 1)
        ]
        write_lines(folder / "metrics.jsonl", lines)
        if note:
            (folder / "launch.json").write_text(json.dumps(note))
        return folder

    return run


COLLECT_ONCE = cache(snapshot.collect_code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpora: Path) -> Path:
    """A folder to launch from, with corpora and nothing else; the code of jobs is read and hashed once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshot, "collect_code", lambda plugins: COLLECT_ONCE(tuple(plugins)))
    return tmp_path


@pytest.fixture
def run(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that job 7 trains on n1 to n3, one process on each."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "slurm").mkdir()
    config = load_config("quickstart", ["train.global_batch=24", "train.micro_batch=1", "train.steps=100"])
    (run / "slurm" / "config.toml").write_text(to_toml(config))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    fake_slurm.answer("scontrol-show", RUNNING)
    return run
