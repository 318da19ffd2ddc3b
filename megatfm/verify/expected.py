"""The traffic that a step should have, from the plan's table and the shapes that the plain model's modules see.

Closed forms by a ring of n ranks, for x bytes on each: all-gather of shards x: (n − 1)·x; reduce-scatter of x:
(n − 1)/n·x; all-reduce of x: 2(n − 1)/n·x (Korthikanti et al. 2022; Rajbhandari et al. 2020). It shares nothing with
the styles and engines that cause the traffic, nor with what counts it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.engines.data_parallel import blocks
from megatfm.engines.precision import PRECISIONS
from megatfm.models import build
from megatfm.ops.initial import initialise
from megatfm.parallel.plan import PLANS, match
from megatfm.parallel.styles import Style
from megatfm.verify.batch import Arrays, objective_of

CHUNK = 1024
"""Rows of the cross-entropy that are reduced together."""
REPLICAS = "dp_replicate × dp_shard"

UNPREDICTED = ("all_to_all",)
"""Collectives of optimizers that need whole tensors: what travels depends on who owns which."""

Flows = dict[tuple[str, str], tuple[int, int]]
"""Axis and collective → calls and bytes sent."""


@dataclass(frozen=True)
class Call:
    """A module's call in the plain forward pass of one micro-batch.

    given, made: elements of its first input and its output (0: no tensor). rows: of the input.
    """

    path: str
    given: int
    made: int
    rows: int
    is_scalar: bool
    has_gradient: bool


@dataclass
class Ledger:
    """What one rank sends. sizes: of the axes; an axis of one rank sends nothing."""

    sizes: Mapping[str, int]
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def all_gather(self, axis: str, shard_bytes: int, times: int = 1) -> None:
        self._add(axis, "all_gather", shard_bytes * (self.sizes[axis] - 1), times)

    def reduce_scatter(self, axis: str, whole_bytes: int, times: int = 1) -> None:
        self._add(axis, "reduce_scatter", whole_bytes * (self.sizes[axis] - 1) // self.sizes[axis], times)

    def all_reduce(self, axis: str, whole_bytes: int, times: int = 1) -> None:
        self._add(axis, "all_reduce", 2 * whole_bytes * (self.sizes[axis] - 1) // self.sizes[axis], times)

    def _add(self, axis: str, collective: str, sent: int, times: int) -> None:
        if self.sizes[axis] > 1 and times:
            self.calls[axis, collective] += times
            self.sent[axis, collective] += sent * times

    def flows(self) -> Flows:
        return {key: (calls, self.sent[key]) for key, calls in self.calls.items()}


def unpredicted(config: Config) -> str | None:
    """Why there is no closed form for a layout here, in words."""
    if config.parallel.pp > 1:
        return "pipeline stages"
    if config.parallel.tp > 1 and config.train.recompute != "none":
        return f"train.recompute = {config.train.recompute!r}, which repeats a part of what tensor parallelism sends"
    return None


def expected_flows(config: Config, batch: Arrays) -> list[Flows]:
    """Of one step, by rank; without what optimizers send that need whole tensors."""
    with torch.random.fork_rng():
        model = build(config.model).double().train()
    initialise(model, config.train.seed)
    parallel, found = config.parallel, []
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    calls = {rank: list(_observe(config, model, batch, rank, data_ranks)) for rank in range(data_ranks)}
    for rank in range(data_ranks * parallel.tp):
        data_rank, tp_rank = divmod(rank, parallel.tp)
        found.append(_rank(config, model, calls[data_rank], data_rank % parallel.dp_shard, tp_rank))
    return found


def _observe(
    config: Config, model: nn.Module, batch: Arrays, data_rank: int, data_ranks: int
) -> Iterator[list[Call]]:
    """The calls of all modules, micro-batch by micro-batch."""
    share, rows = config.train.global_batch // data_ranks, config.train.micro_batch
    objective = objective_of(config)
    calls: list[Call] = []

    def note(path: str, inputs: tuple[Any, ...], output: Any) -> None:
        first, made = (
            value if isinstance(value, Tensor) else torch.empty(0) for value in ((*inputs, None)[0], output)
        )
        calls.append(
            Call(path, first.numel(), made.numel(), first.shape[0], made.dim() == 0, made.requires_grad)
        )

    hooks = [
        module.register_forward_hook(lambda _, inputs, output, path=path: note(path, inputs, output))
        for path, module in model.named_modules()
    ]
    for start in range(data_rank * share, (data_rank + 1) * share, rows):
        objective(
            model, {name: torch.from_numpy(values[start : start + rows]) for name, values in batch.items()}
        )
        yield calls.copy()
        calls.clear()
    for hook in hooks:
        hook.remove()


def _rank(
    config: Config, model: nn.Module, microbatches: Sequence[list[Call]], shard: int, tp_rank: int
) -> Flows:
    parallel = config.parallel
    ledger = Ledger(
        {
            "tp": parallel.tp,
            "dp_shard": parallel.dp_shard,
            "dp_replicate": parallel.dp_replicate,
            REPLICAS: parallel.dp_replicate * parallel.dp_shard,
        }
    )
    styles = {
        path: style.fitted(model.get_submodule(path), parallel.tp)
        for path, style in match(model, PLANS.get(config.model.family)).items()
    }
    local = _local_shapes(model, styles, parallel.tp, tp_rank)
    for calls in microbatches if parallel.tp > 1 else ():
        _activations(ledger, config, model, styles, calls)
    _weights_and_gradients(ledger, config, model, local, microbatches)
    _sums(ledger, config, model, styles, local, shard, terms=len(objective_of(config).weights))
    return ledger.flows()


def _activations(
    ledger: Ledger, config: Config, model: nn.Module, styles: Mapping[str, Style], calls: Sequence[Call]
) -> None:
    """Tensor parallelism, for one micro-batch."""
    precision, sequence = PRECISIONS[config.train.precision], config.parallel.sequence_parallel
    size, tp = precision.computed.itemsize, config.parallel.tp
    for call in calls:
        head, _, leaf = call.path.rpartition(".")
        style = styles[call.path].name if call.path in styles else ""
        given, made = call.given * size, call.made * size
        if style in ("enter", "vocabulary head", "enter output"):
            whole = made if style == "enter output" else given
            if sequence:
                ledger.all_gather("tp", whole // tp)
                ledger.reduce_scatter("tp", whole, times=call.has_gradient)
            else:
                ledger.all_reduce("tp", whole, times=call.has_gradient)
        elif style in ("row", "vocabulary embedding"):
            if sequence:
                ledger.reduce_scatter("tp", made)
                ledger.all_gather("tp", made // tp, times=call.has_gradient)
            else:
                ledger.all_reduce("tp", made)
        elif style == "whole input" and sequence:
            ledger.all_gather("tp", given // tp)
        elif style == "sequence, gathered" and sequence:
            ledger.all_gather("tp", made // tp)
        if style == "vocabulary head" and not call.is_scalar:
            vocabulary = config.model.vocab_size or 0
            ledger.all_gather("tp", call.made // vocabulary * -(-vocabulary // tp) * size)
        if leaf == "loss" and head in styles and styles[head].name == "vocabulary head":
            seam = model.get_submodule(call.path)
            numbers = 5 if seam.variant.smoothing else 3  # type: ignore[union-attr]
            for start in range(0, call.rows, CHUNK):
                rows = min(CHUNK, call.rows - start) * precision.stored.itemsize
                ledger.all_reduce("tp", rows)
                ledger.all_reduce("tp", numbers * rows)


def _weights_and_gradients(
    ledger: Ledger,
    config: Config,
    model: nn.Module,
    local: Mapping[str, Sequence[int]],
    microbatches: Sequence[list[Call]],
) -> None:
    """The data axes: ZeRO."""
    parallel, precision = config.parallel, PRECISIONS[config.train.precision]
    ranks = parallel.dp_shard
    if parallel.zero == 0:
        both = parallel.dp_shard > 1 and parallel.dp_replicate > 1
        axis = REPLICAS if both else "dp_shard" if parallel.dp_shard > 1 else "dp_replicate"
        ledger.all_reduce(axis, sum(map(prod, local.values())) * precision.stored.itemsize)
        return
    padded = {name: ranks * -(-shape[0] // ranks) * prod(shape[1:]) for name, shape in local.items()}
    if parallel.zero == 1:
        everything = sum(padded.values())
        ledger.reduce_scatter("dp_shard", everything * precision.stored.itemsize)
        ledger.all_reduce("dp_replicate", everything // ranks * precision.stored.itemsize)
        ledger.all_gather("dp_shard", everything // ranks * precision.computed.itemsize)
        return
    for path, names in _groups(model).items():
        elements = sum(padded[name] for name in names)
        if not elements:
            continue
        # A block that a stack runs several times (ALBERT's) is given back after each, and what was accumulated of its
        # gradients is reduced after the first.
        uses = sum(call.path == path for call in microbatches[0]) if path else 1
        gathers = uses if parallel.zero == 2 else (2 * uses if path else 1) * len(microbatches)
        reductions = len(microbatches) if parallel.accumulate == "shards" else 1
        if uses > 1 and len(microbatches) > reductions:
            reductions += 1
        ledger.all_gather("dp_shard", elements // ranks * precision.computed.itemsize, times=gathers)
        ledger.reduce_scatter("dp_shard", elements * precision.stored.itemsize, times=reductions)
        ledger.all_reduce("dp_replicate", elements // ranks * precision.stored.itemsize, times=reductions)


def _sums(
    ledger: Ledger,
    config: Config,
    model: nn.Module,
    styles: Mapping[str, Style],
    local: Mapping[str, Sequence[int]],
    shard: int,
    terms: int,
) -> None:
    """Once a step: partial gradients, the terms' sums and counts, the gradient's norm."""
    parallel = config.parallel
    stored = PRECISIONS[config.train.precision].stored.itemsize
    partial = 0
    for name, shape in local.items():
        style = styles[name.rpartition(".")[0]]
        is_cut = style.dim is not None and -len(shape) <= style.dim < len(shape)
        sums = style.gradient == "partial" or (style.gradient == "sequence" and parallel.sequence_parallel)
        if sums and not is_cut:
            each = -(-shape[0] // parallel.dp_shard) if parallel.zero else shape[0]
            rows = max(0, min(each, shape[0] - each * shard)) if parallel.zero else shape[0]
            partial += rows * prod(shape[1:])
    if partial:
        ledger.all_reduce("tp", partial * stored)
    for axis in ("dp_shard", "dp_replicate"):
        ledger.all_reduce(axis, terms * 8, times=2)
    ledger.all_reduce("dp_shard", 2 * 8, times=parallel.zero > 0)
    ledger.all_reduce("tp", 8)


def _local_shapes(
    model: nn.Module, styles: Mapping[str, Style], tp: int, rank: int
) -> dict[str, tuple[int, ...]]:
    """What a tensor-parallel rank holds of each parameter before the data axes cut it."""
    shapes = {}
    for name, parameter in model.named_parameters():
        style, shape = styles[name.rpartition(".")[0]], list(parameter.shape)
        if style.dim is not None and -len(shape) <= style.dim < len(shape):
            each = -(-shape[style.dim] // tp)
            shape[style.dim] = max(0, min(each, shape[style.dim] - each * rank))
        shapes[name] = tuple(shape)
    return shapes


def _groups(model: nn.Module) -> dict[str, list[str]]:
    """The block that gathers a parameter → its parameters; "" is the whole model, for all that lies in no block."""
    inside = set(blocks(model))
    paths = [path for path, module in model.named_modules() if module in inside]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_parameters():
        groups[next((path for path in paths if name.startswith(f"{path}.")), "")].append(name)
    return groups
