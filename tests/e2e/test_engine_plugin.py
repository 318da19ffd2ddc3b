"""A run with the engine of docs/extend/models-and-engines.md: it trains, resumes to the bit, and changes engines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.errors import EXIT_OK
from tests.support.training_runs import train_with_plugins
from tests.support.workers import Workers

DDP = ["plugins=['plain_ddp']", "parallel.engine=ddp", "parallel.zero=0", "train.steps=8"]
MakeConfig = Callable[..., Config]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / "checkpoints/step-00000008")


def forget_the_end(folder: Path) -> None:
    (folder / "checkpoints/step-00000008").rename(folder / "later")


def test_a_plugin_s_engine_trains_as_native_and_engines_can_change(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    native: list[Any] = ["parallel.zero=0", "train.steps=8"]
    for ranks, name, overrides in ((2, "ddp", DDP), (2, "native", native)):
        assert workers.run(train_with_plugins, ranks, make_config(*overrides, run=name)) == [EXIT_OK] * ranks
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "native"), rel=1e-4)
    full = weights(tmp_path / "ddp")
    forget_the_end(tmp_path / "ddp")
    assert workers.run(train_with_plugins, 2, make_config(*DDP, run="ddp")) == [EXIT_OK] * 2
    again = weights(tmp_path / "ddp")
    assert again.keys() == full.keys()
    assert all(torch.equal(again[name], full[name]) for name in full)
    (tmp_path / "ddp" / "later").rename(tmp_path / "ddp" / "later still")
    forget_the_end(tmp_path / "ddp")
    other = ["parallel.engine=native", "parallel.zero=3", "train.steps=8"]
    assert workers.run(train_with_plugins, 1, make_config(*other, run="ddp")) == [EXIT_OK]
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "native"), rel=1e-4)
