"""Configs on a small real corpus, and ranks that train by them."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from megatfm.config import Config, load_section
from megatfm.errors import EXIT_OK
from tests.support.rank_processes import Fault, Ranks, Start
from tests.support.small_runs import SMALL_CONFIG, corpus, texts
from tests.support.training_runs import run_training
from tests.support.workers import Workers

__all__ = ["corpus", "texts"]  # fixtures

TWO_RANKS = ("parallel.dp_shard=2", "evaluate.every=2", "checkpoint.every=3", "train.steps=10")


@pytest.fixture
def config_file(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL_CONFIG.format(corpus=corpus))
    return path


@pytest.fixture
def make_config(config_file: Path, tmp_path: Path) -> Callable[..., Config]:
    """`make_config("train.steps=3", run="a")`: the small config with its run directory under tmp_path."""

    def make(*overrides: str, run: str = "run") -> Config:
        return load_section(Config, config_file, [f"run_dir={tmp_path / run}", *overrides])

    return make


@pytest.fixture(scope="module")
def whole_run(workers: Workers, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`whole_run(ranks, "key=value", …)`: the run that nothing interrupts. Tests of a module share it, so copy it first
    where a test goes on with it."""

    @cache
    def train_once(ranks: int, *overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        (folder / "small.toml").write_text(SMALL_CONFIG.format(corpus=corpus))
        config = load_section(Config, folder / "small.toml", [f"run_dir={folder / 'run'}", *overrides])
        assert workers.run(run_training, ranks, config, timeout=300.0) == [EXIT_OK] * ranks
        return folder / "run"

    return train_once


@pytest.fixture
def start(config_file: Path, tmp_path: Path) -> Iterator[Start]:
    """`start("key=value", …, run="name", fault=…)`: two ranks of `megatfm train` in a run directory."""
    runs: list[Ranks] = []

    def start(
        *overrides: str, run: str = "run", ranks: int = 2, fault: Fault | None = None, absent: tuple[int, ...] = ()
    ) -> Ranks:
        runs.append(Ranks(str(config_file), (*TWO_RANKS, *overrides), tmp_path / run))
        return runs[-1].start(ranks, fault, absent)

    yield start
    for run in runs:
        run.end()
