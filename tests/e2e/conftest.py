"""Configs on a small real corpus, and ranks that train by them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatfm.config import Config, load_section
from tests.support.rank_processes import Fault, Ranks, Start
from tests.support.small_runs import SMALL_CONFIG, corpus, texts

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


@pytest.fixture
def start(config_file: Path, tmp_path: Path) -> Iterator[Start]:
    """`start("key=value", …, run="name", fault=…)`: two ranks of `megatfm train` in a run directory."""
    runs: list[Ranks] = []

    def start(
        *overrides: str,
        run: str = "run",
        ranks: int = 2,
        fault: Fault | None = None,
        absent: tuple[int, ...] = (),
    ) -> Ranks:
        runs.append(Ranks(str(config_file), (*TWO_RANKS, *overrides), tmp_path / run))
        return runs[-1].start(ranks, fault, absent)

    yield start
    for run in runs:
        run.end()
