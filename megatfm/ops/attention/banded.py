"""Attention by bands of tiles (`bands`): queries and keys are views, and what is found is put where it belongs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatfm.ops.attention.bands import Band, add_tiles, tiles
from megatfm.ops.attention.distances import add_tile, for_tile
from megatfm.ops.attention.tiles import (
    EXTRA_COLUMNS,
    BlockAttentionPlan,
    Gradients,
    attend_backward,
    tile_backward_bf16,
    tile_forward,
)

# B batch, N query heads, K key-value heads, g = N / K, X rows times K, T queries, S keys, n tiles of b queries

FOLDED = 2**23
"""So many scores of a tile are held in bfloat16; of larger ones the fused kernel computes them again."""

HELD = 2**21
"""Scores of the tiles whose keys' gradients, which overlap, are held at once."""


def forward(
    band: Band,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    how: BlockAttentionPlan,
) -> None:
    """Puts output and logarithms of the sums into `out` and `lse` [B, N, T, ·], or merges them with what is there.

    bias: by distance."""
    added = _added(band, bias, q, k.shape[1])
    q, out, lse = (_by_keys(x, band, k.shape[1]) for x in (q, out, lse))
    k, v = (_by_keys(x, band, k.shape[1])[:, 0] for x in (k, v))
    for first, start, count in _parts(band, HELD, q):
        keys, values = (tiles(x, start, band.keys, count, band.step) for x in (k, v))
        if band.causal:
            keys, values = (x.expand(-1, q.shape[1], -1, -1) for x in (keys, values))
        found = tile_forward(_queries(q, first, count, band), keys, values, added, None, how, band.causal)
        places = [tiles(x, first, band.queries, count, band.step) for x in (out, lse)]
        made = [_of_heads(x, q.shape[1], band) for x in found]
        if band.accumulates:
            made = list(merge_partial(places[0].to(lse.dtype), places[1], *made))
        for place, x in zip(places, made, strict=True):
            place.copy_(x)


def backward(
    band: Band, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, bias: Tensor | None, of_bias: Tensor | None, how: BlockAttentionPlan,
) -> None:  # fmt: skip
    """Adds to the gradients of q, k and v, and of a bias that learns; all but that of q in the type of `lse`."""
    heads, length, width = k.shape[1], *q.shape[2:]
    added = _added(band, bias, q, heads)
    g, q, out, lse, dq = (_by_keys(x, band, heads) for x in (g, q, out, lse, dq))
    k, v, dk, dv = (_by_keys(x, band, heads)[:, 0] for x in (k, v, dk, dv))
    folded = k.shape[-1] != width
    if folded and (band.causal or q.shape[1] * band.queries * band.keys > FOLDED):
        folded, k, v = False, k[..., :-EXTRA_COLUMNS], v[..., :-EXTRA_COLUMNS]
    for first, start, count in _parts(band, HELD, q):
        gc, qc, oc, lc = (_queries(x, first, count, band) for x in (g, q, out, lse))
        kc, vc = (tiles(x, start, band.keys, count, band.step) for x in (k, v))
        if band.causal:
            kc, vc = (x.expand(-1, q.shape[1], -1, -1) for x in (kc, vc))
        if folded:
            found: Gradients = (*_products(gc, qc, kc, vc, oc, lc, added, how.scale), None)
        else:
            learns = of_bias is not None
            found = attend_backward(gc, qc, kc, vc, oc, lc, added, None, how, band.causal, learns)
            if of_bias is not None and found[3] is not None:
                of_head = (
                    found[3].sum(1).unflatten(0, (-1, heads)).sum(0).reshape(-1, band.queries, band.keys)
                )
                add_tile(of_bias, of_head, length, band.first, band.start)
        of_q = _of_heads(found[0], q.shape[1], band)
        place = tiles(dq, first, band.queries, count, band.step)
        place.copy_(place + of_q if band.accumulates else of_q)
        for total, part in ((dk, found[1]), (dv, found[2])):
            part = part.sum(1, keepdim=True, dtype=total.dtype) if band.causal else part
            add_tiles(total, part, start, band.step)


def merge_partial(out: Tensor, lse: Tensor, more: Tensor, of_more: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each; −∞ where nothing was seen."""
    total = torch.logaddexp(lse, of_more)
    safe = total.masked_fill(total == -torch.inf, 0)
    return out * (lse - safe).exp() + more * (of_more - safe).exp(), total


def _by_keys(x: Tensor, band: Band, heads: int) -> Tensor:
    """[B, N or K, T, ·] → [X, g or 1, T, ·] of the band's row."""
    rows = x if band.row is None else x[band.row : band.row + 1]
    return rows.unflatten(1, (heads, -1)).flatten(0, 1)


def _queries(x: Tensor, first: int, count: int, band: Band) -> Tensor:
    """[X, g, T, ·] → [X, n, g·b, ·], or [X, g, b, ·] of a causal tile, whose heads can't lie on top of each other."""
    found = tiles(x, first, band.queries, count, band.step)
    return found[:, :, 0] if band.causal else found.transpose(1, 2).flatten(2, 3)


def _of_heads(x: Tensor, groups: int, band: Band) -> Tensor:
    """The inverse of `_queries`, up to [X, g, n, b, ·]."""
    return x[:, :, None] if band.causal else x.unflatten(2, (groups, -1)).transpose(1, 2)


def _parts(band: Band, held: int, q: Tensor) -> Iterator[tuple[int, int, int]]:
    count = max(1, held // (q.shape[0] * q.shape[1] * band.queries * band.keys))
    for at in range(0, band.count, count):
        yield band.part(at, count)


def _added(band: Band, bias: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
    """What is added to scores, [X or 1, 1, g·b, M]: the bias, and −∞ where a query does not look; None: nothing.

    All tiles of a band are equally far from their keys, so that it is one for all of them.
    """
    rows, n_heads, total = q.shape[:3]
    if bias is not None:
        added = for_tile(
            bias.to(q.dtype), total, band.first, band.queries, band.start, band.keys
        ).contiguous()
    elif band.partial_columns:
        added = q.new_zeros(n_heads // heads, band.queries, band.keys)
    else:
        return None
    for at, seen in band.partial_columns:
        added[..., at : at + seen.shape[-1]].masked_fill_(~seen, -torch.inf)
    if bias is None:
        return added.view(1, 1, -1, band.keys)
    by_keys = added.view(heads, 1, -1, band.keys)
    return by_keys.repeat(rows if band.row is None else 1, 1, 1, 1)


def _products(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Products in three dims, of keys that no longer overlap: others would be copied for each of them."""
    g_, q_, k_, v_, out_, lse_ = (x.flatten(0, 1).contiguous() for x in (g, q, k, v, out, lse))
    found = tile_backward_bf16(g_, q_, k_, v_, out_, lse_, None if bias is None else bias[0], scale)
    dq, dk, dv = (x.unflatten(0, q.shape[:2]) for x in found)
    return dq, dk, dv
