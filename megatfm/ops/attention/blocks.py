"""Attention by blocks on a CPU: only blocks of keys that are seen are visited, and memory is linear in T.

Blocks of keys are gathered for some blocks of queries, multiplied, and scattered back. The backward pass computes the
scores again from the logarithm of their sum (Dao et al. 2022), and adds up what keys get from all their queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.attention import banded
from megatfm.ops.attention.bands import Band
from megatfm.ops.attention.pieces import Grid, Piece, pieces
from megatfm.ops.attention.products import Variant
from megatfm.ops.attention.tiles import (
    SCORES,
    How,
    attend,
    attend_backward,
    is_folded,
    products_backward,
    with_room,
)
from megatfm.ops.attention.visible import Visible
from megatfm.ops.dropout import LEVELS, keep_at, mix

# B batch, N query heads, K key-value heads, T queries, S keys, H head width, V value width, b tokens of a block
# R rows (query blocks) of a chunk, K' heads that share gathered keys, g queries' heads on one of those
# M key blocks that a row sees

SIZE = 128
"""Tokens of a block: smaller ones fit a mask better, larger ones multiply faster (docs/LOG.md, 2026-11-22)."""


def blocked(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSV: Tensor,
    seen: Visible,
    bias_BNTS: Tensor | None,
    variant: Variant,
    rng_keys_BNT: Tensor | None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """As `attention_reference`, without biases; a query that sees nothing gets 0."""
    queries = q_BNTH.shape[2]
    visits, size = _visits(seen, q_BNTH, k_BKSH, drops=rng_keys_BNT is not None)
    # Contiguous, so that blocks of keys are gathered from views and not from a copy for each chunk.
    q, k, v = (padded(x, size) for x in (q_BNTH, k_BKSH, v_BKSV))
    drawn = None if rng_keys_BNT is None else F.pad(rng_keys_BNT, (0, -rng_keys_BNT.shape[2] % size))
    how = How.of(visits, size, q.shape[-1], variant)
    made: Tensor = _Blocked.apply(q, k, v, drawn, sinks_N, how)
    return made[:, :, :queries]


def _visits(seen: Visible, q_BNTH: Tensor, k_BKSH: Tensor, *, drops: bool) -> tuple[list[Piece | Band], int]:
    """What is visited, and into multiples of how many tokens rows are padded for it."""
    bands = None if drops else seen.once("bands", seen.bands)
    if bands is not None:
        return list(bands), 1
    size = block_size(seen)
    grid = Grid(len(q_BNTH), q_BNTH.shape[2], k_BKSH.shape[2], size)
    return seen.once(("pieces", size), lambda: list(pieces(seen, grid))), size


def block_size(seen: Visible) -> int:
    """Tokens of a block: of what is seen, if it is made of blocks of about the right size."""
    own = seen.grain or 0
    return own if SIZE // 4 <= own <= SIZE and own % 4 == 0 else SIZE


@dataclass(frozen=True)
class Chunk:
    """Some rows that are computed together. flat: numbers of the gathered key blocks in all of the batch and heads.

    bias: −∞ where a query does not look, [R or 1, K' or 1, g·b, M·b]. table: as of a piece.
    """

    rows: Tensor
    flat: Tensor
    heads: int
    size: int
    bias: Tensor | None
    table: Tensor


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | None, sinks: Tensor | None, how: How
    ) -> Tensor:
        out, lse = with_sinks(*forward(q, k, v, drawn, how), sinks)
        ctx.save_for_backward(q, k, v, drawn, sinks, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, drawn, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = backward(g, q, k, v, out, lse, drawn, ctx.how)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, gradient_of_sinks(g, out, lse, sinks), None


def forward(q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """Output and logarithms of the sums [B, N, T, 1] over these keys, −∞ where none is seen; T and S divide into
    blocks."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for band in how.visits:
        if isinstance(band, Band):
            banded.forward(band, q, k, v, out, lse, how)
    for chunk in _chunks(how, q, k):
        (qc,), (kc, vc) = _queries(chunk, q), _keys(chunk, k, v)
        keep = _kept(chunk, drawn, how)
        part, total = attend(qc, kc, vc, chunk.bias, keep, how)
        _put(out, part, chunk)
        _put(lse, total, chunk)
    return out, lse


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, drawn: Tensor | None, how: How
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and, in the type of `lse`, of these k and v; `out` and `lse` are over all keys, others too."""
    dq, folded = torch.zeros_like(q), is_folded(q, v, drawn, how)
    dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (k, v))
    if folded:
        k, v = with_room(k), with_room(v)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    for band in how.visits:
        if isinstance(band, Band):
            banded.backward(band, g, q, k, v, out, lse, dq, dk, dv, how)
    for chunk in _chunks(how, q, k):
        (qc, gc, oc, lc), (kc, vc) = _queries(chunk, q, g, out, lse), _keys(chunk, k, v)
        if folded:
            found = products_backward(
                gc, qc, kc, vc, oc, lc, [] if chunk.bias is None else [(0, chunk.bias)], how.scale
            )
        else:
            found = attend_backward(gc, qc, kc, vc, oc, lc, chunk.bias, _kept(chunk, drawn, how), how)
        _put(dq, found[0], chunk)
        for total, part in ((dk, found[1]), (dv, found[2])):
            part = part.reshape(len(chunk.flat), -1).to(total.dtype)
            total.view(-1, part.shape[-1]).index_add_(0, chunk.flat, part)
    return dq, dk, dv


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both, with the scores [N] of sinks among those that were summed."""
    if sinks is None:
        return out, lse
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])
    return out.mul_((lse - whole).exp().to(out.dtype)), whole


def gradient_of_sinks(g: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """As of the score of a key whose value is 0."""
    if sinks is None:
        return None
    share = (sinks.to(lse.dtype)[:, None, None] - lse).exp()
    return -(share * (g * out).sum(-1, keepdim=True, dtype=lse.dtype)).sum((0, 2, 3)).to(sinks.dtype)


def _chunks(how: How, q: Tensor, k: Tensor) -> Iterator[Chunk]:
    size = how.size
    N, K, Q, J = q.shape[1], k.shape[1], q.shape[2] // size, k.shape[2] // size
    for piece in how.visits:
        if isinstance(piece, Band):
            continue
        differ, count = piece.table.shape[1:]
        heads = N if differ > 1 else K
        of_head = torch.arange(heads, device=q.device) // (heads // K)
        step = max(1, SCORES // (N * size * size * count))
        # One mask for all rows is made into a bias once.
        shared = None
        if piece.mask is not None and len(piece.mask) == 1:
            shared = _bias(piece.mask, count * size, N // heads, q.dtype)
        for at in range(0, len(piece.rows), step):
            rows, table = piece.rows[at : at + step], piece.table[at : at + step]
            flat = (((rows // Q)[:, None] * K + of_head)[..., None] * J + table).flatten()
            bias = shared
            if piece.mask is not None and shared is None:
                bias = _bias(piece.mask[at : at + step], count * size, N // heads, q.dtype)
            yield Chunk(rows, flat, heads, size, bias, table)


def _bias(mask: Tensor, keys: int, groups: int, dtype: torch.dtype) -> Tensor:
    """−∞ where masked, [R, n, g·b, M·b], of which the mask says the last columns."""
    bias = torch.zeros(*mask.shape[:3], keys, dtype=dtype, device=mask.device)
    bias[..., keys - mask.shape[-1] :].masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, 1, groups, 1)


def _queries(chunk: Chunk, *tensors: Tensor) -> Iterator[Tensor]:
    """[B, N, T, ·] → [R, K', g·b, ·]: the rows' queries; heads that share keys lie on top of each other."""
    for x in tensors:
        blocks = x.shape[2] // chunk.size
        rows = x.unflatten(2, (-1, chunk.size))[chunk.rows // blocks, :, chunk.rows % blocks]
        yield rows.unflatten(1, (chunk.heads, -1)).flatten(2, 3)


def _put(out: Tensor, x: Tensor, chunk: Chunk) -> None:
    """The inverse of `_queries`."""
    blocks = out.shape[2] // chunk.size
    rows = x.unflatten(2, (-1, chunk.size)).flatten(1, 2).to(out.dtype)
    out.unflatten(2, (-1, chunk.size))[chunk.rows // blocks, :, chunk.rows % blocks] = rows


def _keys(chunk: Chunk, *tensors: Tensor) -> Iterator[Tensor]:
    """[B, K, S, ·] → [R, K', M·b, ·]."""
    for x in tensors:
        found = x.reshape(-1, chunk.size * x.shape[-1]).index_select(0, chunk.flat)
        yield found.view(len(chunk.rows), chunk.heads, -1, x.shape[-1])


def _kept(chunk: Chunk, drawn: Tensor | None, how: How) -> Tensor | None:
    """Booleans [R, K', g·b, M·b] of probabilities that are not dropped: the same as `ops.dropout` draws for a row."""
    if drawn is None:
        return None
    (keys,) = _queries(chunk, drawn[..., None])
    table, size = chunk.table, chunk.size
    if how.places is not None:
        channels = F.pad(how.places, (0, -len(how.places) % size)).view(-1, size)[table]
        return keep_at(keys, channels.flatten(2)[:, :, None], how.threshold)
    groups = table[..., None] * (size // 4) + torch.arange(size // 4, device=table.device)
    return mix(keys, groups.flatten(2)[:, :, None]).view(torch.int16) >= how.threshold - LEVELS // 2


def padded(x: Tensor, size: int) -> Tensor:
    """[B, n, T, ·] with zeros up to whole blocks, contiguous."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).contiguous()
