"""Attention of some queries to some keys, forward and backward: one tile, and bands of tiles."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatfm.ops.attention.bands import add_tiles, view_tiles
from megatfm.ops.attention.block_plan import BlockGroup
from megatfm.ops.attention.fused import has_flash, run_flash, run_flash_backward
from megatfm.ops.attention.mask import Band, add_tile_gradient, slice_tile
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.keyed_random import RATE_STEPS
from megatfm.ops.torch_private import has_amx_tiles

# X rows and heads, n tiles of b queries (of all heads that share keys) and M keys, H head width

MAX_SCORES = 2**20
"""Number of scores held at once; all other tensors are linear in T."""

EXTRA_COLUMNS = 32 if has_amx_tiles() else 8
"""Columns that `append_columns` adds to bfloat16 keys and values: two of ones, and zeros up to the width of matrix
units, or else to 16 bytes; without such units, 32 columns make the backward pass a fifth slower (docs/LOG.md)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Gradients of q, k and v, and of a learned bias."""


class BackwardInputs(NamedTuple):
    """Gradient of the output, queries, keys and values, output, and log-sum-exp; the last two are over all keys."""

    g: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class GradientTotals(NamedTuple):
    """Gradients to write or add to: of queries; and in the dtype of the log-sum-exp, of keys, values and a learned
    bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class BlockAttentionPlan:
    """Arguments of blockwise attention without gradients.

    visits: the pairs to compute. size: tokens of a block. softcap 0: none. threshold: of 65,536 probabilities, this
    many are dropped. k_positions [S], q_positions [T]: indices in their rows, for dropout and biases; None: from 0 on.
    zero_distance: index of distance 0 in a relative bias. is_banded: bands hold every query once, so that outputs
    needn't start as zeros. (Bands alone don't imply it: queries that see no key are in none.) sums_parts: outputs and
    gradients of queries are in the dtype of the log-sum-exp, as several bands of a query are added up.
    """

    visits: Sequence[BlockGroup | Band]
    size: int
    scale: float
    softcap: float
    threshold: int
    k_positions: Tensor | None = None
    q_positions: Tensor | None = None
    zero_distance: int = 0
    is_banded: bool = False
    sums_parts: bool = False

    @classmethod
    def build(
        cls, visits: Sequence[BlockGroup | Band], size: int, width: int, options: AttentionOptions, **fields: Any
    ) -> Self:
        """Build a plan from options. width: of a head. fields: the plan's fields from `k_positions` on."""
        scale, softcap = options.compute_scale(width), options.softcap or 0.0
        return cls(visits, size, scale, softcap, options.dropout_threshold, **fields)


def tile_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    plan: BlockAttentionPlan,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output [X, n, b, H] and log-sum-exp [X, n, b, 1], −∞ for queries that see no key.

    bias: added to the scores, −∞ at hidden pairs. keep: booleans of probabilities that are not dropped. causal: the
    i-th query sees keys up to the i-th; only for what `supports_flash`.
    """
    if supports_flash(q, v, keep, plan, has_bias=bias is not None):
        out, lse = run_flash(q, k, v, bias, plan.scale, causal)
        if bias is not None:  # the kernel returns 0, not −∞, for queries that see no key
            lse = lse.masked_fill(bias.amax(-1) == -torch.inf, -torch.inf)
        return out, lse[..., None]
    assert not causal, "the built-in causal mask exists in the fused kernel alone"
    scores, _ = _compute_scores(q, k, bias, plan)
    probabilities = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    lse = scores.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
    if bias is not None:
        is_blind = bias.amax(-1, keepdim=True) == -torch.inf
        probabilities, lse = probabilities.masked_fill_(is_blind, 0), lse.masked_fill_(is_blind, -torch.inf)
    if keep is not None:
        probabilities = probabilities.mul_(keep).mul_(RATE_STEPS / (RATE_STEPS - plan.threshold))
    return probabilities.to(q.dtype) @ v, lse


def tile_backward(
    inputs: BackwardInputs,
    bias: Tensor | None,
    keep: Tensor | None,
    plan: BlockAttentionPlan,
    causal: bool = False,
    is_bias_trained: bool = False,
) -> Gradients:
    """Return the gradients of q, k and v, and of the bias if it is trained. bias, keep: see `tile_forward`."""
    g, q, k, v, out, lse = inputs
    if supports_flash(q, v, keep, plan, has_bias=bias is not None) and not is_bias_trained:
        return *run_flash_backward(*inputs, bias, plan.scale, causal), None
    assert not causal, "the built-in causal mask exists in the fused kernel alone"
    scores, slope = _compute_scores(q, k, bias, plan)
    probabilities = scores.to(lse.dtype).sub_(lse).exp_()
    probabilities_grad, kept_probabilities = g @ v.transpose(-1, -2), probabilities
    if keep is not None:
        factor = keep.to(probabilities.dtype) * (RATE_STEPS / (RATE_STEPS - plan.threshold))
        probabilities_grad, kept_probabilities = probabilities_grad * factor, probabilities * factor
    delta = (g * out).sum(-1, keepdim=True, dtype=lse.dtype)
    scores_grad = (probabilities_grad - delta).mul_(probabilities)
    bias_grad = scores_grad if is_bias_trained else None
    scores_grad = (scores_grad if slope is None else scores_grad * slope).to(q.dtype)
    q_grad, k_grad = (scores_grad @ k) * plan.scale, scores_grad.transpose(-1, -2) @ (q * plan.scale)
    return q_grad, k_grad, kept_probabilities.to(q.dtype).transpose(-1, -2) @ g, bias_grad


def append_columns(x: Tensor) -> Tensor:
    """Append `EXTRA_COLUMNS` to keys or values […, S, H]: two columns of ones, and zeros."""
    width = x.shape[-1]
    extended = x.new_zeros(*x.shape[:-1], width + EXTRA_COLUMNS)
    extended[..., :width] = x
    extended[..., width : width + 2] = 1
    return extended


def tile_backward_bf16(inputs: BackwardInputs, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `tile_backward` in bfloat16. k, v: with the columns of `append_columns`.

    The float32 log-sum-exp is subtracted from the scores within the matmul, in two bfloat16 parts, and likewise `delta`
    from the probabilities' gradients. So scores are rounded once, and near 0, where bfloat16 is finest. Probabilities
    are scaled by 2**exponent, so that those of many keys are near 1.
    """
    g, q, k, v, out, lse = inputs
    exponent = round(math.log2(k.shape[-2]))
    delta = (g * out).sum(-1, keepdim=True, dtype=lse.dtype)
    scaled_q, g = q * scale, g * 2.0**-exponent
    offsets = _split_high_low(exponent * math.log(2) - lse, q.dtype)
    probabilities = torch.cat([scaled_q, *offsets], -1) @ k.transpose(-1, -2)
    if bias is not None:
        probabilities.add_(bias)
    probabilities.exp_()
    offsets = _split_high_low(delta * -(2.0**-exponent), g.dtype)
    scores_grad = torch.cat([g, *offsets], -1) @ v.transpose(-1, -2)
    scores_grad.mul_(probabilities)
    q_grad, k_grad = (scores_grad @ k)[..., :-EXTRA_COLUMNS], scores_grad.transpose(-1, -2) @ scaled_q
    return q_grad * scale, k_grad, probabilities.transpose(-1, -2) @ g


def _split_high_low(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Split x [..., 1] into two columns of lower precision whose sum is x, and zeros for the other extra columns."""
    high = x.to(dtype)
    return high, (x - high).to(dtype), high.new_zeros(1).expand(*x.shape[:-1], EXTRA_COLUMNS - 2)


def _compute_scores(
    q: Tensor, k: Tensor, bias: Tensor | None, plan: BlockAttentionPlan
) -> tuple[Tensor, Tensor | None]:
    """Return capped scores with bias, and the derivative of the cap (None: no cap)."""
    scores, slope = (q * plan.scale) @ k.transpose(-1, -2), None
    if plan.softcap:
        tanh = torch.tanh(scores / plan.softcap)
        scores, slope = plan.softcap * tanh, 1 - tanh**2
    return (scores if bias is None else scores.add_(bias)), slope


def uses_bf16_backward(q: Tensor, v: Tensor, rng_keys: Tensor | None, plan: BlockAttentionPlan) -> bool:
    """Return whether to use `tile_backward_bf16`, on matrix units several times as fast as the fused CPU kernel."""
    is_bf16_on_cpu = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    return is_bf16_on_cpu and supports_flash(q, v, rng_keys, plan, has_bias=True)


def supports_flash(q: Tensor, v: Tensor, keep: Tensor | None, plan: BlockAttentionPlan, *, has_bias: bool) -> bool:
    """Return whether the device's fused kernel computes a tile. Only that of a CPU adds a bias to the scores."""
    has_extras = keep is not None or plan.softcap > 0 or (has_bias and q.device.type != "cpu")
    return q.shape[-1] == v.shape[-1] and not has_extras and has_flash(q, q.shape[-1])


# B batch, N query heads, K key-value heads, g = N / K, X rows times K, T queries, S keys, n tiles of b queries

MAX_BF16_SCORES = 2**23
"""Largest number of scores of a tile for `tile_backward_bf16`; the fused kernel, which holds none, takes larger
ones."""

MAX_TILE_SCORES = 2**21
"""Number of scores of tiles computed at once; the gradients of their keys, which overlap, are held."""


def compute_tile(
    band: Band, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, plan: BlockAttentionPlan
) -> None:
    """Write output and log-sum-exp of a band to `out` and `lse` [B, N, T, ·], or merge them with existing values.

    bias: by distance.
    """
    added = _score_bias(band, bias, q, k.shape[1])
    q, out, lse = (_group_by_keys(x, band, k.shape[1]) for x in (q, out, lse))
    k, v = (_group_by_keys(x, band, k.shape[1])[:, 0] for x in (k, v))
    for first, start, count in _iter_tile_ranges(band, MAX_TILE_SCORES, q):
        keys, values = (view_tiles(x, start, band.keys, count, band.step) for x in (k, v))
        results = tile_forward(_select_queries(q, first, count, band), keys, values, added, None, plan, band.causal)
        targets = [view_tiles(x, first, band.queries, count, band.step) for x in (out, lse)]
        outputs = [_ungroup_heads(x, q.shape[1], band) for x in results]
        if band.accumulates:
            outputs = list(merge_partial(targets[0].to(lse.dtype), targets[1], *outputs))
        for target, x in zip(targets, outputs, strict=True):
            target.copy_(x)


def compute_tile_gradients(
    band: Band, inputs: BackwardInputs, bias: Tensor | None, totals: GradientTotals, plan: BlockAttentionPlan
) -> None:
    """Add a band's gradients to the totals. Keys and values have the columns of `append_columns` for
    `tile_backward_bf16`."""
    heads, length, width = inputs.k.shape[1], *inputs.q.shape[2:]
    added = _score_bias(band, bias, inputs.q, heads)
    g, q, out, lse = (_group_by_keys(x, band, heads) for x in (inputs.g, inputs.q, inputs.out, inputs.lse))
    k, v, dk, dv = (_group_by_keys(x, band, heads)[:, 0] for x in (inputs.k, inputs.v, totals.k, totals.v))
    dq = _group_by_keys(totals.q, band, heads)
    is_bf16 = k.shape[-1] != width
    if is_bf16 and (band.causal or q.shape[1] * band.queries * band.keys > MAX_BF16_SCORES):
        is_bf16, k, v = False, k[..., :-EXTRA_COLUMNS], v[..., :-EXTRA_COLUMNS]
    for first, start, count in _iter_tile_ranges(band, MAX_TILE_SCORES, q):
        gc, qc, oc, lc = (_select_queries(x, first, count, band) for x in (g, q, out, lse))
        kc, vc = (view_tiles(x, start, band.keys, count, band.step) for x in (k, v))
        tile_inputs = BackwardInputs(gc, qc, kc, vc, oc, lc)
        if is_bf16:
            results: Gradients = (*_tile_backward_bf16(tile_inputs, added, plan.scale), None)
        else:
            results = tile_backward(
                tile_inputs, added, None, plan, band.causal, is_bias_trained=totals.bias is not None
            )
            if totals.bias is not None and results[3] is not None:
                gradient = results[3].sum(1).unflatten(0, (-1, heads)).sum(0).reshape(-1, band.queries, band.keys)
                add_tile_gradient(totals.bias, gradient, length, band.first_query, band.first_key)
        q_grad = _ungroup_heads(results[0], q.shape[1], band)
        target = view_tiles(dq, first, band.queries, count, band.step)
        target.copy_(target + q_grad if band.accumulates else q_grad)
        for total, gradient in ((dk, results[1]), (dv, results[2])):
            gradient = gradient.sum(1, keepdim=True, dtype=total.dtype) if band.causal else gradient
            add_tiles(total, gradient, start, band.step)


def merge_partial(out: Tensor, lse: Tensor, second_out: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge output and log-sum-exp over two disjoint sets of keys; log-sum-exp is −∞ where no key is seen."""
    total = torch.logaddexp(lse, second_lse)
    finite = total.masked_fill(total == -torch.inf, 0)
    return out * (lse - finite).exp() + second_out * (second_lse - finite).exp(), total


def _group_by_keys(x: Tensor, band: Band, heads: int) -> Tensor:
    """Select [B, N or K, T, ·] → [X, g or 1, T, ·], of the band's rows and each key head."""
    rows = x if band.row is None else x[band.row : band.row + 1]
    return rows.unflatten(1, (heads, -1)).flatten(0, 1)


def _select_queries(x: Tensor, first: int, count: int, band: Band) -> Tensor:
    """Select [X, g, T, ·] → [X, n, g·b, ·], or [X, g, b, ·] of a causal tile, where the heads of a key can't be
    stacked."""
    queries = view_tiles(x, first, band.queries, count, band.step)
    return queries[:, :, 0] if band.causal else queries.transpose(1, 2).flatten(2, 3)


def _ungroup_heads(x: Tensor, groups: int, band: Band) -> Tensor:
    """Invert `_select_queries`, up to [X, g, n, b, ·]."""
    return x[:, :, None] if band.causal else x.unflatten(2, (groups, -1)).transpose(1, 2)


def _iter_tile_ranges(band: Band, max_scores: int, q: Tensor) -> Iterator[tuple[int, int, int]]:
    count = max(1, max_scores // max(1, q.shape[0] * q.shape[1] * band.queries * band.keys))
    for index in range(0, band.count, count):
        yield band.tile_range(index, count)


def _score_bias(band: Band, bias: Tensor | None, q: Tensor, heads: int) -> Tensor | None:
    """Return what is added to the scores [X or 1, 1, g·b, M]: the bias, and −∞ at hidden pairs; None: nothing.

    All tiles of a band have the same distances, so they share it.
    """
    rows, n_heads, total = q.shape[:3]
    if bias is not None:
        added = slice_tile(
            bias.to(q.dtype), total, band.first_query, band.queries, band.first_key, band.keys
        ).contiguous()
    elif band.partial_columns:
        added = q.new_zeros(n_heads // heads, band.queries, band.keys)
    else:
        return None
    for start, is_visible in band.partial_columns:
        added[..., start : start + is_visible.shape[-1]].masked_fill_(~is_visible, -torch.inf)
    if bias is None:
        return added.view(1, 1, -1, band.keys)
    by_keys = added.view(heads, 1, -1, band.keys)
    return by_keys.repeat(rows if band.row is None else 1, 1, 1, 1)


def _tile_backward_bf16(inputs: BackwardInputs, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Call `tile_backward_bf16` with contiguous tensors of three dims: each matmul would copy overlapping views."""
    flat_inputs = BackwardInputs(*(x.flatten(0, 1).contiguous() for x in inputs))
    results = tile_backward_bf16(flat_inputs, None if bias is None else bias[0], scale)
    dq, dk, dv = (x.unflatten(0, inputs.q.shape[:2]) for x in results)
    return dq, dk, dv
