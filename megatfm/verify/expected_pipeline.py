"""Traffic between pipeline stages: b·s·h elements for each boundary. How stages divide is found by trying all ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.cost import ENCODER_TOKENS, TokenCounts, total_cost
from megatfm.engines.interface import PRECISIONS
from megatfm.objectives import target_fraction
from megatfm.verify.axes import PIPELINE
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic


@dataclass(frozen=True)
class ExpectedStage:
    """A run of the model's split points on a pipeline rank. takes: what earlier stages hand it, by name; returns: names
    of those that get gradients back."""

    index: int
    rank: int
    split_points: Sequence[Any]
    takes: Mapping[str, Any] = field(default_factory=dict)
    returns: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stages:
    """All stages, and the pipeline ranks that use each parameter and each module."""

    stages: Sequence[ExpectedStage]
    holders: Mapping[str, tuple[int, ...]]
    module_holders: Mapping[str, tuple[int, ...]]
    sequence_parts: int

    def of_rank(self, rank: int) -> list[ExpectedStage]:
        """Stages of a pipeline rank, in their order."""
        return [stage for stage in self.stages if stage.rank == rank]


def divide(config: Config, model: nn.Module) -> Stages:
    """The division of the model's split points whose sum of squared costs is least, of all that there are."""
    parallel, points = config.parallel, list(model.split_points)  # type: ignore[arg-type]
    rank_of = _stage_ranks(parallel.pp_schedule, parallel.pp, parallel.stages_per_rank)
    costs = _costs(config, model, points)
    starts = [i for i, point in enumerate(points) if i and (costs[i] > 0 or point.name.endswith("embedding"))]
    bounds = _cheapest(starts, costs, len(rank_of))
    stages = []
    for index, (first, last) in enumerate(zip((0, *bounds), (*bounds, len(points)), strict=True)):
        takes = _handed_on(points, first)
        returns = frozenset(takes) & _trained(model, points[:first])
        stages.append(ExpectedStage(index, rank_of[index], points[first:last], takes, returns))
    users = {rank: _used(model, stages, rank) for rank in range(parallel.pp)}
    holders = {
        name: tuple(rank for rank, used in users.items() if parameter in used.parameters)
        for name, parameter in model.named_parameters()
    }
    module_holders = {
        path: tuple(rank for rank, used in users.items() if module in used.modules)
        for path, module in model.named_modules()
    }
    return Stages(stages, holders, module_holders, parallel.tp if parallel.sequence_parallel else 1)


def add_pipeline(
    ledger: ExpectedTraffic,
    config: Config,
    stages: Stages,
    pp: int,
    batch: Arrays,
    microbatches: Sequence[int],
) -> None:
    """Add what a pipeline rank sends: for each boundary between stages of two ranks the activations, and where weights
    before it are trained, their gradients back. What is int64, as ELECTRA's corrupted tokens, goes one way."""
    computed, rows = PRECISIONS[config.train.precision].compute_dtype.itemsize, config.train.micro_batch
    for i in microbatches:
        inputs = {name: torch.from_numpy(values[i * rows :][:rows]) for name, values in batch.items()}
        for stage in stages.stages[1:]:
            previous_rank = stages.stages[stage.index - 1].rank
            for name, field_ in stage.takes.items() if previous_rank != stage.rank else ():
                elements = _elements(field_, inputs, stages.sequence_parts)
                if previous_rank == pp:
                    ledger.send(PIPELINE, elements * (8 if field_.d_model is None else computed))
                if stage.rank == pp and name in stage.returns:
                    ledger.send(PIPELINE, elements * computed)


def _stage_ranks(schedule: str, ranks: int, virtual: int) -> list[int]:
    """Rank of each stage: round and round, or in a V for those schedules."""
    if schedule in ("zbv", "dualpipev"):
        return [*range(ranks), *range(ranks - 1, -1, -1)]
    return list(range(ranks)) * virtual


def _costs(config: Config, model: nn.Module, points: Sequence[Any]) -> list[float]:
    lengths = {
        "tokens": config.data.target_length or config.data.sequence_length or 1,
        ENCODER_TOKENS: config.data.sequence_length or 0,
    }
    predicted = target_fraction(config.objective)
    costs = []
    for point in points:
        tokens = TokenCounts(lengths.get(point.token_field, 1), lengths.get(ENCODER_TOKENS, 0), predicted)
        cost = total_cost((model.get_submodule(path) for path in point.modules), tokens)
        costs.append(cost.matmul_macs + cost.attention_macs)
    return costs


def _cheapest(starts: Sequence[int], costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First split points of all stages but the first. Of equal divisions the one whose last stages begin earliest."""

    def price(bounds: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        parts = [
            sum(costs[first:last]) for first, last in zip((0, *bounds), (*bounds, len(costs)), strict=True)
        ]
        return sum(part**2 for part in parts), bounds[::-1]

    return min(combinations(starts, stages - 1), key=price)


def _handed_on(points: Sequence[Any], first: int) -> dict[str, Any]:
    """Values that split points from `first` on read before they write them, and earlier ones write."""
    read_names: set[str] = set()
    written_names: set[str] = set()
    for point in points[first:]:
        read_names |= set(point.reads) - written_names
        written_names |= set(point.writes)
    fields = {name: field_ for point in points[:first] for name, field_ in point.writes.items()}
    return {name: fields[name] for name in sorted(read_names & fields.keys())}


def _trained(model: nn.Module, points: Sequence[Any]) -> set[str]:
    """Names of what these split points leave behind that depends on weights which are trained."""
    depends: set[str] = set()
    for point in points:
        weights = (p for path in point.modules for p in model.get_submodule(path).parameters())
        trains = any(p.requires_grad for p in weights) or not depends.isdisjoint(point.reads)
        for name, field_ in point.writes.items():
            (depends.add if trains and field_.d_model is not None else depends.discard)(name)
    return depends


@dataclass(frozen=True)
class _Used:
    parameters: set[nn.Parameter]
    modules: set[nn.Module]


def _used(model: nn.Module, stages: Sequence[ExpectedStage], rank: int) -> _Used:
    paths = {
        path
        for stage in stages
        if stage.rank == rank
        for point in stage.split_points
        for path in point.modules
    }
    modules = {module for path in paths for module in model.get_submodule(path).modules()}
    return _Used({p for module in modules for p in module.parameters(recurse=False)}, modules)


def _elements(field_: Any, inputs: Mapping[str, Tensor], sequence_parts: int) -> int:
    rows, length = inputs[field_.shape_of].shape[:2]
    if field_.length_of is not None:
        length = field_.length_of(inputs)
    return rows * (length if field_.d_model is None else length // sequence_parts * field_.d_model)
