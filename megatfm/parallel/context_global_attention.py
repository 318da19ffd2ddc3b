"""Global attention under context parallelism: queries that attend to all keys (Longformer, BigBird) go to the keys.

All ranks receive the few global queries. Each rank computes their attention to its local keys, and the results are
merged by their log-sum-exp (Dao et al. 2022, FlashAttention). The traffic does not grow with the row. A learned query
that pools each image is on every rank already, and is merged in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.tile import BackwardInputs, BlockAttentionPlan, merge_partial
from megatfm.ops.transfer import move_to_device, to_host
from megatfm.parallel.collectives import all_gather, all_reduce_no_grad, copy_to_group, reduce_from_group
from megatfm.parallel.context_parallel import ContextParallel
from megatfm.parallel.ring_attention import (
    compute_partial_attention,
    compute_partial_attention_backward,
    make_bias_gradient_buffer,
    make_block_attention_plan,
)

# B batch, N query heads, K key-value heads, T tokens of a rank, G global queries, H head width, V value width


@dataclass(frozen=True)
class GlobalQueries:
    """Places of the global queries of a row."""

    row_indices: Tensor
    """Row indices of all global queries [G]."""
    local_positions: Tensor
    """Positions of this rank's queries in `row_indices`."""
    local_indices: Tensor
    """Positions of this rank's queries among its tokens."""

    @classmethod
    def find(cls, core: Any, cp: ContextParallel, sequence: Any) -> "GlobalQueries | None":
        """Collect the global queries; None if there is none whose keys are on several ranks."""
        indices_by_rank: Sequence[Tensor] = cp.token_indices(sequence.length)
        row_indices = core.find_global_queries(sequence.full_sequence.on_host(), indices_by_rank)
        if not len(row_indices):
            return None
        local = indices_by_rank[cp.rank]
        return cls(
            row_indices, torch.isin(row_indices, local).nonzero()[:, 0], torch.isin(local, row_indices).nonzero()[:, 0]
        )


def add_global_attention(
    core: Any, out_BNTV: Tensor, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, bias: Tensor | None, sequence: Any,
    global_queries: GlobalQueries, cp: ContextParallel,
) -> Tensor:  # fmt: skip
    """Return `out` [B, N, T, V] with the attention of global queries to all keys written at their positions."""
    device = q_BNTH.device
    positions = move_to_device(global_queries.local_positions, device)
    local = move_to_device(global_queries.local_indices, device)
    zeros = q_BNTH.new_zeros(*q_BNTH.shape[:2], len(global_queries.row_indices), q_BNTH.shape[3])
    local_q = zeros.index_copy(2, positions, q_BNTH[:, :, local])
    q_BNGH = copy_to_group(reduce_from_group(local_q, cp.group), cp.group)
    queries = sequence.with_queries_at(
        ("global queries", core.pattern), move_to_device(global_queries.row_indices, device)
    )
    dropout_keys = core.dropout.make_head_rng_keys(queries, q_BNTH.shape[1])
    key_indices = cp.token_indices(sequence.length)[cp.rank]
    plan = make_block_attention_plan(core, queries, ("rank", cp.rank), key_indices, q_BNGH)
    sinks = None if core.sinks is None else core.sinks.weight
    out_BNGV: Tensor = _AllKeysAttention.apply(q_BNGH, k_BKTH, v_BKTV, bias, dropout_keys, sinks, plan, cp)
    return out_BNTV.index_copy(2, local, out_BNGV[:, :, positions])


def make_global_forward(core: Any, cp: ContextParallel) -> Callable[..., Tensor]:
    """Make the `forward` of a core that gets only global queries, with separate projections of keys (Longformer)."""

    def forward(
        heads_BNTV: Tensor, q_BNGH: Tensor, k_BNTH: Tensor, v_BNTV: Tensor, indices_BG: Tensor, exists_BG: Tensor,
        sequence: Any,
    ) -> Tensor:  # fmt: skip
        is_global_BT = _mask_at(indices_BG, exists_BG, k_BNTH.shape[2])
        host_mask_BT = _mask_at(to_host(indices_BG), to_host(exists_BG), k_BNTH.shape[2])
        index = indices_BG[:, None, :, None].expand(q_BNGH.shape)
        q_BNTH = torch.zeros_like(k_BNTH).scatter(2, index, q_BNGH.where(exists_BG[:, None, :, None], 0))
        out = _attend_to_local_keys(core, q_BNTH, k_BNTH, v_BNTV, host_mask_BT, sequence, cp)
        key = "global queries", type(core), core.pattern
        queries = sequence.cached(key, lambda: GlobalQueries.find(core, cp, sequence))
        if queries is not None:
            out = add_global_attention(core, out, q_BNTH, k_BNTH, v_BNTV, None, sequence, queries, cp)
        return out.where(is_global_BT[:, None, :, None], heads_BNTV)

    return forward


def make_pooling_forward(core: Any, cp: ContextParallel) -> Callable[..., Tensor]:
    """Make the `forward` of attention by one query to each image's tokens: ranks add up numerators and denominators."""

    def forward(q_NH: Tensor, k_BTNH: Tensor, v_BTNH: Tensor, is_member_BIT: Tensor) -> Tensor:
        scores_BINT: Tensor = core.compute_scores(q_NH, k_BTNH, is_member_BIT)
        max_BIN1 = scores_BINT.detach().amax(-1, keepdim=True)
        dist.all_reduce(max_BIN1, dist.ReduceOp.MAX, cp.group)
        weights_BINT = (scores_BINT - max_BIN1).exp()
        sums_BINH = torch.einsum("bint,btnh->binh", weights_BINT, v_BTNH.to(weights_BINT.dtype))
        packed = torch.cat([sums_BINH, weights_BINT.sum(-1, keepdim=True)], -1)
        packed = copy_to_group(reduce_from_group(packed, cp.group), cp.group)
        sums_BINH, totals_BIN1 = packed.split([v_BTNH.shape[-1], 1], -1)
        return (sums_BINH / totals_BIN1).to(v_BTNH.dtype)

    return forward


def _mask_at(indices_BG: Tensor, exists_BG: Tensor, tokens: int) -> Tensor:
    """Return boolean [B, T], true at the token indices that exist."""
    return exists_BG.new_zeros(len(exists_BG), tokens).scatter(1, indices_BG, exists_BG)


def _attend_to_local_keys(
    core: Any, q_BNTH: Tensor, k_BNTH: Tensor, v_BNTV: Tensor, host_mask_BT: Tensor, sequence: Any,
    cp: ContextParallel,
) -> Tensor:  # fmt: skip
    """Return the attention [B, N, T, V] of global queries to this rank's keys, complete for documents on one rank.

    host_mask: boolean [B, T] in host memory, the global tokens.
    """
    columns = host_mask_BT.any(0).nonzero()[:, 0]
    if not len(columns):
        return torch.zeros_like(v_BNTV)
    key_indices, device = cp.token_indices(sequence.length)[cp.rank], q_BNTH.device
    local = move_to_device(columns, device)
    queries = sequence.with_queries_at(
        ("local global queries", core.pattern), move_to_device(key_indices[columns], device)
    )
    dropout_keys = core.dropout.make_head_rng_keys(queries, q_BNTH.shape[1])
    plan = make_block_attention_plan(core, queries, ("rank", cp.rank), key_indices, q_BNTH[:, :, local])
    out: Tensor = _LocalKeysAttention.apply(q_BNTH[:, :, local], k_BNTH, v_BNTV, dropout_keys, plan)
    return torch.zeros_like(v_BNTV).index_copy(2, local, out)


class _LocalKeysAttention(torch.autograd.Function):
    """Attention to the keys of this rank."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout_keys: Tensor | None, plan: BlockAttentionPlan
    ) -> Tensor:
        out, lse = compute_partial_attention(q, k, v, None, dropout_keys, plan)
        ctx.save_for_backward(q, k, v, dropout_keys, out, lse)
        ctx.plan = plan
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, dropout_keys, out, lse = ctx.saved_tensors
        inputs = BackwardInputs(g, q, k, v, out, lse)
        dq, dk, dv = compute_partial_attention_backward(inputs, None, dropout_keys, ctx.plan)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


class _AllKeysAttention(torch.autograd.Function):
    """Attention of replicated queries to the keys of all ranks; every rank gets the result.

    Each rank uses the output of its own queries only, so the gradients of the queries are partial.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_keys: Tensor | None,
        sinks: Tensor | None, plan: BlockAttentionPlan, cp: ContextParallel,
    ) -> Tensor:  # fmt: skip
        out, lse = compute_partial_attention(q, k, v, bias, dropout_keys, plan)
        packed = torch.cat([out.to(lse.dtype), lse], -1)[None]
        (out, lse), *rank_outputs = (x.split([v.shape[-1], 1], -1) for x in all_gather(packed, 0, cp.group))
        for rank_output in rank_outputs:
            out, lse = merge_partial(out, lse, *rank_output)
        out, lse = block_sparse.add_sinks(out.to(q.dtype, copy=True), lse, sinks)
        ctx.save_for_backward(q, k, v, bias, dropout_keys, sinks, out, lse)
        ctx.plan, ctx.cp = plan, cp
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, dropout_keys, sinks, out, lse = ctx.saved_tensors
        plan: BlockAttentionPlan = ctx.plan
        cp: ContextParallel = ctx.cp
        bias_grad = make_bias_gradient_buffer(bias, lse) if ctx.needs_input_grad[3] else None
        summed_grad = all_reduce_no_grad(g, cp.group)
        inputs = BackwardInputs(summed_grad, q, k, v, out, lse)
        dq, dk, dv = compute_partial_attention_backward(inputs, bias, dropout_keys, plan, bias_grad)
        sinks_grad = block_sparse.compute_sinks_gradient(g, out, lse, sinks)
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), bias_grad, None, sinks_grad, None, None
