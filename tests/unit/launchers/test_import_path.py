"""Whose code runs: files of the user in the working directory hide neither ours nor Python's own."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatfm.launchers.job import MEGATFM_COMMAND

ROOT = Path(__file__).parents[3]
RAISES = "raise ImportError('a file of the user was imported')\n"


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a user's own `megatfm.data_prep.py`, `launchers/` and `slurm/`."""
    for name in ("megatfm.data_prep.py", "launchers/__init__.py", "slurm/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(RAISES)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["prep", "--help"], ["launch", "quickstart", "--slurm", "--dry-run"]],
    ids=lambda words: words[0],
)
def test_folders_of_the_user_are_not_imported(folder: Path, words: list[str]) -> None:
    assert run([sys.executable, "-m", "megatfm", *words], folder)


def test_what_ranks_run_finds_nothing_in_the_working_directory(folder: Path) -> None:
    for name in ("queue.py", "statistics.py", "torch.py", "megatfm.py"):
        (folder / name).write_text(RAISES)
    assert "usage: megatfm train" in run([*MEGATFM_COMMAND, "--help"], folder)


@pytest.mark.parametrize(
    ("directory", "paths", "expected"),
    [(ROOT, [], ROOT), (ROOT, [ROOT], None), (ROOT / "tests", [ROOT], None)],
    ids=["working directory", "both", "PYTHONPATH"],
)
def test_ranks_find_a_checkout_that_nobody_installed(
    directory: Path, paths: list[Path], expected: Path | None
) -> None:
    """Packages on PYTHONPATH have no .pth files read, so that an editable install of megatfm is none."""
    packages = sysconfig.get_path("purelib")
    path = os.pathsep.join(map(str, [*paths, packages]))
    python = os.path.realpath(sys.executable)
    output = run(
        [python, "-m", "megatfm", "launch", "quickstart", "--nproc", "1", "--dry-run"],
        directory,
        PYTHONPATH=path,
    )
    assert (
        output.count("PYTHONPATH=")
        == output.count(f"PYTHONPATH={expected}{os.pathsep}{packages} ")
        == bool(expected)
    )
    assert f"{python} -P -m megatfm train quickstart" in output
