"""Attention of rows that are cut, by heads: each rank gets all tokens of some of them (Jacobs et al. 2023, Ulysses).

Fewer key heads than ranks are repeated, so that each rank gets the one that its queries need.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.ops.moved import moved
from megatfm.parallel.context_exchange import ContextParallel, FetchPlan

# B batch, N query heads, K key-value heads, T tokens of a rank, S tokens of the row, H head width, V value width

Exchange = Callable[[Tensor, ContextParallel, int], Tensor]


def uses_ulysses(
    contexts: ContextParallel, q_BNTH: Tensor, kv_heads: int, v_width: int, sent: int, needs: FetchPlan | None
) -> bool:
    """Whether it is asked for, or heads can be dealt and that sends less in both passes than what is done instead: a
    ring, or a fetch of what is needed. sent: numbers of a token that go round, or are fetched."""
    c, n, h = contexts.size, q_BNTH.shape[1], q_BNTH.shape[3]
    if contexts.method == "ulysses":
        return True
    if contexts.method != "auto" or n % c or (kv_heads % c and c % kv_heads):
        return False
    by_heads = 2 * (n + max(kv_heads, c)) * (h + v_width)  # in units of (c − 1) / c² of a row
    if needs is None:
        return by_heads < 3 * c * sent
    return by_heads * (c - 1) * needs.length < 2 * sent * needs.most * c**2


def ulysses_attention(
    core: Any, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, bias_NL: Tensor | None, sequence: Any,
    contexts: ContextParallel,
) -> Tensor:  # fmt: skip
    """[B, N, T, V]. bias: by distance in the row."""
    if k_BKTH.shape[1] < contexts.size:
        times = contexts.size // k_BKTH.shape[1]
        k_BKTH, v_BKTV = (x.repeat_interleave(times, 1) for x in (k_BKTH, v_BKTV))
    rest = contexts, sequence.length
    q: Tensor = _TokensHeadsExchange.apply(q_BNTH, _cp_to_hp, _hp_to_cp, *rest)
    kv: Tensor = _TokensHeadsExchange.apply(torch.cat([k_BKTH, v_BKTV], -1), _cp_to_hp, _hp_to_cp, *rest)
    k, v = kv.split([k_BKTH.shape[-1], v_BKTV.shape[-1]], -1)
    part = core.dropout.part * contexts.size + contexts.rank
    bias = None if bias_NL is None else bias_NL.chunk(contexts.size)[contexts.rank]
    made = core.of_heads(part, q, k, v, sequence.full_row(), bias)
    back: Tensor = _TokensHeadsExchange.apply(made, _hp_to_cp, _cp_to_hp, *rest)
    return back


class _TokensHeadsExchange(torch.autograd.Function):
    """Tokens for heads, or heads for tokens, whichever way; adjoint: the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, way: Exchange, back: Exchange, contexts: ContextParallel, length: int
    ) -> Tensor:
        ctx.rest = back, contexts, length
        return way(x, contexts, length)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        back, contexts, length = ctx.rest
        return back(g, contexts, length), None, None, None, None


def _cp_to_hp(x: Tensor, contexts: ContextParallel, length: int) -> Tensor:
    """[B, n, T, ·] → [B, n / c, S, ·], tokens in the order of the row."""
    indices_by_rank, heads = contexts.token_indices(length), x.shape[1] // contexts.size
    shapes = [(x.shape[0], heads, len(at), x.shape[3]) for at in indices_by_rank]
    came = _exchange(x.chunk(contexts.size, 1), shapes, contexts)
    return torch.cat(came, 2)[:, :, moved(torch.cat(indices_by_rank).argsort(), x.device)]


def _hp_to_cp(x: Tensor, contexts: ContextParallel, length: int) -> Tensor:
    """[B, n / c, S, ·] → [B, n, T, ·]."""
    indices_by_rank = contexts.token_indices(length)
    shape = *x.shape[:2], len(indices_by_rank[contexts.rank]), x.shape[3]
    parts = [x[:, :, moved(at, x.device)] for at in indices_by_rank]
    return torch.cat(_exchange(parts, [shape] * contexts.size, contexts), 1)


def _exchange(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], contexts: ContextParallel
) -> list[Tensor]:
    """Part r goes to rank r; of what comes from each, the shapes."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    came = sent.new_empty(sum(sizes))
    dist.all_to_all_single(came, sent, sizes, [part.numel() for part in parts], group=contexts.group)
    return [part.view(tuple(shape)) for part, shape in zip(came.split(sizes), shapes, strict=True)]
