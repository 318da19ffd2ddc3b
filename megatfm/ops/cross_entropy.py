"""Cross-entropy of next-token targets as a sum, so that a global mean is taken once, over the whole batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""A target that does not count."""

# M tokens of all rows, D model width, V vocabulary, W the rows of it that are held here

Reduce = Callable[[Tensor, str], Tensor]
"""Takes a tensor and "sum" or "max" to its reduction over all parts of the vocabulary."""


def cross_entropy_reference(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """Σ −log softmax(h Wᵀ)[target] over the tokens whose target counts, in nats; all logits at once."""
    logits_MV = (hidden_MD @ weight_VD.T).to(torch.promote_types(hidden_MD.dtype, torch.float32))
    return F.cross_entropy(logits_MV, targets_M, ignore_index=IGNORE, reduction="sum")


def cross_entropy(
    hidden_MD: Tensor,
    weight_WD: Tensor,
    targets_M: Tensor,
    chunk: int = 512,
    *,
    first: int = 0,
    reduce: Reduce = lambda values, _: values,
) -> Tensor:
    """The same in chunks of tokens, so that tokens × vocabulary logits never exist at once.

    The gradients are made in the forward pass, beside the logits (as in Liger, Hsu et al. 2024), and only scaled in
    the backward pass. For a vocabulary in parts, `weight_WD` holds the rows from `first` on and `reduce` joins the
    parts: every part then gives the whole loss, and its own share of the gradient to `hidden`.
    """
    return _ChunkedCrossEntropy.apply(hidden_MD, weight_WD, targets_M, chunk, first, reduce)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_WD: Tensor,
        targets_M: Tensor,
        chunk: int,
        first: int,
        reduce: Reduce,
    ) -> Tensor:
        precise = torch.promote_types(hidden_MD.dtype, torch.float32)
        total = hidden_MD.new_zeros((), dtype=precise)
        hidden_gradient = torch.empty_like(hidden_MD)
        weight_gradient = torch.zeros_like(weight_WD, dtype=precise)
        for start in range(0, hidden_MD.shape[0], chunk):
            part = slice(start, start + chunk)
            hidden, local = hidden_MD[part], targets_M[part, None] - first
            counted = targets_M[part, None] != IGNORE
            held = (local >= 0) & (local < weight_WD.shape[0])
            local = local.where(held, 0)
            logits = (hidden @ weight_WD.T).to(precise)
            logits -= reduce(logits.amax(1, keepdim=True), "max")
            target_logit = logits.gather(1, local) * held
            exponentials = logits.exp_()
            own = torch.stack((target_logit, exponentials.sum(1, keepdim=True), held.to(precise)))
            target_logit, normaliser, found = reduce(own, "sum")
            # A target beyond the vocabulary is found in no part: not a number, rather than a wrong one.
            losses = (normaliser.log() - target_logit).where(found > 0, torch.nan)
            total += losses.where(counted, 0).sum()
            if any(ctx.needs_input_grad):
                gradient = exponentials.mul_(counted / normaliser)
                gradient.scatter_add_(1, local, -held.to(precise))
                gradient = gradient.to(hidden.dtype)
                hidden_gradient[part] = gradient @ weight_WD
                weight_gradient += gradient.T @ hidden
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight_WD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # One factor for the whole sum: scaling afterwards is exact up to rounding.
        hidden, weight = (saved * gradient.to(saved.dtype) for saved in ctx.saved_tensors)
        return hidden, weight, None, None, None, None
