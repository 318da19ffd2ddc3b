"""Expected traffic of attention under context parallelism.

Ring attention over c ranks with x bytes of keys and values each sends (c − 1)·x forward and twice that backward (Liu et
al. 2023). If queries see only runs of keys, or need less than half of the other ranks' keys, ranks fetch the keys that
they need, once forward, and send their gradients back once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatfm.verify.axes import CONTEXT
from megatfm.verify.context_shards import RankCall
from megatfm.verify.expected_keys import (
    compute_fetched_share,
    count_elements_per_token,
    count_global_queries,
    count_local_heads,
    get_block_config,
    is_cross_attention,
    is_ulysses,
    sees_key_runs,
)
from megatfm.verify.module_calls import Shape, get_latent_shapes, require_shapes
from megatfm.verify.module_shardings import is_a

ALL_KEYS = ("DisentangledCore", "ShawCore")  # their biases need all keys at once


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


ATTENTION_TRAFFIC: Mapping[str, Callable[[RankCall], None]] = {
    "GlobalAttention": lambda call: _add_global_queries(call, require_shapes(call.inputs[1:4])),
    "CompressedAttentionCore": lambda _: None,  # its keys are on all ranks
    "DotProductAttention": _add_attention,
    "DisentangledCore": _add_attention,
    "ShawCore": _add_attention,
    "LinformerAttention": _add_linformer,
    "CompressedAttention": _add_compressed,
}
"""Class name → function that adds the traffic of its calls; subclasses before their base classes."""
