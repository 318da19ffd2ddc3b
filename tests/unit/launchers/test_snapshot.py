"""The code that a job takes along: what is in it, and that a job runs it and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import snapshot
from megatfm.errors import UsageError

ROOT = Path(__file__).parents[3]


def test_what_is_copied_is_importable_and_wins_over_the_checkout(tmp_path: Path) -> None:
    place = snapshot.take([]).write(tmp_path)
    assert place.name.startswith("code-")
    assert not list(place.rglob("__pycache__"))
    assert (place / "slurm" / "pretrain.sbatch").is_file()
    assert (place / "megatfm" / "presets" / "quickstart.toml").is_file()
    told = "import megatfm, launchers, data_prep; print(megatfm.__file__, launchers.__file__, data_prep.__file__)"
    environment = {"PYTHONPATH": f"{place}:{ROOT}", "PYTHONSAFEPATH": "1"}
    said = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert [Path(path).is_relative_to(place) for path in said.stdout.split()] == [True] * 3
    origin = json.loads((place / "origin.json").read_text())
    assert origin["copied_from"] == str(ROOT)


def test_the_same_code_is_copied_once_and_other_code_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    plugin = tmp_path / "here" / "my_plugin_of_a_test.py"
    plugin.write_text("x = 1\n")
    first = snapshot.take(["my_plugin_of_a_test"]).write(tmp_path)
    assert snapshot.take(["my_plugin_of_a_test"]).write(tmp_path) == first
    plugin.write_text("x = 2\n")
    place = snapshot.take(["my_plugin_of_a_test"]).write(tmp_path)
    assert (first / "my_plugin_of_a_test.py").read_text() == "x = 1\n"
    assert (place / "my_plugin_of_a_test.py").read_text() == "x = 2\n"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".code")], "no half copies"


def test_installed_plugins_stay_where_they_are() -> None:
    assert snapshot.take(["pydantic"]).files == snapshot.take([]).files


def test_a_plugin_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="plugins: can't find 'nothing_of_this_name'"):
        snapshot.take(["nothing_of_this_name.part"])
