"""Attention of the queries here to keys and values of all ranks that share rows.

What queries may look at is fetched where a pattern says which tokens these are (windows, chunks), and the few queries
that see all go to the keys themselves. Where documents alone bound what is looked at, that is fetched if it is less
than half of the rest of the row; else keys and values go round a ring of ranks (Liu et al. 2023), one part of the row a
step. Of attention of its own, of that to another row, and where a bias has a number for each pair, all keys are
fetched.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.ops.attention import blocks
from megatfm.ops.attention.banded import merge_partial
from megatfm.ops.attention.distances import is_relative
from megatfm.ops.attention.tiles import BlockAttentionPlan
from megatfm.ops.compiled import constant_when_compiled
from megatfm.parallel.backward_parts import current_part
from megatfm.parallel.context_exchange import (
    LENGTHS,
    ContextParallel,
    FetchPlan,
    P2PExchange,
    fetch,
    is_little,
)
from megatfm.parallel.context_heads import ulysses_attention, uses_ulysses
from megatfm.parallel.context_parts import (
    bias_gradient_buffer,
    block_attention_plan,
    partial_attention,
    partial_attention_backward,
)
from megatfm.parallel.context_wide import GlobalQueries, add_global_attention

# B batch, N query heads, K key-value heads, T tokens of a rank, S keys, H head width, V value width

log = logging.getLogger(__name__)

ULYSSES = "each rank takes some heads of all tokens"
RING = "what keys are made of goes round a ring"
FETCH = "the keys that are looked at are fetched"


def make_attention_forward(core: nn.Module, contexts: ContextParallel) -> Callable[..., Tensor]:
    """What is run instead of a core's `forward`, by which it is computed once all keys are there."""
    alone: Callable[..., Tensor] = core.forward
    shown = repr(core.pattern)

    def forward(q: Tensor, k: Tensor, v: Tensor, sequence: Any, bias: Tensor | None = None) -> Tensor:
        core_: Any = core
        looked_at = sequence.memory if core_.pattern.is_cross_attention else sequence
        as_they_are = KeyValues(k.shape[-1], v.shape[-1])
        is_own = not hasattr(core, "seen")
        if looked_at is not sequence or is_own or (bias is not None and not is_relative(bias)):
            wanted = looked_at.cached("everything", lambda: fetch_all_plan(contexts, looked_at.length))
            _log_once(shown, "all keys are fetched", contexts.size)
            return alone(q, *as_they_are.heads(fetch(torch.cat([k, v], -1), wanted)), sequence, bias)
        fetch_plan = plan_fetch(core_, contexts, sequence)
        if not core_.is_local(sequence.length) and uses_ulysses(
            contexts, q, k.shape[1], v.shape[3], k.shape[1] * (k.shape[3] + v.shape[3]), fetch_plan
        ):
            _log_once(shown, ULYSSES, contexts.size)
            return ulysses_attention(core_, q, k, v, bias, sequence, contexts)
        _log_once(shown, RING if fetch_plan is None else FETCH, contexts.size)
        return travelling(core_, q, torch.cat([k, v], -1), as_they_are, bias, sequence, contexts, fetch_plan)

    return forward


def make_latent_forward(core: nn.Module, contexts: ContextParallel) -> Callable[..., Tensor]:
    """The same where keys and values are made of what is narrower than they are: that travels."""
    shown = repr(core.pattern)

    def forward(q: Tensor, latent: Tensor, of_keys: Tensor, of_values: Tensor, sequence: Any) -> Tensor:
        core_: Any = core
        fetch_plan, n = plan_fetch(core_, contexts, sequence), q.shape[1]
        if not core_.is_local(sequence.length) and uses_ulysses(
            contexts, q, n, len(of_values) // n, latent.shape[-1], fetch_plan
        ):
            k, v = core_.heads(latent, of_keys, of_values)
            _log_once(shown, ULYSSES, contexts.size)
            return ulysses_attention(core_, q, k, v, None, sequence, contexts)
        made = LatentKeyValues(core_.heads, (of_keys, of_values))
        _log_once(shown, RING if fetch_plan is None else FETCH, contexts.size)
        return travelling(core_, q, latent, made, None, sequence, contexts, fetch_plan)

    return forward


def make_gather_kv_forward(
    whole: nn.Module, contexts: ContextParallel
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is run instead of a module's `forward` that is given keys and values, for attention of its own."""
    found = lru_cache(LENGTHS)(partial(fetch_all_plan, contexts))

    def forward(k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return KeyValues(k.shape[-1], v.shape[-1]).heads(fetch(torch.cat([k, v], -1), found(length)))

    return forward


def fetch_all_plan(contexts: ContextParallel, length: int) -> FetchPlan:
    """All ranks look at all keys."""
    return FetchPlan.of(contexts, contexts.token_indices(length), [torch.arange(length)] * contexts.size)


@constant_when_compiled
def _log_once(pattern: str, way: str, ranks: int) -> None:
    """Log once how attention of this pattern gets at what other ranks have."""
    if (pattern, way, ranks) not in _logged:
        _logged.add((pattern, way, ranks))
        log.info("attention %s, cp %d: %s", pattern, ranks, way)


_logged: set[tuple[str, str, int]] = set()


def plan_fetch(core: Any, contexts: ContextParallel, sequence: Any) -> FetchPlan | None:
    """What queries may look at, where that is fetched: always where the pattern bounds it, and where documents do if no
    rank fetches half of what others have. All ranks know whole rows, and so decide alike."""

    def found() -> FetchPlan | None:
        indices_by_rank = contexts.token_indices(sequence.length)
        row = sequence.full_sequence.on_host()
        fetch_plan = [core.reached(row, each) for each in indices_by_rank]
        is_fetched = core.is_local(sequence.length) or is_little(indices_by_rank, fetch_plan)
        return FetchPlan.of(contexts, indices_by_rank, fetch_plan) if is_fetched else None

    made: FetchPlan | None = sequence.cached(("needs", core.pattern), found)
    return made


@dataclass(frozen=True)
class _Step:
    """Keys that are looked at together: what all layers know them by, and where they stand in the row."""

    key: Any
    places: Tensor


def travelling(
    core: Any,
    q: Tensor,
    kv: Tensor,
    made: "KeyValues | LatentKeyValues",
    bias: Tensor | None,
    sequence: Any,
    contexts: ContextParallel,
    fetch_plan: FetchPlan | None,
) -> Tensor:
    """Attention to keys and values that are made of what is sent [B, ·, T, ·]: fetched, or all round a ring.

    bias: by distance in the row [N, 2L − 1], of which no rank sends anything."""
    if fetch_plan is None:
        steps = [
            _Step(("rank", rank), contexts.token_indices(sequence.length)[rank])
            for rank in ((contexts.rank - step) % contexts.size for step in range(contexts.size))
        ]
        return ring_attention(core, q, kv, made, bias, sequence, steps, contexts)
    steps = [_Step(("fetched", core.pattern), fetch_plan.indices)]
    out = ring_attention(core, q, fetch(kv, fetch_plan), made, bias, sequence, steps, contexts)
    wide = sequence.cached(
        ("wide", type(core), core.pattern), lambda: GlobalQueries.of(core, contexts, sequence)
    )
    return (
        out
        if wide is None
        else add_global_attention(core, out, q, *made.heads(kv), bias, sequence, wide, contexts)
    )


def ring_attention(
    core: Any, q: Tensor, kv: Tensor, kv_format: "KeyValues | LatentKeyValues", bias: Tensor | None, sequence: Any,
    steps: Sequence[_Step], contexts: ContextParallel,
) -> Tensor:  # fmt: skip
    """By blocks: what the keys of the first step are made of is here, that of each further one comes from the rank
    before."""
    drawn = core.dropout.head_rng_keys(sequence, q.shape[1])
    hows = [block_attention_plan(core, sequence, step.key, step.places, q) for step in steps]
    sinks = None if core.sinks is None else core.sinks.weight
    out: Tensor = _RingAttention.apply(
        q, kv, bias, drawn, sinks, hows, contexts, kv_format, *kv_format.weights
    )
    return out


@dataclass(frozen=True)
class KeyValues:
    """Keys and values travel as they are, side by side. k, v: their widths."""

    k: int
    v: int
    weights: tuple[Tensor, ...] = ()

    def heads(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        k, v = kv.split([self.k, self.v], -1)
        return k, v

    def backward(self, kv: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Gradient of what is sent, and of the weights."""
        return (torch.cat([dk, dv], -1),)


@dataclass(frozen=True)
class LatentKeyValues:
    """Keys and values are made, by every rank that needs them, of what travels. make: of it and the weights."""

    make: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...]

    def heads(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.make(kv, *self.weights)

    def backward(self, kv: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Gradient of what is sent in the type of `dk`, and of the weights."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (kv, *weights)]
            k, v = self.make(*given)
        kv_grad, *weight_grads = torch.autograd.grad((k, v), given, (dk.to(k.dtype), dv.to(v.dtype)))
        return kv_grad.to(dk.dtype), *weight_grads


class _RingAttention(torch.autograd.Function):
    """What keys and values are made of goes round; in the backward pass its gradients follow one step behind, and end
    at home. What the next step needs is under way while a part is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        bias: Tensor | None,
        drawn: Tensor | None,
        sinks: Tensor | None,
        hows: Sequence[BlockAttentionPlan],
        contexts: ContextParallel,
        made: KeyValues | LatentKeyValues,
        *weights: Tensor,
    ) -> Tensor:
        here, flight = kv, _shift(kv, contexts, hows[1:2])
        out, lse = partial_attention(q, *made.heads(kv), bias, drawn, hows[0])
        for step, how in enumerate(hows[1:], 1):
            (here,) = flight.wait()
            flight = _shift(here, contexts, hows[step + 1 : step + 2])
            out, lse = merge_partial(out, lse, *partial_attention(q, *made.heads(here), bias, drawn, how))
        out, lse = blocks.with_sinks(out.to(q.dtype), lse, sinks)
        ctx.save_for_backward(q, kv, bias, drawn, sinks, out, lse, *weights)
        ctx.rest = hows, contexts, made
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        kept = vars(ctx).pop("of_weights", None) if current_part() == "weights" else None
        if kept is not None:  # computed with the gradients of inputs: nothing travels again
            bias_grad, sinks_grad, weight_grads = kept
            return None, None, bias_grad, None, sinks_grad, None, None, None, *weight_grads
        q, kv, bias, drawn, sinks, out, lse, *weights = ctx.saved_tensors
        hows, contexts, made = ctx.rest
        bias_grad = bias_gradient_buffer(bias, lse) if ctx.needs_input_grad[2] else None

        def of(here: Tensor, how: BlockAttentionPlan) -> tuple[Tensor, ...]:
            k, v = made.heads(here)
            dq, dk, dv = partial_attention_backward(g, q, k, v, out, lse, bias, drawn, how, bias_grad)
            return dq, *made.backward(here, weights, dk, dv)

        here, keys, behind = kv, _shift(kv, contexts, hows[1:2]), None
        dq, own, *weight_grads = of(kv, hows[0])
        dq, *weight_grads = (x.to(lse.dtype) for x in (dq, *weight_grads))  # rounded once, not once a part
        for step, how in enumerate(hows[1:], 1):
            (here,) = keys.wait()
            keys = _shift(here, contexts, hows[step + 1 : step + 2])
            more, part, *more_of_weights = of(here, how)
            dq = dq + more
            weight_grads = [total + x for total, x in zip(weight_grads, more_of_weights, strict=True)]
            if behind is not None:
                part = behind.wait()[0] + part
            behind = _shift(part, contexts, [hows[(step + 1) % len(hows)]])
        if behind is not None:
            own = own + behind.wait()[0]
        weight_grads = [x.to(weight.dtype) for x, weight in zip(weight_grads, weights, strict=True)]
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        sinks_grad = blocks.gradient_of_sinks(g, out, lse, sinks)
        if current_part() == "inputs":
            ctx.of_weights = bias_grad, sinks_grad, weight_grads
        return dq.to(q.dtype), own.to(kv.dtype), bias_grad, None, sinks_grad, None, None, None, *weight_grads


def _shift(x: Tensor, contexts: ContextParallel, hows: Sequence[BlockAttentionPlan]) -> P2PExchange:
    """Begins to send x to the next rank, and to get what the one before has: as many tokens as are looked at then.
    Nothing travels where no step is to come."""
    if not hows:
        return P2PExchange(contexts.group, [], [])
    (how,) = hows
    assert how.places is not None
    after, before = (contexts.rank + 1) % contexts.size, (contexts.rank - 1) % contexts.size
    came = x.new_empty(*x.shape[:2], len(how.places), x.shape[3])
    return P2PExchange(contexts.group, [(after, x)], [(before, came)])
