"""Queries that see all keys, where rows are cut: not the keys go to them, but they to the keys.

Each rank computes their attention to its own keys, and what all have made is merged by the logarithms of the sums
(Dao et al. 2022). What is sent does not grow with the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.ops.attention import blocks
from megatfm.ops.attention.banded import merge_partial
from megatfm.ops.attention.tiles import BlockAttentionPlan
from megatfm.ops.moved import moved, to_host
from megatfm.parallel.collectives import all_gather, all_reduce_no_grad, copy_to_group, reduce_from_group
from megatfm.parallel.context_exchange import ContextParallel
from megatfm.parallel.context_parts import (
    bias_gradient_buffer,
    block_attention_plan,
    partial_attention,
    partial_attention_backward,
)

# B batch, N query heads, K key-value heads, T tokens of a rank, G wide queries, H head width, V value width


@dataclass(frozen=True)
class GlobalQueries:
    """Wide queries of all ranks. places: in the row; own: the numbers of this rank's among them; here: among its
    tokens."""

    places: Tensor
    own: Tensor
    here: Tensor

    @classmethod
    def of(cls, core: Any, contexts: ContextParallel, sequence: Any) -> "GlobalQueries | None":
        """None where there are none whose keys are on several ranks."""
        indices_by_rank: Sequence[Tensor] = contexts.token_indices(sequence.length)
        places = core.wide(sequence.full_sequence.on_host(), indices_by_rank)
        if not len(places):
            return None
        mine = indices_by_rank[contexts.rank]
        return cls(places, torch.isin(places, mine).nonzero()[:, 0], torch.isin(mine, places).nonzero()[:, 0])


def add_global_attention(
    core: Any, out_BNTV: Tensor, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, bias: Tensor | None, sequence: Any,
    wide: GlobalQueries, contexts: ContextParallel,
) -> Tensor:  # fmt: skip
    """[B, N, T, V]: `out` with the wide queries' attention to all keys in their places."""
    own, here = moved(wide.own, q_BNTH.device), moved(wide.here, q_BNTH.device)
    none = q_BNTH.new_zeros(*q_BNTH.shape[:2], len(wide.places), q_BNTH.shape[3])
    mine = none.index_copy(2, own, q_BNTH[:, :, here])
    q_BNGH = copy_to_group(reduce_from_group(mine, contexts.group), contexts.group)
    queries = sequence.with_queries_at(("wide", core.pattern), moved(wide.places, q_BNTH.device))
    drawn = core.dropout.head_rng_keys(queries, q_BNTH.shape[1])
    keys = contexts.token_indices(sequence.length)[contexts.rank]
    how = block_attention_plan(core, queries, ("rank", contexts.rank), keys, q_BNGH)
    sinks = None if core.sinks is None else core.sinks.weight
    made: Tensor = _AllKeysAttention.apply(q_BNGH, k_BKTH, v_BKTV, bias, drawn, sinks, how, contexts)
    return out_BNTV.index_copy(2, here, made[:, :, own])


def make_global_forward(core: nn.Module, contexts: ContextParallel) -> Callable[..., Tensor]:
    """What is run instead of a core's `forward` that is given wide queries alone, with keys of their own."""

    def forward(
        heads_BNTV: Tensor, q_BNGH: Tensor, k_BNTH: Tensor, v_BNTV: Tensor, places_BG: Tensor, found_BG: Tensor,
        sequence: Any,
    ) -> Tensor:  # fmt: skip
        core_: Any = core
        is_wide_BT = _mask_at(places_BG, found_BG, k_BNTH.shape[2])
        known_BT = _mask_at(to_host(places_BG), to_host(found_BG), k_BNTH.shape[2])
        index = places_BG[:, None, :, None].expand(q_BNGH.shape)
        q_BNTH = torch.zeros_like(k_BNTH).scatter(2, index, q_BNGH.where(found_BG[:, None, :, None], 0))
        made = _of_keys_here(core_, q_BNTH, k_BNTH, v_BNTV, known_BT, sequence, contexts)
        key = "wide", type(core_), core_.pattern
        if (wide := sequence.cached(key, lambda: GlobalQueries.of(core_, contexts, sequence))) is not None:
            made = add_global_attention(core_, made, q_BNTH, k_BNTH, v_BNTV, None, sequence, wide, contexts)
        return made.where(is_wide_BT[:, None, :, None], heads_BNTV)

    return forward


def _mask_at(places_BG: Tensor, found_BG: Tensor, tokens: int) -> Tensor:
    """Boolean [B, T]: the tokens at these places."""
    return found_BG.new_zeros(len(found_BG), tokens).scatter(1, places_BG, found_BG)


def _of_keys_here(
    core: Any,
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    v_BNTV: Tensor,
    known_BT: Tensor,
    sequence: Any,
    contexts: ContextParallel,
) -> Tensor:
    """[B, N, T, V]: wide queries' attention to the keys that are here, which is all of it where documents are whole.
    known: boolean [B, T] in the host's memory, which tokens they are."""
    known = known_BT.any(0).nonzero()[:, 0]
    if not len(known):
        return torch.zeros_like(v_BNTV)
    places, device = contexts.token_indices(sequence.length)[contexts.rank], q_BNTH.device
    at = moved(known, device)
    queries = sequence.with_queries_at(("wide here", core.pattern), moved(places[known], device))
    drawn = core.dropout.head_rng_keys(queries, q_BNTH.shape[1])
    how = block_attention_plan(core, queries, ("rank", contexts.rank), places, q_BNTH[:, :, at])
    made: Tensor = _LocalKeysAttention.apply(q_BNTH[:, :, at], k_BNTH, v_BNTV, drawn, how)
    return torch.zeros_like(v_BNTV).index_copy(2, at, made)


class _LocalKeysAttention(torch.autograd.Function):
    """Attention to keys of this rank alone."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | None, how: BlockAttentionPlan
    ) -> Tensor:
        out, lse = partial_attention(q, k, v, None, drawn, how)
        ctx.save_for_backward(q, k, v, drawn, out, lse)
        ctx.how = how
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, drawn, out, lse = ctx.saved_tensors
        dq, dk, dv = partial_attention_backward(g, q, k, v, out, lse, None, drawn, ctx.how)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


class _AllKeysAttention(torch.autograd.Function):
    """Queries that all ranks have, and the keys of each → attention to all keys, on all ranks; each uses, and has
    gradients of, other queries. Gradients of queries are partial."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drawn: Tensor | None, sinks: Tensor | None,
        how: BlockAttentionPlan, contexts: ContextParallel,
    ) -> Tensor:  # fmt: skip
        out, lse = partial_attention(q, k, v, bias, drawn, how)
        packed = torch.cat([out.to(lse.dtype), lse], -1)[None]
        (out, lse), *others = (
            each.split([v.shape[-1], 1], -1) for each in all_gather(packed, 0, contexts.group)
        )
        for other in others:
            out, lse = merge_partial(out, lse, *other)
        out, lse = blocks.with_sinks(out.to(q.dtype, copy=True), lse, sinks)
        ctx.save_for_backward(q, k, v, bias, drawn, sinks, out, lse)
        ctx.rest = how, contexts
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, drawn, sinks, out, lse = ctx.saved_tensors
        how, contexts = ctx.rest
        bias_grad = bias_gradient_buffer(bias, lse) if ctx.needs_input_grad[3] else None
        summed_grad = all_reduce_no_grad(g, contexts.group)
        dq, dk, dv = partial_attention_backward(summed_grad, q, k, v, out, lse, bias, drawn, how, bias_grad)
        sinks_grad = blocks.gradient_of_sinks(g, out, lse, sinks)
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), bias_grad, None, sinks_grad, None, None
