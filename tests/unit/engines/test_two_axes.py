"""A parameter that two axes of the model cut, with data axes of its own, as experts will be: where it is, how it
starts, its gradients, their norm, checkpoints and comparisons of copies, each against one device."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatfm import checkpoint
from megatfm.config import ParallelConfig
from megatfm.engines.interface import OptimizerGroup, ParallelizedModel
from megatfm.engines.native.engine import NativeEngine, NativeOptions
from megatfm.engines.native.zero import ZeroOptions
from megatfm.errors import MegatfmError
from megatfm.layers.initialisation import Normal, initialise
from megatfm.parallel.collectives import (
    TensorParallelGroup,
    all_gather,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
)
from megatfm.parallel.layout import Shard, TensorLayout
from megatfm.parallel.mesh import DataAxes, Mesh, build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.parallel.styles import STYLES, Layouts, ParallelStyle
from megatfm.train.resilience import compare_replicas
from tests.support.layouts import extend
from tests.support.parity import local_block
from tests.support.workers import Workers

EXPERT_AXIS = "dp_replicate"
"""Experts are divided over these ranks; the rows of all of them go to each expert."""
D, F, E, ROWS = 6, 8, 4, 8
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
TP_DIMS = {"up": 2, "down": 1}


class Experts(nn.Module):
    """y = Σₑ tanh(scale · x upₑ) downₑ, over all experts."""

    tp_plan = (("", "experts on two axes"),)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(E, D, F)), nn.Parameter(torch.empty(E, F, D))
        self.scale = nn.Parameter(torch.empty(F))
        self.initial = {"up": Normal(0.5), "down": Normal(0.4), "scale": Normal(0.3)}

    def forward(self, x: Tensor) -> Tensor:
        local = slice(0, self.up.shape[2])  # of the scales, those of the features that are here
        if hasattr(self, "first"):
            local = slice(self.first, self.first + self.up.shape[2])
        inner = torch.tanh(torch.einsum("bd,edf->ebf", x, self.up) * self.scale[local])
        return torch.einsum("ebf,efd->bd", inner, self.down)


class Layer(nn.Module):
    tp_plan = (("dense", "replicated"),)

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(D, D), Experts()
        self.dense.initial = {"weight": Normal(0.3), "bias": Normal(0.2)}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.dense(x))


class Model(nn.Module):
    tp_plan = (("head", "replicated"),)

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Module()
        self.stack.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(D, 3)
        self.head.initial = {"weight": Normal(0.3), "bias": Normal(0.2)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stack.layers:
            x = layer(x)
        return self.head(x)


def placed(placement: TensorLayout, mesh: Mesh) -> TensorLayout:
    """Experts over one axis, their inner width over tensor parallelism; what all share has a share of its gradient."""
    key, data = placement.name.rpartition(".")[2], DataAxes(("dp_shard",))
    if key == "scale":
        return replace(placement, partial_axes=("dp_replicate", "tp"), data_axes=data)
    axes = ((EXPERT_AXIS, 0), ("tp", TP_DIMS[key]))
    cuts = tuple(Shard(axis, dim, mesh.rank(axis), mesh.size(axis)) for axis, dim in axes)
    return replace(placement, shards=cuts, data_axes=data, fsdp_dim=1 if key == "up" else 0)


GROUPS: dict[str, ProcessGroup] = {}


def route(module: nn.Module, ranks: TensorParallelGroup, layouts: Layouts) -> None:
    """Every expert's ranks see the rows of all of them."""
    genuine, experts = module.forward, GROUPS[EXPERT_AXIS]
    module.first = ranks.rank * F // ranks.group.size()

    def forward(x: Tensor) -> Tensor:
        everyone = copy_to_group(all_gather(x, 0, experts), ranks.group)
        summed = reduce_scatter(reduce_from_group(genuine(everyone), ranks.group), 0, experts)
        return summed.clone()  # FSDP2 puts its hooks on what a module returns, and warns of a view

    module.forward = forward


STYLES.register("experts on two axes")(ParallelStyle("experts on two axes", shard_experts=placed, apply=route))


LAYOUTS = {
    4: {**{f"zero {z}": ParallelConfig(dp_replicate=2, dp_shard=1, tp=2, zero=z) for z in (0, 1, 3)}},
    8: {f"zero {z}": ParallelConfig(dp_replicate=2, dp_shard=2, tp=2, zero=z) for z in range(4)},
}


class Squares:
    loss_weights: Mapping[str, float] = {"squares": 1.0}

    def target_counts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"squares": batch["x"].new_tensor(len(batch["x"]))}

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"squares": model(batch["x"]).square().sum()}


def make_engine(parallel: ParallelConfig) -> NativeEngine:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    GROUPS[EXPERT_AXIS] = mesh.group(EXPERT_AXIS)
    with torch.device("meta"):
        model = Model()
    names = [name for name, _ in model.named_parameters()]
    adamw = OptimizerGroup(names, "elementwise", lambda groups: torch.optim.AdamW(groups, **ADAMW))
    layout = parallelize(model, mesh, sequence_parallel=False)
    parallelized = ParallelizedModel(model=model, layout=layout, mesh=mesh, device=torch.device("cpu"))
    options = NativeOptions(ZeroOptions(parallel.zero, parallel.grad_accumulation))
    return NativeEngine(parallelized, [adamw], precision="fp64", seed=7, options=options)


def one_device() -> Model:
    model = Model().double()
    initialise(model, 7)
    return model


def rows() -> Tensor:
    return torch.randn(ROWS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def forward_backward(engine: NativeEngine) -> float:
    item = ROWS // engine.mesh.data_ranks
    rows_of_rank = rows()[engine.mesh.data_rank * item :][:item]
    return engine.forward_backward(
        [{"x": rows_of_rank[:1]}, {"x": rows_of_rank[1:]}] if item > 1 else [{"x": rows_of_rank}], Squares()
    ).loss


def compare(world: int, folder: Path) -> None:
    for layout, parallel in LAYOUTS[world].items():
        engine, model = make_engine(parallel), one_device()
        for name, parameter in model.named_parameters():
            assert torch.equal(local_block(engine, name, parameter.detach()), engine.local[name]), (layout, name)
        loss = model(rows()).square().sum() / ROWS
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert forward_backward(engine) == pytest.approx(loss.item(), rel=1e-12)
        floor = 1e-6 * torch.cat([g.flatten() for g in expected.values()]).norm()
        gradients = engine.gradients()
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            error = (gradient - local_block(engine, name, expected[name])).norm()
            assert error <= 1e-9 * max(expected[name].norm(), floor), (layout, name, float(error))
        actual = engine.layer_statistics()["stack.layers.0"]
        for kind, tensors in (("weight", dict(model.named_parameters())), ("gradient", expected)):
            full = torch.cat([t.detach().flatten() for n, t in tensors.items() if n.startswith("stack.layers.0.")])
            assert actual[kind] == pytest.approx(float(full.square().mean() ** 0.5), rel=1e-9), (layout, kind)
        norm = torch.cat([g.flatten() for g in expected.values()]).norm()
        assert engine.step(1e-2, clip=0.1) == pytest.approx(float(norm), rel=1e-12), layout
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.AdamW(model.parameters(), lr=1e-2, **ADAMW).step()
        for name, parameter in model.named_parameters():
            stepped = local_block(engine, name, parameter.detach())
            torch.testing.assert_close(engine.local[name], stepped, rtol=1e-9, atol=1e-12)
        compare_replicas(engine, step=1, every=1)
        checkpoint.save(folder / layout, 1, engine.state_dict(), {})
        loaded = make_engine(parallel)
        checkpoint.load(folder / layout / "step-00000001", {f"model.{n}": b for n, b in loaded.weights().items()})
        assert all(torch.equal(block, engine.local[name]) for name, block in loaded.local.items())


@pytest.mark.parametrize("world", extend(LAYOUTS, kept=[4]))
def test_gradients_norms_and_checkpoints_are_those_of_one_device(workers: Workers, tmp_path: Path, world: int) -> None:
    workers.run(compare, world, world, tmp_path)
    # The boxes fill every tensor, once, or a save would have said so.
    actual = {layout: checkpoint.read_tensors(tmp_path / layout / "step-00000001") for layout in LAYOUTS[world]}
    shapes = {name: p.shape for name, p in Model().named_parameters()}
    first = next(iter(actual.values()))
    for layout, tensors in actual.items():
        assert {n.removeprefix("model."): t.shape for n, t in tensors.items() if n.startswith("model.")} == shapes
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, first[name], rtol=1e-9, atol=1e-12, msg=f"{layout}: {name}")


def flipped(kind: str) -> str:
    """A bit flips on the last of the ranks that hold this copy; experts of other ranks are no copies of it."""
    engine = make_engine(ParallelConfig(dp_replicate=2, dp_shard=2, tp=1, zero=0))
    name = f"stack.layers.0.{kind}"
    if dist.get_rank() == 3:
        engine.local[name].view(-1)[0] += 1
    try:
        compare_replicas(engine, step=1, every=1)
    except MegatfmError as error:
        return str(error)
    return "nothing was found"


@pytest.mark.parametrize("kind", ["experts.up", "dense.weight"])
def test_copies_are_compared_with_copies(workers: Workers, kind: str) -> None:
    messages: list[Any] = workers.run(flipped, 4, kind)
    for rank in (2, 3) if kind == "experts.up" else (3,):
        assert f"rank {rank} on " in messages[0], messages[0]
    assert f"model.stack.layers.0.{kind}" in messages[0]
    assert "rank 0" not in messages[0]
    assert "rank 1" not in messages[0]
