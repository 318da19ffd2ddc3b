"""Attention of the queries here to some of a row's keys, and how it is put together of such parts."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.attention import blocks
from megatfm.ops.attention.blocks import padded
from megatfm.ops.attention.pieces import BlockGrid, plan_blocks
from megatfm.ops.attention.tiles import BlockAttentionPlan
from megatfm.ops.moved import moved


def block_attention_plan(
    core: Any, sequence: Any, key: Hashable, places: Tensor, q_BNTH: Tensor
) -> BlockAttentionPlan:
    """Which blocks of keys at some places are visited. key: what all layers know these keys by."""
    places = moved(places, q_BNTH.device)
    batch, n_heads, queries, width = q_BNTH.shape
    part = sequence.with_keys_at(key, places)
    seen = core.seen(part, n_heads)
    size = min(blocks.block_size(seen), -(-max(queries, len(places)) // 4) * 4)
    grid = BlockGrid(batch, queries, len(places), size)
    visits = seen.cached(
        ("pieces", size), lambda: plan_blocks(seen, grid, core.seen(part.on_host(), n_heads), q_BNTH.device)
    )
    of_row, q_places = sequence.length - 1, sequence.indices
    return BlockAttentionPlan.build(
        visits, size, width, core.variant, zero=of_row, places=places, q_places=q_places
    )


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drawn: Tensor | None, how: BlockAttentionPlan
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sums over some keys. bias: by distance in the row."""
    queries = q.shape[2]
    drawn = None if drawn is None else F.pad(drawn, (0, -queries % how.size))
    q, k, v = (padded(x, how.size) for x in (q, k, v))
    out, lse = blocks.forward(q, k, v, drawn, how, bias)
    return out[:, :, :queries], lse[:, :, :queries]


def bias_gradient_buffer(bias: Tensor, lse: Tensor) -> Tensor:
    """What gradients of a bias are added up in."""
    return bias.new_zeros(bias.shape, dtype=lse.dtype)


def partial_attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, drawn: Tensor | None,
    how: BlockAttentionPlan, of_bias: Tensor | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Gradients of q and, in the type of `lse`, of these k and v; `out` and `lse` are over all keys. That of a bias
    that learns is added to `of_bias`."""
    sizes = q.shape[2], k.shape[2], v.shape[2]
    drawn = None if drawn is None else F.pad(drawn, (0, -sizes[0] % how.size))
    g, q, k, v, out, lse = (padded(x, how.size) for x in (g, q, k, v, out, lse))
    found = blocks.backward(g, q, k, v, out, lse, drawn, how, bias, of_bias)
    return [x[:, :, :size] for x, size in zip(found, sizes, strict=True)]
