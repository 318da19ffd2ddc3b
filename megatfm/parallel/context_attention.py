"""Attention under context parallelism, by one of three methods: fetching keys, a ring, or Ulysses.

| Method | When | What is sent |
|---|---|---|
| fetch | a local pattern, or documents that need less than half of the other ranks' keys | these keys and values |
| ring | otherwise, or `parallel.cp_method = "ring"` | all keys and values (or latents), around the ranks |
| Ulysses | `parallel.cp_method = "ulysses"`, or "auto" if it sends less | queries, keys, values and output, by heads |

Queries that attend to all keys (global tokens) are sent to the keys instead (`context_global_attention.py`). Modules
with their own attention, cross-attention, and biases with a value per pair fetch all keys.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from megatfm.ops.attention.mask import is_relative
from megatfm.ops.torch_private import constant_when_compiled
from megatfm.ops.transfer import move_to_device
from megatfm.parallel.collectives import all_to_all_no_grad
from megatfm.parallel.context_global_attention import GlobalQueries, add_global_attention
from megatfm.parallel.context_parallel import (
    MAX_CACHED_LENGTHS,
    ContextParallel,
    FetchPlan,
    fetch,
    is_sparse_fetch,
    make_fetch_all_plan,
)
from megatfm.parallel.ring_attention import KeyValueFormat, KeyValues, LatentKeyValues, RingStep, ring_attention
from megatfm.terminal import log_once

# B batch, N query heads, K key-value heads, T tokens of a rank, S tokens of the row, H head width, V value width

ULYSSES = "Ulysses, each rank computes some heads of all tokens"
RING = "ring, keys and values rotate around the ranks"
FETCH = "each rank fetches the keys that its queries attend to"
FETCH_ALL = "each rank fetches all keys"


def make_attention_forward(core: Any, cp: ContextParallel) -> Callable[..., Tensor]:
    """Make the `forward` of an attention core: it exchanges keys, then calls the original forward on local queries."""
    local_forward: Callable[..., Tensor] = core.forward
    pattern_name = repr(core.pattern)

    def forward(q: Tensor, k: Tensor, v: Tensor, sequence: Any, bias: Tensor | None = None) -> Tensor:
        kv_sequence = sequence.memory if core.pattern.is_cross_attention else sequence
        kv_format = KeyValues(k.shape[-1], v.shape[-1])
        has_own_attention = not hasattr(core, "attention_mask")
        if kv_sequence is not sequence or has_own_attention or (bias is not None and not is_relative(bias)):
            plan = kv_sequence.cached("all keys", lambda: make_fetch_all_plan(cp, kv_sequence.length))
            _log_once(pattern_name, FETCH_ALL, cp.size)
            all_k, all_v = kv_format.unpack(fetch(torch.cat([k, v], -1), plan))
            return local_forward(q, all_k, all_v, sequence, bias)
        fetch_plan = plan_fetch(core, cp, sequence)
        if not core.is_local(sequence.length) and uses_ulysses(
            cp, q, k.shape[1], v.shape[3], k.shape[1] * (k.shape[3] + v.shape[3]), fetch_plan
        ):
            _log_once(pattern_name, ULYSSES, cp.size)
            return ulysses_attention(core, q, k, v, bias, sequence, cp)
        _log_once(pattern_name, RING if fetch_plan is None else FETCH, cp.size)
        kv = torch.cat([k, v], -1)
        return exchange_and_attend(core, q, kv, kv_format, bias, sequence, cp, fetch_plan)

    return forward


def make_latent_forward(core: Any, cp: ContextParallel) -> Callable[..., Tensor]:
    """Make the `forward` of a core (MLA) that computes keys and values from latents: it sends the narrower latents."""
    pattern_name = repr(core.pattern)

    def forward(q: Tensor, latent: Tensor, k_weight: Tensor, v_weight: Tensor, sequence: Any) -> Tensor:
        fetch_plan, n = plan_fetch(core, cp, sequence), q.shape[1]
        if not core.is_local(sequence.length) and uses_ulysses(
            cp, q, n, len(v_weight) // n, latent.shape[-1], fetch_plan
        ):
            k, v = core.project_heads(latent, k_weight, v_weight)
            _log_once(pattern_name, ULYSSES, cp.size)
            return ulysses_attention(core, q, k, v, None, sequence, cp)
        kv_format = LatentKeyValues(core.project_heads, (k_weight, v_weight), len(v_weight) // n)
        _log_once(pattern_name, RING if fetch_plan is None else FETCH, cp.size)
        return exchange_and_attend(core, q, latent, kv_format, None, sequence, cp, fetch_plan)

    return forward


def make_gather_kv_forward(gather: nn.Module, cp: ContextParallel) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the `forward` of a module that gathers keys and values of the full row, for attention outside a core."""
    plan_of = lru_cache(MAX_CACHED_LENGTHS)(partial(make_fetch_all_plan, cp))

    def forward(k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return KeyValues(k.shape[-1], v.shape[-1]).unpack(fetch(torch.cat([k, v], -1), plan_of(length)))

    return forward


@constant_when_compiled
def _log_once(pattern: str, method: str, ranks: int) -> None:
    """Log once by which method attention of this pattern reads keys of other ranks."""
    log_once(f"attention {pattern}, cp {ranks}: {method}")


def plan_fetch(core: Any, cp: ContextParallel, sequence: Any) -> FetchPlan | None:
    """Plan a fetch of the keys that local queries attend to; None if a ring should be used instead.

    A local pattern is always fetched. Otherwise documents decide: a fetch if every rank needs less than half of the
    other ranks' keys. All ranks know the full rows, so they decide alike.
    """

    def plan() -> FetchPlan | None:
        indices_by_rank = cp.token_indices(sequence.length)
        row = sequence.full_sequence.on_host()
        needed_indices = [core.find_reachable_keys(row, indices) for indices in indices_by_rank]
        is_fetched = core.is_local(sequence.length) or is_sparse_fetch(indices_by_rank, needed_indices)
        return FetchPlan.build(cp, indices_by_rank, needed_indices) if is_fetched else None

    fetch_plan: FetchPlan | None = sequence.cached(("needs", core.pattern), plan)
    return fetch_plan


def exchange_and_attend(
    core: Any,
    q: Tensor,
    kv: Tensor,
    kv_format: KeyValueFormat,
    bias: Tensor | None,
    sequence: Any,
    cp: ContextParallel,
    fetch_plan: FetchPlan | None,
) -> Tensor:
    """Exchange `kv` [B, ·, T, ·] by the fetch plan, or around a ring without one, and attend; returns [B, N, T, V].

    kv_format: how keys and values follow from `kv`. bias: by distance in the row [N, 2L − 1], known to every rank.
    """
    if fetch_plan is None:
        sources = [(cp.rank - step) % cp.size for step in range(cp.size)]
        indices_by_rank = cp.token_indices(sequence.length)
        steps = [RingStep(("rank", source), indices_by_rank[source]) for source in sources]
        return ring_attention(core, q, kv, kv_format, bias, sequence, steps, cp)
    steps = [RingStep(("fetched", core.pattern), fetch_plan.indices)]
    out = ring_attention(core, q, fetch(kv, fetch_plan), kv_format, bias, sequence, steps, cp)
    key = "global queries", type(core), core.pattern
    global_queries = sequence.cached(key, lambda: GlobalQueries.find(core, cp, sequence))
    if global_queries is None:
        return out
    return add_global_attention(core, out, q, *kv_format.unpack(kv), bias, sequence, global_queries, cp)


def uses_ulysses(
    cp: ContextParallel, q_BNTH: Tensor, kv_heads: int, v_width: int, n_sent: int, fetch_plan: FetchPlan | None
) -> bool:  # fmt: skip
    """Return whether to use Ulysses: if configured, or in "auto" if heads divide evenly and it sends less than the ring
    or the fetch.

    The comparison counts forward and backward. n_sent: elements per token that the ring or the fetch sends.
    """
    c, n, h = cp.size, q_BNTH.shape[1], q_BNTH.shape[3]
    if cp.method == "ulysses":
        return True
    if cp.method != "auto" or n % c or (kv_heads % c and c % kv_heads):
        return False
    by_heads = 2 * (n + max(kv_heads, c)) * (h + v_width)  # in units of (c − 1) / c² of a row
    if fetch_plan is None:
        return by_heads < 3 * c * n_sent
    return by_heads * (c - 1) * fetch_plan.length < 2 * n_sent * fetch_plan.max_fetched * c**2


def ulysses_attention(
    core: Any, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, bias_NL: Tensor | None, sequence: Any,
    cp: ContextParallel,
) -> Tensor:  # fmt: skip
    """Attend with some heads of all tokens on each rank; returns [B, N, T, V] (Jacobs et al. 2023, DeepSpeed-Ulysses).

    If there are fewer key heads than ranks, key heads are repeated. bias: by distance in the row.
    """
    if k_BKTH.shape[1] < cp.size:
        times = cp.size // k_BKTH.shape[1]
        k_BKTH, v_BKTV = (x.repeat_interleave(times, 1) for x in (k_BKTH, v_BKTV))
    row: _SplitRow = sequence.cached("split row", lambda: _SplitRow.build(cp, sequence.length, q_BNTH.device))
    q: Tensor = _TokensHeadsExchange.apply(q_BNTH, _to_heads, _to_tokens, row)
    kv: Tensor = _TokensHeadsExchange.apply(torch.cat([k_BKTH, v_BKTV], -1), _to_heads, _to_tokens, row)
    k, v = kv.split([k_BKTH.shape[-1], v_BKTV.shape[-1]], -1)
    head_shard = core.dropout.shard_index * cp.size + cp.rank
    bias = None if bias_NL is None else bias_NL.chunk(cp.size)[cp.rank]
    out = core.attend_head_shard(head_shard, q, k, v, sequence.make_full_row(), bias)
    out_BNTV: Tensor = _TokensHeadsExchange.apply(out, _to_tokens, _to_heads, row)
    return out_BNTV


class _SplitRow(NamedTuple):
    """How a row is split over ranks.

    counts: tokens of each rank. order: int64 [S], indices of all tokens, rank by rank. inverse: the inverse
    permutation. Both are on the device, and all layers share them.
    """

    cp: ContextParallel
    counts: Sequence[int]
    order: Tensor
    inverse: Tensor

    @classmethod
    def build(cls, cp: ContextParallel, length: int, device: torch.device) -> Self:
        """Return the split of a row of `length` tokens."""
        indices_by_rank = cp.token_indices(length)
        order = torch.cat(indices_by_rank)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(length))
        counts = [len(indices) for indices in indices_by_rank]
        return cls(cp, counts, move_to_device(order, device), move_to_device(inverse, device))


Exchange = Callable[[Tensor, _SplitRow], Tensor]


class _TokensHeadsExchange(torch.autograd.Function):
    """All-to-all between a split by tokens and a split by heads; the backward pass runs the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, adjoint: Exchange, row: _SplitRow) -> Tensor:
        ctx.adjoint, ctx.row = adjoint, row
        return exchange(x, row)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = ctx.adjoint(g, ctx.row)
        return gradient, None, None, None


def _to_heads(x: Tensor, row: _SplitRow) -> Tensor:
    """Exchange [B, n, T, ·] → [B, n / c, S, ·], tokens in row order."""
    heads = x.shape[1] // row.cp.size
    shapes = [(x.shape[0], heads, count, x.shape[3]) for count in row.counts]
    return torch.cat(_exchange(x.chunk(row.cp.size, 1), shapes, row.cp), 2).index_select(2, row.inverse)


def _to_tokens(x: Tensor, row: _SplitRow) -> Tensor:
    """Exchange [B, n / c, S, ·] → [B, n, T, ·]."""
    shape = *x.shape[:2], row.counts[row.cp.rank], x.shape[3]
    rows_by_rank = x.index_select(2, row.order).split(row.counts, 2)
    return torch.cat(_exchange(rows_by_rank, [shape] * row.cp.size, row.cp), 1)


def _exchange(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], cp: ContextParallel) -> list[Tensor]:
    """Send tensors[r] to rank r; return the tensors received from each rank, of these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    received = all_to_all_no_grad(flat, [tensor.numel() for tensor in tensors], sizes, cp.group)
    return [tensor.view(tuple(shape)) for tensor, shape in zip(received.split(sizes), shapes, strict=True)]
