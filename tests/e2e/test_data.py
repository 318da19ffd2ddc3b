"""A run on a mixture with warm-ups: stopped within them and resumed, also on other ranks, it is the same run."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import Config, load_section
from megatfm.data.mixture import Mixture
from megatfm.errors import EXIT_OK, UsageError
from megatfm.train.corpora import open_corpora, open_tokenizer
from tests.support.files import read_lines
from tests.support.training_runs import delete_checkpoints_after, run_training
from tests.support.workers import WorkerFailure

WARMUP = """
rampup = [{ steps = 3, global_batch = 4, sequence_length = 16 }, { steps = 2, sequence_length = 32 }]
mixture_schedule = [{ tokens = 1600, weights = { web = 1, code = 3 } }]
mixture_block_rows = 8
mixture = { web = { path = "CORPUS/train", weight = 3 }, code = { path = "CORPUS/validation", weight = 1 } }
"""


@pytest.fixture
def mixed(config_file: Path, corpus: Path, tmp_path: Path) -> Callable[..., Config]:
    """The small config with a mixture and warm-ups."""
    text = config_file.read_text().replace(f'train = "{corpus}/train"\n', "")
    config_file.write_text(text + WARMUP.replace("CORPUS", str(corpus)))

    def make(*overrides: str, run: str) -> Config:
        more = ["train.steps=8", "train.micro_batch=2", "checkpoint.every=1", "checkpoint.keep=9"]
        return load_section(Config, config_file, [f"run_dir={tmp_path / run}", *more, *overrides])

    return make


def test_weights_change_after_the_tokens_that_the_config_says(mixed: Any) -> None:
    """1,600 tokens are 25 rows of 64."""
    mixture = open_corpora(*open_tokenizer(mixed(run="opened"))).train
    assert isinstance(mixture, Mixture)
    assert [(phase.position, dict(phase.weights)) for phase in mixture.phases] == [
        (0, {"web": 3, "code": 1}),
        (25, {"web": 1, "code": 3}),
    ]


def test_warmups_and_mixtures_resume_exactly(workers: Any, mixed: Any, tmp_path: Path) -> None:
    exact = "train.precision=fp64"
    assert workers.run(run_training, 1, mixed(exact, run="whole")) == [EXIT_OK]
    full = read_lines(tmp_path / "whole/metrics.jsonl")
    assert [line["tokens"] for line in full] == [256, 512, 768, 1280, 1792, 2304, 2816, 3328]
    assert all(line["data_wait_seconds"] >= 0 for line in full)
    for line in full:
        assert all(seconds >= 0 for seconds in line["step_parts"].values()), line
        assert sum(line["step_parts"].values()) == pytest.approx(line["step_seconds"])
        assert line["step_parts"]["passes"] > 0.1 * line["step_seconds"]
    mixture = open_corpora(*open_tokenizer(mixed(run="opened"))).train
    see_sources(full, mixture)
    assert list_epochs(tmp_path / "whole") == count_epochs(full, mixture)
    for step, ranks in ((2, 1), (4, 2)):
        delete_checkpoints_after(tmp_path / "whole", step)
        assert set(workers.run(run_training, ranks, mixed(exact, run="whole"))) == {EXIT_OK}
        resumed = read_lines(tmp_path / "whole/metrics.jsonl")
        assert [line["tokens"] for line in resumed] == [line["tokens"] for line in full]
        for first, second in zip(full, resumed, strict=True):
            assert second["loss"] == pytest.approx(first["loss"], rel=0 if ranks == 1 else 1e-12, abs=0)
            assert second["loss_by_source"] == pytest.approx(first["loss_by_source"], rel=1e-12, abs=0)
    delete_checkpoints_after(tmp_path / "whole", 5)
    with pytest.raises(WorkerFailure, match=r"UsageError: .*data\.mixture: .*resume\.allow"):
        workers.run(run_training, 1, mixed(exact, "data.mixture.code.weight=2", run="whole"))
    with pytest.raises(WorkerFailure, match=r"UsageError: .*data\.rampup: .*resume\.allow"):
        workers.run(run_training, 1, mixed(exact, "data.rampup=[]", run="whole"))


def list_epochs(folder: Path) -> list[tuple[int, int, str]]:
    """Return step, number and source of each epoch that begins in a run's log."""
    log_text = (folder / "logs" / "rank-0.log").read_text()
    epochs = re.findall(r"step (\d+)  epoch (\d+) of (\w+) begins", log_text)
    return [(int(step), int(number), source) for step, number, source in epochs]


def count_epochs(lines: list[dict[str, Any]], mixture: Mixture) -> list[tuple[int, int, str]]:
    """Return what `list_epochs` should, counted from the rows of each step."""
    rows_read, epochs, expected, first = Counter[str](), Counter[str](), [], 0
    for line in lines:
        end = line["tokens"] // 64
        rows_read.update(mixture.find_source(position)[0] for position in range(first, end))
        for name, source in mixture.sources.items():
            number = max(0, rows_read[name] - 1) // len(source)
            if number > epochs[name]:
                expected.append((line["step"], number + 1, name))
            epochs[name] = number
        first = end
    return expected


def see_sources(lines: list[dict[str, Any]], mixture: Any) -> None:
    """Each step tells the losses of the corpora that its rows are of, and they lie around the mean."""
    first, sources = 0, set()
    for line in lines:
        end = line["tokens"] // 64
        names = {mixture.find_source(position)[0] for position in range(first, end)}
        losses = line["loss_by_source"]
        assert set(losses) == names
        assert min(losses.values()) <= line["loss"] * (1 + 1e-12)
        assert line["loss"] <= max(losses.values()) * (1 + 1e-12)
        first, sources = end, sources | names
    assert sources == {"web", "code"}


@pytest.mark.parametrize(("override", "message"), [
    ("data.rampup=[{steps=1, global_batch=3}]", "global_batch = 3 is not a multiple of train.micro_batch"),
    ("data.rampup=[{steps=1, sequence_length=24}]", "24 does not divide data.sequence_length = 64"),
    ("data.train=x", "data.train, or several as data.mixture, and not both"),
    ('data.quarantine=["3"]', "in a mixture this is a key of the source"),
    ('data.mixture.code.quarantine=["999999"]', "quarantine '999999': give a sample"),
    ("data.mixture_schedule=[{tokens=5, weights={web=1}}]", "the mixture has web, code: give one for each"),
    ("data.mixture.code.weight=0.001", "comes to no row in a block of 8"),
])  # fmt: skip
def test_mistakes_are_named(mixed: Any, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_corpora(*open_tokenizer(mixed(override, run="wrong")))
