"""Traffic of the ranks of one pipeline rank in a step, over all axes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from megatfm.config import Config
from megatfm.estimate.operators import Operator
from megatfm.estimate.part_profile import ModelProfile, PartProfile
from megatfm.estimate.traffic import Axis, Flows, axes_of, data_flows
from megatfm.estimate.weights import LocalWeight, experts_section
from megatfm.parallel.mesh import CONTEXT, EXPERT, PIPELINE, TENSOR


def rank_flows(
    config: Config,
    profile: ModelProfile,
    weights: Sequence[LocalWeight],
    stages: Sequence[Sequence[int]],
    rank_of: Sequence[int],
    rank: int,
    microbatches: int,
) -> Flows:
    """Traffic of a pipeline rank. stages: split points of each; rank_of: the pipeline rank of each stage."""
    axes, flows = axes_of(config.parallel), Flows()
    indices = parts_of(stages, rank_of, rank)
    for part in (profile.parts[index] for index in indices):
        _tensor_flows(flows, axes[TENSOR], part, config, microbatches)
        context_flows(flows, config, part, axes[CONTEXT], microbatches)
        expert_flows(flows, config, part, axes[EXPERT], microbatches)
    data_flows(flows, config, weights, indices, microbatches)
    ends = [profile.parts[stage[-1]] for stage in stages]
    _pipeline_flows(flows, axes[PIPELINE], ends, rank_of, rank, microbatches)
    holders = {index: at for stage, at in zip(stages, rank_of, strict=True) for index in stage}
    _shared_gradients(flows, config, weights, holders, rank)
    return flows


def parts_of(stages: Sequence[Sequence[int]], rank_of: Sequence[int], rank: int) -> list[int]:
    """Indices of the split points of a pipeline rank."""
    return [index for stage, at in zip(stages, rank_of, strict=True) if at == rank for index in stage]


def recomputed_operators(part: PartProfile, mode: str) -> list[Operator]:
    """Operators of a block that a backward pass repeats: all but the last sum with "full", which stops after what is
    kept; with "selective" what is cheap, and gathers."""
    if mode == "selective":
        return [
            op
            for op in part.forward
            if op.kind == "pointwise" or op.collective == "all_gather" or op.name == "_grouped_mm"
        ]
    saved_numbers = {tensor.number for tensor in part.saved}
    last = max((i for i, op in enumerate(part.forward) if saved_numbers & op.writes.keys()), default=-1)
    return list(part.forward[: last + 1])


def _tensor_flows(flows: Flows, axis: Axis, part: PartProfile, config: Config, microbatches: int) -> None:
    mode = config.train.recompute
    again: Iterable[Operator] = ()
    if part.is_block and mode in ("full", "selective"):
        again = recomputed_operators(part, mode)
    for op in (*part.forward, *part.backward, *again):
        if op.kind == "collective":
            flows.add(axis, op.collective, op.sent_bytes, microbatches)


def context_flows(flows: Flows, config: Config, part: PartProfile, axis: Axis, microbatches: int) -> None:
    """Add what attention sends of rows that are one document: heads for tokens, or keys and values round a ring.

    By a ring of c ranks, for x bytes of keys and values on each: (c − 1)·x forward, and back x in the activations'
    type and their gradients in float32; recomputing a block repeats the forward's. By heads each rank keeps 1/c.
    """
    if axis.size == 1:
        return
    c, again = axis.size, config.train.recompute == "full"
    for op in part.forward:
        if op.kind != "attention":
            continue
        q, k, v, out, _ = _attention_bytes(op.reads, op.writes)
        ring = (c - 1) * (k + v)
        exchanged = (q + max(k, q // _heads(config)) + max(v, q // _heads(config)) + out) * (c - 1) // c
        if _by_heads(config, exchanged, ring):
            flows.add(axis, "all_to_all", exchanged, (2 + again) * microbatches)
        else:
            flows.add(axis, "send", ring, (1 + again) * microbatches)
            flows.add(axis, "send", ring * (1 + 4 // op.itemsize), microbatches)


def _attention_bytes(reads: Mapping[int, int], writes: Mapping[int, int]) -> tuple[int, ...]:
    q, k, v = list(reads.values())[:3]
    out, sums = list(writes.values())[:2]
    return q, k, v, out, sums


def _heads(config: Config) -> int:
    return max(1, config.model.attention.n_heads // config.parallel.tp)


def _by_heads(config: Config, exchanged: int, ring: int) -> bool:
    """Whether tokens are exchanged for heads (see `parallel.cp_method`)."""
    parallel, attention = config.parallel, config.model.attention
    if parallel.cp_method != "auto":
        return parallel.cp_method == "ulysses"
    heads, keys = attention.n_heads // parallel.tp, max(1, attention.kv_heads // parallel.tp)
    can = heads % parallel.cp == 0 and (keys % parallel.cp == 0 or parallel.cp % keys == 0)
    return can and 2 * exchanged < 3 * ring


def expert_flows(flows: Flows, config: Config, part: PartProfile, axis: Axis, microbatches: int) -> None:
    """Add the exchanges of tokens with experts' ranks, routed evenly: there and back, forward and backward."""
    if axis.size == 1:
        return
    products = [op for op in part.forward if op.name == "_grouped_mm"]
    if not products:
        return
    section = experts_section(config.model)
    top_k = getattr(section, "top_k", 1)
    rows = config.train.micro_batch * config.data.sequence_length // config.parallel.cp * top_k
    if config.parallel.tp > 1:
        rows //= config.parallel.tp  # experts of a rank, or tokens of its own
    width = config.model.d_model * products[0].itemsize
    sent = rows * width * (axis.size - 1) // axis.size
    again = config.train.recompute in ("full", "selective")
    flows.add(axis, "all_to_all", sent, (4 + 2 * again) * microbatches)


def _pipeline_flows(
    flows: Flows,
    axis: Axis,
    ends: Sequence[PartProfile],
    rank_of: Sequence[int],
    rank: int,
    microbatches: int,
) -> None:
    """Add what a rank hands on: activations forward, as many gradients back. ends: last split points of the stages."""
    for end, (before, after) in zip(ends, pairwise(rank_of), strict=False):
        if before != after and rank in (before, after):
            flows.add(axis, "send", end.output_bytes, microbatches)


def _shared_gradients(
    flows: Flows, config: Config, weights: Sequence[LocalWeight], holders: dict[int, int], rank: int
) -> None:
    """Add sums of gradients of which each rank has a share: tied tables' over pipeline ranks, those of norms and biases
    of cut sequences over tensor-parallel ranks."""
    parallel, axes = config.parallel, axes_of(config.parallel)
    size = 8 if config.train.precision == "fp64" else 4
    sharded = parallel.zero and parallel.dp_shard * parallel.dp_replicate > 1
    for weight in weights:
        ranks = {holders[index] for index in weight.parts}
        if rank not in ranks or not weight.is_trained:
            continue
        n_bytes = (weight.shard(parallel.dp_shard) if sharded else weight.local) * size
        if len(ranks) > 1:
            flows.add(axes[PIPELINE], "all_reduce", 2 * n_bytes * (len(ranks) - 1) / len(ranks))
        if weight.is_partial:
            flows.add(axes[TENSOR], "all_reduce", 2 * n_bytes * (parallel.tp - 1) / parallel.tp)
