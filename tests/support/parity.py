"""Engines of small models, and the gradients of one device that theirs must equal."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from megatfm.config import ModelConfig, OptimizerSection, ParallelConfig
from megatfm.engines.interface import ParallelizedModel
from megatfm.engines.native.compile import CompileOptions
from megatfm.engines.native.cuda_graphs import GraphCapture
from megatfm.engines.native.engine import NativeEngine, NativeOptions
from megatfm.engines.native.zero import ZeroOptions
from megatfm.layers.block import collect_auxiliary_losses
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives.base import DECODER_ONLY, ENCODER_DECODER, ObjectiveWithAuxiliaryLosses
from megatfm.ops.cross_entropy import cross_entropy_reference
from megatfm.optim.parameters import build_optimizer_groups
from megatfm.parallel.mesh import build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.parallel.pipeline_stages import prune_to_stages, split_into_stages
from tests.support.batches import PassThroughObjective
from tests.support.models import ADAMW, LENGTH, ROWS


def one_device(config: ModelConfig, seed: int = 7) -> nn.Module:
    """The whole model in float64, with the initial weights of an engine with this seed."""
    model = build(config).double()
    initialise(model, seed)
    return model


def one_device_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by plain autograd through all logits at once."""
    model.zero_grad()
    inputs = {name: batch[name] for name in ("positions", "documents", "keys") if name in batch}
    hidden = model(batch["tokens"], **inputs).hidden
    loss = cross_entropy_reference(hidden.flatten(0, 1), model.get_parameter("head.weight"), batch["targets"].flatten())
    loss = loss / (batch["targets"] != -100).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


ROW_LENGTHS = {"tokens": LENGTH, "encoder_tokens": LENGTH}
GRADIENT_BOUND = 1e-9


def build_engine(
    config: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerSection = ADAMW,
    *,
    build_model: Callable[[ModelConfig], nn.Module] = build,
    precision: str = "fp64",
    recomputed: str = "none",
    compile_blocks: bool = False,
    async_tp: bool = False,
    graphs: GraphCapture | None = None,
) -> NativeEngine:
    """An engine on the ranks of the process group, cut into pipeline stages where the layout has them."""
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with torch.device("meta"):
        model = build_model(config)
    optimizers = build_optimizer_groups(optimizer, model)
    pipeline = None
    if parallel.pp > 1:
        pipeline = split_into_stages(
            model, parallel.pp_schedule, parallel.pp, parallel.stages_per_rank, lengths=ROW_LENGTHS,
            pp_split_points=parallel.pp_split_points, sequence_shards=parallel.tp if parallel.sequence_parallel else 1,
        )  # fmt: skip
    layout = parallelize(model, mesh, sequence_parallel=parallel.sequence_parallel, cp_method=parallel.cp_method)
    if pipeline is not None:
        prune_to_stages(model, pipeline.list_stages(mesh.rank("pp")))
    compilation = CompileOptions(async_tp=async_tp) if compile_blocks else None
    options = NativeOptions(ZeroOptions.from_config(parallel), recomputed, compilation, graphs)
    parallelized = ParallelizedModel(
        model=model, layout=layout, mesh=mesh, device=torch.device("cpu"), pipeline=pipeline
    )
    return NativeEngine(parallelized, optimizers, precision=precision, seed=7, options=options)


@dataclass(frozen=True)
class Compilation:
    """Blocks that were compiled, with torch's options for each, and the graphs that were made of them."""

    blocks: list[tuple[nn.Module, dict[str, Any]]]
    graphs: list[GraphModule]


@contextmanager
def compile_blocks_by(name: str) -> Iterator[Compilation]:
    """Compile blocks by a backend of torch that makes no machine code, which would take minutes."""
    compilation, real, backend = Compilation([], []), nn.Module.compile, torch._dynamo.lookup_backend(name)

    def make_graph(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compilation.graphs.append(graph)
        compiled: Callable[..., Any] = backend(graph, inputs)
        return compiled

    def compile_block(block: nn.Module, **options: Any) -> None:
        compilation.blocks.append((block, options))
        real(block, **options, backend=make_graph)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: its tracer looks at .grad of what is no leaf
        patch.setattr(nn.Module, "compile", compile_block)
        yield compilation
    torch._dynamo.reset()


def rank_rows(engine: NativeEngine, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This data rank's rows of a batch of ROWS; some ranks have more where their number doesn't divide it."""
    rank, ranks = engine.mesh.data_rank, engine.mesh.data_ranks
    return {key: value[ROWS * rank // ranks : ROWS * (rank + 1) // ranks] for key, value in batch.items()}


def microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows in micro-batches of two, as many on all ranks; the last may have one, or three."""
    rows = rank_rows(engine, batch)
    bounds = [*range(0, ROWS // engine.mesh.data_ranks, 2), ROWS]
    return [{key: value[a:b] for key, value in rows.items()} for a, b in pairwise(bounds)]


def uneven_microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows in micro-batches of one or two, the last of one row alone."""
    rows, count = rank_rows(engine, batch), ROWS // engine.mesh.data_ranks
    bounds = [*range(0, count - 1, 2), count - 1, count]
    return [{key: value[a:b] for key, value in rows.items()} for a, b in pairwise(bounds)]


def layout_microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Uneven micro-batches for pipeline stages, others of two rows."""
    return (uneven_microbatches if engine.pipeline else microbatches)(engine, batch)


def weighted_loss(objective: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sum of a model's terms, each by its weight and over its number of targets in the batch."""
    return _weighted_sum(objective, PassThroughObjective([])(model, batch), batch)


def _weighted_sum(objective: Any, terms: Mapping[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    counts = objective.target_counts(batch)
    return torch.stack([objective.loss_weights[term] * terms[term] / counts[term] for term in terms]).sum()


def objective_with_auxiliary_losses(config: ModelConfig, terms: Iterable[str]) -> Any:
    """An objective with these terms of a model, among which are those of its blocks."""
    auxiliary = collect_auxiliary_losses(config)
    objective: Any = PassThroughObjective([term for term in terms if term not in auxiliary], auxiliary)
    objective.field_prefixes = ENCODER_DECODER if config.family == "encoder_decoder" else DECODER_ONLY
    return ObjectiveWithAuxiliaryLosses(objective, auxiliary)


def backward_on_one_device(config: ModelConfig, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, float]:
    """Compute a model's gradients; returns the objective that they are of, and the loss."""
    terms = PassThroughObjective([])(model, batch)
    assert collect_auxiliary_losses(config).keys() <= terms.keys()
    objective = objective_with_auxiliary_losses(config, terms)
    loss = _weighted_sum(objective, terms, batch)
    loss.backward()
    return objective, loss.item()


def one_device_reference(
    config: ModelConfig, batch: dict[str, Tensor], objective_class: type[PassThroughObjective] = PassThroughObjective
) -> tuple[nn.Module, PassThroughObjective, float]:
    """One device: the model with its gradients, the objective and the loss."""
    model = build(config).double().train()
    initialise(model, 7)
    terms = objective_class([])(model, batch)
    objective = objective_class(list(terms))
    assert min(objective.target_counts(batch).values()) > 0
    loss = _weighted_sum(objective, terms, batch)
    loss.backward()
    return model, objective, float(loss.detach())


def local_block(engine: NativeEngine, name: str, tensor: Tensor) -> Tensor:
    """This rank's block of a parameter's whole tensor."""
    offsets, sizes = engine.regions[name]
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


def gradient_errors(engine: NativeEngine, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Errors ‖g−r‖ / max(‖r‖, 1e-6·‖all gradients‖) of this rank's blocks, those over the bound."""
    assert engine.gradients().keys() == expected.keys()
    return _errors_over_bound(engine, expected)


def model_gradient_errors(engine: NativeEngine, model: nn.Module) -> dict[str, float]:
    """Compare with the gradients of a complete model, for an engine that may hold a part of its parameters.

    A parameter that the engine holds without a gradient has an error of NaN.
    """
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    errors = _errors_over_bound(engine, expected)
    return errors | dict.fromkeys(engine.local.keys() - engine.gradients().keys(), float("nan"))


def _errors_over_bound(engine: NativeEngine, expected: Mapping[str, Tensor]) -> dict[str, float]:
    floor = 1e-6 * torch.cat([g.flatten() for g in expected.values()]).norm()
    errors = {
        name: float((g - local_block(engine, name, expected[name])).norm() / max(expected[name].norm(), floor))
        for name, g in engine.gradients().items()
    }
    return {name: error for name, error in errors.items() if not error <= GRADIENT_BOUND}  # NaN is over it


EVERYTHING = {"*"}
"""Patterns of all parameters whose gradient is not zero on one device."""


def list_expected_errors(model: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Return the parameters of a model with gradients whose gradients a fault makes wrong.

    patterns: of names, each of which matches some; those behind a minus are left out. A bias of keys shifts all scores
    of a query alike, and so has no gradient under a softmax: only a pattern with `wk` in it stands for one in which a
    fault leaves a gradient.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bound = 1e-12 * torch.cat([g.flatten() for g in gradients.values()]).norm()
    zero = {name for name, gradient in gradients.items() if gradient.norm() <= bound}
    assert all(fnmatchcase(name, "*.wk*.bias") for name in zero), sorted(zero)

    for pattern in patterns:
        assert any(fnmatchcase(name, pattern.removeprefix("-")) for name in gradients), pattern

    def is_expected(name: str) -> bool:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("-"))]
        return any(name not in zero or "wk" in p for p in matching) and not any(p.startswith("-") for p in matching)

    expected = set(filter(is_expected, gradients))
    assert expected
    return expected
