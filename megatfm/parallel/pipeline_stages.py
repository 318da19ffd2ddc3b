"""Pipeline stages: where a model is split, which rank holds which modules, and pruning a model to a rank's stages.

This module knows a model by its list of split points (`megatfm.split_points`). A rank keeps the modules of its own
stages; if stages of several ranks use a parameter, each of them holds it under the same name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from megatfm.cost import ENCODER_TOKENS, TokenCounts, sum_costs
from megatfm.errors import UsageError
from megatfm.parallel.pipeline_schedule import stage_to_rank
from megatfm.split_points import CarrySpec, SplitPoint, Splittable, find_live_fields


@dataclass(frozen=True)
class PipelineStage:
    """A slice of a model's split points. inputs, outputs: fields of the carry that it receives and sends."""

    index: int
    rank: int
    split_points: Sequence[SplitPoint]
    inputs: Mapping[str, CarrySpec]
    outputs: Mapping[str, CarrySpec]
    produced: frozenset[str]
    """Outputs that its split points write; the others only pass through."""
    inputs_with_grad: frozenset[str]
    """Inputs that depend on trained weights, so their gradients are sent back."""
    outputs_with_grad: frozenset[str]
    """Outputs that depend on trained weights."""
    cost: float
    """Multiply-accumulates of a row."""

    @property
    def module_paths(self) -> set[str]:
        """Paths of the modules that it runs, in the model."""
        return {path for point in self.split_points for path in point.modules}


@dataclass(frozen=True)
class StageOutput:
    """The fields of a model's output that an objective reads."""

    losses: Mapping[str, torch.Tensor]
    predictions: Mapping[str, torch.Tensor]
    """Features of an objective that compares samples; empty but in the stage that computes them."""


@dataclass(frozen=True)
class Pipeline:
    """All stages of a model, and the pipeline ranks of each parameter."""

    schedule: str
    ranks: int
    stages_per_rank: int
    stages: Sequence[PipelineStage]
    parameter_ranks: Mapping[str, tuple[int, ...]]
    sequence_shards: int = 1
    """Number of ranks that shard the sequence between blocks (tp with sequence parallelism)."""
    module_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Pipeline ranks of each module with buffers."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""

    @property
    def stage_to_rank(self) -> list[int]:
        """Pipeline rank of each stage; one rank holds several in an interleaved schedule."""
        return [stage.rank for stage in self.stages]

    def list_stages(self, rank: int) -> list[PipelineStage]:
        """Return the stages of a pipeline rank, in the order of the forward pass."""
        return [stage for stage in self.stages if stage.rank == rank]

    def format_table(self) -> str:
        """Return the stages as a table, for plan.txt."""
        total = sum(stage.cost for stage in self.stages)
        lines = [f"pipeline  {self.schedule}, {len(self.stages)} stages on {self.ranks} ranks", ""]
        lines.append(f"{'stage':<7}{'rank':<6}{'of the cost':<13}{'from':<34}{'to':<34}carries on")
        for stage in self.stages:
            first, last = stage.split_points[0].name, stage.split_points[-1].name
            share = f"{100 * stage.cost / total:.1f} %"
            line = f"{stage.index:<7}{stage.rank:<6}{share:<13}{first:<34}{last:<34}"
            lines.append((line + ", ".join(stage.outputs)).rstrip())
        shared = {name: ranks for name, ranks in self.parameter_ranks.items() if len(ranks) > 1}
        if shared:
            lines += ["", "held by several ranks, which sum its gradients:"]
            lines += [f"{name:<60}{', '.join(map(str, ranks))}" for name, ranks in shared.items()]
        return "\n".join(lines) + "\n"


def split_into_stages(
    model: nn.Module,
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    *,
    lengths: Mapping[str, int],
    predicted: float | None = None,
    pp_split_points: Sequence[str] | None = None,
    sequence_shards: int = 1,
) -> Pipeline:
    """Split a full model (on the meta device) into the stages of a schedule.

    lengths: tokens of each input, to weigh encoder against decoder. predicted: fraction of tokens that the objective
    predicts, if known. pp_split_points: names of the split points that begin all stages but the first; None: balance
    the costs.
    Raises UsageError for a model without split points, or with too few of them.
    """
    if not hasattr(model, "split_points"):
        raise UsageError(
            f"parallel.pp = {ranks}: this model family has no `split_points` for pipeline stages: set parallel.pp = 1 "
            "and use parallel.dp_shard"
        )
    points = cast(Splittable, model).split_points
    rank_of = stage_to_rank(schedule, ranks, stages_per_rank)
    costs = [compute_cost(model, point, lengths, predicted) for point in points]
    starts = [0, *(i for i, point in enumerate(points) if i and _may_begin(point, costs[i]))]
    if not pp_split_points and len(starts) < len(rank_of):
        raise UsageError(
            f"{len(rank_of)} pipeline stages (parallel.pp = {ranks}, {stages_per_rank} on each rank), but the model "
            f"can be cut into {len(starts)} at most: choose "
            f"{_suggest_layout(schedule, ranks, stages_per_rank, len(starts))}"
        )
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    if pp_split_points:
        bounds = _find_named_cuts(points, pp_split_points, len(rank_of))
    else:
        bounds = _balance_cuts(starts, costs, len(rank_of))
    stages = _make_stages(model, points, costs, rank_of, bounds)
    return Pipeline(
        schedule,
        ranks,
        stages_per_rank,
        stages,
        _find_parameter_holders(model, stages),
        sequence_shards,
        _find_module_holders(model, stages),
        frozen,
    )


def _make_stages(
    model: nn.Module,
    points: Sequence[SplitPoint],
    costs: Sequence[float],
    rank_of: Sequence[int],
    bounds: Sequence[int],
) -> list[PipelineStage]:
    """Make the stages. rank_of: each stage's rank. bounds: the first split point of each stage but the first."""
    trained = _find_trained_fields(model, points)
    stages = []
    for index, (first, last) in enumerate(zip([0, *bounds], [*bounds, len(points)], strict=True)):
        received, sent = find_live_fields(points, first), find_live_fields(points, last)
        stages.append(
            PipelineStage(
                index,
                rank_of[index],
                points[first:last],
                received,
                sent,
                frozenset(name for point in points[first:last] for name in point.writes),
                trained[first] & frozenset(received),
                trained[last] & frozenset(sent),
                sum(costs[first:last]),
            )
        )
    return stages


def compute_cost(
    model: nn.Module, point: SplitPoint, lengths: Mapping[str, int], predicted: float | None = None
) -> float:
    """Return the multiply-accumulates of a split point for all tokens of a row, in matmuls and attention."""
    tokens = TokenCounts(lengths.get(point.token_field, 1), lengths.get(ENCODER_TOKENS, 0), predicted)
    total = sum_costs((model.get_submodule(path) for path in point.modules), tokens)
    return total.matmul_macs + total.attention_macs


def _find_trained_fields(model: nn.Module, points: Sequence[SplitPoint]) -> list[frozenset[str]]:
    """Return the fields of the carry that depend on trained weights, before each split point and after the last."""
    trained = [frozenset[str]()]
    for point in points:
        trains = any(p.requires_grad for path in point.modules for p in model.get_submodule(path).parameters())
        depends = trains or bool(trained[-1].intersection(point.reads))
        written_hidden = {name for name, field in point.writes.items() if depends and field.d_model is not None}
        trained.append((trained[-1] - frozenset(point.writes)) | written_hidden)
    return trained


def _find_named_cuts(points: Sequence[SplitPoint], pp_split_points: Sequence[str], stages: int) -> list[int]:
    names = [point.name for point in points]
    unknown = [name for name in pp_split_points if name not in names[1:]]
    if unknown:
        raise UsageError(
            f"parallel.pp_split_points: no split point is called {unknown[0]!r} after the first; there are "
            f"{', '.join(names[1:])}"
        )
    bounds = [names.index(name) for name in pp_split_points]
    if len(bounds) != stages - 1 or bounds != sorted(set(bounds)):
        raise UsageError(
            f"parallel.pp_split_points = {list(pp_split_points)}: {stages} stages need {stages - 1} different names in "
            "the model's order"
        )
    return bounds


def _suggest_layout(schedule: str, ranks: int, stages_per_rank: int, max_stages: int) -> str:
    """Return the settings of the nearest layout with at most `max_stages` stages, for an error message."""
    if schedule.startswith("interleaved") and max_stages // ranks > 1:
        return f"parallel.virtual_stages = {max_stages // ranks}"
    if max_stages // stages_per_rank > 1:
        return f"parallel.pp = {max_stages // stages_per_rank}"
    return f"parallel.pp = {min(ranks, max_stages)} and parallel.pp_schedule = '1f1b'"


def _balance_cuts(starts: Sequence[int], costs: Sequence[float], stages: int) -> list[int]:
    """Find where stages 1, 2, … begin, such that the sum of squared stage costs is minimal (dynamic programming).

    starts: split points at which a stage may begin.
    """
    ends = [*starts[1:], len(costs)]
    unit_costs = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
    sums = [0.0]
    for unit_cost in unit_costs:
        sums.append(sums[-1] + unit_cost)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(unit_costs)]
    for _ in range(stages):
        row = [(float("inf"), 0)]
        for end in range(1, len(unit_costs) + 1):
            row.append(min((best[-1][start][0] + (sums[end] - sums[start]) ** 2, start) for start in range(end)))
        best.append(row)
    bounds, end = list[int](), len(unit_costs)
    for row in reversed(best[1:]):
        end = row[end][1]
        bounds.append(starts[end])
    return bounds[::-1][1:]


def _may_begin(point: SplitPoint, cost: float) -> bool:
    """Return whether a stage may begin here: at a point with matmuls, or at an embedding; never at a lone norm."""
    return cost > 0 or point.name.endswith("embedding")


def _find_parameter_holders(model: nn.Module, stages: Sequence[PipelineStage]) -> dict[str, tuple[int, ...]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    ranks_by_name: dict[str, set[int]] = {name: set() for name in names.values()}
    for stage in stages:
        for parameter in _find_used_parameters(model, [stage]):
            ranks_by_name[names[parameter]].add(stage.rank)
    if unused := [name for name, ranks in ranks_by_name.items() if not ranks]:
        raise UsageError(
            f"no split point of the model uses {unused[0]}, so no pipeline stage would hold it: add its module to the "
            "`modules` of a split point"
        )
    return {name: tuple(sorted(ranks)) for name, ranks in ranks_by_name.items()}


def _find_module_holders(model: nn.Module, stages: Sequence[PipelineStage]) -> dict[str, tuple[int, ...]]:
    used = {stage.rank: set[nn.Module]() for stage in stages}
    for stage in stages:
        for path in stage.module_paths:
            used[stage.rank].update(model.get_submodule(path).modules())
    return {
        path: tuple(sorted(rank for rank, modules in used.items() if module in modules))
        for path, module in model.named_modules()
        if next(module.buffers(recurse=False), None) is not None
    }


def _find_used_parameters(model: nn.Module, stages: Sequence[PipelineStage]) -> set[nn.Parameter]:
    paths = set[str]().union(*(stage.module_paths for stage in stages))
    return {parameter for path in paths for parameter in model.get_submodule(path).parameters()}


def prune_to_stages(model: nn.Module, stages: Sequence[PipelineStage]) -> None:
    """Remove all modules that these stages don't use.

    The owner of a tied parameter stays if a used module shares it, so that the parameter keeps its name.
    """
    used = _find_used_parameters(model, stages)
    paths = set[str]().union(*(stage.module_paths for stage in stages))
    kept_modules = {module for path in paths for module in model.get_submodule(path).modules()}
    owners = {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter in used}

    def prune(module: nn.Module, path: str) -> None:
        if path in owners and module not in kept_modules:
            for key, parameter in module.named_parameters(recurse=False):
                if parameter not in used:
                    setattr(module, key, None)
        for key, child in list(module.named_children()):
            inner = f"{path}.{key}" if path else key
            if child in kept_modules:
                continue
            if any(needed == inner or needed.startswith(f"{inner}.") for needed in (*owners, *paths)):
                prune(child, inner)
            else:
                vars(module)["_modules"][key] = None

    prune(model, "")


def compute_activation_shape(
    field: CarrySpec, batch: Mapping[str, torch.Tensor], sequence_shards: int
) -> tuple[int, ...]:
    """Return the shape of a field of the carry on a rank that holds one of `sequence_shards` shards of the sequence."""
    rows, length = batch[field.shape_of].shape[:2]
    if field.length_of is not None:
        length = field.length_of(batch)
    if field.d_model is None:
        return rows, length
    return rows, length // sequence_shards, field.d_model
