"""Runs under DeepSpeed: they train as native does, resume to the bit, and go on under native, whose runs go on here."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.errors import DONE
from megatfm.train.loop import train
from tests.workers import Workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)
MakeConfig = Callable[..., Config]
BASE = ["optimizer.name=adamw", "train.steps=8", "evaluate.every=4"]
NATIVE = [*BASE, "parallel.zero=3"]


def deepspeed(*more: str) -> list[str]:
    return [*BASE, "parallel.engine=deepspeed", *more]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(folder / "checkpoints/step-00000008")


def forget_the_end(folder: Path) -> None:
    (folder / "checkpoints/step-00000008").rename(folder / f"later {len(list(folder.iterdir()))}")


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not name.startswith("rng.") and not torch.equal(one[name], other[name])]


def test_it_trains_as_native_does_and_either_goes_on_with_the_other(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    def run(name: str, ranks: int, overrides: list[Any]) -> None:
        assert workers.run(train, ranks, make_config(*overrides, run=name), timeout=200) == [DONE] * ranks

    native, ours = tmp_path / "native", tmp_path / "deepspeed"
    run("native", 2, NATIVE)
    wanted, whole = losses(native), state(native)
    for stage in (3, 1):
        settings = deepspeed(f"parallel.zero={stage}")
        if stage == 3:
            run("deepspeed", 2, settings)
            assert losses(ours) == pytest.approx(wanted, rel=1e-5)
            assert state(ours).keys() == whole.keys()
        else:  # what stage 3 has saved goes on, with another stage
            forget_the_end(ours)
            run("deepspeed", 2, settings)
            assert losses(ours) == pytest.approx(wanted, rel=1e-5)
        end = state(ours)
        forget_the_end(ours)
        run("deepspeed", 2, settings)
        assert differing(end, state(ours)) == [], "a resume on the same layout is the same run to the bit"
    forget_the_end(ours)
    run("deepspeed", 1, NATIVE)
    assert losses(ours) == pytest.approx(wanted, rel=1e-5)
    forget_the_end(native)
    run("native", 2, deepspeed("parallel.zero=2"))
    assert losses(native) == pytest.approx(wanted, rel=1e-5)
