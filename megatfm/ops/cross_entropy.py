"""Cross-entropy of next-token targets as a sum, so that a global mean is taken once, over the whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""A target that does not count."""

# M tokens of all rows, D model width, V vocabulary


def cross_entropy_reference(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
    """Σ −log softmax(h Wᵀ)[target] over the tokens whose target counts, in nats; all logits at once."""
    logits_MV = (hidden_MD @ weight_VD.T).to(torch.promote_types(hidden_MD.dtype, torch.float32))
    return F.cross_entropy(logits_MV, targets_M, ignore_index=IGNORE, reduction="sum")


def cross_entropy(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, chunk: int = 512) -> Tensor:
    """The same in chunks of tokens, so that tokens × vocabulary logits never exist at once.

    The gradients are made in the forward pass, beside the logits (as in Liger, Hsu et al. 2024), and only
    scaled in the backward pass.
    """
    return _ChunkedCrossEntropy.apply(hidden_MD, weight_VD, targets_M, chunk)  # type: ignore[no-any-return]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, targets_M, chunk):  # type: ignore[no-untyped-def]
        precise = torch.promote_types(hidden_MD.dtype, torch.float32)
        wants_gradient = any(ctx.needs_input_grad)
        total = hidden_MD.new_zeros((), dtype=precise)
        hidden_gradient = torch.empty_like(hidden_MD) if wants_gradient else None
        weight_gradient = torch.zeros_like(weight_VD, dtype=precise) if wants_gradient else None
        for part in range(0, hidden_MD.shape[0], chunk):
            hidden, targets = hidden_MD[part : part + chunk], targets_M[part : part + chunk]
            counted = targets != IGNORE
            rows = targets.clamp_min(0)[:, None]
            log_probabilities = (hidden @ weight_VD.T).to(precise).log_softmax(-1)
            total -= (log_probabilities.gather(1, rows)[:, 0] * counted).sum()
            if hidden_gradient is not None and weight_gradient is not None:
                logit_gradient = log_probabilities.exp_()
                logit_gradient.scatter_add_(1, rows, -torch.ones_like(rows, dtype=precise))
                logit_gradient = logit_gradient.mul_(counted[:, None]).to(hidden.dtype)
                hidden_gradient[part : part + chunk] = logit_gradient @ weight_VD
                weight_gradient += logit_gradient.T @ hidden
        if hidden_gradient is not None and weight_gradient is not None:
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        # One factor for the whole sum: scaling afterwards is exact up to rounding.
        return (
            hidden_gradient * gradient.to(hidden_gradient.dtype),
            weight_gradient * gradient.to(weight_gradient.dtype),
            None,
            None,
        )
