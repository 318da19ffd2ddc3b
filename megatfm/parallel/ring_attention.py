"""Ring attention (Liu et al. 2023), and the partial attention to some keys that it is made of.

Key-value shards (or latents) pass from rank to rank, one shard per step; partial outputs are merged by their
log-sum-exp. `core` is a `DotProductAttention`, `sequence` a `SequenceShard`; both are used through their methods only,
since this package does not import layers.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.attention import block_sparse
from megatfm.ops.attention.block_plan import BlockGrid, plan_blocks
from megatfm.ops.attention.block_sparse import pad_to_blocks
from megatfm.ops.attention.fused import has_flash
from megatfm.ops.attention.tile import BackwardInputs, BlockAttentionPlan, merge_partial
from megatfm.ops.torch_private import constant_when_compiled
from megatfm.ops.transfer import move_to_device
from megatfm.parallel.context_parallel import ContextParallel, P2PExchange
from megatfm.parallel.pipeline_schedule import get_current_backward_part
from megatfm.terminal import log_once

# B batch, N query heads, K key-value heads, T tokens of a rank, S keys, H head width, V value width


def make_block_attention_plan(
    core: Any, sequence: Any, key: Hashable, key_indices: Tensor, q_BNTH: Tensor, *, fused_width: int | None = None
) -> BlockAttentionPlan:
    """Plan how to attend to the keys at row indices `key_indices`. key: cache key, shared by all layers.

    fused_width: width of heads for which a fused kernel may be used, that of values if it is larger; None: no such
    kernel. Full attention then needs no blocks: of each document, a shard of queries sees a shard of keys fully, not at
    all, or as a causal square.
    """
    batch, n_heads, queries, width = q_BNTH.shape
    positions = {"zero_distance": sequence.length - 1, "q_positions": sequence.indices}
    if fused_width is not None and has_flash(q_BNTH, fused_width):
        host_mask = core.attention_mask(sequence.on_host().with_keys_at(key, key_indices), n_heads)
        bands = host_mask.cached("shard bands", host_mask.shard_bands)
        if bands is not None:
            return BlockAttentionPlan.build(
                bands, 1, width, core.options, k_positions=key_indices, sums_parts=True, **positions
            )
    warn_of_blocks(q_BNTH, fused_width, repr(core.pattern))
    key_indices = sequence.cached(("key indices", key), lambda: move_to_device(key_indices, q_BNTH.device))
    shard = sequence.with_keys_at(key, key_indices)
    mask = core.attention_mask(shard, n_heads)
    size = min(block_sparse.choose_block_size(mask), -(-max(queries, len(key_indices)) // 4) * 4)
    grid = BlockGrid(batch, queries, len(key_indices), size)
    visits = mask.cached(
        ("block groups", size),
        lambda: plan_blocks(mask, grid, core.attention_mask(shard.on_host(), n_heads), q_BNTH.device),
    )
    return BlockAttentionPlan.build(visits, size, width, core.options, k_positions=key_indices, **positions)


@constant_when_compiled
def warn_of_blocks(q: Tensor, fused_width: int | None, pattern: str) -> None:
    """Warn once that a GPU computes attention by blocks of keys, and why.

    fused_width: see `make_block_attention_plan`.
    """
    if q.device.type != "cuda":
        return
    if fused_width is None:
        reason = "a bias, a soft cap or dropout of probabilities"
    elif not has_flash(q, fused_width):
        reason = f"{str(q.dtype)[6:]} with heads of {fused_width} channels"
    else:
        reason = "a pattern other than full attention, a prefix, or documents of few tokens"
    log_once(
        f"attention {pattern} under parallel.cp runs matmuls by blocks of keys on this GPU, because FlashAttention "
        f"does not support {reason} here; parallel.cp_method = 'ulysses' runs the kernels of a model without cp",
        logging.WARNING,
    )


def compute_partial_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_keys: Tensor | None, plan: BlockAttentionPlan
) -> tuple[Tensor, Tensor]:
    """Return output [B, N, T, V] and log-sum-exp [B, N, T, 1] over some keys. bias: by distance in the row."""
    queries, v_width = q.shape[2], v.shape[3]
    dropout_keys = None if dropout_keys is None else F.pad(dropout_keys, (0, -queries % plan.size))
    q, k, v = (pad_to_blocks(x, plan.size) for x in _pad_heads(plan, q, k, v))
    out, lse = block_sparse.compute_forward(q, k, v, dropout_keys, plan, bias)
    return out[:, :, :queries, :v_width], lse[:, :, :queries]


def compute_partial_attention_backward(
    inputs: BackwardInputs,
    bias: Tensor | None,
    dropout_keys: Tensor | None,
    plan: BlockAttentionPlan,
    bias_grad: Tensor | None = None,
) -> Sequence[Tensor]:
    """Return gradients of q and, in the dtype of the log-sum-exp, of these k and v.

    inputs: the output and its log-sum-exp are over all keys. bias_grad: accumulates the gradient of a learned bias.
    """
    shapes = [x.shape[2:] for x in (inputs.q, inputs.k, inputs.v)]
    dropout_keys = None if dropout_keys is None else F.pad(dropout_keys, (0, -shapes[0][0] % plan.size))
    *heads, lse = inputs
    padded_inputs = BackwardInputs(*(pad_to_blocks(x, plan.size) for x in (*_pad_heads(plan, *heads), lse)))
    gradients = block_sparse.compute_backward(padded_inputs, dropout_keys, plan, bias, bias_grad)
    return [x[:, :, :length, :width] for x, (length, width) in zip(gradients, shapes, strict=True)]


def _pad_heads(plan: BlockAttentionPlan, *tensors: Tensor) -> Sequence[Tensor]:
    """Pad heads with zeros to one width for a fused kernel, which supports no other; blocks need no padding."""
    width = max(x.shape[3] for x in tensors)
    is_fused = plan.sums_parts
    return [F.pad(x, (0, width - x.shape[3])) if is_fused and x.shape[3] < width else x for x in tensors]


def make_bias_gradient_buffer(bias: Tensor, lse: Tensor) -> Tensor:
    """Return a zero buffer that accumulates the gradient of a bias."""
    return bias.new_zeros(bias.shape, dtype=lse.dtype)


class KeyValueFormat(Protocol):
    """How keys and values follow from the tensor that ranks send."""

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Weights that the computation uses."""

    @property
    def v_width(self) -> int:
        """Width of a value head."""

    def unpack(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values."""

    def backward(self, kv: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Return gradients of the sent tensor, in the dtype of `dk`, and of the weights."""


@dataclass(frozen=True)
class KeyValues:
    """Keys and values, sent concatenated along the last dim. k_width, v_width: widths of a head."""

    k_width: int
    v_width: int
    weights: tuple[Tensor, ...] = ()

    def unpack(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Split keys and values."""
        k, v = kv.split([self.k_width, self.v_width], -1)
        return k, v

    def backward(self, kv: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Return the gradient of the sent tensor."""
        return (torch.cat([dk, dv], -1),)


@dataclass(frozen=True)
class LatentKeyValues:
    """Latents, from which each rank computes keys and values (MLA).

    project: (latents, *weights) → keys, values. v_width: of a head.
    """

    project: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...]
    v_width: int

    def unpack(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values from latents."""
        return self.project(kv, *self.weights)

    def backward(self, kv: Tensor, weights: Sequence[Tensor], dk: Tensor, dv: Tensor) -> Sequence[Tensor]:
        """Return gradients of the latents, in the dtype of `dk`, and of the weights."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (kv, *weights)]
            k, v = self.project(*inputs)
        kv_grad, *weight_grads = torch.autograd.grad((k, v), inputs, (dk.to(k.dtype), dv.to(v.dtype)))
        return kv_grad.to(dk.dtype), *weight_grads


class RingStep(NamedTuple):
    """One step of the ring."""

    key: Hashable
    """Cache key under which all layers share the plan of this step."""
    key_indices: Tensor
    """Row indices of the keys to attend to."""


def ring_attention(
    core: Any, q: Tensor, kv: Tensor, kv_format: KeyValueFormat, bias: Tensor | None, sequence: Any,
    steps: Sequence[RingStep], cp: ContextParallel,
) -> Tensor:  # fmt: skip
    """Attend to the keys of all steps; returns [B, N, T, V].

    kv: the local key-value shard of the first step; each further step receives its shard from the previous rank.
    """
    dropout_keys = core.dropout.make_head_rng_keys(sequence, q.shape[1])
    is_plain = bias is None and dropout_keys is None and not core.options.softcap
    fused_width = max(q.shape[3], kv_format.v_width) if is_plain else None
    plans = [
        make_block_attention_plan(core, sequence, step.key, step.key_indices, q, fused_width=fused_width)
        for step in steps
    ]
    sinks = None if core.sinks is None else core.sinks.weight
    out: Tensor = _RingAttention.apply(q, kv, bias, dropout_keys, sinks, plans, cp, kv_format, *kv_format.weights)
    return out


class _WeightGradients(NamedTuple):
    """Weight gradients that the input half of a split backward pass keeps for the weight half."""

    bias: Tensor | None
    sinks: Tensor | None
    weights: Sequence[Tensor]


class _RingAttention(torch.autograd.Function):
    """Rotates key-value shards around the ranks, overlapping the next transfer with the computation of a step.

    In the backward pass the gradients of a shard follow it one step behind, and reach its owner after the last step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        bias: Tensor | None,
        dropout_keys: Tensor | None,
        sinks: Tensor | None,
        plans: Sequence[BlockAttentionPlan],
        cp: ContextParallel,
        kv_format: KeyValueFormat,
        *weights: Tensor,
    ) -> Tensor:
        current, transfer = kv, _start_shift(kv, cp, plans[1:2])
        out, lse = compute_partial_attention(q, *kv_format.unpack(kv), bias, dropout_keys, plans[0])
        for step, plan in enumerate(plans[1:], 1):
            (current,) = transfer.wait()
            transfer = _start_shift(current, cp, plans[step + 1 : step + 2])
            shard_output = compute_partial_attention(q, *kv_format.unpack(current), bias, dropout_keys, plan)
            out, lse = merge_partial(out, lse, *shard_output)
        out, lse = block_sparse.add_sinks(out.to(q.dtype), lse, sinks)
        ctx.save_for_backward(q, kv, bias, dropout_keys, sinks, out, lse, *weights)
        ctx.plans, ctx.cp, ctx.kv_format = plans, cp, kv_format
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        saved = vars(ctx).pop("weight_gradients", None) if get_current_backward_part() == "weights" else None
        if saved is not None:  # computed in the input half: nothing is sent again
            return None, None, saved.bias, None, saved.sinks, None, None, None, *saved.weights
        q, kv, bias, dropout_keys, sinks, out, lse, *weights = ctx.saved_tensors
        plans: Sequence[BlockAttentionPlan] = ctx.plans
        cp: ContextParallel = ctx.cp
        kv_format: KeyValueFormat = ctx.kv_format
        bias_grad = make_bias_gradient_buffer(bias, lse) if ctx.needs_input_grad[2] else None

        def compute_gradients(current: Tensor, plan: BlockAttentionPlan) -> tuple[Tensor, ...]:
            k, v = kv_format.unpack(current)
            inputs = BackwardInputs(g, q, k, v, out, lse)
            dq, dk, dv = compute_partial_attention_backward(inputs, bias, dropout_keys, plan, bias_grad)
            return dq, *kv_format.backward(current, weights, dk, dv)

        current, kv_transfer, grad_transfer = kv, _start_shift(kv, cp, plans[1:2]), None
        dq, kv_grad, *weight_grads = compute_gradients(kv, plans[0])
        dq, *weight_grads = (x.to(lse.dtype) for x in (dq, *weight_grads))  # rounded once, not once per step
        for step, plan in enumerate(plans[1:], 1):
            (current,) = kv_transfer.wait()
            kv_transfer = _start_shift(current, cp, plans[step + 1 : step + 2])
            dq_part, kv_part, *weight_parts = compute_gradients(current, plan)
            dq = dq + dq_part
            weight_grads = [total + x for total, x in zip(weight_grads, weight_parts, strict=True)]
            if grad_transfer is not None:
                kv_part = grad_transfer.wait()[0] + kv_part
            grad_transfer = _start_shift(kv_part, cp, [plans[(step + 1) % len(plans)]])
        if grad_transfer is not None:
            kv_grad = kv_grad + grad_transfer.wait()[0]
        weight_grads = [x.to(weight.dtype) for x, weight in zip(weight_grads, weights, strict=True)]
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        sinks_grad = block_sparse.compute_sinks_gradient(g, out, lse, sinks)
        if get_current_backward_part() == "inputs":
            ctx.weight_gradients = _WeightGradients(bias_grad, sinks_grad, weight_grads)
        kv_grad = kv_grad.to(kv.dtype)
        return dq.to(q.dtype), kv_grad, bias_grad, None, sinks_grad, None, None, None, *weight_grads


def _start_shift(x: Tensor, cp: ContextParallel, next_plans: Sequence[BlockAttentionPlan]) -> P2PExchange:
    """Start to send x to the next rank and to receive the next step's shard from the previous one.

    Sends nothing if there is no next step.
    """
    if not next_plans:
        return P2PExchange(cp.group, [], [])
    (plan,) = next_plans
    assert plan.k_positions is not None
    next_rank, previous_rank = (cp.rank + 1) % cp.size, (cp.rank - 1) % cp.size
    received = x.new_empty(*x.shape[:2], len(plan.k_positions), x.shape[3])
    return P2PExchange(cp.group, [(next_rank, x)], [(previous_rank, received)])
