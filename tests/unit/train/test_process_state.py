"""Global generators over a resume; collections of garbage at chosen steps, and what a step leaves to them."""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import ModelConfig, ParallelConfig
from megatfm.train import process_state
from megatfm.train.process_state import GarbageCollection
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of the module gc, by name, while automatic collections are on and no object is frozen."""
    was_enabled, calls = gc.isenabled(), list[str]()
    gc.enable()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "get_objects", lambda: range(500_000))
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    yield calls
    if not was_enabled:
        gc.disable()


def run_steps(every: int, steps: range, calls: list[str]) -> dict[int, list[str]]:
    """Return the calls after each step, without steps that have none."""
    calls_by_step = {}
    with GarbageCollection(every) as garbage:
        for step in steps:
            assert gc.isenabled() == (every == 0)
            garbage.after_step(step)
            if calls:
                calls_by_step[step] = [*calls]
            calls.clear()
    return calls_by_step


def test_garbage_is_collected_at_steps_and_after_the_first_one(collected: list[str]) -> None:
    """Ranks of a resumed run start at the same step."""
    assert run_steps(5, range(8, 17), collected) == {8: ["collect", "freeze"], 10: ["collect"], 15: ["collect"]}
    assert collected == ["unfreeze"]
    assert gc.isenabled()


def test_an_error_leaves_automatic_collections_on(collected: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), GarbageCollection(5):
        _ = 1 / 0
    assert gc.isenabled()


def test_python_collects_by_itself_without_an_interval(collected: list[str]) -> None:
    assert run_steps(0, range(1, 9), collected) == {}
    assert collected == []


def test_a_caller_that_collects_itself_is_left_alone(collected: list[str]) -> None:
    gc.disable()
    with GarbageCollection(1) as garbage:
        garbage.after_step(1)
    assert collected == []
    assert not gc.isenabled()


def count_frozen_objects() -> int:
    """Frozen objects after three steps of a worker, which freezes all that it has imported."""
    with GarbageCollection(2) as garbage:
        for step in range(1, 4):
            garbage.after_step(step)
    return gc.get_freeze_count()


def test_what_a_caller_has_frozen_stays_frozen(workers: Workers) -> None:
    """Each later collection would traverse all of it, in half a second."""
    (count,) = workers.run(count_frozen_objects, 1)
    assert count > 100_000


def count_tensors_in_cycles(model: ModelConfig, parallel: ParallelConfig, recomputed: str) -> Counter[str]:
    """Types of the objects that two steps leave in reference cycles."""
    engine = build_engine(model, parallel, ADAMW, precision="bf16", recomputed=recomputed)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for step in range(4):
            if step == 2:
                gc.collect()
            engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
            engine.step(1e-2, clip=1.0)
            engine.evaluate(microbatches(engine, global_batch(seed=9)), CAUSAL)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(x).__name__ for x in gc.garbage if isinstance(x, Tensor))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if was_enabled:
            gc.enable()


EXPERTS: dict[str, Any] = {"ffn": {"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 48}}


@pytest.mark.parametrize(("model", "parallel", "recomputed"), [
    (TIED_MODEL, ParallelConfig(dp_shard=2), "full"),
    (TIED_MODEL, ParallelConfig(dp_shard=2, zero=1), "none"),
    (TIED_MODEL, ParallelConfig(tp=2), "selective"),
    (TIED_MODEL, ParallelConfig(pp=2, pp_schedule="zbv"), "none"),
    (TIED_MODEL.with_changes(EXPERTS), ParallelConfig(dp_shard=2, ep=2), "full"),
], ids=["zero 3", "zero 1", "tp", "pp", "ep"])  # fmt: skip
def test_a_step_leaves_no_tensors_in_reference_cycles(
    workers: Workers, model: ModelConfig, parallel: ParallelConfig, recomputed: str
) -> None:
    """Their memory would be held until the next collection."""
    assert workers.run(count_tensors_in_cycles, 2, model, parallel, recomputed) == [Counter()] * 2


# ------------------------------------------------------------------------------------------------- generators


CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.standard_normal()), float(np.random.rand()),
        float(torch.randn(())), float(torch.rand(())),
    ]  # fmt: skip


@pytest.mark.parametrize("draws", [0, 1, 4])
def test_random_numbers_after_a_resume_are_those_of_an_uninterrupted_run(tmp_path: Path, draws: int) -> None:
    process_state.seed_all(3, 0)
    for _ in range(draws):
        draw()
    path = checkpoint.save(tmp_path, 1, process_state.rng_state_dict(0, CPU), {})
    expected = [draw() for _ in range(3)]
    process_state.seed_all(4, 0)
    assert draw() not in expected
    room = process_state.empty_rng_state_dict(checkpoint.read_tensor_specs(path), 0, 1, CPU)
    checkpoint.load(path, room)
    process_state.load_rng_state_dict(room, 0, CPU)
    assert [draw() for _ in range(3)] == expected


def test_ranks_and_seeds_differ_and_repeat() -> None:
    draws = []
    for seed, rank in ((0, 0), (0, 1), (1, 0), (0, 0)):
        process_state.seed_all(seed, rank)
        draws.append(draw())
    assert draws[3] == draws[0]
    assert len({tuple(item) for item in draws[:3]}) == 3


def test_generators_of_other_ranks_are_not_taken() -> None:
    names = [name for rank in range(2) for name in process_state.rng_state_dict(rank, CPU)]
    assert process_state.empty_rng_state_dict(names, 1, 2, CPU).keys() == process_state.rng_state_dict(1, CPU).keys()
    assert process_state.empty_rng_state_dict(names, 0, 1, CPU) == {}
    assert process_state.empty_rng_state_dict(names, 0, 4, CPU) == {}
    assert process_state.empty_rng_state_dict(["model.w"], 0, 1, CPU) == {}
    before = torch.get_rng_state()
    process_state.load_rng_state_dict({}, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)
