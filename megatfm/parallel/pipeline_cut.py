"""Cutting a model's steps into pipeline stages: where, which rank has what, and what it needs not hold.

A model is known here as a list of steps by name (`megatfm.models.steps`). A rank keeps the modules of its own stages;
a parameter that stages of several ranks use is held by each of these, under its one name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from megatfm.cost import MEMORY, Tokens, costs_of
from megatfm.errors import UsageError
from megatfm.parallel.pipeline_schedule import stage_ranks


class Field(Protocol):
    """See `megatfm.models.steps.Field`."""

    @property
    def like(self) -> str: ...

    @property
    def width(self) -> int | None: ...

    @property
    def length(self) -> Callable[[Mapping[str, torch.Tensor]], int] | None: ...


class ModelStep(Protocol):
    """See `megatfm.models.steps.ModelStep`."""

    @property
    def name(self) -> str: ...

    @property
    def uses(self) -> Sequence[str]: ...

    @property
    def reads(self) -> Sequence[str]: ...

    @property
    def writes(self) -> Mapping[str, Field]: ...

    @property
    def tokens(self) -> str: ...


class ModelSteps(Protocol):
    """See `megatfm.models.steps.ModelSteps`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, index: Any) -> Any: ...

    def alive(self, index: int) -> Mapping[str, Field]: ...

    def start(self, inputs: Mapping[str, Any], carry: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """A slice of a model's steps. takes, gives: the parts of the carry that come in and go out."""

    index: int
    rank: int
    steps: ModelSteps
    takes: Mapping[str, Field]
    gives: Mapping[str, Field]
    makes: frozenset[str]
    """What its steps write, of the carry; what else it gives only passes through."""
    returns: frozenset[str]
    """What of `takes` depends on weights that are trained, so that its gradient goes back."""
    expects: frozenset[str]
    """Likewise of `gives`."""
    cost: float
    """In parameters by which a token is multiplied."""


@dataclass(frozen=True)
class StageOutput:
    """Of a model's output what an objective reads, made by one stage or all."""

    losses: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Pipeline:
    """All stages of a model, and on which pipeline ranks each parameter is."""

    schedule: str
    ranks: int
    virtual: int
    stages: Sequence[Stage]
    holders: Mapping[str, tuple[int, ...]]
    sequence_parts: int = 1
    """Ranks that share a sequence between blocks."""
    module_holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """On which pipeline ranks each module with buffers is."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained."""

    @property
    def rank_of(self) -> list[int]:
        """Pipeline rank of each stage; one rank holds several in an interleaved schedule."""
        return [stage.rank for stage in self.stages]

    def mine(self, rank: int) -> list[Stage]:
        """The stages that a pipeline rank holds, in the order in which a micro-batch meets them."""
        return [stage for stage in self.stages if stage.rank == rank]

    def table(self) -> str:
        """What lies where, for people."""
        total = sum(stage.cost for stage in self.stages)
        lines = [f"pipeline  {self.schedule}, {len(self.stages)} stages on {self.ranks} ranks", ""]
        lines.append(f"{'stage':<7}{'rank':<6}{'of the cost':<13}{'from':<34}{'to':<34}carries on")
        for stage in self.stages:
            first, last = stage.steps[0].name, stage.steps[len(stage.steps) - 1].name
            line = f"{stage.index:<7}{stage.rank:<6}{stage.cost / total:<13.1%}{first:<34}{last:<34}"
            lines.append((line + ", ".join(stage.gives)).rstrip())
        shared = {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1}
        if shared:
            lines += ["", "held by several ranks, which sum its gradients:"]
            lines += [f"{name:<60}{', '.join(map(str, ranks))}" for name, ranks in shared.items()]
        return "\n".join(lines) + "\n"


def cut(
    model: nn.Module,
    schedule: str,
    ranks: int,
    virtual: int,
    *,
    lengths: Mapping[str, int],
    predicted: float | None = None,
    at: Sequence[str] | None = None,
    sequence_parts: int = 1,
) -> Pipeline:
    """Cut a whole model (on the meta device) into the stages of a schedule.

    lengths: tokens of each input, to weigh encoder against decoder. predicted: the share of them that the objective
    predicts, where that is known. at: the names of the steps with which all stages but the first begin; left out, cuts
    are where the costs of stages are most equal. Raises UsageError for a model that isn't told in steps, and for more
    stages than it can be cut into.
    """
    steps: ModelSteps | None = getattr(model, "steps", None)
    if steps is None:
        raise UsageError(
            f"parallel.pp = {ranks}: this model family is not cut into pipeline stages: set parallel.pp = 1 and use "
            "parallel.dp_shard"
        )
    rank_of = stage_ranks(schedule, ranks, virtual)
    costs = [cost(model, step, lengths, predicted) for step in steps]
    starts = [0, *(i for i, step in enumerate(steps) if i and _may_begin(step, costs[i]))]
    if not at and len(starts) < len(rank_of):
        raise UsageError(
            f"{len(rank_of)} pipeline stages (parallel.pp = {ranks}, {virtual} on each rank), but the model can be "
            f"cut into {len(starts)} at most: choose {_fewer(schedule, ranks, virtual, len(starts))}"
        )
    trained = _trained(model, steps)
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    bounds = _named_cuts(steps, at, len(rank_of)) if at else _balanced(starts, costs, len(rank_of))
    stages = []
    for index, (first, last) in enumerate(zip([0, *bounds], [*bounds, len(steps)], strict=True)):
        stages.append(
            Stage(
                index,
                rank_of[index],
                steps[first:last],
                steps.alive(first),
                steps.alive(last),
                frozenset(name for step in steps[first:last] for name in step.writes),
                trained[first] & frozenset(steps.alive(first)),
                trained[last] & frozenset(steps.alive(last)),
                sum(costs[first:last]),
            )
        )
    return Pipeline(
        schedule,
        ranks,
        virtual,
        stages,
        _holders(model, stages),
        sequence_parts,
        _module_holders(model, stages),
        frozen,
    )


def cost(
    model: nn.Module, step: ModelStep, lengths: Mapping[str, int], predicted: float | None = None
) -> float:
    """Of a step, for all tokens of a row: products with matrices, and those of attention."""
    tokens = Tokens(lengths.get(step.tokens, 1), lengths.get(MEMORY, 0), predicted)
    found = costs_of((model.get_submodule(path) for path in step.uses), tokens)
    return found.products + found.attention


def _trained(model: nn.Module, steps: ModelSteps) -> list[frozenset[str]]:
    """Before each step, and after the last: the parts of the carry that depend on weights that are trained."""
    found = [frozenset[str]()]
    for step in steps:
        trains = any(p.requires_grad for path in step.uses for p in model.get_submodule(path).parameters())
        depends = trains or bool(found[-1].intersection(step.reads))
        now = {name for name, field in step.writes.items() if depends and field.width is not None}
        found.append((found[-1] - frozenset(step.writes)) | now)
    return found


def _named_cuts(steps: ModelSteps, at: Sequence[str], stages: int) -> list[int]:
    names = [step.name for step in steps]
    unknown = [name for name in at if name not in names[1:]]
    if unknown:
        raise UsageError(
            f"parallel.cuts: no step is called {unknown[0]!r} after the first; there are {', '.join(names[1:])}"
        )
    bounds = [names.index(name) for name in at]
    if len(bounds) != stages - 1 or bounds != sorted(set(bounds)):
        raise UsageError(
            f"parallel.cuts = {list(at)}: {stages} stages need {stages - 1} different names in the model's order"
        )
    return bounds


def _fewer(schedule: str, ranks: int, virtual: int, most: int) -> str:
    """The nearest layout of at most so many stages."""
    if schedule.startswith("interleaved") and most // ranks > 1:
        return f"parallel.virtual_stages = {most // ranks}"
    if most // virtual > 1:
        return f"parallel.pp = {most // virtual}"
    return f"parallel.pp = {min(ranks, most)} and parallel.schedule = '1f1b'"


def _balanced(starts: Sequence[int], costs: Sequence[float], stages: int) -> list[int]:
    """Where stages 1, 2, … begin, so that the sum of the stages' squared costs is least. starts: where they may."""
    ends = [*starts[1:], len(costs)]
    pieces = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
    sums = [0.0]
    for piece in pieces:
        sums.append(sums[-1] + piece)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(pieces)]
    for _ in range(stages):
        row = [(float("inf"), 0)]
        for end in range(1, len(pieces) + 1):
            row.append(
                min((best[-1][start][0] + (sums[end] - sums[start]) ** 2, start) for start in range(end))
            )
        best.append(row)
    bounds, end = list[int](), len(pieces)
    for row in reversed(best[1:]):
        end = row[end][1]
        bounds.append(starts[end])
    return bounds[::-1][1:]


def _may_begin(step: ModelStep, cost: float) -> bool:
    """A stage begins with what costs something, or with a stack, never with an embedding's neighbour or a norm."""
    return cost > 0 or step.name.endswith("embedding")


def _holders(model: nn.Module, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, set[int]] = {name: set() for name in names.values()}
    for stage in stages:
        for parameter in _used(model, [stage]):
            found[names[parameter]].add(stage.rank)
    if unused := [name for name, ranks in found.items() if not ranks]:
        raise UsageError(f"{unused[0]} is used by no step of the model, so no pipeline stage would hold it")
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def _module_holders(model: nn.Module, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    used = {stage.rank: set[nn.Module]() for stage in stages}
    for stage in stages:
        for path in {path for step in stage.steps for path in step.uses}:
            used[stage.rank].update(model.get_submodule(path).modules())
    return {
        path: tuple(sorted(rank for rank, modules in used.items() if module in modules))
        for path, module in model.named_modules()
        if next(module.buffers(recurse=False), None) is not None
    }


def _used(model: nn.Module, stages: Sequence[Stage]) -> set[nn.Parameter]:
    paths = {path for stage in stages for step in stage.steps for path in step.uses}
    return {parameter for path in paths for parameter in model.get_submodule(path).parameters()}


def keep(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Take out of a model all modules that these stages don't use.

    A module that owns a parameter which a kept one shares stays too, for the parameter's name.
    """
    used = _used(model, stages)
    paths = {path for stage in stages for step in stage.steps for path in step.uses}
    whole = {module for path in paths for module in model.get_submodule(path).modules()}
    owners = {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter in used}

    def prune(module: nn.Module, path: str) -> None:
        if path in owners and module not in whole:
            for key, parameter in module.named_parameters(recurse=False):
                if parameter not in used:
                    setattr(module, key, None)
        for key, child in list(module.named_children()):
            inner = f"{path}.{key}" if path else key
            if child in whole:
                continue
            if any(other == inner or other.startswith(f"{inner}.") for other in (*owners, *paths)):
                prune(child, inner)
            else:
                vars(module)["_modules"][key] = None

    prune(model, "")


def activation_shape(field: Field, batch: Mapping[str, torch.Tensor], sequence_parts: int) -> tuple[int, ...]:
    """Of a part of the carry, on a rank that holds one of so many parts of the sequence."""
    rows, length = batch[field.like].shape[:2]
    if field.length is not None:
        length = field.length(batch)
    if field.width is None:
        return rows, length
    return rows, length // sequence_parts, field.width
