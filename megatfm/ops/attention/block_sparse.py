"""Block-sparse attention on a CPU: computes only blocks of keys that are seen; memory is linear in T.

Key blocks are gathered for some query blocks, and results are scattered back. The backward pass recomputes the scores
from the log-sum-exp (Dao et al. 2022), and sums the gradients of keys over all their queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.attention.block_plan import BlockGrid, BlockGroup, plan_blocks
from megatfm.ops.attention.fused import has_flash
from megatfm.ops.attention.mask import AttentionMask, Band, compute_block_indices, find_block_positions
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.attention.tile import (
    MAX_SCORES,
    BackwardInputs,
    BlockAttentionPlan,
    Gradients,
    GradientTotals,
    append_columns,
    compute_tile,
    compute_tile_gradients,
    tile_backward,
    tile_backward_bf16,
    tile_forward,
    uses_bf16_backward,
)
from megatfm.ops.keyed_random import RATE_STEPS, draw_keep_mask_at, fold_in

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width, b tokens of a block
# R query blocks of a chunk, K' heads of gathered keys, g query heads on each of them
# M key blocks that a query block sees

SIZE = 128
"""Tokens of a block: smaller blocks fit a mask better, larger ones multiply faster (docs/LOG.md, 2026-11-22)."""


def block_sparse_attention(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    options: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference`; only biases by distance are supported."""
    queries = q_BNTH.shape[2]
    width = q_BNTH.shape[-1]
    is_fused = width == v_BKSV.shape[-1] and has_flash(q_BNTH, width) and not options.softcap and bias is None
    visits, size, is_banded = _plan_visits(mask, q_BNTH, k_BKSH, has_dropout=rng_keys_BNT is not None, fused=is_fused)
    # Contiguous, so that blocks of keys are gathered from views and not from a copy for each chunk.
    q, k, v = (pad_to_blocks(x, size) for x in (q_BNTH, k_BKSH, v_BKSV))
    rng_keys = None if rng_keys_BNT is None else F.pad(rng_keys_BNT, (0, -rng_keys_BNT.shape[2] % size))
    plan = BlockAttentionPlan.build(visits, size, q.shape[-1], options, zero_distance=queries - 1, is_banded=is_banded)
    result: Tensor = _BlockSparse.apply(q, k, v, bias, rng_keys, sinks_N, plan)
    return result if result.shape[2] == queries else result[:, :, :queries]


def _plan_visits(
    mask: AttentionMask, q_BNTH: Tensor, k_BKSH: Tensor, *, has_dropout: bool, fused: bool
) -> tuple[list[BlockGroup | Band], int, bool]:
    """Return the visits, the multiple to which rows are padded, and whether bands hold every query."""
    bands = None if has_dropout else mask.cached(("bands", fused), lambda: mask.bands(fused=fused))
    if bands is not None:
        return list(bands), 1, True
    size = choose_block_size(mask)
    grid = BlockGrid(len(q_BNTH), q_BNTH.shape[2], k_BKSH.shape[2], size)
    groups = mask.cached(("block groups", size), lambda: list(plan_blocks(mask, grid)))
    visits: list[BlockGroup | Band] = [*groups]
    if not has_dropout:
        visits = mask.cached(("dense bands", size), lambda: turn_dense_blocks_into_bands(groups, grid))
    return visits, size, False


def turn_dense_blocks_into_bands(groups: Sequence[BlockGroup], grid: BlockGrid) -> list[BlockGroup | Band]:
    """Replace query blocks that see all keys, as BigBird's first and last, by bands, whose keys need no gather."""
    visits: list[BlockGroup | Band] = []
    for group in groups:
        sees_all = group.mask is None and group.table.shape[-1] == grid.columns
        if not sees_all or grid.queries % grid.size:
            visits.append(group)
            continue
        for index in group.query_blocks.tolist():
            row, block = divmod(index, grid.rows)
            visits.append(Band(row, block * grid.size, 0, grid.size, grid.keys))
    return visits


def choose_block_size(mask: AttentionMask) -> int:
    """Return the block size: the mask's, if that is near `SIZE` and a multiple of 4, else `SIZE`."""
    size = mask.block_size or 0
    return size if SIZE // 4 <= size <= SIZE and size % 4 == 0 else SIZE


@dataclass(frozen=True)
class Chunk:
    """Query blocks [R] that are computed together.

    key_blocks: [R · K' · M], indices of the gathered key blocks in [B · K · J]. heads: K'. size: b. score_bias: added
    to the scores [R or 1, K' or 1, g·b, M·b]: a bias, and −∞ at hidden pairs. table: see `BlockGroup`. distances:
    indices of the relative bias [R, n, b, M·b].
    """

    query_blocks: Tensor
    key_blocks: Tensor
    heads: int
    size: int
    score_bias: Tensor | None
    table: Tensor
    distances: Tensor | None


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rng_keys: Tensor | None,
        sinks: Tensor | None, plan: BlockAttentionPlan,
    ) -> Tensor:  # fmt: skip
        out, lse = add_sinks(*compute_forward(q, k, v, rng_keys, plan, bias), sinks)
        ctx.save_for_backward(q, k, v, bias, rng_keys, sinks, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, rng_keys, sinks, out, lse = ctx.saved_tensors
        bias_grad = bias.new_zeros(bias.shape, dtype=lse.dtype) if ctx.needs_input_grad[3] else None
        inputs = BackwardInputs(g, q, k, v, out, lse)
        dq, dk, dv = compute_backward(inputs, rng_keys, ctx.plan, bias, bias_grad)
        sinks_grad = compute_sinks_gradient(g, out, lse, sinks)
        return (
            dq, dk.to(k.dtype), dv.to(v.dtype), None if bias_grad is None else bias_grad.to(bias.dtype), None,
            sinks_grad, None,
        )  # fmt: skip


def compute_forward(
    q: Tensor, k: Tensor, v: Tensor, rng_keys: Tensor | None, plan: BlockAttentionPlan, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [B, N, T, V] and log-sum-exp [B, N, T, 1] over these keys, −∞ where none is seen.

    T and S must be multiples of the block size. bias: by distance.
    """
    allocate = torch.empty if plan.is_banded else torch.zeros
    lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    dtype = lse.dtype if plan.sums_parts else q.dtype
    out = allocate(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    for band in plan.visits:
        if isinstance(band, Band):
            compute_tile(band, q, k, v, out, lse, bias, plan)
    for chunk in _iter_chunks(plan, q, k, bias):
        (qc,), (kc, vc) = _gather_queries(chunk, q), _gather_keys(chunk, k, v)
        keep = _keep_mask(chunk, rng_keys, plan)
        chunk_out, chunk_lse = tile_forward(qc, kc, vc, chunk.score_bias, keep, plan)
        _scatter_queries(out, chunk_out, chunk)
        _scatter_queries(lse, chunk_lse, chunk)
    return out, lse


def compute_backward(
    inputs: BackwardInputs,
    rng_keys: Tensor | None,
    plan: BlockAttentionPlan,
    bias: Tensor | None = None,
    bias_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q and, in the dtype of `lse`, of these k and v; adds that of a learned bias to
    `bias_grad`.

    inputs: output and log-sum-exp are over all keys, also those of other calls.
    """
    g, q, k, v, out, lse = inputs
    dq = torch.empty_like(q) if plan.is_banded else torch.zeros_like(q, dtype=lse.dtype if plan.sums_parts else q.dtype)
    is_bf16 = uses_bf16_backward(q, v, rng_keys, plan) and bias is None
    dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    if is_bf16:
        k, v = append_columns(k), append_columns(v)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    band_inputs, totals = BackwardInputs(g, q, k, v, out, lse), GradientTotals(dq, dk, dv, bias_grad)
    for band in plan.visits:
        if isinstance(band, Band):
            compute_tile_gradients(band, band_inputs, bias, totals, plan)
    for chunk in _iter_chunks(plan, q, k, bias):
        (qc, gc, oc, lc), (kc, vc) = _gather_queries(chunk, q, g, out, lse), _gather_keys(chunk, k, v)
        chunk_inputs = BackwardInputs(gc, qc, kc, vc, oc, lc)
        if is_bf16:
            results: Gradients = (*tile_backward_bf16(chunk_inputs, chunk.score_bias, plan.scale), None)
        else:
            keep = _keep_mask(chunk, rng_keys, plan)
            results = tile_backward(chunk_inputs, chunk.score_bias, keep, plan, is_bias_trained=bias_grad is not None)
            if bias_grad is not None and results[3] is not None:
                gradient = results[3].unflatten(2, (-1, chunk.size)).flatten(1, 2)
                bias_grad.index_put_(_index_bias(chunk, q.shape[1]), gradient, accumulate=True)
        _scatter_queries(dq, results[0], chunk)
        for total, gradient in ((dk, results[1]), (dv, results[2])):
            gradient = gradient.reshape(len(chunk.key_blocks), -1).to(total.dtype)
            total.view(-1, gradient.shape[-1]).index_add_(0, chunk.key_blocks, gradient)
    return dq, dk, dv


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add sinks, a score [N] without a value, to the softmax of an output; returns output (in place) and
    log-sum-exp."""
    if sinks is None:
        return out, lse
    total_lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])
    return out.mul_((lse - total_lse).exp().to(out.dtype)), total_lse


def compute_sinks_gradient(g: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient [N] of sinks. lse: with the sinks."""
    if sinks is None:
        return None
    probabilities = (sinks.to(lse.dtype)[:, None, None] - lse).exp()
    return -(probabilities * (g * out).sum(-1, keepdim=True, dtype=lse.dtype)).sum((0, 2, 3)).to(sinks.dtype)


def _iter_chunks(plan: BlockAttentionPlan, q: Tensor, k: Tensor, bias: Tensor | None) -> Iterator[Chunk]:
    size = plan.size
    N, K, Q, J = q.shape[1], k.shape[1], q.shape[2] // size, k.shape[2] // size
    for group in plan.visits:
        if isinstance(group, Band):
            continue
        n_tables, count = group.table.shape[1:]
        heads = N if n_tables > 1 else K
        kv_head_of = torch.arange(heads, device=q.device) // (heads // K)
        step = max(1, MAX_SCORES // (N * size * size * count))
        shared_bias = None
        if group.mask is not None and len(group.mask) == 1:
            shared_bias = _mask_to_bias(group.mask, count * size, N // heads, q.dtype)
        for start in range(0, len(group.query_blocks), step):
            blocks, table = group.query_blocks[start : start + step], group.table[start : start + step]
            key_blocks = (((blocks // Q)[:, None] * K + kv_head_of)[..., None] * J + table).flatten()
            score_bias = shared_bias
            if group.mask is not None and shared_bias is None:
                mask = group.mask[start : start + step]
                score_bias = _mask_to_bias(mask, count * size, N // heads, q.dtype)
            if bias is None:
                yield Chunk(blocks, key_blocks, heads, size, score_bias, table, None)
                continue
            distances = compute_block_indices(
                bias.shape[1], plan.zero_distance, size, blocks % Q, table, plan.q_positions, plan.k_positions
            )
            chunk = Chunk(blocks, key_blocks, heads, size, score_bias, table, distances)
            relative_bias = bias.to(q.dtype)[_index_bias(chunk, N)].unflatten(1, (heads, -1)).flatten(2, 3)
            yield replace(chunk, score_bias=relative_bias if score_bias is None else relative_bias + score_bias)


def _index_bias(chunk: Chunk, n_heads: int) -> tuple[Tensor, Tensor]:
    """Return the indices of heads and distances [R, N, b, M·b] in a relative bias."""
    assert chunk.distances is not None
    heads = torch.arange(n_heads, device=chunk.query_blocks.device)[:, None, None]
    distances = chunk.distances
    if distances.shape[1] > 1:
        distances = distances.repeat_interleave(n_heads // distances.shape[1], 1)
    return heads, distances


def _mask_to_bias(mask: Tensor, keys: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Return 0, or −∞ where masked, [R, n, g·b, M·b]. mask: of the last columns."""
    bias = torch.zeros(*mask.shape[:3], keys, dtype=dtype, device=mask.device)
    bias[..., keys - mask.shape[-1] :].masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, 1, groups, 1)


def _gather_queries(chunk: Chunk, *tensors: Tensor) -> Iterator[Tensor]:
    """Gather queries [B, N, T, ·] → [R, K', g·b, ·]; heads that share keys are stacked."""
    for x in tensors:
        blocks = x.shape[2] // chunk.size
        queries = x.unflatten(2, (-1, chunk.size))
        queries = queries[chunk.query_blocks // blocks, :, chunk.query_blocks % blocks]
        yield queries.unflatten(1, (chunk.heads, -1)).flatten(2, 3)


def _scatter_queries(out: Tensor, x: Tensor, chunk: Chunk) -> None:
    """Write [R, K', g·b, ·] to [B, N, T, ·], the inverse of `_gather_queries`."""
    blocks = out.shape[2] // chunk.size
    queries = x.unflatten(2, (-1, chunk.size)).flatten(1, 2).to(out.dtype)
    out.unflatten(2, (-1, chunk.size))[chunk.query_blocks // blocks, :, chunk.query_blocks % blocks] = queries


def _gather_keys(chunk: Chunk, *tensors: Tensor) -> Iterator[Tensor]:
    """Gather keys or values [B, K, S, ·] → [R, K', M·b, ·]."""
    for x in tensors:
        keys = x.reshape(-1, chunk.size * x.shape[-1]).index_select(0, chunk.key_blocks)
        yield keys.view(len(chunk.query_blocks), chunk.heads, -1, x.shape[-1])


def _keep_mask(chunk: Chunk, rng_keys: Tensor | None, plan: BlockAttentionPlan) -> Tensor | None:
    """Return booleans [R, K', g·b, M·b] of probabilities that are not dropped, as `keyed_random.dropout` draws them."""
    if rng_keys is None:
        return None
    (keys,) = _gather_queries(chunk, rng_keys[..., None])
    table, size = chunk.table, chunk.size
    if plan.k_positions is not None:
        channels = find_block_positions(plan.k_positions, table, size)
        return draw_keep_mask_at(keys, channels.flatten(2)[:, :, None], plan.threshold)
    groups = table[..., None] * (size // 4) + torch.arange(size // 4, device=table.device)
    return fold_in(keys, groups.flatten(2)[:, :, None]).view(torch.int16) >= plan.threshold - RATE_STEPS // 2


def pad_to_blocks(x: Tensor, size: int) -> Tensor:
    """Pad [B, n, T, ·] with zeros to full blocks; returns a contiguous tensor."""
    missing = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).contiguous()
