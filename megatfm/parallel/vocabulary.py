"""Embedding and cross-entropy over a vocabulary cut into shards, one a rank (Shoeybi et al. 2019, section 3)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.ops.cross_entropy import IGNORE
from megatfm.parallel.collectives import all_sum

# M tokens, D model width, W rows of the vocabulary that are held here


def embed_shard(tokens: Tensor, weight_WD: Tensor, group: ProcessGroup) -> Tensor:
    """Rows of the tokens held here and zeros for the others: a partial [..., D]."""
    local = tokens - dist.get_rank(group) * weight_WD.shape[0]
    held = (local >= 0) & (local < weight_WD.shape[0])
    rows = F.embedding(local.where(held, local.new_zeros(())), weight_WD)
    return rows * held[..., None].to(rows.dtype)


def cross_entropy_shard(
    hidden_MD: Tensor, weight_WD: Tensor, targets_M: Tensor, group: ProcessGroup, chunk: int = 512
) -> Tensor:
    """Summed cross-entropy, the same on all ranks; the gradient to `hidden` is partial.

    In chunks of tokens, with the gradients made beside the logits, as `ops.cross_entropy` does on one device.
    """
    return _CrossEntropyShard.apply(hidden_MD, weight_WD, targets_M, group, chunk)  # type: ignore[no-any-return]


class _CrossEntropyShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD, weight_WD, targets_M, group, chunk):  # type: ignore[no-untyped-def]
        precise = torch.promote_types(hidden_MD.dtype, torch.float32)
        wants_gradient = any(ctx.needs_input_grad)
        total = hidden_MD.new_zeros((), dtype=precise)
        hidden_gradient = torch.empty_like(hidden_MD) if wants_gradient else None
        weight_gradient = torch.zeros_like(weight_WD, dtype=precise) if wants_gradient else None
        start = dist.get_rank(group) * weight_WD.shape[0]
        for part in range(0, hidden_MD.shape[0], chunk):
            hidden, targets = hidden_MD[part : part + chunk], targets_M[part : part + chunk]
            counted = targets != IGNORE
            local = (targets - start)[:, None]
            held = (local >= 0) & (local < weight_WD.shape[0])
            rows = local.where(held, local.new_zeros(()))
            logits = (hidden @ weight_WD.T).to(precise)
            logits -= all_sum(logits.amax(1, keepdim=True), group, "max")
            target_logit = logits.gather(1, rows) * held
            exponentials = logits.exp_()
            target_logit, normaliser = all_sum(
                torch.stack((target_logit, exponentials.sum(1, keepdim=True))), group
            )
            total += ((normaliser.log() - target_logit)[:, 0] * counted).sum()
            if hidden_gradient is not None and weight_gradient is not None:
                logit_gradient = exponentials / normaliser
                logit_gradient.scatter_add_(1, rows, -held.to(precise))
                logit_gradient = logit_gradient.mul_(counted[:, None]).to(hidden.dtype)
                hidden_gradient[part : part + chunk] = logit_gradient @ weight_WD
                weight_gradient += logit_gradient.T @ hidden
        if hidden_gradient is not None and weight_gradient is not None:
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight_WD.dtype))
        return total

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            hidden_gradient * gradient.to(hidden_gradient.dtype),
            weight_gradient * gradient.to(weight_gradient.dtype),
            None,
            None,
            None,
        )
