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
from megatfm.ops.attention.banded import merged
from megatfm.ops.attention.tiles import How
from megatfm.ops.moved import moved, on_host
from megatfm.parallel.collectives import all_sum, copy_to_shards, gather_shards, sum_partial
from megatfm.parallel.context_exchange import Contexts
from megatfm.parallel.context_parts import how_of, part_backward, part_of, zeros_for

# B batch, N query heads, K key-value heads, T tokens of a rank, G wide queries, H head width, V value width


@dataclass(frozen=True)
class Wide:
    """Wide queries of all ranks. places: in the row; own: the numbers of this rank's among them; here: among its
    tokens."""

    places: Tensor
    own: Tensor
    here: Tensor

    @classmethod
    def of(cls, core: Any, contexts: Contexts, sequence: Any) -> "Wide | None":
        """None where there are none whose keys are on several ranks."""
        dealt: Sequence[Tensor] = contexts.places(sequence.length)
        places = core.wide(sequence.row.on_host(), dealt)
        if not len(places):
            return None
        mine = dealt[contexts.rank]
        return cls(places, torch.isin(places, mine).nonzero()[:, 0], torch.isin(mine, places).nonzero()[:, 0])


def with_wide(
    core: Any, out_BNTV: Tensor, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, bias: Tensor | None, sequence: Any,
    wide: Wide, contexts: Contexts,
) -> Tensor:  # fmt: skip
    """[B, N, T, V]: `out` with the wide queries' attention to all keys in their places."""
    own, here = moved(wide.own, q_BNTH.device), moved(wide.here, q_BNTH.device)
    none = q_BNTH.new_zeros(*q_BNTH.shape[:2], len(wide.places), q_BNTH.shape[3])
    mine = none.index_copy(2, own, q_BNTH[:, :, here])
    q_BNGH = copy_to_shards(sum_partial(mine, contexts.group), contexts.group)
    queries = sequence.at(("wide", core.pattern), moved(wide.places, q_BNTH.device))
    drawn = core.dropout.head_rng_keys(queries, q_BNTH.shape[1])
    keys = contexts.places(sequence.length)[contexts.rank]
    how = how_of(core, queries, ("rank", contexts.rank), keys, q_BNGH)
    sinks = None if core.sinks is None else core.sinks.weight
    made: Tensor = _Merged.apply(q_BNGH, k_BKTH, v_BKTV, bias, drawn, sinks, how, contexts)
    return out_BNTV.index_copy(2, here, made[:, :, own])


def across_wide(core: nn.Module, contexts: Contexts) -> Callable[..., Tensor]:
    """What is run instead of a core's `forward` that is given wide queries alone, with keys of their own."""

    def forward(
        heads_BNTV: Tensor, q_BNGH: Tensor, k_BNTH: Tensor, v_BNTV: Tensor, places_BG: Tensor, found_BG: Tensor,
        sequence: Any,
    ) -> Tensor:  # fmt: skip
        core_: Any = core
        is_wide_BT = _marked(places_BG, found_BG, k_BNTH.shape[2])
        known_BT = _marked(on_host(places_BG), on_host(found_BG), k_BNTH.shape[2])
        index = places_BG[:, None, :, None].expand(q_BNGH.shape)
        q_BNTH = torch.zeros_like(k_BNTH).scatter(2, index, q_BNGH.where(found_BG[:, None, :, None], 0))
        made = _of_keys_here(core_, q_BNTH, k_BNTH, v_BNTV, known_BT, sequence, contexts)
        key = "wide", type(core_), core_.pattern
        if (wide := sequence.once(key, lambda: Wide.of(core_, contexts, sequence))) is not None:
            made = with_wide(core_, made, q_BNTH, k_BNTH, v_BNTV, None, sequence, wide, contexts)
        return made.where(is_wide_BT[:, None, :, None], heads_BNTV)

    return forward


def _marked(places_BG: Tensor, found_BG: Tensor, tokens: int) -> Tensor:
    """Boolean [B, T]: the tokens at these places."""
    return found_BG.new_zeros(len(found_BG), tokens).scatter(1, places_BG, found_BG)


def _of_keys_here(
    core: Any, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTV: Tensor, known_BT: Tensor, sequence: Any, contexts: Contexts
) -> Tensor:  # fmt: skip
    """[B, N, T, V]: wide queries' attention to the keys that are here, which is all of it where documents are whole.
    known: boolean [B, T] in the host's memory, which tokens they are."""
    known = known_BT.any(0).nonzero()[:, 0]
    if not len(known):
        return torch.zeros_like(v_BNTV)
    places, device = contexts.places(sequence.length)[contexts.rank], q_BNTH.device
    at = moved(known, device)
    queries = sequence.at(("wide here", core.pattern), moved(places[known], device))
    drawn = core.dropout.head_rng_keys(queries, q_BNTH.shape[1])
    how = how_of(core, queries, ("rank", contexts.rank), places, q_BNTH[:, :, at])
    made: Tensor = _Here.apply(q_BNTH[:, :, at], k_BNTH, v_BNTV, drawn, how)
    return torch.zeros_like(v_BNTV).index_copy(2, at, made)


class _Here(torch.autograd.Function):
    """Attention to keys of this rank alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | None, how: How) -> Tensor:
        out, lse = part_of(q, k, v, None, drawn, how)
        ctx.save_for_backward(q, k, v, drawn, out, lse)
        ctx.how = how
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, drawn, out, lse = ctx.saved_tensors
        dq, dk, dv = part_backward(g, q, k, v, out, lse, None, drawn, ctx.how)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


class _Merged(torch.autograd.Function):
    """Queries that all ranks have, and the keys of each → attention to all keys, on all ranks; each uses, and has
    gradients of, other queries. Gradients of queries are partial."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drawn: Tensor | None, sinks: Tensor | None,
        how: How, contexts: Contexts,
    ) -> Tensor:  # fmt: skip
        out, lse = part_of(q, k, v, bias, drawn, how)
        packed = torch.cat([out.to(lse.dtype), lse], -1)[None]
        (out, lse), *others = (
            each.split([v.shape[-1], 1], -1) for each in gather_shards(packed, 0, contexts.group)
        )
        for other in others:
            out, lse = merged(out, lse, *other)
        out, lse = blocks.with_sinks(out.to(q.dtype, copy=True), lse, sinks)
        ctx.save_for_backward(q, k, v, bias, drawn, sinks, out, lse)
        ctx.rest = how, contexts
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, drawn, sinks, out, lse = ctx.saved_tensors
        how, contexts = ctx.rest
        of_bias = zeros_for(bias, lse) if ctx.needs_input_grad[3] else None
        of_all = all_sum(g, contexts.group)
        dq, dk, dv = part_backward(of_all, q, k, v, out, lse, bias, drawn, how, of_bias)
        of_sinks = blocks.gradient_of_sinks(g, out, lse, sinks)
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), of_bias, None, of_sinks, None, None
