"""Under DeepSpeed's ZeRO a step is that of one device, and ten of them are those of the native engine."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import Config, load_config
from megatfm.engines.interface import Engine
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.verify.batch import objective_of, random_batch
from megatfm.verify.rank import _microbatches, _step
from megatfm.verify.reference import reference_step
from megatfm.verify.shrink import shrink
from megatfm.verify.verify import LIMITS, gradient_differences
from tests.workers import Workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)

# A larger ε, so that a first update doesn't make one size of gradients that are rounding and nothing else.
ADAMW = ["optimizer.name=adamw", "optimizer.eps=1e-4"]
FAMILIES: dict[str, list[str]] = {
    "decoder": ["quickstart", *ADAMW],
    "bert": ["bert-base", *ADAMW],
    "t5": ["t5-small", *ADAMW],
    "moe": ["mixtral-8x7b", *ADAMW],
}


def small(family: str, *overrides: str, **parallel: Any) -> Config:
    preset, *own = FAMILIES[family]
    base = ["data.tokenizer=t", "data.train=d", "train.precision=fp32", *own, *overrides]
    keys = {"engine": "deepspeed", **parallel}
    config = load_config(preset, [*base, *(f"parallel.{key}={value}" for key, value in keys.items())])
    return shrink(config)[0]


def in_precision(config: Config, precision: str) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


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
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    found: dict[str, Tensor] = {}
    for rank in everyone:
        for name, parts in rank.items():
            found.setdefault(name, torch.full(engine.layout[name].shape, torch.nan))
            for offsets, part in parts:
                found[name][tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
    return found


def weights(engine: Engine) -> dict[str, Tensor]:
    return whole(
        engine, {name: box.tensor for name, box in engine.weights().items() if name in engine.layout}
    )


def gradient_errors(config: Config) -> float:
    """The worst error of one step's gradients against plain autograd in float64, of its loss and of its norm: what is
    above 1e-6 counts only as far as it is more than the native engine's, which is float32's own."""
    batch = random_batch(config)
    expected = reference_step(config, batch)

    def worst(config: Config) -> float:
        answers: list[Any] = [None] * dist.get_world_size()
        mine = _step(config, batch, dist.get_world_size())
        dist.all_gather_object(answers, mine)
        numbers = [mine.loss / expected.loss - 1, mine.grad_norm / expected.grad_norm - 1]
        of_gradients = gradient_differences(expected.gradients, answers, LIMITS["fp32"])[0].error
        return max(*map(abs, numbers), of_gradients)

    error = worst(config)
    if error <= 1e-6:
        return error
    native = config.parallel.model_copy(update={"engine": "native"})
    return error - max(0.0, worst(config.model_copy(update={"parallel": native})) - 9e-7)


def take(config: Config, engine: Engine, step: int) -> float:
    seeded = config.model_copy(update={"train": config.train.model_copy(update={"seed": step})})
    batch = _microbatches(config, engine, random_batch(seeded))
    stats = engine.forward_backward(batch, objective_of(config))
    engine.step(config.optimizer.lr, config.optimizer.clip)
    return stats.loss


def against_native(config: Config, steps: int) -> tuple[float, float]:
    """The first update's error by norm, the worst of a parameter; that of the losses. The same seed gives both engines
    the same weights to begin with, to the bit."""
    ours, native = engine_of(config), engine_of(config, engine="native")
    before = weights(native)
    for name, tensor in weights(ours).items():
        assert torch.equal(tensor, before[name]), f"initial {name} differs"
    losses, updates, norms = [], [], []
    for step in range(steps):
        losses.append(abs(take(config, ours, step) / take(config, native, step) - 1))
        if step == 0:
            moved, theirs = weights(ours), weights(native)
            for name, start in before.items():
                updates.append(float((moved[name] - theirs[name]).norm()))
                norms.append(float((theirs[name] - start).norm()))
    least = 1e-3 * math.hypot(*norms)
    return max(error / max(norm, least) for error, norm in zip(updates, norms, strict=True)), max(losses)


def compare(cases: list[Config], steps: int) -> list[tuple[float, float, float]]:
    return [
        (gradient_errors(config), *against_native(config, min(steps, STEPS[config.parallel.zero])))
        for config in cases
    ]


STEPS = {0: 10, 1: 10, 2: 10, 3: 4}
"""By stage: stage 3 takes ten times as long for the same."""


def one(family: str, ranks: int, zero: int, *overrides: str, **parallel: Any) -> Config:
    parallel = {"dp_shard": ranks, **parallel}
    return small(family, *overrides, zero=zero, **parallel)


GRID: dict[str, tuple[int, list[Config]]] = {
    "data ranks": (2, [one("decoder", 2, stage) for stage in (0, 1, 2, 3)]),
    "contexts": (
        2,
        [
            one("decoder", 1, 1, cp=2),
            one("t5", 1, 2, cp=2),
            one("bert", 1, 3, "train.recompute=full", cp=2),
        ],
    ),
    "experts": (2, [one("moe", 2, 2, ep=2), one("moe", 2, 3, ep=2)]),
    "pipelines": (2, [one("bert", 1, 0, pp=2), one("t5", 1, 1, pp=2)]),
    "on 4": (
        4,
        [
            one("decoder", 4, 2),
            one("decoder", 4, 3, "deepspeed.hpz=2"),
            one("bert", 2, 1, tp=2),
            one("t5", 2, 3, "train.recompute=selective", tp=2),
            one("decoder", 2, 1, pp=2, schedule="zbv"),
            one("moe", 2, 1, ep=2, cp=2),
            one("moe", 2, 0, ep=2, pp=2),
        ],
    ),
}
"""Ranks, and a choice of stages, layouts and families to be compared on them."""


@pytest.mark.parametrize("name", GRID)
def test_steps_are_those_of_one_device_and_of_the_native_engine(workers: Workers, name: str) -> None:
    ranks, cases = GRID[name]
    for found in workers.run(compare, ranks, cases, 10 if ranks == 2 else 2, timeout=250):
        for (gradients, updates, losses), case in zip(found, cases, strict=True):
            assert gradients <= 1e-6, case.parallel
            assert losses <= 1e-6, case.parallel
            assert updates <= 1e-5, case.parallel


def save_first(folder: Path, config: Config) -> None:
    engine = engine_of(config, engine="native", zero=0, dp_shard=1, tp=1, cp=1, ep=1, pp=1)
    for step in range(2):
        take(config, engine, step)
    checkpoint.save(folder / "first", 1, engine.state_dict(), {})


def load(engine: Engine, path: Path) -> None:
    room = engine.empty_state_dict(checkpoint.names(path))
    checkpoint.load(path, room)
    engine.load_state_dict(room)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert {name for name in one if "loss_scale" not in name} == {n for n in other if "loss_scale" not in n}
    return [n for n in one if "loss_scale" not in n and not torch.equal(one[n], other[n])]


def hand_on(folder: Path, cases: list[Config]) -> list[str]:
    """Each stage opens what native has saved, saves it, goes a step on, and native goes on with what that saved."""
    wrong, first = [], folder / "first/step-00000001"
    expected = checkpoint.read_tensors(first)
    for number, config in enumerate(cases):
        engine, native = engine_of(config), engine_of(config, engine="native")
        load(engine, first)
        path = checkpoint.save(folder / str(number), 1, engine.state_dict(), {})
        wrong += [f"{number}: {name}" for name in differing(expected, checkpoint.read_tensors(path))]
        loss = take(config, engine, 2)
        path = checkpoint.save(folder / str(number), 2, engine.state_dict(), {})
        kept = checkpoint.read_tensors(path)
        load(native, path)
        again = checkpoint.save(folder / f"{number} native", 2, native.state_dict(), {})
        wrong += [f"{number}, native: {name}" for name in differing(kept, checkpoint.read_tensors(again))]
        load(engine, first)  # over what has moved: the same step once more
        if take(config, engine, 2) != loss:
            wrong.append(f"{number}: the loss of a repeated step")
        path = checkpoint.save(folder / str(number), 3, engine.state_dict(), {})
        wrong += [f"{number}, repeated: {name}" for name in differing(kept, checkpoint.read_tensors(path))]
    return wrong


CHECKPOINTS = {
    "2": [
        small("decoder", zero=0, dp_shard=2),
        small("decoder", zero=1, dp_shard=2),
        in_precision(small("decoder", zero=2, dp_shard=2), "bf16"),
        in_precision(small("decoder", zero=3, dp_shard=2), "fp16"),
        small("decoder", "deepspeed.offload_optimizer=cpu", zero=2, dp_shard=2),
        small("decoder", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu", dp_shard=2),
    ],
    "4": [small("decoder", zero=2, dp_shard=2, tp=2)],
    "4, stages": [in_precision(small("decoder", zero=1, dp_shard=2, pp=2), "bf16")],
    "2, stages": [small("decoder", "deepspeed.offload_optimizer=cpu", zero=1, pp=2)],
    "4, second copies": [small("decoder", "deepspeed.hpz=2", dp_shard=4)],
    "4, experts": [small("moe", zero=3, dp_shard=2, ep=2, cp=2)],
}


@pytest.mark.parametrize("ranks", CHECKPOINTS)
def test_checkpoints_go_from_native_and_back_to_the_bit(workers: Workers, tmp_path: Path, ranks: str) -> None:
    workers.run(save_first, 1, tmp_path, CHECKPOINTS[ranks][0])
    for found in workers.run(hand_on, int(ranks[0]), tmp_path, CHECKPOINTS[ranks], timeout=250):
        assert found == []


def pairs(cases: list[Config], steps: int) -> list[str]:
    """What differs, by a bit, between a run that offloads and one that does not."""
    wrong = []
    for number, config in enumerate(cases):
        places = {"offload_optimizer": "none", "offload_parameters": "none"}
        plain = config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update=places)})
        engine, other = engine_of(config), engine_of(plain)
        for step in range(steps):
            if take(config, engine, step) != take(plain, other, step):
                wrong.append(f"{number}: loss {step}")
            if step in (0, steps - 1):
                wrong += [f"{number}, {step}: {name}" for name in differing(weights(engine), weights(other))]
        engine.device = torch.device("cuda")  # what would be free there
        if engine.memory_needed(1, 1).moments:
            wrong.append(f"{number}: a device would be asked for moments that are not to be there")
    return wrong


OFFLOADED = [
    *(small("decoder", "deepspeed.offload_optimizer=cpu", zero=stage, dp_shard=2) for stage in (1, 2, 3)),
    small(
        "moe",
        "deepspeed.offload_optimizer=cpu",
        "deepspeed.offload_parameters=cpu",
        dp_shard=2,
        ep=2,
    ),
    small(
        "t5",
        "deepspeed.offload_optimizer=cpu",
        "deepspeed.offload_parameters=cpu",
        "train.freeze=['*.attn.wq.*']",
        dp_shard=2,
    ),
    in_precision(small("decoder", "deepspeed.offload_optimizer=cpu", zero=1, pp=2), "fp16"),
]


def test_what_is_offloaded_gives_the_same_run(workers: Workers) -> None:
    for found in workers.run(pairs, 2, OFFLOADED, 10, timeout=250):
        assert found == []


def behave(folder: Path) -> list[str]:
    """What else a step may be asked for, one after another under stages 2 and 3."""
    wrong = []
    for stage in (2, 3):
        config = small("decoder", "train.freeze=['*.attn.wq.*']", zero=stage, dp_shard=2)
        engine, native = engine_of(config), engine_of(config, engine="native")
        start = weights(engine)
        batch = _microbatches(config, engine, random_batch(config))
        engine.forward_backward(batch, objective_of(config))
        if not math.isnan(engine.step(1.0, 1.0, skip=True)) or differing(start, weights(engine)):
            wrong.append(f"{stage}: a step that is left out")
        engine.forward_backward(batch, objective_of(config))
        once = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        engine.zero_grad()
        engine.forward_backward(batch, objective_of(config))
        if differing(once, engine.gradients()):
            wrong.append(f"{stage}: a step computed twice")
        engine.zero_grad()
        if abs(take(config, engine, 1) / take(config, native, 1) - 1) > 1e-6:
            wrong.append(f"{stage}: the loss with frozen weights")
        after, theirs = weights(engine), weights(native)
        still = {name for name in start if torch.equal(start[name], after[name])}
        if still != {name for name in start if ".attn.wq." in name}:
            wrong.append(f"{stage}: what is frozen")
        if any((after[name] - theirs[name]).abs().max() > 1e-6 for name in start):
            wrong.append(f"{stage}: the update with frozen weights")
        batches = _microbatches(config, engine, random_batch(config))
        told = [each.evaluate(batches, objective_of(config)).loss for each in (engine, native)]
        if abs(told[0] / told[1] - 1) > 1e-6:
            wrong.append(f"{stage}: the evaluated loss")
    scaled = engine_of(in_precision(small("decoder", zero=2, dp_shard=2), "fp16"))
    scaled.loss_scale.value = 2.0**60
    if math.isfinite(_overflowing(scaled)) or scaled.loss_scale.value != 2.0**59:
        wrong.append("an overflow of float16")
    return wrong


def _overflowing(engine: Engine) -> float:
    config = small("decoder", zero=2, dp_shard=2)
    before = weights(engine)
    engine.forward_backward(_microbatches(config, engine, random_batch(config)), objective_of(config))
    norm = engine.step(1.0, 1.0)
    assert differing(before, weights(engine)) == []
    return norm


def test_steps_left_out_replays_frozen_weights_and_overflows(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(behave, 2, tmp_path, timeout=250):
        assert found == []


def optimizers(folder: Path) -> list[str]:
    wrong = []
    for optimizer in ("lion", "schedule_free_adamw"):
        config = small(
            "decoder",
            "~optimizer.eps",
            f"optimizer.name={optimizer}",
            "schedule.name=constant",
            zero=1,
            dp_shard=2,
        )
        ours, native = engine_of(config), engine_of(config, engine="native")
        for step in range(3):
            if abs(take(config, ours, step) / take(config, native, step) - 1) > 1e-6:
                wrong.append(f"{optimizer}: loss {step}")
        path = checkpoint.save(folder / optimizer, 1, ours.state_dict(), {})
        load(native, path)
        again = checkpoint.save(folder / optimizer, 2, native.state_dict(), {})
        wrong += differing(checkpoint.read_tensors(path), checkpoint.read_tensors(again))
    return wrong


def test_other_optimizers_compose(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(optimizers, 2, tmp_path, timeout=250):
        assert found == []
