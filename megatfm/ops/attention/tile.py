"""Attention of some queries to some keys, forward and backward: one tile, and bands of tiles, which are views."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatfm.ops.attention.block_plan import BlockGroup, add_tiles, tiles
from megatfm.ops.attention.mask import Band
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.attention.relative_bias import add_tile, for_tile
from megatfm.ops.keyed_random import RATE_STEPS
from megatfm.ops.torch_private import flash_on_cpu, flash_on_cpu_backward, has_amx_tiles

# X rows and heads, n tiles of b queries (of all heads that share keys) and M keys, H head width

FLASH = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes that the fused CPU kernel serves."""

SCORES = 2**20
"""Number of scores held at once, besides tensors linear in T."""

EXTRA_COLUMNS = 32 if has_amx_tiles() else 8
"""Columns that are added to bfloat16 keys and values for what is taken off the scores: two, and zeros up to what matrix
units take at once, or else to 16 bytes; 32 make the backward pass a fifth slower without such units (docs/LOG.md)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Gradients of q, k and v, and of a bias that learns."""


@dataclass(frozen=True)
class BlockAttentionPlan:
    """Arguments without gradients. size: tokens of a block. softcap 0: none. threshold: so many of 65,536 are dropped.

    places: where the keys [S] stand in their rows, on which depends what is dropped; None: one after the other from 0.
    q_places: the same of the queries [T]. zero_distance: the number of a bias by distance that is of no distance.
    covers: the visits are bands that hold every query once, so that outputs need not start as zeros.
    """

    steps: Sequence[BlockGroup | Band]
    size: int
    scale: float
    softcap: float
    threshold: int
    places: Tensor | None = None
    q_places: Tensor | None = None
    zero_distance: int = 0
    covers: bool = False

    @property
    def is_banded(self) -> bool:
        """Whether each query is in a band, and nowhere in blocks. Bands alone don't say so: queries that see nothing
        are in none."""
        return self.covers

    @classmethod
    def build(
        cls,
        visits: Sequence[BlockGroup | Band],
        size: int,
        width: int,
        variant: AttentionOptions,
        *,
        zero: int,
        places: Tensor | None = None,
        q_places: Tensor | None = None,
        covers: bool = False,
    ) -> Self:
        """width: of a head."""
        scale = width**-0.5 if variant.scale is None else variant.scale
        threshold = round(variant.dropout * RATE_STEPS)
        return cls(visits, size, scale, variant.softcap or 0.0, threshold, places, q_places, zero, covers)


def tile_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    plan: BlockAttentionPlan,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum [X, n, b, 1]."""
    if is_plain(q, v, keep, plan):
        out, lse = flash_on_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=plan.scale)
        if bias is not None:  # of a query that sees nothing, the kernel says 0 and not −∞
            lse = lse.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return out, lse[..., None]
    scores, _ = _scores(q, k, bias, plan)
    shares = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = scores.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log()
    if bias is not None:
        blind = bias.amax(-1, keepdim=True) == -torch.inf
        shares, lse = shares.masked_fill_(blind, 0), lse.masked_fill_(blind, -torch.inf)
    if keep is not None:
        shares = shares.mul_(keep).mul_(RATE_STEPS / (RATE_STEPS - plan.threshold))
    return shares.to(q.dtype) @ v, lse


def attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    plan: BlockAttentionPlan,
    causal: bool = False,
    learns: bool = False,
) -> Gradients:
    """Gradients of q, k and v, and where the bias learns, of that; `out` and `lse` over all keys."""
    if is_plain(q, v, keep, plan) and not learns:
        dq, dk, dv = flash_on_cpu_backward(
            g, q, k, v, out, lse[..., 0], 0.0, causal, attn_mask=bias, scale=plan.scale
        )
        return dq, dk, dv, None
    scores, slope = _scores(q, k, bias, plan)
    shares = scores.to(lse.dtype).sub_(lse).exp_()
    shares_grad, used = g @ v.transpose(-1, -2), shares
    if keep is not None:
        factor = keep.to(shares.dtype) * (RATE_STEPS / (RATE_STEPS - plan.threshold))
        shares_grad, used = shares_grad * factor, shares * factor
    scores_grad = (shares_grad - (g * out).sum(-1, keepdim=True, dtype=lse.dtype)).mul_(shares)
    bias_grad = scores_grad if learns else None
    scores_grad = (scores_grad if slope is None else scores_grad * slope).to(q.dtype)
    q_grad, k_grad = (scores_grad @ k) * plan.scale, scores_grad.transpose(-1, -2) @ (q * plan.scale)
    return q_grad, k_grad, used.to(q.dtype).transpose(-1, -2) @ g, bias_grad


def append_columns(x: Tensor) -> Tensor:
    """Keys or values […, S, H] with columns beside them, of which two are 1 and the others 0: [X, S, H + 32]."""
    outputs = x.new_zeros(*x.shape[:-1], x.shape[-1] + EXTRA_COLUMNS)
    outputs[..., : x.shape[-1]] = x
    outputs[..., x.shape[-1] : x.shape[-1] + 2] = 1
    return outputs


def tile_backward_bf16(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` in bfloat16; keys and values have room beside them.

    What is taken off scores and their gradients, in float32, is taken off within the matrix product, in two parts:
    the scores are then rounded once, and near 0, where bfloat16 is finest. Probabilities are kept `level` powers of 2
    too large, so that those of many keys are near 1.
    """
    level = round(math.log2(k.shape[-2]))
    delta = (g * out).sum(-1, keepdim=True, dtype=lse.dtype)
    scaled, g = q * scale, g * 2.0**-level
    shares = torch.cat([scaled, *_split_high_low(level * math.log(2) - lse, q.dtype)], -1) @ k.transpose(
        -1, -2
    )
    if bias is not None:
        shares.add_(bias)
    shares.exp_()
    scores_grad = torch.cat([g, *_split_high_low(delta * -(2.0**-level), g.dtype)], -1) @ v.transpose(-1, -2)
    scores_grad.mul_(shares)
    q_grad, k_grad = (scores_grad @ k)[..., :-EXTRA_COLUMNS], scores_grad.transpose(-1, -2) @ scaled
    return q_grad * scale, k_grad, shares.transpose(-1, -2) @ g


def _split_high_low(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two columns that sum to a number beyond their precision, and zeros."""
    high = x.to(dtype)
    return high, (x - high).to(dtype), high.new_zeros(1).expand(*x.shape[:-1], EXTRA_COLUMNS - 2)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, plan: BlockAttentionPlan
) -> tuple[Tensor, Tensor | None]:
    """Capped and masked scores, and the slope of the cap."""
    scores, slope = (q * plan.scale) @ k.transpose(-1, -2), None
    if plan.softcap:
        share = torch.tanh(scores / plan.softcap)
        scores, slope = plan.softcap * share, 1 - share**2
    return (scores if bias is None else scores.add_(bias)), slope


def uses_bf16_backward(q: Tensor, v: Tensor, rng_keys: Tensor | None, plan: BlockAttentionPlan) -> bool:
    """Whether `tile_backward_bf16` serves it: on matrix units it is several times as fast as the fused kernel."""
    return q.dtype == torch.bfloat16 and is_plain(q, v, rng_keys, plan)


def is_plain(q: Tensor, v: Tensor, keep: Tensor | None, plan: BlockAttentionPlan) -> bool:
    """Whether the fused kernel serves it."""
    is_flash = q.device.type == "cpu" and q.dtype in FLASH
    return is_flash and q.shape[-1] == v.shape[-1] and keep is None and not plan.softcap


# B batch, N query heads, K key-value heads, g = N / K, X rows times K, T queries, S keys, n tiles of b queries

FOLDED = 2**23
"""Number of scores of a tile held in bfloat16; of larger ones the fused kernel computes them again."""

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
    plan: BlockAttentionPlan,
) -> None:
    """Puts output and logarithms of the sums into `out` and `lse` [B, N, T, ·], or merges them with existing values.

    bias: by distance."""
    added = _added(band, bias, q, k.shape[1])
    q, out, lse = (_by_keys(x, band, k.shape[1]) for x in (q, out, lse))
    k, v = (_by_keys(x, band, k.shape[1])[:, 0] for x in (k, v))
    for first, start, count in _parts(band, HELD, q):
        keys, values = (tiles(x, start, band.keys, count, band.step) for x in (k, v))
        if band.causal:
            keys, values = (x.expand(-1, q.shape[1], -1, -1) for x in (keys, values))
        results = tile_forward(_queries(q, first, count, band), keys, values, added, None, plan, band.causal)
        places = [tiles(x, first, band.queries, count, band.step) for x in (out, lse)]
        outputs = [_of_heads(x, q.shape[1], band) for x in results]
        if band.accumulates:
            outputs = list(merge_partial(places[0].to(lse.dtype), places[1], *outputs))
        for place, x in zip(places, outputs, strict=True):
            place.copy_(x)


def backward(
    band: Band, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, bias: Tensor | None, bias_grad: Tensor | None, plan: BlockAttentionPlan,
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
            results: Gradients = (*_products(gc, qc, kc, vc, oc, lc, added, plan.scale), None)
        else:
            learns = bias_grad is not None
            results = attend_backward(gc, qc, kc, vc, oc, lc, added, None, plan, band.causal, learns)
            if bias_grad is not None and results[3] is not None:
                kv_head_of = (
                    results[3].sum(1).unflatten(0, (-1, heads)).sum(0).reshape(-1, band.queries, band.keys)
                )
                add_tile(bias_grad, kv_head_of, length, band.first, band.start)
        q_grad = _of_heads(results[0], q.shape[1], band)
        place = tiles(dq, first, band.queries, count, band.step)
        place.copy_(place + q_grad if band.accumulates else q_grad)
        for total, part in ((dk, results[1]), (dv, results[2])):
            part = part.sum(1, keepdim=True, dtype=total.dtype) if band.causal else part
            add_tiles(total, part, start, band.step)


def merge_partial(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each; −∞ where nothing was seen."""
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -torch.inf, 0)
    return out * (lse - safe).exp() + more_out * (more_lse - safe).exp(), total


def _by_keys(x: Tensor, band: Band, heads: int) -> Tensor:
    """[B, N or K, T, ·] → [X, g or 1, T, ·] of the band's row."""
    rows = x if band.row is None else x[band.row : band.row + 1]
    return rows.unflatten(1, (heads, -1)).flatten(0, 1)


def _queries(x: Tensor, first: int, count: int, band: Band) -> Tensor:
    """[X, g, T, ·] → [X, n, g·b, ·], or [X, g, b, ·] of a causal tile, whose heads can't lie on top of each other."""
    results = tiles(x, first, band.queries, count, band.step)
    return results[:, :, 0] if band.causal else results.transpose(1, 2).flatten(2, 3)


def _of_heads(x: Tensor, groups: int, band: Band) -> Tensor:
    """The inverse of `_queries`, up to [X, g, n, b, ·]."""
    return x[:, :, None] if band.causal else x.unflatten(2, (groups, -1)).transpose(1, 2)


def _parts(band: Band, group_size: int, q: Tensor) -> Iterator[tuple[int, int, int]]:
    count = max(1, group_size // (q.shape[0] * q.shape[1] * band.queries * band.keys))
    for at in range(0, band.count, count):
        yield band.part(at, count)


def _added(band: Band, bias: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
    """Summand of the scores, [X or 1, 1, g·b, M]: the bias, and −∞ where a query does not look; None: nothing.

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
    for at, is_visible in band.partial_columns:
        added[..., at : at + is_visible.shape[-1]].masked_fill_(~is_visible, -torch.inf)
    if bias is None:
        return added.view(1, 1, -1, band.keys)
    by_keys = added.view(heads, 1, -1, band.keys)
    return by_keys.repeat(rows if band.row is None else 1, 1, 1, 1)


def _products(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Products in three dims, of keys that no longer overlap: others would be copied for each of them."""
    g_, q_, k_, v_, out_, lse_ = (x.flatten(0, 1).contiguous() for x in (g, q, k, v, out, lse))
    results = tile_backward_bf16(g_, q_, k_, v_, out_, lse_, None if bias is None else bias[0], scale)
    dq, dk, dv = (x.unflatten(0, q.shape[:2]) for x in results)
    return dq, dk, dv
