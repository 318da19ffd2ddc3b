"""Expected traffic of context parallelism: attention, mixtures of experts, and heads that read across rows.

Ring attention over c ranks with x bytes of keys and values each sends (c − 1)·x forward and twice that backward (Liu et
al. 2023). If queries see only runs of keys, or need less than half of the other ranks' keys, ranks fetch the keys that
they need, once forward, and send their gradients back once.

Experts with a capacity send their choices to all; a router that balances each row sums its counts. Soft mixtures
reduce-scatter slots and all-gather the experts' outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from megatfm.verify.context_shards import ContextShards, RankCall
from megatfm.verify.expected_keys import (
    compute_fetched_share,
    count_elements_per_token,
    count_global_queries,
    count_local_heads,
    find_image_tokens,
    find_span_boundaries,
    find_visible_tokens,
    get_block_config,
    is_cross_attention,
    is_ulysses,
    sees_key_runs,
)
from megatfm.verify.layouts import CONTEXT
from megatfm.verify.module_calls import Call, Shape, get_latent_shapes, require_shapes
from megatfm.verify.module_shardings import is_a
from megatfm.verify.traffic import ExpectedTraffic

ALL_KEYS = ("DisentangledCore", "ShawCore")  # their biases need all keys at once


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


def _add_attention(call: RankCall) -> None:
    """Add keys and values, or the latents that they are projected from."""
    is_latent = is_a(call.module, "LatentCore")
    qkv = get_latent_shapes(call.recorded) if is_latent else require_shapes(call.inputs[:3])
    sent_shapes = require_shapes(call.inputs[1:2]) if is_latent else qkv[1:]
    numel_per_token = count_elements_per_token(call.config, sent_shapes)
    by_rank = call.positions_by_rank
    has_pair_bias = any(len(bias or ()) > 2 for bias in call.inputs[4:5])
    if is_cross_attention(call.path) or has_pair_bias or any(is_a(call.module, name) for name in ALL_KEYS):
        call.send_all_tokens(by_rank, numel_per_token)
        return
    fetched = call.find_needed_keys()
    if sees_key_runs(call.pattern, sum(map(len, by_rank)), causal=call.is_causal):
        if not is_a(call.module, "LocalAttention"):  # its global queries run in a module of their own
            _add_global_queries(call, qkv)
        call.send_tokens(by_rank, fetched, numel_per_token)
        return
    share = compute_fetched_share(by_rank, fetched)
    is_ring = 2 * share >= 1
    if is_ulysses(call.config, qkv, numel_per_token, None if is_ring else share):
        _add_ulysses(call, qkv)
    elif is_ring:
        _add_ring(call, numel_per_token)
    else:
        call.send_tokens(by_rank, fetched, numel_per_token)


def _add_ring(call: RankCall, numel_per_token: int) -> None:
    """Add a ring: at step s a rank sends the shard that rank − s started with, and gradients one step behind.

    Gradients are in float32 or wider. numel_per_token: elements per position, over all rows.
    """
    tokens = [len(positions) for positions in call.positions_by_rank]
    size, c, has_gradient = call.compute_bytes, len(tokens), call.has_gradient
    for step in range(c - 1):
        for _ in range(call.n_forwards + has_gradient):
            call.traffic.send(CONTEXT, tokens[(call.rank - step) % c] * numel_per_token * size)
        if has_gradient:
            n_tokens = tokens[(call.rank - step - 1) % c]
            call.traffic.send(CONTEXT, n_tokens * numel_per_token * call.reduction_bytes)


def _add_ulysses(call: RankCall, qkv: Sequence[Shape]) -> None:
    """Add Ulysses' all-to-alls of queries, keys with values, and outputs, and of their gradients; "selective"
    recomputation saves their results."""
    by_rank = call.positions_by_rank
    c, (n, k) = len(by_rank), count_local_heads(call.config, *qkv[:2])
    (rows, *_, h), (*_, v) = qkv[0], qkv[2]
    local_rows = rows * len(by_rank[call.rank]) * (c - 1)
    remote_rows = rows * sum(len(positions) for i, positions in enumerate(by_rank) if i != call.rank)
    for width, to_heads in ((n // c * h, True), (max(k, c) // c * (h + v), True), (n // c * v, False)):
        forward, backward = (local_rows, remote_rows) if to_heads else (remote_rows, local_rows)
        for _ in range(call.n_forward_sums):
            call.traffic.all_to_all(CONTEXT, forward * width * call.compute_bytes)
        if call.has_gradient:
            call.traffic.all_to_all(CONTEXT, backward * width * call.compute_bytes)


def _add_global_queries(call: RankCall, qkv: Sequence[Shape]) -> None:
    """Add global queries: all-reduced (other ranks add zeros); their outputs and log-sum-exps are all-gathered in
    float32 or wider; the backward pass reduces both gradients."""
    (rows, n, _, h), (*_, v) = qkv[0], qkv[2]
    by_rank = call.positions_by_rank
    rank_of = np.zeros(sum(map(len, by_rank)), np.int64)
    for owner, positions in enumerate(by_rank):
        rank_of[positions] = owner
    count = count_global_queries(call.pattern, call.rows, rank_of, causal=call.is_causal)
    if not count:
        return
    queries = rows * n // call.config.parallel.tp * count
    call.traffic.all_reduce(CONTEXT, queries * h * call.compute_bytes, times=call.n_passes_with_sums)
    call.traffic.all_reduce(CONTEXT, queries * v * call.compute_bytes, times=call.has_gradient)
    call.traffic.all_gather(CONTEXT, queries * (v + 1) * call.reduction_bytes, times=call.n_forwards)


def _add_linformer(call: RankCall) -> None:
    """Add sums of each document's projected keys and values over its tokens on all ranks."""
    options: Any = get_block_config(call.config, call.path).attention
    documents = sum(1 for _ in call.rows.iter_documents())
    _add_key_sums(call, documents * 2 * options.projected_length)


def _add_compressed(call: RankCall) -> None:
    """Add sums of compressed keys and values, one for each block of `factor` tokens of a document; rows are padded to
    the most blocks."""
    options: Any = get_block_config(call.config, call.path).attention
    n_blocks = [0] * call.rows.count
    for row, begin, end in call.rows.iter_documents():
        n_blocks[row] += -(-(end - begin) // options.factor)
    _add_key_sums(call, len(n_blocks) * max(n_blocks) * 2)


def _add_key_sums(call: RankCall, numel_per_head: int) -> None:
    """Add all-reduces of keys and values that summarise tokens of several ranks, forward and backward."""
    model = call.config.model
    elements = numel_per_head * model.head_width * model.attention.n_heads // call.config.parallel.tp
    call.traffic.all_reduce(CONTEXT, elements * call.compute_bytes, times=call.n_passes_with_sums)


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
    "GlobalAttention": lambda call: _add_global_queries(call, require_shapes(call.inputs[1:4])),
    "CompressedAttentionCore": lambda _: None,  # its keys are on all ranks
    "DotProductAttention": _add_attention,
    "DisentangledCore": _add_attention,
    "ShawCore": _add_attention,
    "LinformerAttention": _add_linformer,
    "CompressedAttention": _add_compressed,
    "KVGather": _add_gathered_keys,
    "SpanBoundaryGather": _add_span_boundaries,
    "TokenGather": _add_token_gather,
    "ImageMean": lambda call: _all_reduce_sums(call, max(call.count_documents(), 1), call.reduction_bytes),
    "BoundaryVector": lambda call: _all_reduce_sums(call, max(call.count_documents(), 1), call.compute_bytes),
    "PoolingAttention": _add_pooling,
    "RowScores": lambda call: _all_reduce_sums(
        call, sum(map(len, call.shards.positions_by_rank[""])), call.compute_bytes
    ),
    "SoftMoE": _add_soft_moe,
    "Experts": _add_expert_capacity,
    "ExpertChoiceRouter": _add_expert_choice,
}
"""Class name → function that adds the traffic of its calls; subclasses before their base classes."""
