"""Every optimizer through the engine: layouts, the checkpoint store, resumes, and averaged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import OptimizerSection, ParallelConfig
from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.optimizers import ElementwiseOptimizer
from megatfm.errors import MegatfmError
from tests.support.batches import CAUSAL, global_batch
from tests.support.layouts import EXTENDED, SLOW, extend, make_cases
from tests.support.models import OPTIMIZERS, UNTIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.sharded_engines import (
    assert_same_after_resume,
    gather_whole,
    get_tensor,
    load_and_train,
    train_steps,
)
from tests.support.workers import Workers

# SOAP's bases start from the covariance of one gradient. Where that is singular, as on the longer side of a matrix,
# rounding chooses the rest of the basis, and no two layouts round alike: here all rotated sides are of full rank.
SQUARE = UNTIED_MODEL.with_changes({"attention.n_kv_heads": 4})
KEYS = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "adamw, short moments": {"step", "exp_avg", "exp_avg_sq"},
    "muon": {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"},
    "muon, weights averaged": {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema", "trained"},
    "soap": {"step", "exp_avg", "exp_avg_sq", "left", "left_basis", "right", "right_basis"},
    "adafactor": {"step", "row_var", "col_var", "variance"},
    "lamb": {"step", "exp_avg", "exp_avg_sq"},
    "lion": {"exp_avg"},
    "adamw, weights averaged": {"step", "exp_avg", "exp_avg_sq", "ema", "trained"},
    "schedule_free_adamw": {"k", "weight_sum", "lr_max", "z", "exp_avg_sq", "trained"},
}


def count_steps(optimizer: OptimizerSection) -> int:
    """SOAP's bases turn in every second step."""
    return 5 if optimizer.name == "soap" else 3


def train(parallel: ParallelConfig, optimizer: OptimizerSection) -> dict[str, Tensor]:
    """Weights after a few train_steps, whole."""
    engine = build_engine(SQUARE, parallel, optimizer)
    train_steps(engine, 0, count_steps(optimizer))
    return {name: engine.local[name].clone() for name in engine.local}


def distances(
    layouts: list[str], optimizer: OptimizerSection, expected: dict[str, Tensor]
) -> list[tuple[float, float]]:
    """The largest difference of a weight from those given, and how far the one that moved least has moved."""
    actual = []
    for layout in layouts:
        engine = build_engine(SQUARE, LAYOUTS[layout], optimizer)
        before = {name: tensor.clone() for name, tensor in engine.local.items()}
        train_steps(engine, 0, count_steps(optimizer))
        shards = {name: tensor for name, tensor in engine.local.items() if tensor.numel()}
        differences = [float((local_block(engine, n, expected[n]) - t).abs().max()) for n, t in shards.items()]
        moved = [float((tensor - before[name]).abs().max()) for name, tensor in shards.items()]
        actual.append((max(differences), min(moved)))
    return actual


LAYOUTS = {
    "zero3": ParallelConfig(dp_shard=2),
    "zero1": ParallelConfig(dp_shard=2, zero=1),
    "tp2": ParallelConfig(tp=2),
}


@pytest.mark.parametrize(("name", "layouts"), make_cases(dict.fromkeys(OPTIMIZERS, LAYOUTS), rounds=2))
def test_two_ranks_do_what_one_does(workers: Workers, name: str, layouts: list[str]) -> None:
    (expected,) = workers.run(train, 1, ParallelConfig(), OPTIMIZERS[name])
    for rank in workers.run(distances, 2, layouts, OPTIMIZERS[name], expected):
        assert len(rank) == len(layouts)
        for difference, moved in rank:
            assert difference <= 1e-7
            assert moved > 1e-4


MARKS = {
    **dict.fromkeys(("adamw", "lamb", "lion"), (SLOW,)),
    **dict.fromkeys(("adamw, short moments", "adamw, weights averaged", "muon", "muon, weights averaged"), (EXTENDED,)),
}
"""Optimizers whose state is that of another here, less or by another name, and those of which other tests store it."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in OPTIMIZERS])
def test_optimizer_state_is_saved_loaded_and_training_continues(workers: Workers, tmp_path: Path, name: str) -> None:
    path = assert_same_after_resume(workers, tmp_path, 2, ParallelConfig(dp_shard=2), OPTIMIZERS[name])
    ((saved, _),) = workers.run(load_and_train, 1, path, ParallelConfig(), OPTIMIZERS[name], tmp_path / "alone")
    before, after = checkpoint.read_tensors(path), checkpoint.read_tensors(saved)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    assert {key.rpartition(".")[2] for key in before if key.startswith("optimizer.")} == KEYS[name]


def weights(engine: NativeEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.local.items()}


def averaged_by_hand(engine: NativeEngine) -> dict[str, Tensor]:
    """x = (y − (1 − β₁)z) / β₁, from the state that is saved."""
    state = {key: get_tensor(part) for key, part in engine.state_dict().items()}
    names = engine.local
    return {n: (state[f"optimizer.{n}.trained"] - 0.1 * state[f"optimizer.{n}.z"]) / 0.9 for n in names}


def train_and_average_by_hand(engine: NativeEngine) -> dict[str, Tensor]:
    """The moving average of the weights that the engine trains, from those after the first step on."""
    averages: dict[str, Tensor] = {}
    for step in range(4):
        train_steps(engine, step, step + 1)
        averages = {n: 0.7 * averages.get(n, tensor) + 0.3 * tensor for n, tensor in engine.local.items()}
    return averages


WITH_AVERAGE = {name: OPTIMIZERS[name].model_copy(update={"ema_decay": 0.7}) for name in ("soap", "adafactor", "lamb")}


def evaluates_and_saves_the_average(parallel: ParallelConfig, name: str) -> None:
    engine = build_engine(UNTIED_MODEL, parallel, {**OPTIMIZERS, **WITH_AVERAGE}[name])
    if name == "schedule_free_adamw":
        train_steps(engine, 0, 4)
        x = averaged_by_hand(engine)
    else:
        x = train_and_average_by_hand(engine)
    trained = weights(engine)
    for name, tensor in x.items():
        stored = get_tensor(engine.state_dict()[f"model.{name}"])
        assert torch.allclose(stored, tensor, rtol=1e-12, atol=1e-14), name
        assert not torch.allclose(stored, trained[name], rtol=1e-4) or not tensor.numel(), name

    batch, losses = global_batch(seed=50), {}
    for kind, blocks in (("average", x), ("trained", trained)):
        model = one_device(UNTIED_MODEL)
        model.load_state_dict(gather_whole(engine, blocks))
        losses[kind], _ = one_device_gradients(model, batch)
    # Far beyond the 1e-12 at which they are told apart below.
    assert abs(losses["average"] - losses["trained"]) > 1e-6 * losses["trained"]
    for _ in range(2):
        evaluated = engine.evaluate(microbatches(engine, batch), CAUSAL)
        assert evaluated.loss == pytest.approx(losses["average"], rel=1e-12)
        training = engine.forward_backward(microbatches(engine, batch), CAUSAL)
        assert training.loss == pytest.approx(losses["trained"], rel=1e-12)
        engine.zero_grad()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in engine.local.items())


AVERAGED = [
    *(("schedule_free_adamw", layout) for layout in ("one", "zero3", "tp2")),
    *(("muon, weights averaged", layout) for layout in ("one", *LAYOUTS, "zero0", "zero2", "replicas")),
]
AVERAGED_BY_OTHERS = [
    pytest.param(name, layout, marks=[SLOW] * (layout != default))
    for name, default in (("soap", "tp2"), ("adafactor", "zero3"), ("lamb", "zero1"))
    for layout in ("one", *LAYOUTS, "zero2")
]
AVERAGED_IN_SHORT = [
    ("schedule_free_adamw", "one"), ("schedule_free_adamw", "zero3"), ("muon, weights averaged", "one"),
    ("muon, weights averaged", "zero1"), ("muon, weights averaged", "tp2"),
]  # fmt: skip
"""Each kind of average, and each layout with one of them."""


@pytest.mark.parametrize(("name", "layout"), [*extend(AVERAGED, kept=AVERAGED_IN_SHORT), *AVERAGED_BY_OTHERS])
def test_averaged_weights_are_evaluated_and_saved_and_the_others_trained(
    workers: Workers, name: str, layout: str
) -> None:
    parallel = {
        **LAYOUTS,
        "one": ParallelConfig(),
        "zero0": ParallelConfig(dp_shard=2, zero=0),
        "zero2": ParallelConfig(dp_shard=2, zero=2),
        "replicas": ParallelConfig(dp_replicate=2, dp_shard=1),
    }[layout]
    workers.run(evaluates_and_saves_the_average, 1 if layout == "one" else 2, parallel, name)


def evaluate_in_between(name: str, every: bool) -> dict[str, Tensor]:
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), OPTIMIZERS[name])
    for step in range(3):
        train_steps(engine, step, step + 1)
        if every:
            engine.evaluate(microbatches(engine, global_batch(seed=90 + step)), CAUSAL)
            engine.state_dict()
    return weights(engine)


@pytest.mark.parametrize("name", ["schedule_free_adamw", "muon, weights averaged"])
def test_evaluating_and_saving_leave_no_trace(workers: Workers, name: str) -> None:
    runs = (workers.run(evaluate_in_between, 2, name, every) for every in (True, False))
    for often, never in zip(*runs, strict=True):
        assert all(torch.equal(tensor, never[name]) for name, tensor in often.items())


class RowOptimizer(torch.optim.Optimizer):
    """Looks at whole rows, and says that it doesn't."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["rows"] = weight.grad.norm(dim=1)


def test_an_optimizer_that_is_not_elementwise_is_found_out() -> None:
    weight = torch.ones(3, 2)
    optimizer = ElementwiseOptimizer(OptimizerGroup(["w"], "elementwise", RowOptimizer), {"w": weight})
    optimizer.step({"w": weight.clone()}, 0.1)
    with pytest.raises(MegatfmError, match=r"state rows of w is \[3\], its block \[3, 2\].*granularity='whole_tensor'"):
        optimizer.state()


def test_the_state_of_a_shard_without_rows_is_loaded() -> None:
    """ZeRO leaves the last ranks none where a weight has fewer rows than there are ranks."""
    group = OptimizerGroup(["w"], "elementwise", torch.optim.AdamW)
    optimizers = [ElementwiseOptimizer(group, {"w": torch.ones(0, 2)}) for _ in range(2)]
    optimizers[0].step({"w": torch.ones(0, 2)}, 0.1)
    optimizers[1].load(optimizers[0].state())
    state = optimizers[1].state()["w"]
    assert (state["step"], state["exp_avg"].shape) == (1, (0, 2))


def test_names_that_share_options_share_torch_s_group() -> None:
    group = OptimizerGroup(
        ["a", "b", "c"],
        "elementwise",
        RowOptimizer,
        options={"a": {"weight_decay": 0.0}, "b": {"weight_decay": 0.0}, "c": {"weight_decay": 0.1}},
        lr_ratios={"b": 0.5},
    )
    tensors = {name: torch.zeros(1) for name in "abc"}
    groups = group.make_param_groups({**tensors, "d": torch.zeros(1)})
    assert [names for names, _ in groups] == [["a"], ["b"], ["c"], ["d"]]
    same = OptimizerGroup(list("abc"), "elementwise", RowOptimizer).make_param_groups(tensors)
    assert [names for names, _ in same] == [["a", "b", "c"]]
    assert same[0][1]["lr_ratio"] == 1.0
