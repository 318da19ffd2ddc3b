"""Expected traffic between pipeline stages: b·s·h elements at each boundary. All divisions into stages are tried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.cost import ENCODER_TOKENS, TokenCounts, sum_costs
from megatfm.engines.interface import PRECISIONS
from megatfm.objectives import target_fraction
from megatfm.verify.layouts import PIPELINE
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic


@dataclass(frozen=True)
class ExpectedStage:
    """Run of the model's split points on a pipeline rank.

    inputs: name → spec of the tensors from earlier stages. inputs_with_grad: names of those whose gradients are sent
    back.
    """

    index: int
    rank: int
    split_points: Sequence[Any]
    inputs: Mapping[str, Any]
    inputs_with_grad: frozenset[str]


@dataclass(frozen=True)
class ExpectedPipeline:
    """All stages of a model, and the pipeline ranks that hold each parameter and module. sequence_shards: ranks that
    shard the sequence."""

    stages: Sequence[ExpectedStage]
    holders: Mapping[str, tuple[int, ...]]
    module_holders: Mapping[str, tuple[int, ...]]
    sequence_shards: int

    def list_stages(self, rank: int) -> list[ExpectedStage]:
        """Return the stages of a pipeline rank in order."""
        return [stage for stage in self.stages if stage.rank == rank]


def divide_into_stages(config: Config, model: nn.Module) -> ExpectedPipeline:
    """Divide the model's split points into stages: of all divisions the one with the least sum of squared costs."""
    parallel, points = config.parallel, list(model.split_points)  # type: ignore[arg-type]
    rank_of = _list_stage_ranks(parallel.pp_schedule, parallel.pp, parallel.stages_per_rank)
    costs = _compute_costs(config, model, points)
    starts = [i for i, point in enumerate(points) if i and (costs[i] > 0 or point.name.endswith("embedding"))]
    bounds = _find_min_cost_bounds(starts, costs, len(rank_of))
    stages = []
    for index, (first, last) in enumerate(zip((0, *bounds), (*bounds, len(points)), strict=True)):
        inputs = _find_carried_inputs(points, first)
        inputs_with_grad = frozenset(inputs) & _find_trained_outputs(model, points[:first])
        stages.append(ExpectedStage(index, rank_of[index], points[first:last], inputs, inputs_with_grad))
    modules = [_collect_modules(model, stages, rank) for rank in range(parallel.pp)]
    weights = [{p for module in owned for p in module.parameters(recurse=False)} for owned in modules]
    holders = {
        name: tuple(rank for rank, held in enumerate(weights) if parameter in held)
        for name, parameter in model.named_parameters()
    }
    module_holders = {
        path: tuple(rank for rank, held in enumerate(modules) if module in held)
        for path, module in model.named_modules()
    }
    return ExpectedPipeline(stages, holders, module_holders, parallel.tp if parallel.sequence_parallel else 1)


def add_pipeline(
    traffic: ExpectedTraffic,
    config: Config,
    pipeline: ExpectedPipeline,
    rank: int,
    batch: Arrays,
    microbatches: Sequence[int],
) -> None:
    """Add the bytes that a pipeline rank sends.

    Activations cross each boundary between stages on different ranks; their gradients return if weights before the
    boundary are trained. Integer tensors, such as ELECTRA's corrupted tokens, go one way only. A contrastive loss has a
    forward pass of its own before.
    """
    n_forward = 1 if config.model.contrastive is None else 2
    computed, rows = PRECISIONS[config.train.precision].compute_dtype.itemsize, config.train.micro_batch
    for i in microbatches:
        tensors = {name: torch.from_numpy(values[i * rows :][:rows]) for name, values in batch.items()}
        for stage in pipeline.stages[1:]:
            previous_rank = pipeline.stages[stage.index - 1].rank
            for name, spec in stage.inputs.items() if previous_rank != stage.rank else ():
                elements = _count_elements(spec, tensors, pipeline.sequence_shards)
                for _ in range(n_forward if previous_rank == rank else 0):
                    traffic.send(PIPELINE, elements * (8 if spec.d_model is None else computed))
                if stage.rank == rank and name in stage.inputs_with_grad:
                    traffic.send(PIPELINE, elements * computed)


def _list_stage_ranks(schedule: str, ranks: int, stages_per_rank: int) -> list[int]:
    """Return the rank of each stage: in a loop over the ranks, or in a V for schedules of that shape."""
    if schedule in ("zbv", "dualpipev"):
        return [*range(ranks), *range(ranks - 1, -1, -1)]
    return list(range(ranks)) * stages_per_rank


def _compute_costs(config: Config, model: nn.Module, points: Sequence[Any]) -> list[float]:
    lengths = {
        "tokens": config.data.target_length or config.data.sequence_length or 1,
        ENCODER_TOKENS: config.data.sequence_length or 0,
    }
    predicted_share = target_fraction(config.objective)
    costs = []
    for point in points:
        tokens = TokenCounts(lengths.get(point.token_field, 1), lengths.get(ENCODER_TOKENS, 0), predicted_share)
        cost = sum_costs((model.get_submodule(path) for path in point.modules), tokens)
        costs.append(cost.matmul_macs + cost.attention_macs)
    return costs


def _find_min_cost_bounds(starts: Sequence[int], costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the first split points of all stages but the first, at least cost; ties go to the earliest last stages."""

    def rank_division(bounds: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        stage_costs = [sum(costs[first:last]) for first, last in zip((0, *bounds), (*bounds, len(costs)), strict=True)]
        return sum(cost**2 for cost in stage_costs), bounds[::-1]

    return min(combinations(starts, stages - 1), key=rank_division)


def _find_carried_inputs(points: Sequence[Any], first: int) -> dict[str, Any]:
    """Return name → spec of the tensors that split points before `first` write and later ones read."""
    read_names: set[str] = set()
    written_names: set[str] = set()
    for point in points[first:]:
        read_names |= set(point.reads) - written_names
        written_names |= set(point.writes)
    fields = {name: spec for point in points[:first] for name, spec in point.writes.items()}
    return {name: fields[name] for name in sorted(read_names & fields.keys())}


def _find_trained_outputs(model: nn.Module, points: Sequence[Any]) -> set[str]:
    """Return the names of these split points' outputs that depend on trained weights."""
    trained_names: set[str] = set()
    for point in points:
        weights = (p for path in point.modules for p in model.get_submodule(path).parameters())
        is_trained = any(p.requires_grad for p in weights) or not trained_names.isdisjoint(point.reads)
        for name, spec in point.writes.items():
            (trained_names.add if is_trained and spec.d_model is not None else trained_names.discard)(name)
    return trained_names


def _collect_modules(model: nn.Module, stages: Sequence[ExpectedStage], rank: int) -> set[nn.Module]:
    """Return the modules that a pipeline rank runs, with their submodules."""
    points = (point for stage in stages if stage.rank == rank for point in stage.split_points)
    paths = {path for point in points for path in point.modules}
    return {module for path in paths for module in model.get_submodule(path).modules()}


def _count_elements(spec: Any, batch: Mapping[str, Tensor], sequence_shards: int) -> int:
    rows, length = batch[spec.shape_of].shape[:2]
    if spec.length_of is not None:
        length = spec.length_of(batch)
    return rows * (length if spec.d_model is None else length // sequence_shards * spec.d_model)
