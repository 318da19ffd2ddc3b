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
from megatfm.ops.attention.banded import merged
from megatfm.ops.attention.distances import by_distance
from megatfm.ops.attention.tiles import How
from megatfm.ops.compiled import constant_when_compiled
from megatfm.parallel.backward_parts import current_part
from megatfm.parallel.context_exchange import LENGTHS, Contexts, Flight, Wanted, fetch, is_little
from megatfm.parallel.context_heads import by_heads, goes_by_heads
from megatfm.parallel.context_parts import how_of, part_backward, part_of, zeros_for
from megatfm.parallel.context_wide import Wide, with_wide

# B batch, N query heads, K key-value heads, T tokens of a rank, S keys, H head width, V value width

log = logging.getLogger(__name__)

BY_HEADS = "each rank takes some heads of all tokens"
BY_RING = "what keys are made of goes round a ring"
BY_NEED = "the keys that are looked at are fetched"


def across(core: nn.Module, contexts: Contexts) -> Callable[..., Tensor]:
    """What is run instead of a core's `forward`, by which it is computed once all keys are there."""
    alone: Callable[..., Tensor] = core.forward
    shown = repr(core.pattern)

    def forward(q: Tensor, k: Tensor, v: Tensor, sequence: Any, bias: Tensor | None = None) -> Tensor:
        core_: Any = core
        looked_at = sequence.memory if core_.pattern.of_memory else sequence
        as_they_are = Heads(k.shape[-1], v.shape[-1])
        is_own = not hasattr(core, "seen")
        if looked_at is not sequence or is_own or (bias is not None and not by_distance(bias)):
            wanted = looked_at.once("everything", lambda: everything(contexts, looked_at.length))
            _tell(shown, "all keys are fetched", contexts.size)
            return alone(q, *as_they_are.heads(fetch(torch.cat([k, v], -1), wanted)), sequence, bias)
        needs = needs_of(core_, contexts, sequence)
        if not core_.is_local(sequence.length) and goes_by_heads(
            contexts, q, k.shape[1], v.shape[3], k.shape[1] * (k.shape[3] + v.shape[3]), needs
        ):
            _tell(shown, BY_HEADS, contexts.size)
            return by_heads(core_, q, k, v, bias, sequence, contexts)
        _tell(shown, BY_RING if needs is None else BY_NEED, contexts.size)
        return travelling(core_, q, torch.cat([k, v], -1), as_they_are, bias, sequence, contexts, needs)

    return forward


def across_latents(core: nn.Module, contexts: Contexts) -> Callable[..., Tensor]:
    """The same where keys and values are made of what is narrower than they are: that travels."""
    shown = repr(core.pattern)

    def forward(q: Tensor, latent: Tensor, of_keys: Tensor, of_values: Tensor, sequence: Any) -> Tensor:
        core_: Any = core
        needs, n = needs_of(core_, contexts, sequence), q.shape[1]
        if not core_.is_local(sequence.length) and goes_by_heads(
            contexts, q, n, len(of_values) // n, latent.shape[-1], needs
        ):
            k, v = core_.heads(latent, of_keys, of_values)
            _tell(shown, BY_HEADS, contexts.size)
            return by_heads(core_, q, k, v, None, sequence, contexts)
        made = Made(core_.heads, (of_keys, of_values))
        _tell(shown, BY_RING if needs is None else BY_NEED, contexts.size)
        return travelling(core_, q, latent, made, None, sequence, contexts, needs)

    return forward


def across_keys(whole: nn.Module, contexts: Contexts) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is run instead of a module's `forward` that is given keys and values, for attention of its own."""
    found = lru_cache(LENGTHS)(partial(everything, contexts))

    def forward(k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return Heads(k.shape[-1], v.shape[-1]).heads(fetch(torch.cat([k, v], -1), found(length)))

    return forward


def everything(contexts: Contexts, length: int) -> Wanted:
    """All ranks look at all keys."""
    return Wanted.of(contexts, contexts.places(length), [torch.arange(length)] * contexts.size)


@constant_when_compiled
def _tell(pattern: str, way: str, ranks: int) -> None:
    """Log once how attention of this pattern gets at what other ranks have."""
    if (pattern, way, ranks) not in _TOLD:
        _TOLD.add((pattern, way, ranks))
        log.info("attention %s, cp %d: %s", pattern, ranks, way)


_TOLD: set[tuple[str, str, int]] = set()


def needs_of(core: Any, contexts: Contexts, sequence: Any) -> Wanted | None:
    """What queries may look at, where that is fetched: always where the pattern bounds it, and where documents do if no
    rank fetches half of what others have. All ranks know whole rows, and so decide alike."""

    def found() -> Wanted | None:
        dealt = contexts.places(sequence.length)
        row = sequence.row.on_host()
        needs = [core.reached(row, each) for each in dealt]
        is_fetched = core.is_local(sequence.length) or is_little(dealt, needs)
        return Wanted.of(contexts, dealt, needs) if is_fetched else None

    made: Wanted | None = sequence.once(("needs", core.pattern), found)
    return made


@dataclass(frozen=True)
class _Step:
    """Keys that are looked at together: what all layers know them by, and where they stand in the row."""

    key: Any
    places: Tensor


def travelling(
    core: Any, q: Tensor, sent: Tensor, made: "Heads | Made", bias: Tensor | None, sequence: Any, contexts: Contexts,
    needs: Wanted | None,
) -> Tensor:  # fmt: skip
    """Attention to keys and values that are made of what is sent [B, ·, T, ·]: fetched, or all round a ring.

    bias: by distance in the row [N, 2L − 1], of which no rank sends anything."""
    if needs is None:
        steps = [
            _Step(("rank", rank), contexts.places(sequence.length)[rank])
            for rank in ((contexts.rank - step) % contexts.size for step in range(contexts.size))
        ]
        return attend(core, q, sent, made, bias, sequence, steps, contexts)
    steps = [_Step(("fetched", core.pattern), needs.looked_at)]
    out = attend(core, q, fetch(sent, needs), made, bias, sequence, steps, contexts)
    wide = sequence.once(("wide", type(core), core.pattern), lambda: Wide.of(core, contexts, sequence))
    return out if wide is None else with_wide(core, out, q, *made.heads(sent), bias, sequence, wide, contexts)


def attend(
    core: Any, q: Tensor, sent: Tensor, made: "Heads | Made", bias: Tensor | None, sequence: Any,
    steps: Sequence[_Step], contexts: Contexts,
) -> Tensor:  # fmt: skip
    """By blocks: what the keys of the first step are made of is here, that of each further one comes from the rank
    before."""
    drawn = core.dropout.head_rng_keys(sequence, q.shape[1])
    hows = [how_of(core, sequence, step.key, step.places, q) for step in steps]
    sinks = None if core.sinks is None else core.sinks.weight
    out: Tensor = _Ring.apply(q, sent, bias, drawn, sinks, hows, contexts, made, *made.weights)
    return out


@dataclass(frozen=True)
class Heads:
    """Keys and values travel as they are, side by side. k, v: their widths."""

    k: int
    v: int
    weights: tuple[Tensor, ...] = ()

    def heads(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        k, v = sent.split([self.k, self.v], -1)
        return k, v

    def back(self, sent: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Gradient of what is sent, and of the weights."""
        return (torch.cat([dk, dv], -1),)


@dataclass(frozen=True)
class Made:
    """Keys and values are made, by every rank that needs them, of what travels. make: of it and the weights."""

    make: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...]

    def heads(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.make(sent, *self.weights)

    def back(self, sent: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Gradient of what is sent in the type of `dk`, and of the weights."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in (sent, *weights)]
            k, v = self.make(*given)
        of_sent, *of_weights = torch.autograd.grad((k, v), given, (dk.to(k.dtype), dv.to(v.dtype)))
        return of_sent.to(dk.dtype), *of_weights


class _Ring(torch.autograd.Function):
    """What keys and values are made of goes round; in the backward pass its gradients follow one step behind, and end
    at home. What the next step needs is under way while a part is computed."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, sent: Tensor, bias: Tensor | None, drawn: Tensor | None, sinks: Tensor | None,
        hows: Sequence[How], contexts: Contexts, made: Heads | Made, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        here, flight = sent, _shift(sent, contexts, hows[1:2])
        out, lse = part_of(q, *made.heads(sent), bias, drawn, hows[0])
        for step, how in enumerate(hows[1:], 1):
            (here,) = flight.wait()
            flight = _shift(here, contexts, hows[step + 1 : step + 2])
            out, lse = merged(out, lse, *part_of(q, *made.heads(here), bias, drawn, how))
        out, lse = blocks.with_sinks(out.to(q.dtype), lse, sinks)
        ctx.save_for_backward(q, sent, bias, drawn, sinks, out, lse, *weights)
        ctx.rest = hows, contexts, made
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        kept = vars(ctx).pop("of_weights", None) if current_part() == "weights" else None
        if kept is not None:  # computed with the gradients of inputs: nothing travels again
            of_bias, of_sinks, of_weights = kept
            return None, None, of_bias, None, of_sinks, None, None, None, *of_weights
        q, sent, bias, drawn, sinks, out, lse, *weights = ctx.saved_tensors
        hows, contexts, made = ctx.rest
        of_bias = zeros_for(bias, lse) if ctx.needs_input_grad[2] else None

        def of(here: Tensor, how: How) -> tuple[Tensor, ...]:
            k, v = made.heads(here)
            dq, dk, dv = part_backward(g, q, k, v, out, lse, bias, drawn, how, of_bias)
            return dq, *made.back(here, weights, dk, dv)

        here, keys, behind = sent, _shift(sent, contexts, hows[1:2]), None
        dq, own, *of_weights = of(sent, hows[0])
        dq, *of_weights = (x.to(lse.dtype) for x in (dq, *of_weights))  # rounded once, not once a part
        for step, how in enumerate(hows[1:], 1):
            (here,) = keys.wait()
            keys = _shift(here, contexts, hows[step + 1 : step + 2])
            more, part, *more_of_weights = of(here, how)
            dq = dq + more
            of_weights = [total + x for total, x in zip(of_weights, more_of_weights, strict=True)]
            if behind is not None:
                part = behind.wait()[0] + part
            behind = _shift(part, contexts, [hows[(step + 1) % len(hows)]])
        if behind is not None:
            own = own + behind.wait()[0]
        of_weights = [x.to(weight.dtype) for x, weight in zip(of_weights, weights, strict=True)]
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        of_sinks = blocks.gradient_of_sinks(g, out, lse, sinks)
        if current_part() == "inputs":
            ctx.of_weights = of_bias, of_sinks, of_weights
        return dq.to(q.dtype), own.to(sent.dtype), of_bias, None, of_sinks, None, None, None, *of_weights


def _shift(x: Tensor, contexts: Contexts, hows: Sequence[How]) -> Flight:
    """Begins to send x to the next rank, and to get what the one before has: as many tokens as are looked at then.
    Nothing travels where no step is to come."""
    if not hows:
        return Flight(contexts.group, [], [])
    (how,) = hows
    assert how.places is not None
    after, before = (contexts.rank + 1) % contexts.size, (contexts.rank - 1) % contexts.size
    came = x.new_empty(*x.shape[:2], len(how.places), x.shape[3])
    return Flight(contexts.group, [(after, x)], [(before, came)])
