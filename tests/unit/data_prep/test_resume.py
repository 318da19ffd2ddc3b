"""Killed at any moment, the same command goes on, and the result is that of a run that was never killed."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatfm import data_prep
from megatfm.config import to_toml
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.workspace import Workspace
from tests.support.killed_preps import KILLED, NEVER, SIGNAL_SCRIPT, count_moments, run_killed_at
from tests.support.prep_files import file_hashes

Make = Callable[..., PrepConfig]


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_moment(config: Make, tmp_path: Path, count: int) -> None:
    full = file_hashes(data_prep.run(config()).out)
    moments = count_moments(tmp_path, config())
    rng = random.Random(count)
    # The last moments are those of the commits after the last document was written.
    lasts = sorted({*rng.sample(range(moments), count), *rng.sample(range(moments - 25, moments), 1 + count)})
    assert run_killed_at(tmp_path, config(), [(f"killed{last}", last) for last in lasts]) == [KILLED] * len(
        lasts
    )
    for last in lasts:
        left = file_hashes(tmp_path / f"killed{last}")
        finals = {name: left[name] for name in left if "." not in {part[0] for part in name.split("/")}}
        assert finals.items() <= full.items()
        assert file_hashes(data_prep.run(config(f"killed{last}")).out) == full


@pytest.mark.slow  # test_stages.py does this with every kind of step
def test_killed_again_and_again(config: Make, tmp_path: Path) -> None:
    full = file_hashes(data_prep.run(config()).out)
    moments = count_moments(tmp_path, config())
    rng = random.Random(1)
    # Each of these is too short for the whole, but long enough for the longest stage.
    attempts = [rng.randrange(moments // 2, 3 * moments // 4) for _ in range(3)]
    statuses = run_killed_at(tmp_path, config(), [("chain", last) for last in [*attempts, NEVER]])
    assert statuses[0] == KILLED
    assert statuses[-1] == 0
    assert file_hashes(tmp_path / "chain") == full


def test_what_is_finished_is_not_done_again(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megatfm.data_prep.shards.ShardWriter.finish", fail)
        with pytest.raises(KeyboardInterrupt):
            data_prep.run(config())
    for done in (
        "clean.DocumentReader",
        "split.plan_split",
        "split.plan_parts_of_files",
        "tokenize.make_tokenizer_files",
    ):
        monkeypatch.setattr(f"megatfm.data_prep.{done}", fail)
    out = data_prep.run(config()).out
    monkeypatch.undo()
    assert file_hashes(out) == file_hashes(data_prep.run(config("clean")).out)


OTHERS: list[dict[str, Any]] = [
    {"read": {"exclude": ["dbm"]}},
    {"split": {"seed": 1}},
    {"tokenizer": {"vocab_size": 800}},
    {"tokenizer": {"kind": "byte-bpe"}},
]


def test_what_other_settings_made_is_not_used(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = file_hashes(data_prep.run(config("clean")).out)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for number, settings in enumerate(OTHERS):
        with monkeypatch.context() as patch:
            patch.setattr("megatfm.data_prep.execution.workspace.Workspace.finish", fail)
            with pytest.raises(KeyboardInterrupt):
                data_prep.run(config(f"{number}", **settings))
        assert file_hashes(data_prep.run(config(f"{number}")).out) == clean


def test_two_preps_do_not_share_a_folder(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(to_toml(config()))
    command = [sys.executable, "-m", "megatfm.data_prep", path]
    with Workspace(config()).lock():
        second = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert second.returncode == 2
    assert "another prep is working here" in second.stderr
    assert not data_prep.run(config()).already_done


def test_a_request_to_stop_ends_with_75_and_the_same_command_goes_on(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(to_toml(config()))
    falling = [sys.executable, str(SIGNAL_SCRIPT), "SIGTERM", "9", "-", str(path)]
    stopped = subprocess.run(falling, capture_output=True, text=True)
    assert stopped.returncode == 75, stopped.stderr
    assert stopped.stderr.strip().splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in stopped.stderr
    data_prep.run(config())
    assert file_hashes(tmp_path / "out") == file_hashes(data_prep.run(config("clean")).out)
