"""A SLURM that answers from files: stand-ins for its commands, which note what they were asked."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_slurm import COMMANDS, STAND_IN, FakeSlurm


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
