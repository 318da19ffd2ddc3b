"""Under DeepSpeed's ZeRO a step is that of one device, and ten of them are those of the native engine."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.config import Config, load_config
from megatfm.engines.interface import Engine
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.verify.batch import objective_of, random_batch
from megatfm.verify.rank import _microbatches, _step
from megatfm.verify.reference import reference_step
from megatfm.verify.shrink import shrink
from megatfm.verify.verify import gradient_differences
from tests.workers import Workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)

FAMILIES: dict[str, list[str]] = {
    "decoder": ["quickstart", "optimizer.name=adamw"],
    "bert": ["bert-base", "optimizer.name=adamw"],
    "t5": ["t5-small", "optimizer.name=adamw"],
    "moe": ["mixtral-8x7b", "optimizer.name=adamw"],
}
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp_shard": 2},
    "dp4": {"dp_shard": 4},
    "tp2 × dp2": {"dp_shard": 2, "tp": 2},
}


def small(family: str, *overrides: str, **parallel: Any) -> Config:
    preset, *own = FAMILIES[family]
    base = ["data.tokenizer=t", "data.train=d", "train.precision=fp32", *own, *overrides]
    keys = {"engine": "deepspeed", **parallel}
    config = load_config(preset, [*base, *(f"parallel.{key}={value}" for key, value in keys.items())])
    return shrink(config)[0]


def engine_of(config: Config, **parallel: Any) -> Engine:
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
    return build_engine(config, mesh, torch.device("cpu"), config.train.precision)


def whole(engine: Engine, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Blocks of all ranks put together, on each of them."""
    pieces = {
        name: [(part.offsets, part.tensor.clone()) for part in engine.weights()[name].over(tensor).parts]
        for name, tensor in tensors.items()
    }
    found = {name: torch.full(engine.layout[name].shape, torch.nan) for name in tensors}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    for rank in everyone:
        for name, parts in rank.items():
            for offsets, part in parts:
                found[name][tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
    return found


def weights(engine: Engine) -> dict[str, Tensor]:
    return whole(
        engine, {name: box.tensor for name, box in engine.weights().items() if name in engine.layout}
    )


def gradient_errors(config: Config) -> float:
    """The worst error of one step's gradients against plain autograd in float64, of its loss and of its norm."""
    batch = random_batch(config)
    expected = reference_step(config, batch)
    answers: list[Any] = [None] * dist.get_world_size()
    mine = _step(config, batch, dist.get_world_size())
    dist.all_gather_object(answers, mine)
    numbers = [mine.loss / expected.loss - 1, mine.grad_norm / expected.grad_norm - 1]
    worst = [difference.error for difference in gradient_differences(expected.gradients, answers)]
    return max(*map(abs, numbers), worst[0])


def ten_steps(config: Config) -> tuple[float, float]:
    """Against the native engine: the first update's error by norm, the worst of a parameter; that of ten losses."""
    ours, native = engine_of(config), engine_of(config, engine="native")
    before = weights(native)
    for name, tensor in weights(ours).items():
        assert torch.equal(tensor, before[name]), f"initial {name} differs"
    losses, updates = [], []
    for step in range(10):
        seeded = config.model_copy(update={"train": config.train.model_copy(update={"seed": step})})
        batch = random_batch(seeded)
        told = []
        for engine in (ours, native):
            stats = engine.forward_backward(_microbatches(config, engine, batch), objective_of(config))
            engine.step(config.optimizer.lr, config.optimizer.clip)
            told.append(stats.loss)
        losses.append(abs(told[0] / told[1] - 1))
        if step == 0:
            moved, theirs = weights(ours), weights(native)
            for name, start in before.items():
                change = theirs[name] - start
                updates.append(float((moved[name] - theirs[name]).norm() / change.norm()))
    return max(updates), max(losses)


def compare(cases: list[Config]) -> list[tuple[float, float, float]]:
    return [(gradient_errors(config), *ten_steps(config)) for config in cases]


GRID = {
    "decoder on 2": [("decoder", "dp2", stage) for stage in (0, 1, 2, 3)],
    "decoder on 4": [("decoder", layout, stage) for layout in ("dp4", "tp2 × dp2") for stage in (0, 1, 2, 3)],
    "others on 4": [
        (family, "tp2 × dp2", stage) for family in ("bert", "t5", "moe") for stage in (0, 1, 2, 3)
    ],
}


@pytest.mark.parametrize("name", GRID)
def test_steps_are_those_of_one_device(workers: Workers, name: str) -> None:
    cases = [small(family, zero=stage, **LAYOUTS[layout]) for family, layout, stage in GRID[name]]
    ranks = int(name[-1])
    for found in workers.run(compare, ranks, cases, timeout=200):
        print(name, found)
        for (gradients, updates, losses), case in zip(found, GRID[name], strict=True):
            assert gradients <= 1e-6, case
            assert losses <= 1e-6, case
            assert updates <= 1e-3, case
