"""Terms of the loss that keep a router even, and its logits small."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.moe.router import RouterOutput

# B batch, T tokens, E experts, K chosen experts


def load_balancing_loss(routing: RouterOutput, real_BT: Tensor, shares_E: Tensor) -> Tensor:
    """Σₜ E Σₑ shareₑ pₜₑ over tokens (Fedus et al. 2022, equation 4; Qiu et al. 2025): 1 a token where all is even.

    shares: of all choices of a global batch, that of the step before.
    """
    probabilities_BTE = routing.probabilities
    weighted_BT = probabilities_BTE @ shares_E.to(probabilities_BTE.dtype) * len(shares_E)
    return weighted_BT.masked_fill(~real_BT, 0).sum()


class RowSums(nn.Module):
    """Sums over the tokens of each row."""

    def forward(self, numbers_BTX: Tensor) -> Tensor:
        """[B, X]."""
        return numbers_BTX.sum(1)


def row_expert_counts(routing: RouterOutput, real_BT: Tensor, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """[B, 1 + E]: tokens of each row, and how often each expert was chosen for them."""
    places_BTX = F.pad(torch.zeros_like(routing.probabilities), (0, 1))  # the last for none
    chosen_BTE = places_BTX.scatter(-1, routing.expert_indices, 1.0)[..., :-1].detach()
    kept_BT1 = real_BT[..., None].to(chosen_BTE.dtype)
    return torch.cat([sums(kept_BT1), sums(chosen_BTE * kept_BT1)], dim=-1)


def sequence_load_balancing_loss(
    routing: RouterOutput, real_BT: Tensor, counts_BX: Tensor, sums: Callable[[Tensor], Tensor]
) -> Tensor:
    """Σ over rows of E Σₑ fₑ Pₑ, with shares of a row's choices and mean probabilities of its tokens (DeepSeek-AI 2024,
    equations 17 to 20): 1 a row where all is even. counts: as of `row_expert_counts`, over whole rows."""
    tokens_B1, chosen_BE = counts_BX[:, :1].clamp(min=1), counts_BX[:, 1:]
    shares_BE = chosen_BE / (tokens_B1 * routing.expert_indices.shape[-1])
    summed_BE = sums(routing.probabilities.masked_fill(~real_BT[..., None], 0))
    return (shares_BE * summed_BE / tokens_B1).sum() * chosen_BE.shape[-1]


def z_loss(routing: RouterOutput, real_BT: Tensor) -> Tensor:
    """Σₜ logsumexp(logits)² (Zoph et al. 2022, equation 5)."""
    return routing.logits.logsumexp(-1).square().masked_fill(~real_BT, 0).sum()


def cv_squared_loss(numbers_BTE: Tensor, real_BT: Tensor, means_E: Tensor) -> Tensor:
    """Σ over tokens of what adds up to tokens · CV², the squared coefficient of variation of their sums (Shazeer et al.
    2017, equations 7 and 11): its tangent at the means of the step before, exact where they are this batch's own."""
    n, total = len(means_E), means_E.sum()
    value = n * means_E.square().sum() / total.square() - 1
    slope_E = 2 * n / total * (means_E / total - means_E.square().sum() / total.square())
    each_BT = value + numbers_BTE @ slope_E.to(numbers_BTE.dtype)
    return each_BT.masked_fill(~real_BT, 0).sum()


def squared_cv(sums_E: Tensor) -> float:
    """Return CV² of sums over tokens; 0 where there was no token."""
    sums_E = sums_E.double()
    total = float(sums_E.sum())
    return float(len(sums_E) * sums_E.square().sum() / total**2 - 1) if total else 0.0


STEP = 2.0**-24
"""Numbers are counted in steps of this size: whole numbers add up to the same in any order, on any layout."""


def quantise_counts(numbers_BTE: Tensor, real_BT: Tensor) -> Tensor:
    """int64 [E], the sum over tokens that are no padding."""
    steps_BTE = (numbers_BTE.detach().double() / STEP).round().to(torch.int64)
    return steps_BTE.masked_fill(~real_BT[..., None], 0).sum((0, 1))
