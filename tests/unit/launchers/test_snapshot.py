"""Whose code runs: a job's own copy and nothing else, and files of the user hide neither ours nor Python's."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatfm.errors import UsageError
from megatfm.launchers import snapshot
from megatfm.launchers.job import MEGATFM_COMMAND

ROOT = Path(__file__).parents[3]


def test_what_is_copied_is_importable_and_wins_over_the_checkout(tmp_path: Path) -> None:
    place = snapshot.collect_code([]).copy_to(tmp_path)
    assert place.name.startswith("code-")
    assert not list(place.rglob("__pycache__"))
    assert (place / "megatfm" / "slurm" / "pretrain.sbatch").is_file()
    assert (place / "megatfm" / "presets" / "quickstart.toml").is_file()
    code = "from megatfm import cli, data_prep, launchers; print(cli.__file__, data_prep.__file__, launchers.__file__)"
    environment = {"PYTHONPATH": f"{place}:{ROOT}", "PYTHONSAFEPATH": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert [Path(path).is_relative_to(place) for path in process.stdout.split()] == [True] * 3
    origin = json.loads((place / "origin.json").read_text())
    assert origin["copied_from"] == str(ROOT)


def test_the_same_code_is_copied_once_and_other_code_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    plugin = tmp_path / "here" / "my_plugin_of_a_test.py"
    plugin.write_text("x = 1\n")
    first = snapshot.collect_code(["my_plugin_of_a_test"]).copy_to(tmp_path)
    assert snapshot.collect_code(["my_plugin_of_a_test"]).copy_to(tmp_path) == first
    plugin.write_text("x = 2\n")
    place = snapshot.collect_code(["my_plugin_of_a_test"]).copy_to(tmp_path)
    assert (first / "my_plugin_of_a_test.py").read_text() == "x = 1\n"
    assert (place / "my_plugin_of_a_test.py").read_text() == "x = 2\n"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".code")], "no half copies"


def test_installed_plugins_stay_where_they_are() -> None:
    assert snapshot.collect_code(["pydantic"]).files == snapshot.collect_code([]).files


def test_a_plugin_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="plugins: can't find 'nothing_of_this_name'"):
        snapshot.collect_code(["nothing_of_this_name.part"])


def test_what_a_plugin_imports_from_its_own_folder_goes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job doesn't look into the folder that it was submitted from, where a `queue.py` would hide Python's own."""
    local = tmp_path / "here"
    (local / "helper_of_a_test").mkdir(parents=True)
    (local / "plugin_of_a_test.py").write_text("def later():\n    import queue, helper_of_a_test.deep\n")
    (local / "helper_of_a_test" / "deep.py").write_text("from further_of_a_test import x\nfrom . import x\n")
    (local / "further_of_a_test.py").write_text("import plugin_of_a_test\nx = 1\n")
    (local / "queue.py").write_text("raise ImportError\n")
    (local / "nothing_to_do_with_it.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(local)])
    more = set(snapshot.collect_code(["plugin_of_a_test"]).files) - set(snapshot.collect_code([]).files)
    assert more == {"plugin_of_a_test.py", "helper_of_a_test/deep.py", "further_of_a_test.py"}


def test_a_plugin_with_a_link_to_itself_and_with_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "package_of_a_test"
    for folder in ("part", "runs/a", ".git", "part/__pycache__"):
        (local / folder).mkdir(parents=True)
        (local / folder / "file.py").write_text("")
    (local / "part" / "up").symlink_to(local)
    (local / "again").symlink_to(local / "part")
    (local / "table.json").write_text("{}")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    more = set(snapshot.collect_code(["package_of_a_test"]).files) - set(snapshot.collect_code([]).files)
    assert more == {f"package_of_a_test/{name}" for name in ("again/file.py", "part/file.py", "table.json")}
    with open(local / "part" / "weights.bin", "wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(
        UsageError, match=r"holds 136 MB, .*the largest file is package_of_a_test/.*weights\.bin"
    ):
        snapshot.collect_code(["package_of_a_test"])


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
