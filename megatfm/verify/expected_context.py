"""Expected traffic of context parallelism: attention (`expected_attention.py`), mixtures of experts, and heads that
read across rows.

Experts with a capacity send their choices to all; a router that balances each row sums its counts. Soft mixtures
reduce-scatter slots and all-gather the experts' outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from megatfm.verify.axes import CONTEXT
from megatfm.verify.context_shards import ContextShards, RankCall
from megatfm.verify.expected_attention import ATTENTION_TRAFFIC
from megatfm.verify.expected_keys import (
    count_elements_per_token,
    find_image_tokens,
    find_span_boundaries,
    find_visible_tokens,
)
from megatfm.verify.module_calls import Call, require_shapes
from megatfm.verify.module_shardings import is_a
from megatfm.verify.traffic import ExpectedTraffic


def add_context(
    traffic: ExpectedTraffic, shards: ContextShards, microbatch: int, rank: int, calls: Sequence[Call]
) -> None:
    """Add the bytes that a rank sends for one micro-batch."""
    for module_call in calls:
        call = RankCall(shards, traffic, microbatch, rank, module_call)
        for name, add_traffic in TRAFFIC_BY_MODULE.items():
            if is_a(call.module, name):
                add_traffic(call)
                break
        if call.path.endswith(".reduce_counts"):
            repeats = call.config.train.recompute == "full" and module_call.in_layer
            times = 1 + (repeats and module_call.saves_tensors_after)
            traffic.all_reduce(CONTEXT, module_call.output_numel * call.reduction_bytes, times=times)


def _add_soft_moe(call: RankCall) -> None:
    """Add a soft mixture: log-sum-exps are all-gathered, slots reduce-scattered, expert outputs all-gathered."""
    ranks, has_gradient = call.config.parallel.cp, call.has_gradient
    ((rows, _, d),), (slots, _) = require_shapes(call.inputs[:1]), call.module.weight.shape
    slots *= call.count_documents()
    rank_bytes = rows * -(-slots // ranks) * d * call.compute_bytes
    for shard_bytes in (rows * slots * call.reduction_bytes, rank_bytes):
        call.traffic.all_gather(CONTEXT, shard_bytes, times=call.n_forwards)
        call.traffic.reduce_scatter(CONTEXT, shard_bytes * ranks, times=has_gradient)
    call.traffic.reduce_scatter(CONTEXT, rank_bytes * ranks, times=call.n_forward_sums)
    call.traffic.all_gather(CONTEXT, rank_bytes, times=has_gradient)


def _add_gathered_keys(call: RankCall) -> None:
    """Add the keys and values of full rows, which two-stream attention fetches."""
    numel_per_token = count_elements_per_token(call.config, require_shapes(call.inputs[:2]))
    call.send_all_tokens(call.shards.positions_by_rank[""], numel_per_token)


def _add_span_boundaries(call: RankCall) -> None:
    """Add hidden states at the boundaries of masked spans that reach into another rank."""
    fields, by_rank = call.fields, call.shards.positions_by_rank[""]
    fetched = find_span_boundaries(fields["span_left"], fields["span_right"], by_rank)
    ((rows, _, width),) = require_shapes(call.inputs[:1])
    call.send_tokens(by_rank, fetched, rows * width)


def _add_token_gather(call: RankCall) -> None:
    """Add vectors of the encoder's row that tokens of another rank look up."""
    by_rank = call.shards.positions_by_rank[""]
    connector, tower = call.config.model.connector, call.config.model.vision_tower
    if connector is None or tower is None:
        fetched = find_visible_tokens(call.fields, by_rank)
    else:
        n_special = tower.embedding.n_special_tokens
        fetched = find_image_tokens(call.fields, by_rank, connector.image_token_id, n_special)
    ((rows, _, width),) = require_shapes(call.inputs[:1])
    call.send_tokens(call.shards.positions_by_rank["encoder_"], fetched, rows * width)


def _add_row_sums(call: RankCall) -> None:
    """Add all-reduces of sums over each image."""
    _all_reduce_sums(call, max(call.count_documents(), 1), call.reduction_bytes)


def _add_boundary_vectors(call: RankCall) -> None:
    """Add all-reduces of a vector for each document."""
    _all_reduce_sums(call, max(call.count_documents(), 1), call.compute_bytes)


def _add_row_scores(call: RankCall) -> None:
    """Add all-reduces of a score for each token."""
    _all_reduce_sums(call, sum(map(len, call.shards.positions_by_rank[""])), call.compute_bytes)


def _all_reduce_sums(call: RankCall, n_sums: int, n_bytes: int) -> None:
    """Add all-reduces of sums of vectors, `n_sums` a row, forward and backward."""
    ((rows, _, width),) = require_shapes(call.inputs[:1])
    call.traffic.all_reduce(CONTEXT, rows * n_sums * width * n_bytes, times=1 + call.has_gradient)


def _add_pooling(call: RankCall) -> None:
    """Add attention pooling: for each image and head the largest score, then sums of values and of weights."""
    (heads, width), (rows, *_) = require_shapes(call.inputs[:2])
    n_bytes = rows * max(call.count_documents(), 1) * heads * call.reduction_bytes
    call.traffic.all_reduce(CONTEXT, n_bytes)
    call.traffic.all_reduce(CONTEXT, n_bytes * (width + 1), times=1 + call.has_gradient)


def _add_expert_capacity(call: RankCall) -> None:
    """Add messages of a rank's choices to all others, if experts have a capacity per row."""
    if call.module.capacity_factor is not None or call.module.fixed_capacity is not None:
        _send_to_others(call, prod(call.inputs[2] or ()) * 8)


def _add_expert_choice(call: RankCall) -> None:
    """Add messages of a rank's scores to all others, since experts choose among the tokens of full rows."""
    tokens = prod((call.inputs[0] or ())[:-1])
    _send_to_others(call, tokens * call.module.n_experts * call.reduction_bytes)


def _send_to_others(call: RankCall, n_bytes: int) -> None:
    for _ in range(call.n_forwards * (call.config.parallel.cp - 1)):
        call.traffic.send(CONTEXT, n_bytes)


TRAFFIC_BY_MODULE: Mapping[str, Callable[[RankCall], None]] = {
    **ATTENTION_TRAFFIC,
    "KVGather": _add_gathered_keys,
    "SpanBoundaryGather": _add_span_boundaries,
    "TokenGather": _add_token_gather,
    "ImageMean": _add_row_sums,
    "BoundaryVector": _add_boundary_vectors,
    "PoolingAttention": _add_pooling,
    "RowScores": _add_row_scores,
    "SoftMoE": _add_soft_moe,
    "Experts": _add_expert_capacity,
    "ExpertChoiceRouter": _add_expert_choice,
}
"""Class name → function that adds the traffic of its calls; subclasses before their base classes."""
