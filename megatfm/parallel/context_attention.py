"""Attention of the queries here to keys and values of all ranks that share rows.

What queries may look at is fetched where a pattern says which tokens these are (windows, chunks), and the few queries
that see all go to the keys themselves; where all look at all, keys and values go round a ring of ranks (Liu et al.
2023), one part of the row a step. Where attention has numbers for all pairs (biases), or is one of its own, all keys
are fetched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.ops.attention import blocks
from megatfm.ops.attention.banded import merged
from megatfm.ops.attention.tiles import How
from megatfm.parallel.context_exchange import Contexts, Flight, Wanted, fetch
from megatfm.parallel.context_heads import by_heads, sends_less
from megatfm.parallel.context_parts import how_of, part_backward, part_of
from megatfm.parallel.context_wide import Wide, with_wide

# B batch, N query heads, K key-value heads, T tokens of a rank, S keys, H head width, V value width


def across(core: nn.Module, contexts: Contexts) -> Callable[..., Tensor]:
    """What is run instead of a core's `forward`, by which it is computed once all keys are there."""
    alone: Callable[..., Tensor] = core.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, sequence: Any, bias: Tensor | None = None) -> Tensor:
        core_: Any = core
        looked_at = sequence.memory if core_.pattern.of_memory else sequence
        if bias is not None or looked_at is not sequence or not hasattr(core, "seen"):
            wanted = looked_at.once("everything", lambda: everything(contexts, looked_at))
            return alone(q, *_fetched(k, v, wanted), sequence, bias)
        needs = sequence.once(("needs", core_.pattern), lambda: _needs(core_, contexts, sequence))
        if needs is None and (
            contexts.way == "heads" or (contexts.way == "auto" and sends_less(contexts, q, k, v))
        ):
            return by_heads(core_, q, k, v, sequence, contexts)
        if needs is None:
            steps = [
                _Step(("rank", rank), contexts.places(sequence.length)[rank])
                for rank in ((contexts.rank - step) % contexts.size for step in range(contexts.size))
            ]
        else:
            steps = [_Step(("fetched", core_.pattern), needs.looked_at)]
            k_fetched, v_fetched = _fetched(k, v, needs)
            out = _attend(core_, q, k_fetched, v_fetched, sequence, steps, contexts)
            wide = sequence.once(("wide", core_.pattern), lambda: Wide.of(core_, contexts, sequence))
            return out if wide is None else with_wide(core_, out, q, k, v, sequence, wide, contexts)
        return _attend(core_, q, k, v, sequence, steps, contexts)

    return forward


def everything(contexts: Contexts, sequence: Any) -> Wanted:
    """All ranks look at all keys."""
    dealt = contexts.places(sequence.length)
    return Wanted.of(contexts, dealt, [torch.arange(sequence.length)] * contexts.size)


def _needs(core: Any, contexts: Contexts, sequence: Any) -> Wanted | None:
    """What a pattern's queries may look at; None where that is anywhere."""
    dealt = contexts.places(sequence.length)
    needs = [core.reached(sequence.row, each) for each in dealt]
    return None if needs[0] is None else Wanted.of(contexts, dealt, needs)


def _fetched(k: Tensor, v: Tensor, wanted: Wanted) -> Sequence[Tensor]:
    return fetch(torch.cat([k, v], -1), wanted).split([k.shape[-1], v.shape[-1]], -1)


@dataclass(frozen=True)
class _Step:
    """Keys that are looked at together: what all layers know them by, and where they stand in the row."""

    key: Any
    places: Tensor


def _attend(
    core: Any, q: Tensor, k: Tensor, v: Tensor, sequence: Any, steps: Sequence[_Step], contexts: Contexts
) -> Tensor:
    """By blocks: the keys of the first step are here, those of each further one come from the rank before."""
    drawn = core.dropout.head_rng_keys(sequence, q.shape[1])
    hows = [how_of(core, sequence, step.key, step.places, q) for step in steps]
    sinks = None if core.sinks is None else core.sinks.weight
    made: Tensor = _Ring.apply(q, k, v, drawn, sinks, hows, contexts)
    return made


class _Ring(torch.autograd.Function):
    """Keys and values go round; in the backward pass their gradients follow them one step behind, and end at home."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, drawn: Tensor | None, sinks: Tensor | None,
        hows: Sequence[How], contexts: Contexts,
    ) -> Tensor:  # fmt: skip
        kv = torch.cat([k, v], -1) if len(hows) > 1 else None
        out, lse = part_of(q, k, v, drawn, hows[0])
        for how in hows[1:]:
            assert kv is not None
            kv = _shift(kv, contexts, how)
            more = part_of(q, *_split(kv, k, v), drawn, how)
            out, lse = merged(out, lse, *more)
        out, lse = blocks.with_sinks(out.to(q.dtype), lse, sinks)
        ctx.save_for_backward(q, k, v, drawn, sinks, out, lse)
        ctx.rest = hows, contexts
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, drawn, sinks, out, lse = ctx.saved_tensors
        hows, contexts = ctx.rest
        dq, *own = part_backward(g, q, k, v, out, lse, drawn, hows[0])
        kv = torch.cat([k, v], -1) if len(hows) > 1 else None
        travelling: Tensor | None = None
        for how in hows[1:]:
            assert kv is not None
            kv = _shift(kv, contexts, how)
            more, *parts = part_backward(g, q, *_split(kv, k, v), out, lse, drawn, how)
            part = torch.cat(parts, -1)
            dq = dq + more
            travelling = part if travelling is None else _shift(travelling, contexts, how) + part
        if travelling is not None:
            of_k, of_v = _split(_shift(travelling, contexts, hows[0]), k, v)
            own = [own[0] + of_k, own[1] + of_v]
        dk, dv = own[0].to(k.dtype), own[1].to(v.dtype)
        return dq, dk, dv, None, blocks.gradient_of_sinks(g, out, lse, sinks), None, None


def _shift(x: Tensor, contexts: Contexts, how: How) -> Tensor:
    """Sends x to the next rank, and gives what the one before had: as many tokens as are looked at now."""
    assert how.places is not None
    after, before = (contexts.rank + 1) % contexts.size, (contexts.rank - 1) % contexts.size
    came = x.new_empty(*x.shape[:2], len(how.places), x.shape[3])
    return Flight(contexts.group, [(after, x)], [(before, came)]).wait()[0]


def _split(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    of_k, of_v = kv.split([k.shape[-1], v.shape[-1]], -1)
    return of_k, of_v
