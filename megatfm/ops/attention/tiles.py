"""Attention of some queries to keys that lie beside them: what one call computes, forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatfm.ops.attention.bands import Band
from megatfm.ops.attention.pieces import BlockGroup
from megatfm.ops.attention.products import AttentionOptions
from megatfm.ops.dropout import RATE_STEPS
from megatfm.ops.torch_private import flash_on_cpu, flash_on_cpu_backward, has_amx_tiles

# X rows and heads, n tiles of b queries (of all heads that share keys) and M keys, H head width

FLASH = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes that the fused CPU kernel serves."""

SCORES = 2**20
"""So many scores are held at once, besides what is linear in T."""

EXTRA_COLUMNS = 32 if has_amx_tiles() else 8
"""Columns that are added to bfloat16 keys and values for what is taken off the scores: two, and zeros up to what matrix
units take at once, or else to 16 bytes; 32 make the backward pass a fifth slower without such units (docs/LOG.md)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Gradients of q, k and v, and of a bias that learns."""


@dataclass(frozen=True)
class BlockAttentionPlan:
    """What has no gradient. size: tokens of a block. softcap 0: none. threshold: so many of 65,536 are dropped.

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
    how: BlockAttentionPlan,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum [X, n, b, 1]."""
    if is_plain(q, v, keep, how):
        out, lse = flash_on_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=how.scale)
        if bias is not None:  # of a query that sees nothing, the kernel says 0 and not −∞
            lse = lse.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return out, lse[..., None]
    scores, _ = _scores(q, k, bias, how)
    shares = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = scores.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log()
    if bias is not None:
        blind = bias.amax(-1, keepdim=True) == -torch.inf
        shares, lse = shares.masked_fill_(blind, 0), lse.masked_fill_(blind, -torch.inf)
    if keep is not None:
        shares = shares.mul_(keep).mul_(RATE_STEPS / (RATE_STEPS - how.threshold))
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
    how: BlockAttentionPlan,
    causal: bool = False,
    learns: bool = False,
) -> Gradients:
    """Gradients of q, k and v, and where the bias learns, of that; `out` and `lse` over all keys."""
    if is_plain(q, v, keep, how) and not learns:
        dq, dk, dv = flash_on_cpu_backward(
            g, q, k, v, out, lse[..., 0], 0.0, causal, attn_mask=bias, scale=how.scale
        )
        return dq, dk, dv, None
    scores, slope = _scores(q, k, bias, how)
    shares = scores.to(lse.dtype).sub_(lse).exp_()
    of_shares, used = g @ v.transpose(-1, -2), shares
    if keep is not None:
        factor = keep.to(shares.dtype) * (RATE_STEPS / (RATE_STEPS - how.threshold))
        of_shares, used = of_shares * factor, shares * factor
    of_scores = (of_shares - (g * out).sum(-1, keepdim=True, dtype=lse.dtype)).mul_(shares)
    of_bias = of_scores if learns else None
    of_scores = (of_scores if slope is None else of_scores * slope).to(q.dtype)
    of_q, of_k = (of_scores @ k) * how.scale, of_scores.transpose(-1, -2) @ (q * how.scale)
    return of_q, of_k, used.to(q.dtype).transpose(-1, -2) @ g, of_bias


def append_columns(x: Tensor) -> Tensor:
    """Keys or values […, S, H] with columns beside them, of which two are 1 and the others 0: [X, S, H + 32]."""
    made = x.new_zeros(*x.shape[:-1], x.shape[-1] + EXTRA_COLUMNS)
    made[..., : x.shape[-1]] = x
    made[..., x.shape[-1] : x.shape[-1] + 2] = 1
    return made


def tile_backward_bf16(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend_backward` in bfloat16; keys and values have room beside them.

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
    of_scores = torch.cat([g, *_split_high_low(delta * -(2.0**-level), g.dtype)], -1) @ v.transpose(-1, -2)
    of_scores.mul_(shares)
    of_q, of_k = (of_scores @ k)[..., :-EXTRA_COLUMNS], of_scores.transpose(-1, -2) @ scaled
    return of_q * scale, of_k, shares.transpose(-1, -2) @ g


def _split_high_low(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two columns that sum to a number beyond their precision, and zeros."""
    high = x.to(dtype)
    return high, (x - high).to(dtype), high.new_zeros(1).expand(*x.shape[:-1], EXTRA_COLUMNS - 2)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, how: BlockAttentionPlan
) -> tuple[Tensor, Tensor | None]:
    """Capped and masked scores, and the slope of the cap."""
    scores, slope = (q * how.scale) @ k.transpose(-1, -2), None
    if how.softcap:
        share = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * share, 1 - share**2
    return (scores if bias is None else scores.add_(bias)), slope


def uses_bf16_backward(q: Tensor, v: Tensor, drawn: Tensor | None, how: BlockAttentionPlan) -> bool:
    """Whether `tile_backward_bf16` serves it: on matrix units it is several times as fast as the fused kernel."""
    return q.dtype == torch.bfloat16 and is_plain(q, v, drawn, how)


def is_plain(q: Tensor, v: Tensor, keep: Tensor | None, how: BlockAttentionPlan) -> bool:
    """Whether the fused kernel serves it."""
    is_flash = q.device.type == "cpu" and q.dtype in FLASH
    return is_flash and q.shape[-1] == v.shape[-1] and keep is None and not how.softcap
