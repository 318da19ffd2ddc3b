"""Stopped or killed at any stage, gone on also with other settings or two tasks: the corpus of a fresh run."""

import errno
import io
import json
import os
import random
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from rich.console import Console

from megatfm import data_prep
from megatfm.config import to_toml
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.execution.progress import Reporter
from megatfm.data_prep.execution.workspace import Workspace
from megatfm.data_prep.fast_encode import FastEncoder
from megatfm.errors import UsageError
from tests.support.forked_commands import ForkedCommand
from tests.support.layouts import EXTENDED, SLOW
from tests.support.prep_files import (
    KILLED,
    SIGNAL_SCRIPT,
    count_moments,
    file_hashes,
    hold_first_task,
    run_killed_at,
    run_task,
    run_tasks,
    stop_before_commit,
    write_file,
)

Make = Callable[..., PrepConfig]
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few records."""
    folder = tmp_path_factory.mktemp("texts")
    records = [
        {
            "text": f"Record {number} tells of {number * 7919 % 1000}.\nA line of all.\n{'Ä b c. ' * 20}",
            "lang": ("en", "de")[number % 2],
        }
        for number in range(24)
    ]
    for name, selected in (("a", records[:12]), ("b", records[12:]), ("c", records[:4])):
        lines = "".join(json.dumps(record) + "\n" for record in selected)
        write_file(folder / f"{name}.jsonl", lines.encode())
    return folder


def make_config(texts: Path, folder: Path, **settings: Any) -> PrepConfig:
    """A config that prepares the records in several parts."""
    values: dict[str, Any] = {
        "out": str(folder / "out"),
        "tokenizer_threads": 1,
        "task_bytes": 1024,
        "dedup_memory_bytes": 2**21,
        "read": {"folder": str(texts), "metadata_keys": ["lang"]},
        "split": {"validation": 0.2, "partition_by": "lang"},
        "dedup": [{"name": "lines"}],
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 270, "sentinels": 0, "ul2_modes": False},
    }
    return PrepConfig.model_validate({**values, **settings})


@pytest.fixture
def make(tmp_path: Path, texts: Path) -> Make:
    return partial(make_config, texts, tmp_path)


@pytest.fixture(scope="module")
def hash_fresh(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Callable[[str], dict[str, str]]:
    """`hash_fresh(name)`: the hashes of a corpus that was never stopped, with the other settings of this name."""

    @cache
    def prepare_fresh(name: str) -> dict[str, str]:
        config = make_config(texts, tmp_path_factory.mktemp("fresh"), **OTHERS.get(name, {}))
        return file_hashes(data_prep.run(config).out)

    return prepare_fresh


def prepare(config: PrepConfig, tasks: int) -> None:
    data_prep.run(config) if tasks == 1 else run_tasks(config, tasks)


def stop(config: PrepConfig, stage: str, tasks: int) -> None:
    if config.dedup[0].name == "minhash":
        stage = stage.replace("lines-keys", "minhash-signatures").replace("lines", "minhash")
    with stop_before_commit(stage):
        prepare(config, tasks)


@pytest.mark.parametrize(("other", "stage", "then", "tasks"), [mark_case(case) for case in CASES])
def test_leftovers_of_other_settings_reach_no_corpus(
    make: Make, hash_fresh: Callable[[str], dict[str, str]], other: str, stage: str, then: str, tasks: int
) -> None:
    stop(make(), stage, tasks)
    stop(make(**OTHERS[other]), stage, 3 - tasks)
    last = "" if then == "back" else other
    prepare(make(**OTHERS.get(last, {})), tasks)
    assert file_hashes(Path(make().out)) == hash_fresh(last)


@pytest.mark.parametrize(
    ("other", "name"), [("memory", "dedup_memory_bytes"), ("a step", "steps"), ("no validation", "split.validation")]
)
def test_a_task_with_another_config_is_refused_by_name(
    make: Make, hash_fresh: Callable[[str], dict[str, str]], other: str, name: str
) -> None:
    """Two tasks of an array, between which the config was edited."""
    with hold_first_task(make()):
        with pytest.raises(UsageError, match=rf"out: other tasks are preparing it with another config \({name}"):
            run_task(make(**OTHERS[other]), 2)
        with pytest.raises(UsageError, match="another prep is working here"):
            data_prep.run(make())
    assert file_hashes(Path(make().out)) == hash_fresh("")


def test_a_task_that_slept_does_not_do_again_what_others_have_finished(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatfm.data_prep.execution.executors.POLL_SECONDS", 1.0)
    encoded = list[str]()
    encode = FastEncoder.encode_batch

    def count(self: FastEncoder, texts: list[str], threads: int) -> Any:
        encoded.extend(texts)
        time.sleep(0.02)
        return encode(self, texts, threads)

    monkeypatch.setattr(FastEncoder, "encode_batch", count)
    prepare(make(split={"validation": 0}), 2)
    assert len(encoded) == 24


def test_files_of_finished_stages_are_removed(make: Make) -> None:
    config = make(dedup=[{"name": "lines"}, {"name": "minhash"}])
    stop(config, "finish", 1)
    work = Path(config.out, ".work")
    for needless in (
        "clean.*.zst", "dedup-0-lines.*.zst", "*.tokens", "rows-*", "digests.*", "identity.*", "marks.*",
        "exact_dedup.*.zst", "dedup-1-minhash.*.zst",
    ):  # fmt: skip
        assert not list(work.rglob(needless)), needless
    assert list(work.rglob("train.*.zst"))


def test_a_work_folder_that_can_not_be_removed_fails_no_finished_prep(
    config: Callable[..., PrepConfig], prepared_hashes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a mapped file that is removed, under another name, until the process ends."""
    remove_folder, sink = os.rmdir, io.StringIO()

    def fail(path: Path, **options: Any) -> None:
        if Path(path).name == ".work":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove_folder(path, **options)

    monkeypatch.setattr(os, "rmdir", fail)
    summary = data_prep.run(config(), Reporter(Console(file=sink)))
    assert f"{summary.out}/.work: can't be removed yet: delete it, or run the same command again" in sink.getvalue()
    monkeypatch.undo()
    assert data_prep.run(config()).already_done
    assert file_hashes(summary.out) == prepared_hashes


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_moment(config: Make, prepared_hashes: dict[str, str], tmp_path: Path, count: int) -> None:
    moments = count_moments(config())
    rng = random.Random(count)
    # The last moments are those of the commits after the last document was written.
    lasts = sorted({*rng.sample(range(moments), count), *rng.sample(range(moments - 25, moments), count)})
    for last in lasts:
        assert run_killed_at(config(f"killed{last}"), last) == KILLED
        left = file_hashes(tmp_path / f"killed{last}")
        finals = {name: left[name] for name in left if "." not in {part[0] for part in name.split("/")}}
        assert finals.items() <= prepared_hashes.items()
        assert file_hashes(data_prep.run(config(f"killed{last}")).out) == prepared_hashes


def fail(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def run_and_fail(config: PrepConfig, place: str) -> None:
    """Prepare, and be interrupted where a function of `megatfm.data_prep` is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"megatfm.data_prep.{place}", fail)
        with pytest.raises(KeyboardInterrupt):
            data_prep.run(config)


def test_finished_stages_are_not_repeated(
    config: Make, prepared_hashes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_and_fail(config(), "shards.ShardWriter.finish")
    for done in (
        "clean.DocumentReader", "split.plan_by_files", "split.plan_by_documents", "tokenize.make_tokenizer_files",
    ):  # fmt: skip
        monkeypatch.setattr(f"megatfm.data_prep.{done}", fail)
    assert file_hashes(data_prep.run(config()).out) == prepared_hashes


@pytest.mark.extended
@pytest.mark.parametrize("settings", [
    {"read": {"exclude": ["dbm"]}},
    {"split": {"seed": 1}},
    {"tokenizer": {"vocab_size": 800}},
    {"tokenizer": {"kind": "byte-bpe"}},
])  # fmt: skip
def test_stages_of_other_settings_are_not_used(
    config: Make, prepared_hashes: dict[str, str], settings: dict[str, Any]
) -> None:
    run_and_fail(config(**settings), "execution.workspace.Workspace.finish")
    assert file_hashes(data_prep.run(config()).out) == prepared_hashes


def test_two_preps_do_not_share_a_folder(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(to_toml(config()))
    with Workspace(config()).lock():
        second = ForkedCommand([path], tmp_path / "output", program="megatfm.data_prep")
        assert second.wait() == 2
    assert "another prep is working here" in second.output
    assert not data_prep.run(config()).already_done


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_request_ends_with_75_and_the_same_command_resumes(
    config: Make, prepared_hashes: dict[str, str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(to_toml(config()))
    stopped = ForkedCommand([name, 9, "-", path], tmp_path / "output", program=str(SIGNAL_SCRIPT))
    assert stopped.wait() == 75, stopped.output
    assert stopped.output.splitlines()[-1].startswith("interrupted: ")
    assert "Traceback" not in stopped.output
    assert file_hashes(data_prep.run(config()).out) == prepared_hashes
