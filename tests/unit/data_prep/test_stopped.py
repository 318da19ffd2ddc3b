"""Stopped or killed at any stage, gone on also with other settings or two tasks: the corpus of a fresh run."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from megatfm import data_prep
from megatfm.config import to_toml
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.workspace import Workspace
from megatfm.data_prep.fast_encode import FastEncoder
from megatfm.errors import UsageError
from tests.support.layouts import EXTENDED, SLOW
from tests.support.prep_files import KILLED, SIGNAL_SCRIPT, count_moments, file_hashes, run_killed_at, write_file
from tests.support.prep_tasks import hold_first_task, run_task, run_tasks, stop_before_commit

STEP = {"name": "c4", "min_num_sentences": 1, "min_words_per_line": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "plain tars": {"compress": False},
    "no validation": {"split": {"validation": 0, "partition_by": None}},
    "no split.partition_by": {"split": {"validation": 0.2, "partition_by": None}},
    "memory": {"dedup_memory_bytes": 2**20},
    "a step": {"steps": [STEP]},
    "duplicates": {"dedup": [{"name": "minhash"}]},
    "near duplicates": {"split": {"validation": 0.2, "partition_by": "lang", "near_duplicates": {"n_grams": 2}}},
    "tokenizer": {"tokenizer": {"kind": "byte-bpe", "vocab_size": 280, "sentinels": 0, "ul2_modes": False}},
}
"""By name, settings that another config has."""
STAGES = (
    "clean.00001", "clean", "exact_dedup-sort", "exact_dedup-duplicates", "exact_dedup.00001", "dedup-0-lines-keys",
    "dedup-0-lines-duplicates", "dedup-0-lines", "split-plan", "split-validation", "split-train.00000", "tokenizer",
    "tokenize-train", "tokenize-validation", "finish",
)  # fmt: skip
OF_VALIDATION = ("split-plan", "split-validation", "tokenize-validation")
"""Stages that a corpus without validation has not."""
CASES = [
    (other, stage, then, tasks)
    for other in OTHERS
    for stage in STAGES
    for then in ("back", "on")
    for tasks in (1, 2)
    if other != "no validation" or stage not in OF_VALIDATION
]
SOON = [
    (other, stage, then, tasks)
    for number, other in enumerate(OTHERS)
    for stage, then, tasks in (
        (STAGES[(3 * number + 1) % len(STAGES)], "back", 1 + number % 2),
        (STAGES[-1 - 2 * (number % 2)], "on", 2 - number % 2),
    )
]
"""Each of the settings and of the stages."""
LATER = [case for case in SOON if case[2] == "on"][2:]
"""Cases that go on with the other settings, of which `make test` has two."""


def mark_case(case: tuple[str, str, str, int]) -> ParameterSet:
    return pytest.param(*case, marks=SLOW if case not in SOON else [EXTENDED] * (case in LATER))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PrepConfig]:
    """`make("out", **settings)`: a config for a few records in several parts."""
    records = [
        {
            "text": f"Record {number} tells of {number * 7919 % 1000}.\nA line of all.\n{'Ä b c. ' * 20}",
            "lang": ("en", "de")[number % 2],
        }
        for number in range(24)
    ]
    for name, selected in (("a", records[:12]), ("b", records[12:]), ("c", records[:4])):
        lines = "".join(json.dumps(record) + "\n" for record in selected)
        write_file(tmp_path / "texts" / f"{name}.jsonl", lines.encode())

    def config(out: str, **settings: Any) -> PrepConfig:
        values: dict[str, Any] = {
            "out": str(tmp_path / out),
            "tokenizer_threads": 1,
            "task_bytes": 1024,
            "dedup_memory_bytes": 2**21,
            "read": {"folder": str(tmp_path / "texts"), "metadata_keys": ["lang"]},
            "split": {"validation": 0.2, "partition_by": "lang"},
            "dedup": [{"name": "lines"}],
            "tokenizer": {"kind": "byte-bpe", "vocab_size": 270, "sentinels": 0, "ul2_modes": False},
        }
        return PrepConfig.model_validate({**values, **settings})

    return config


def prepare(config: PrepConfig, tasks: int) -> None:
    data_prep.run(config) if tasks == 1 else run_tasks(config, tasks)


def stop(config: PrepConfig, stage: str, tasks: int) -> None:
    if config.dedup[0].name == "minhash":
        stage = stage.replace("lines-keys", "minhash-signatures").replace("lines", "minhash")
    with stop_before_commit(stage):
        prepare(config, tasks)


@pytest.mark.parametrize(("other", "stage", "then", "tasks"), [mark_case(case) for case in CASES])
def test_leftovers_of_other_settings_reach_no_corpus(
    make: Callable[..., PrepConfig], other: str, stage: str, then: str, tasks: int
) -> None:
    settings: dict[str, Any] = OTHERS[other]
    stop(make("out"), stage, tasks)
    stop(make("out", **settings), stage, 3 - tasks)
    last = {} if then == "back" else settings
    prepare(make("out", **last), tasks)
    assert file_hashes(Path(make("out").out)) == file_hashes(data_prep.run(make("fresh", **last)).out)


@pytest.mark.parametrize(
    ("other", "name"), [("memory", "dedup_memory_bytes"), ("a step", "steps"), ("no validation", "split.validation")]
)
def test_a_task_with_another_config_is_refused_by_name(make: Callable[..., PrepConfig], other: str, name: str) -> None:
    """Two tasks of an array, between which the config was edited."""
    with hold_first_task(make("out")):
        with pytest.raises(UsageError, match=rf"out: other tasks are preparing it with another config \({name}"):
            run_task(make("out", **OTHERS[other]), 2)
        with pytest.raises(UsageError, match="another prep is working here"):
            data_prep.run(make("out"))
    assert file_hashes(Path(make("out").out)) == file_hashes(data_prep.run(make("fresh")).out)


def test_a_task_that_slept_does_not_do_again_what_others_have_finished(
    make: Callable[..., PrepConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatfm.data_prep.execution.executors.POLL_SECONDS", 1.0)
    encoded = list[str]()
    encode = FastEncoder.encode_batch

    def count(self: FastEncoder, texts: list[str], threads: int) -> Any:
        encoded.extend(texts)
        time.sleep(0.02)
        return encode(self, texts, threads)

    monkeypatch.setattr(FastEncoder, "encode_batch", count)
    prepare(make("out", split={"validation": 0}), 2)
    assert len(encoded) == 24


def test_files_of_finished_stages_are_removed(make: Callable[..., PrepConfig]) -> None:
    config = make("out", dedup=[{"name": "lines"}, {"name": "minhash"}])
    stop(config, "finish", 1)
    work = Path(config.out, ".work")
    for needless in (
        "clean.*.zst", "dedup-0-lines.*.zst", "*.tokens", "rows-*", "digests.*", "identity.*", "marks.*",
        "exact_dedup.*.zst", "dedup-1-minhash.*.zst",
    ):  # fmt: skip
        assert not list(work.rglob(needless)), needless
    assert list(work.rglob("train.*.zst"))


Make = Callable[..., PrepConfig]


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_moment(config: Make, tmp_path: Path, count: int) -> None:
    full = file_hashes(data_prep.run(config()).out)
    moments = count_moments(tmp_path, config())
    rng = random.Random(count)
    # The last moments are those of the commits after the last document was written.
    lasts = sorted({*rng.sample(range(moments), count), *rng.sample(range(moments - 25, moments), count)})
    assert run_killed_at(tmp_path, config(), [(f"killed{last}", last) for last in lasts]) == [KILLED] * len(lasts)
    for last in lasts:
        left = file_hashes(tmp_path / f"killed{last}")
        finals = {name: left[name] for name in left if "." not in {part[0] for part in name.split("/")}}
        assert finals.items() <= full.items()
        assert file_hashes(data_prep.run(config(f"killed{last}")).out) == full


def test_finished_stages_are_not_repeated(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megatfm.data_prep.shards.ShardWriter.finish", fail)
        with pytest.raises(KeyboardInterrupt):
            data_prep.run(config())
    for done in (
        "clean.DocumentReader", "split.plan_by_files", "split.plan_by_documents", "tokenize.make_tokenizer_files",
    ):  # fmt: skip
        monkeypatch.setattr(f"megatfm.data_prep.{done}", fail)
    out = data_prep.run(config()).out
    monkeypatch.undo()
    assert file_hashes(out) == file_hashes(data_prep.run(config("clean")).out)


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"read": {"exclude": ["dbm"]}},
    {"split": {"seed": 1}},
    {"tokenizer": {"vocab_size": 800}},
    {"tokenizer": {"kind": "byte-bpe"}},
]


@pytest.mark.extended
def test_stages_of_other_settings_are_not_used(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = file_hashes(data_prep.run(config("clean")).out)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for number, settings in enumerate(OTHER_SETTINGS):
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_request_ends_with_75_and_the_same_command_resumes(config: Make, tmp_path: Path, name: str) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(to_toml(config()))
    falling = [sys.executable, str(SIGNAL_SCRIPT), name, "9", "-", str(path)]
    stopped = subprocess.run(falling, capture_output=True, text=True)
    assert stopped.returncode == 75, stopped.stderr
    assert stopped.stderr.strip().splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in stopped.stderr
    data_prep.run(config())
    assert file_hashes(tmp_path / "out") == file_hashes(data_prep.run(config("clean")).out)
