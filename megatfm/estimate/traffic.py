"""Traffic of ZeRO and of whole-tensor optimizers in closed forms, by axis and collective; and seconds on a link.

A rank of a ring of n ranks sends (n − 1) · x bytes in an all-gather of shards of x bytes, (n − 1) / n · x in a
reduce-scatter of x bytes, and twice that in an all-reduce. `tests/unit/estimate` compares these flows with executed
ranks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatfm.config import Config, ContrastiveObjective, ParallelConfig
from megatfm.estimate.devices import Link, Node
from megatfm.estimate.weights import (
    LocalWeight,
    assign_owners,
    count_expert_shards,
    count_shards,
    get_item_sizes,
    list_buckets,
)
from megatfm.parallel.mesh import CONTEXT, EXPERT, EXPERT_SHARD, PIPELINE, REPLICATE, SHARD, TENSOR

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Axis:
    """A mesh axis, or several joined."""

    name: str
    size: int
    """Ranks of a group."""
    stride: int
    """Distance between neighbours of a group, in rank numbers."""
    world: int
    """Ranks of all groups."""


@dataclass
class Flows:
    """Traffic of a rank in a step, by (axis, collective)."""

    sent: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Bytes that the rank sends; where ranks differ, the most that one of them sends."""
    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Number of collectives."""
    by_member: dict[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    """Bytes that each rank of a group sends, where ranks differ."""

    def add(self, axis: Axis, collective: str, n_bytes: float, times: int = 1) -> None:
        """Add `times` collectives, in each of which this rank sends `n_bytes`."""
        if axis.size > 1 and times and n_bytes:
            self.sent[axis.name, collective] += int(n_bytes) * times
            self.calls[axis.name, collective] += times

    def get_sent_bytes(self, key: tuple[str, str], rank: int, axes: Mapping[str, Axis]) -> int:
        """Return the bytes that a rank sends over an axis. rank: its number among all; key: (axis, collective)."""
        if key not in self.by_member:
            return self.sent.get(key, 0)
        member = 0
        for axis in (axes[name] for name in key[0].split(" × ")):
            member = member * axis.size + rank // axis.stride % axis.size
        return self.by_member[key][member]

    def select(self, keys: Collection[tuple[str, str]]) -> "Flows":
        """Return the flows with these keys."""
        return Flows({k: self.sent[k] for k in keys}, {k: self.calls[k] for k in keys})


def make_axes(parallel: ParallelConfig) -> dict[str, Axis]:
    """Return the axes of a layout, whose `dp_shard` is known, with their strides (see `parallel.mesh.AXES`)."""
    tp, cp, shard = parallel.tp, parallel.cp, parallel.dp_shard
    ep_stride = 1 if parallel.expert_tp == "folded" else tp
    edp = count_expert_shards(parallel) if parallel.ep > 1 else 1
    stage = tp * cp * shard * parallel.dp_replicate
    size_and_stride = {
        TENSOR: (tp, 1),
        CONTEXT: (cp, tp),
        SHARD: (shard, tp * cp),
        REPLICATE: (parallel.dp_replicate, tp * cp * shard),
        PIPELINE: (parallel.pp, stage),
        EXPERT: (parallel.ep, ep_stride),
        EXPERT_SHARD: (edp, ep_stride * parallel.ep),
    }
    return {name: Axis(name, size, stride, stage * parallel.pp) for name, (size, stride) in size_and_stride.items()}


def leaves_node(axis: Axis, node: Node) -> bool:
    """Return whether a group of the axis talks over the network."""
    return spread_over_nodes(axis.size, axis.stride, axis.world, node.gpus)[0] > 1


@lru_cache(1024)
def spread_over_nodes(size: int, stride: int, world: int, gpus: int) -> tuple[int, int]:
    """Return the most nodes that a group of an axis spans, and the fewest of a group's ranks that share a node.

    Groups may straddle nodes differently, and a step waits for the slowest. gpus: of a node, filled in rank order.
    """
    group_span = size * stride
    # A group's place on nodes depends on its first rank modulo the GPUs of a node.
    starts = range(0, min(world, math.lcm(group_span, gpus)), group_span)
    first_ranks = {(start + offset) % gpus for start in starts for offset in range(min(stride, gpus))}
    counts = [Counter((first + i * stride) // gpus for i in range(size)) for first in first_ranks]
    return max(map(len, counts)), min(min(ranks_by_node.values()) for ranks_by_node in counts)


def data_leaves_node(zero: int, axes: Mapping[str, Axis], node: Node) -> bool:
    """Return whether ZeRO's gathers and reductions, or sums of gradients without it, go over the network."""
    shard = find_zero_axis(axes, is_expert=False)
    return leaves_node(shard if zero >= 2 else join_axes((axes[REPLICATE], axes[SHARD], axes[CONTEXT])), node)


def find_zero_axis(axes: Mapping[str, Axis], *, is_expert: bool) -> Axis:
    """Return the axis over which ZeRO shards experts under `ep`, or other weights."""
    return axes[EXPERT_SHARD] if is_expert else join_axes((axes[SHARD], axes[CONTEXT]))


def estimate_collective_seconds(axis: Axis, node: Node, collective: str, n_bytes: float, calls: float = 1) -> float:
    """Estimate the seconds of collectives. n_bytes: what each rank sends in all calls together.

    A byte that a rank sends in a ring over nodes crosses the network once, and the ranks of a node share their network
    cards for it. An all-to-all sends most bytes to other nodes, each rank over its own card.
    """
    if axis.size == 1 or not n_bytes:
        return 0.0
    n_nodes, local_ranks = spread_over_nodes(axis.size, axis.stride, axis.world, node.gpus)
    within, between = node.within, node.between
    n_trips = 2 if collective == "all_reduce" else 1
    latency = calls * n_trips * _estimate_latency(axis.size, n_nodes, within, between)
    if n_nodes == 1:
        return n_bytes / within.rate + latency
    if collective == "all_to_all":
        local_share = (local_ranks - 1) / (axis.size - 1)
        local_seconds = n_bytes * local_share / within.rate
        return max(local_seconds, n_bytes * (1 - local_share) / between.rate) + latency
    if collective == "send":
        return n_bytes / between.rate + calls * between.latency
    return n_bytes / min(within.rate, local_ranks * between.rate) + latency


def _estimate_latency(size: int, n_nodes: int, within: Link, between: Link) -> float:
    """Return the latency of one collective: a ring within nodes, and a tree over nodes."""
    if n_nodes == 1:
        return (size - 1) * within.latency
    local_ranks = -(-size // n_nodes)
    return min(local_ranks - 1, 7) * within.latency + math.ceil(math.log2(n_nodes)) * between.latency


def add_data_flows(
    flows: Flows, config: Config, weights: Sequence[LocalWeight], parts: Sequence[int], microbatches: int
) -> None:
    """Add the traffic of ZeRO for the parameters of a rank's split points."""
    parallel, axes = config.parallel, make_axes(config.parallel)
    size, compute, reduced = get_item_sizes(config)
    stage_weights = [w for w in weights if any(index in parts for index in w.parts)]
    for is_expert in (False, True):
        weights_of_kind = [w for w in stage_weights if w.is_expert == is_expert]
        shard = find_zero_axis(axes, is_expert=is_expert)
        if parallel.effective_zero == 0:
            shard_axes = [axes[EXPERT_SHARD]] if is_expert else [axes[SHARD], axes[CONTEXT]]
            _add_replicated(flows, weights_of_kind, join_axes((axes[REPLICATE], *shard_axes)), reduced)
        elif parallel.zero == 1:
            _add_sharded_optimizer(flows, weights_of_kind, shard, axes[REPLICATE], size, compute)
        else:
            _add_fully_sharded(flows, config, weights_of_kind, shard, axes[REPLICATE], microbatches)
    _add_whole_tensors(flows, config, stage_weights)


def _add_replicated(flows: Flows, weights: Sequence[LocalWeight], axis: Axis, size: int) -> None:
    """Add the traffic of ZeRO 0: one all-reduce for each bucket of gradients. size: bytes of a number."""
    for bucket in list_buckets(w for w in weights if w.is_trained):
        n_bytes = sum(w.local for w in bucket) * size
        flows.add(axis, "all_reduce", 2 * n_bytes * (axis.size - 1) // axis.size)


def join_axes(axes: Iterable[Axis]) -> Axis:
    """Join axes into one, named by those with more than one rank, the outermost first."""
    joined = sorted((axis for axis in axes if axis.size > 1), key=lambda axis: axis.stride, reverse=True)
    name, size = " × ".join(axis.name for axis in joined), math.prod(axis.size for axis in joined)
    return Axis(name, size, joined[-1].stride, joined[-1].world) if joined else Axis("", 1, 1, 1)


def _add_sharded_optimizer(
    flows: Flows, weights: Sequence[LocalWeight], shard: Axis, replicas: Axis, size: int, compute: int
) -> None:
    """Add the traffic of ZeRO 1: gradients are reduce-scattered, and new weights gathered, bucket by bucket."""
    n = shard.size
    for bucket in list_buckets(w for w in weights if w.is_trained):
        shard_numel = sum(w.shard(n) for w in bucket)
        flows.add(shard, "reduce_scatter", shard_numel * n * size * (n - 1) // n)
        flows.add(replicas, "all_reduce", 2 * shard_numel * size * (replicas.size - 1) // replicas.size)
        flows.add(shard, "all_gather", shard_numel * compute * (n - 1))


def _add_fully_sharded(
    flows: Flows, config: Config, weights: Sequence[LocalWeight], shard: Axis, replicas: Axis, microbatches: int
) -> None:
    """Add the traffic of ZeRO 2 and 3: each block is gathered, and its gradients are reduce-scattered."""
    parallel, n = config.parallel, shard.size
    _, compute, reduced = get_item_sizes(config)
    groups: dict[object, list[LocalWeight]] = defaultdict(list)
    for weight in weights:
        groups[weight.parts if weight.in_block else ()].append(weight)
    for parts, group in groups.items():
        shard_numel = sum(w.shard(n) for w in group)
        trained = sum(w.shard(n) for w in group if w.is_trained)
        gathers = count_all_gathers(config, parts != (), microbatches)
        flows.add(shard, "all_gather", shard_numel * compute * (n - 1), gathers)
        times = microbatches if parallel.grad_accumulation == "sharded" else 1
        flows.add(shard, "reduce_scatter", trained * n * reduced * (n - 1) // n, times)
        flows.add(replicas, "all_reduce", 2 * trained * reduced * (replicas.size - 1) // replicas.size, times)


def _add_whole_tensors(flows: Flows, config: Config, weights: Sequence[LocalWeight]) -> None:
    """Add the exchange of optimizers that need whole tensors: gradients go to a tensor's owner, new weights back.

    The ranks of dp_shard, cp and tp share the tensors (`assign_owners`).
    """
    parallel, axes = config.parallel, make_axes(config.parallel)
    axis = join_axes((axes[SHARD], axes[CONTEXT], axes[TENSOR]))
    size = get_item_sizes(config).stored
    owners = assign_owners(weights, axis.size)
    if axis.size == 1 or not owners:
        return
    total, groups = np.zeros(axis.size, dtype=np.int64), set[int | None]()
    for weight in (w for w in weights if w.name in owners):
        owner = owners[weight.name]
        blocks, is_first = _list_blocks_by_member(parallel, weight)
        gradients = blocks * is_first
        gradients[owner] = blocks.sum() - blocks[owner]  # the owner sends new weights instead
        total += gradients * size
        groups.add(weight.whole_tensor_group)
    key = axis.name, "all_to_all"
    flows.by_member[key] = [flows.sent.get(key, 0) + int(n_bytes) for n_bytes in total]  # after those of attention
    flows.sent[key] += int(total.max())
    flows.calls[key] += 2 * len(groups)


def _list_blocks_by_member(parallel: ParallelConfig, weight: LocalWeight) -> tuple[IntArray, IntArray]:
    """Return two arrays by rank: its elements of a weight after ZeRO, and 1 for the first of the ranks with the same
    block, else 0."""
    sharded, shards = parallel.effective_zero > 0, count_shards(weight, parallel)
    numel_before_tp = weight.numel // parallel.ep if weight.is_expert else weight.numel
    known_blocks = set[tuple[int, int, int]]()
    blocks, is_first = list[int](), list[bool]()
    for shard, tensor in product(range(parallel.zero_shards), range(parallel.tp)):
        expert = 0
        if weight.is_expert:
            index = shard * parallel.tp + tensor if parallel.expert_tp == "folded" else shard
            shard, expert = divmod(index, parallel.ep)
        block = expert, shard if sharded else 0, tensor if weight.local < numel_before_tp else 0
        blocks.append(weight.shard(shards, shard) if sharded else weight.local)
        is_first.append(block not in known_blocks)
        known_blocks.add(block)
    return np.array(blocks, dtype=np.int64), np.array(is_first, dtype=np.int64)


def takes_two_passes(config: Config, microbatches: int) -> bool:
    """Return whether a step runs each micro-batch forward once more, for the features of all samples."""
    return isinstance(config.objective, ContrastiveObjective) and microbatches > 1


def count_all_gathers(config: Config, in_block: bool, microbatches: int) -> int:
    """Return how often a step gathers weights under ZeRO 2 and 3. in_block: those of a block, else those outside."""
    parallel = config.parallel
    if parallel.zero == 2 or (parallel.pp > 1 and parallel.splits_backward):
        return 1
    if in_block:
        return (2 + takes_two_passes(config, microbatches)) * microbatches
    return microbatches * (parallel.stages_per_rank if parallel.pp > 1 else 1)  # each backward pass reshards them


def estimate_axis_seconds(flows: Flows, axes: Mapping[str, Axis], node: Node, names: Sequence[str]) -> float:
    """Estimate the seconds of all traffic over some axes, and over joint axes that begin with one of them."""
    seconds = 0.0
    for (name, collective), n_bytes in flows.sent.items():
        parts = name.split(" × ")
        if parts[0] in names:
            axis = join_axes(axes[part] for part in parts)
            seconds += estimate_collective_seconds(axis, node, collective, n_bytes, flows.calls[name, collective])
    return seconds
