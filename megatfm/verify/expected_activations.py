"""Expected traffic of activations in one micro-batch: tensor parallelism (Korthikanti et al. 2022), experts,
contrastive losses.

Column-parallel inputs: all-gather forward, reduce-scatter backward. Row-parallel outputs: reduce-scatter forward,
all-gather backward; without sequence parallelism, an all-reduce in one of the two directions. Experts: all-to-all
dispatch and combine, forward and backward. Contrastive losses over the global batch: a ring of data ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.context_shards import ContextShards
from megatfm.verify.layouts import (
    CONTEXT,
    EXPERT,
    EXPERT_SHARD,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshPosition,
    get_axis_sizes,
    name_group,
)
from megatfm.verify.module_calls import Call
from megatfm.verify.module_shardings import ModuleSharding
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic

CHUNK = 1024
"""Rows of a chunk of the vocab-parallel cross-entropy."""


def add_activations(
    traffic: ExpectedTraffic,
    config: Config,
    model: nn.Module,
    shardings: Mapping[str, ModuleSharding],
    calls: Sequence[Call],
) -> None:
    """Add the bytes that a tensor-parallel rank sends for the calls of a micro-batch."""
    precision, is_sequence_parallel = PRECISIONS[config.train.precision], config.parallel.sequence_parallel
    element_bytes, tp = precision.compute_dtype.itemsize, config.parallel.tp
    for call in calls:
        communication = _get_communication(shardings, call.path)
        input_bytes, output_bytes = call.input_numel * element_bytes, call.output_numel * element_bytes
        gathers, sums = count_forward_collectives(call, config.train.recompute)
        for gathered, gathered_bytes, has_gradient in (
            ("input gathered", input_bytes, call.has_gradient and call.input_has_gradient),
            ("output gathered", output_bytes, call.has_gradient),
        ):
            if gathered not in communication:
                continue
            if is_sequence_parallel:
                traffic.all_gather(TENSOR, gathered_bytes // tp, times=gathers)
                traffic.reduce_scatter(TENSOR, gathered_bytes, times=has_gradient)
            else:
                traffic.all_reduce(TENSOR, gathered_bytes, times=has_gradient)
        if "output gathered for tokens" in communication and is_sequence_parallel:
            traffic.all_gather(TENSOR, output_bytes // tp, times=gathers)
            traffic.reduce_scatter(TENSOR, output_bytes, times=call.has_gradient)
        if "output summed" in communication:
            if is_sequence_parallel:
                traffic.reduce_scatter(TENSOR, output_bytes, times=sums)
                traffic.all_gather(TENSOR, output_bytes // tp, times=call.has_gradient)
            else:
                traffic.all_reduce(TENSOR, output_bytes, times=sums)
        if "input replicated" in communication and is_sequence_parallel:
            traffic.all_gather(TENSOR, input_bytes // tp)
        if "output replicated" in communication and is_sequence_parallel:
            traffic.all_gather(TENSOR, output_bytes // tp, times=gathers)
        if "shards summed" in communication:  # in float32 or wider; "selective" recomputation saves the sums
            sums_forward = gathers if config.train.recompute == "full" else 1
            sums_bytes = call.output_numel * max(element_bytes, 4)
            traffic.all_reduce(TENSOR, sums_bytes, times=sums_forward + call.has_gradient)
        if "loss summed" in communication and is_sequence_parallel:  # in float32 or wider
            traffic.all_reduce(TENSOR, call.output_numel * max(element_bytes, 4), times=sums)
        _add_vocab_parallel_head(traffic, config, model, shardings, call)


def count_forward_collectives(call: Call, recompute: str) -> tuple[int, int]:
    """Return the number of forward collectives before and after a call: 2 if recomputation repeats it.

    Recomputation stops after the last tensor that the block saves; "selective" saves the results of sums.
    """
    is_recomputed = call.in_layer and recompute in ("full", "selective")
    return 1 + is_recomputed, 1 + (is_recomputed and recompute == "full" and call.saves_tensors_after)


def _add_vocab_parallel_head(
    traffic: ExpectedTraffic, config: Config, model: nn.Module, shardings: Mapping[str, ModuleSharding], call: Call
) -> None:
    """Add the all-gathers of a vocab-parallel head: logits, or the statistics of its cross-entropy."""
    precision, vocab_size = PRECISIONS[config.train.precision], config.model.vocab_size
    head, _, leaf = call.path.rpartition(".")
    if _is_vocab_parallel_head(shardings, call.path) and not call.is_loss:
        assert vocab_size is not None
        shard_numel = call.output_numel // vocab_size * -(-vocab_size // config.parallel.tp)
        traffic.all_gather(TENSOR, shard_numel * precision.compute_dtype.itemsize)
    if leaf == "loss" and _is_vocab_parallel_head(shardings, head):
        module = model.get_submodule(call.path)
        values_per_row = 4 if module.options.smoothing else 3  # type: ignore[union-attr]
        for start in range(0, call.rows, CHUNK):
            n_values = values_per_row * min(CHUNK, call.rows - start)
            traffic.all_gather(TENSOR, n_values * precision.param_dtype.itemsize)


def _is_vocab_parallel_head(shardings: Mapping[str, ModuleSharding], path: str) -> bool:
    return "loss over the vocabulary" in _get_communication(shardings, path)


def _get_communication(shardings: Mapping[str, ModuleSharding], path: str) -> tuple[str, ...]:
    return (shardings[path].communication or ()) if path in shardings else ()


def add_experts(
    traffic: ExpectedTraffic,
    config: Config,
    position: MeshPosition,
    calls_by_rank: Sequence[Sequence[Call]],
    context_shards: ContextShards | None,
) -> None:
    """Add the bytes that a rank sends for one micro-batch. calls_by_rank: of the ranks that divide experts.

    Dispatch and combine are one all-to-all each, forward and backward; "selective" recomputation saves their results.
    With `parallel.expert_tp = "by_expert"`, tensor parallelism distributes the experts of a rank, and each
    tensor-parallel rank receives the rows of its own experts.
    """
    element_bytes = PRECISIONS[config.train.precision].compute_dtype.itemsize
    n_ranks, own_rank = len(calls_by_rank), position.ep
    tp_shards = config.parallel.tp if config.parallel.expert_tp == "by_expert" else 1
    for calls in zip(*calls_by_rank, strict=True):
        call, experts = calls[own_rank], calls[own_rank].n_experts // n_ranks
        local_experts = experts // tp_shards
        first_local = position.tp * local_experts if tp_shards > 1 else 0
        rows_by_expert = [
            _count_rows_by_expert(config, peer_call, peer, context_shards)
            for peer_call, peer in zip(calls, position.expert_peers, strict=True)
        ]
        firsts = [rank * experts + first_local for rank in range(n_ranks)]
        # [source][target]
        rows = [[sum(counts[first : first + local_experts]) for first in firsts] for counts in rows_by_expert]
        width = call.input_numel // call.n_tokens * element_bytes
        dispatched = (sum(rows[own_rank]) - rows[own_rank][own_rank]) * width
        combined = (sum(counts[own_rank] for counts in rows) - rows[own_rank][own_rank]) * width
        forward = 1 + (call.in_layer and config.train.recompute == "full")
        traffic.all_to_all(EXPERT, (n_ranks - 1) * local_experts * 8, times=forward)  # row counts
        traffic.all_to_all(EXPERT, dispatched, times=forward + call.has_gradient)
        traffic.all_to_all(EXPERT, combined, times=forward + call.input_has_gradient)


def _count_rows_by_expert(
    config: Config, call: Call, position: MeshPosition, context_shards: ContextShards | None
) -> list[int]:
    """Count, for each expert, how often a rank's tokens choose it."""
    chosen_BTK = call.expert_index
    assert chosen_BTK is not None
    if context_shards:
        chosen_BTK = context_shards.slice_choices(call.path, chosen_BTK, position.cp)
    if config.parallel.expert_tp == "folded":
        chosen_BTK = chosen_BTK.flatten(0, 1).chunk(config.parallel.tp)[position.tp]
    counts: list[int] = torch.bincount(chosen_BTK.flatten(), minlength=call.n_experts).tolist()
    return counts[: call.n_experts]


def name_equal_groups(config: Config) -> dict[str, str]:
    """Return axis (or joined axes) → name under which its collectives count, for groups with the same ranks.

    If `ep` spans exactly one axis, its traffic counts for that axis; if several, their joint traffic counts as `ep`.
    """
    sizes = get_axis_sizes(config.parallel)
    folded_axes = (SHARD, CONTEXT, TENSOR) if config.parallel.expert_tp == "folded" else (SHARD, CONTEXT)
    multi_rank_axes = [axis for axis in folded_axes if sizes[axis] > 1]
    if config.parallel.ep == 1 or sizes[EXPERT_SHARD] > 1:
        return {}
    if len(multi_rank_axes) == 1:
        return {EXPERT: multi_rank_axes[0]}
    return {" × ".join(multi_rank_axes): EXPERT}


def list_first_pass_calls(config: Config, calls: Sequence[Sequence[Call]]) -> list[list[Call]]:
    """Return the calls of the first pass over all micro-batches, without gradients.

    Only contrastive losses have it, for several micro-batches, and in pipelines for one, too.
    """
    if config.model.contrastive is None or (len(calls) == 1 and config.parallel.pp == 1):
        return []
    return [
        [replace(call, has_gradient=False, in_layer=False) for call in microbatch_calls] for microbatch_calls in calls
    ]


def add_contrastive_loss(
    traffic: ExpectedTraffic, config: Config, batches: Sequence[Arrays], position: MeshPosition
) -> None:
    """Add the bytes that a rank sends to compare its pairs with those of all others. batches: of each context rank.

    With n pairs of width d on each of P > 1 ranks, a rank sends n((3P − 2)d + 2P − 1) elements a step for the softmax
    loss and n(3P − 2)d for the sigmoid loss: forward P − 1 blocks of text features (and P times the statistics of their
    columns), backward P − 1 blocks (and their columns) and P times their gradient. Context ranks count, too: a pair is
    on that with the caption's first token.
    """
    contrastive, parallel = config.model.contrastive, config.parallel
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    ranks, rank = data_ranks * parallel.cp, position.data_rank * parallel.cp + position.cp
    if contrastive is None or ranks == 1:
        return
    axis = name_group(traffic.sizes, REPLICATE, SHARD, CONTEXT)
    traffic.all_gather(axis, 8)
    size = max(4, PRECISIONS[config.train.precision].compute_dtype.itemsize)
    is_first = [(batch["positions"] == 0) & (batch["documents"] >= 0) for batch in batches]
    pairs_by_context = [[int(rows.sum()) for rows in np.split(chosen, data_ranks)] for chosen in is_first]
    pairs = [n for by_rank in zip(*pairs_by_context, strict=True) for n in by_rank]
    is_softmax = contrastive.loss == "softmax"
    for step in range(ranks):
        n, is_last = pairs[(rank - step) % ranks], step == ranks - 1
        feature, column = n * contrastive.width * size, n * size
        block, columns = [feature] * (not is_last), [column] * is_softmax
        forward, backward = [*block, *columns], [feature, *block, *(columns if not is_last else [])]
        for sent in (*forward, *backward) if n else ():
            traffic.send(axis, sent)
