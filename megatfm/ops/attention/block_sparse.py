"""Attention by blocks on a CPU: only blocks of keys that are seen are visited, and memory is linear in T.

Blocks of keys are gathered for some blocks of queries, multiplied, and scattered back. The backward pass computes the
scores again from the logarithm of their sum (Dao et al. 2022), and adds up what keys get from all their queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.attention import tile
from megatfm.ops.attention.block_plan import BlockGrid, BlockGroup, plan_blocks
from megatfm.ops.attention.mask import AttentionMask, Band
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.attention.relative_bias import block_indices, block_positions
from megatfm.ops.attention.tile import (
    SCORES,
    BlockAttentionPlan,
    Gradients,
    append_columns,
    attend_backward,
    tile_backward_bf16,
    tile_forward,
    uses_bf16_backward,
)
from megatfm.ops.keyed_random import RATE_STEPS, fold_in, keep_at

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width, b tokens of a block
# R rows (query blocks) of a chunk, K' heads that share gathered keys, g queries' heads on one of those
# M key blocks that a row sees

SIZE = 128
"""Tokens of a block: smaller ones fit a mask better, larger ones multiply faster (docs/LOG.md, 2026-11-22)."""


def blocked(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    mask: AttentionMask,
    bias: Tensor | None,
    variant: AttentionOptions,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` with biases by distance only; a query that sees nothing gets 0."""
    queries = q_BNTH.shape[2]
    has_same_width = q_BNTH.shape[-1] == v_BKSV.shape[-1] and not variant.softcap and bias is None
    visits, size, covers = _visits(mask, q_BNTH, k_BKSH, drops=rng_keys_BNT is not None, fused=has_same_width)
    # Contiguous, so that blocks of keys are gathered from views and not from a copy for each chunk.
    q, k, v = (padded(x, size) for x in (q_BNTH, k_BKSH, v_BKSV))
    rng_keys = None if rng_keys_BNT is None else F.pad(rng_keys_BNT, (0, -rng_keys_BNT.shape[2] % size))
    plan = BlockAttentionPlan.build(visits, size, q.shape[-1], variant, zero=queries - 1, covers=covers)
    result: Tensor = _Blocked.apply(q, k, v, bias, rng_keys, sinks_N, plan)
    return result if result.shape[2] == queries else result[:, :, :queries]


def _visits(
    mask: AttentionMask, q_BNTH: Tensor, k_BKSH: Tensor, *, drops: bool, fused: bool
) -> tuple[list[BlockGroup | Band], int, bool]:
    """The visits, into multiples of how many tokens rows are padded for them, and whether they hold every query."""
    bands = None if drops else mask.cached(("bands", fused), lambda: mask.bands(fused=fused))
    if bands is not None:
        return list(bands), 1, True
    size = block_size(mask)
    grid = BlockGrid(len(q_BNTH), q_BNTH.shape[2], k_BKSH.shape[2], size)
    result = mask.cached(("pieces", size), lambda: list(plan_blocks(mask, grid)))
    visits: list[BlockGroup | Band] = (
        [*result] if drops else mask.cached(("wide", size), lambda: dense_blocks_as_bands(result, grid))
    )
    return visits, size, False


def dense_blocks_as_bands(result: Sequence[BlockGroup], grid: BlockGrid) -> list[BlockGroup | Band]:
    """Blocks of queries that see all keys, as BigBird's first and last, as tiles, whose keys need not be gathered."""
    visits: list[BlockGroup | Band] = []
    for piece in result:
        sees_all = piece.mask is None and piece.table.shape[-1] == grid.columns
        if not sees_all or grid.queries % grid.size:
            visits.append(piece)
            continue
        for number in piece.query_blocks.tolist():
            row, block = divmod(number, grid.rows)
            visits.append(Band(row, block * grid.size, 0, grid.size, grid.keys))
    return visits


def block_size(mask: AttentionMask) -> int:
    """Tokens of a block: of what is seen, if it is made of blocks of about the right size."""
    grain = mask.grain or 0
    return grain if SIZE // 4 <= grain <= SIZE and grain % 4 == 0 else SIZE


@dataclass(frozen=True)
class Chunk:
    """Some rows that are computed together. flat: numbers of the gathered key blocks in all of the batch and heads.

    added: to the scores, [R or 1, K' or 1, g·b, M·b]: a bias, and −∞ where a query does not look. table: as of a piece.
    distances: which numbers of the bias, [R, n, b, M·b].
    """

    query_blocks: Tensor
    flat: Tensor
    heads: int
    size: int
    added: Tensor | None
    table: Tensor
    distances: Tensor | None


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rng_keys: Tensor | None,
        sinks: Tensor | None, plan: BlockAttentionPlan,
    ) -> Tensor:  # fmt: skip
        out, lse = with_sinks(*forward(q, k, v, rng_keys, plan, bias), sinks)
        ctx.save_for_backward(q, k, v, bias, rng_keys, sinks, out, lse)
        ctx.how = plan
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, rng_keys, sinks, out, lse = ctx.saved_tensors
        bias_grad = bias.new_zeros(bias.shape, dtype=lse.dtype) if ctx.needs_input_grad[3] else None
        dq, dk, dv = backward(g, q, k, v, out, lse, rng_keys, ctx.how, bias, bias_grad)
        sinks_grad = gradient_of_sinks(g, out, lse, sinks)
        return (
            dq, dk.to(k.dtype), dv.to(v.dtype), None if bias_grad is None else bias_grad.to(bias.dtype), None,
            sinks_grad, None,
        )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng_keys: Tensor | None,
    plan: BlockAttentionPlan,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logarithms of the sums [B, N, T, 1] over these keys, −∞ where none is seen; T and S divide into
    blocks. bias: by distance."""
    filled = torch.empty if plan.is_banded else torch.zeros
    out = filled(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for band in plan.steps:
        if isinstance(band, Band):
            tile.forward(band, q, k, v, out, lse, bias, plan)
    for chunk in _chunks(plan, q, k, bias):
        (qc,), (kc, vc) = _queries(chunk, q), _keys(chunk, k, v)
        keep = _kept(chunk, rng_keys, plan)
        part, total = tile_forward(qc, kc, vc, chunk.added, keep, plan)
        _put(out, part, chunk)
        _put(lse, total, chunk)
    return out, lse


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_keys: Tensor | None,
    plan: BlockAttentionPlan, bias: Tensor | None = None, bias_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q and, in the type of `lse`, of these k and v; `out` and `lse` are over all keys, others too.

    That of a bias that learns is added to `bias_grad`.
    """
    dq = torch.empty_like(q) if plan.is_banded else torch.zeros_like(q)
    folded = uses_bf16_backward(q, v, rng_keys, plan) and bias is None
    dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    if folded:
        k, v = append_columns(k), append_columns(v)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    for band in plan.steps:
        if isinstance(band, Band):
            tile.backward(band, g, q, k, v, out, lse, dq, dk, dv, bias, bias_grad, plan)
    for chunk in _chunks(plan, q, k, bias):
        (qc, gc, oc, lc), (kc, vc) = _queries(chunk, q, g, out, lse), _keys(chunk, k, v)
        if folded:
            results: Gradients = (*tile_backward_bf16(gc, qc, kc, vc, oc, lc, chunk.added, plan.scale), None)
        else:
            keep, learns = _kept(chunk, rng_keys, plan), bias_grad is not None
            results = attend_backward(gc, qc, kc, vc, oc, lc, chunk.added, keep, plan, learns=learns)
            if bias_grad is not None and results[3] is not None:
                part = results[3].unflatten(2, (-1, chunk.size)).flatten(1, 2)
                bias_grad.index_put_(_of_heads(chunk, q.shape[1]), part, accumulate=True)
        _put(dq, results[0], chunk)
        for total, part in ((dk, results[1]), (dv, results[2])):
            part = part.reshape(len(chunk.flat), -1).to(total.dtype)
            total.view(-1, part.shape[-1]).index_add_(0, chunk.flat, part)
    return dq, dk, dv


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both, with the scores [N] of sinks among those that were summed."""
    if sinks is None:
        return out, lse
    total_lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])
    return out.mul_((lse - total_lse).exp().to(out.dtype)), total_lse


def gradient_of_sinks(g: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Gradient of a score whose key has value 0."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype)[:, None, None] - lse).exp()
    return -(share * (g * out).sum(-1, keepdim=True, dtype=lse.dtype)).sum((0, 2, 3)).to(sinks.dtype)


def _chunks(plan: BlockAttentionPlan, q: Tensor, k: Tensor, bias: Tensor | None) -> Iterator[Chunk]:
    size = plan.size
    N, K, Q, J = q.shape[1], k.shape[1], q.shape[2] // size, k.shape[2] // size
    for piece in plan.steps:
        if isinstance(piece, Band):
            continue
        differ, count = piece.table.shape[1:]
        heads = N if differ > 1 else K
        kv_head_of = torch.arange(heads, device=q.device) // (heads // K)
        step = max(1, SCORES // (N * size * size * count))
        # One mask for all rows is made into a bias once.
        shared = None
        if piece.mask is not None and len(piece.mask) == 1:
            shared = _hidden(piece.mask, count * size, N // heads, q.dtype)
        for at in range(0, len(piece.query_blocks), step):
            rows, table = piece.query_blocks[at : at + step], piece.table[at : at + step]
            flat = (((rows // Q)[:, None] * K + kv_head_of)[..., None] * J + table).flatten()
            added = shared
            if piece.mask is not None and shared is None:
                added = _hidden(piece.mask[at : at + step], count * size, N // heads, q.dtype)
            if bias is None:
                yield Chunk(rows, flat, heads, size, added, table, None)
                continue
            distances = block_indices(
                bias.shape[1], plan.zero_distance, size, rows % Q, table, plan.q_places, plan.places
            )
            chunk = Chunk(rows, flat, heads, size, added, table, distances)
            results = bias.to(q.dtype)[_of_heads(chunk, N)].unflatten(1, (heads, -1)).flatten(2, 3)
            yield replace(chunk, added=results if added is None else results + added)


def _of_heads(chunk: Chunk, n_heads: int) -> tuple[Tensor, Tensor]:
    """Heads and distances [R, N, b, M·b] of the numbers of a bias."""
    assert chunk.distances is not None
    heads = torch.arange(n_heads, device=chunk.query_blocks.device)[:, None, None]
    distances = chunk.distances
    if distances.shape[1] > 1:
        distances = distances.repeat_interleave(n_heads // distances.shape[1], 1)
    return heads, distances


def _hidden(mask: Tensor, keys: int, groups: int, dtype: torch.dtype) -> Tensor:
    """−∞ where masked, [R, n, g·b, M·b], of which the mask says the last columns."""
    hidden = torch.zeros(*mask.shape[:3], keys, dtype=dtype, device=mask.device)
    hidden[..., keys - mask.shape[-1] :].masked_fill_(~mask, -torch.inf)
    return hidden.repeat(1, 1, groups, 1)


def _queries(chunk: Chunk, *tensors: Tensor) -> Iterator[Tensor]:
    """[B, N, T, ·] → [R, K', g·b, ·]: the rows' queries; heads that share keys lie on top of each other."""
    for x in tensors:
        blocks = x.shape[2] // chunk.size
        rows = x.unflatten(2, (-1, chunk.size))[chunk.query_blocks // blocks, :, chunk.query_blocks % blocks]
        yield rows.unflatten(1, (chunk.heads, -1)).flatten(2, 3)


def _put(out: Tensor, x: Tensor, chunk: Chunk) -> None:
    """The inverse of `_queries`."""
    blocks = out.shape[2] // chunk.size
    rows = x.unflatten(2, (-1, chunk.size)).flatten(1, 2).to(out.dtype)
    out.unflatten(2, (-1, chunk.size))[chunk.query_blocks // blocks, :, chunk.query_blocks % blocks] = rows


def _keys(chunk: Chunk, *tensors: Tensor) -> Iterator[Tensor]:
    """[B, K, S, ·] → [R, K', M·b, ·]."""
    for x in tensors:
        results = x.reshape(-1, chunk.size * x.shape[-1]).index_select(0, chunk.flat)
        yield results.view(len(chunk.query_blocks), chunk.heads, -1, x.shape[-1])


def _kept(chunk: Chunk, rng_keys: Tensor | None, plan: BlockAttentionPlan) -> Tensor | None:
    """Booleans [R, K', g·b, M·b] of probabilities that are not dropped: the same as `ops.dropout` draws for a row."""
    if rng_keys is None:
        return None
    (keys,) = _queries(chunk, rng_keys[..., None])
    table, size = chunk.table, chunk.size
    if plan.places is not None:
        channels = block_positions(plan.places, table, size)
        return keep_at(keys, channels.flatten(2)[:, :, None], plan.threshold)
    groups = table[..., None] * (size // 4) + torch.arange(size // 4, device=table.device)
    return fold_in(keys, groups.flatten(2)[:, :, None]).view(torch.int16) >= plan.threshold - RATE_STEPS // 2


def padded(x: Tensor, size: int) -> Tensor:
    """[B, n, T, ·] with zeros up to whole blocks, contiguous."""
    missing = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).contiguous()
