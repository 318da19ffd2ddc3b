"""A SLURM that answers from files: stand-ins for its commands, which note what they were asked."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@dataclass
class FakeSlurm:
    """What its commands print and whether they fail, by name (`scontrol-show` for `scontrol show`)."""

    folder: Path

    def answer(self, command: str, text: str) -> None:
        (self.folder / command).write_text(text)

    def fail(self, command: str, text: str) -> None:
        (self.folder / f"{command}.fails").write_text(text)

    @property
    def calls(self) -> list[str]:
        """The commands so far, quoted as a shell would."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


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
    """What the quickstart's config names, as far as a launch looks at it."""
    result = tmp_path / "corpora" / "quickstart"
    for name in ("train", "validation"):
        (result / name).mkdir(parents=True)
        (result / name / "manifest.json").touch()
    (result / "tokenizer.model").touch()
    return result
