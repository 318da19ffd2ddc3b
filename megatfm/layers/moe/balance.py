"""Terms of the loss that keep a router even, and its logits small."""

import torch
from torch import Tensor

from megatfm.layers.moe.router import Routing

# B batch, T tokens, E experts, K chosen experts


def over_batch(routing: Routing, real_BT: Tensor, shares_E: Tensor) -> Tensor:
    """Σₜ E Σₑ shareₑ pₜₑ over tokens (Fedus et al. 2022, equation 4; Qiu et al. 2025): 1 a token where all is even.

    shares: of all choices of a global batch, that of the step before.
    """
    probabilities_BTE = routing.probabilities
    weighted_BT = probabilities_BTE @ shares_E.to(probabilities_BTE.dtype) * len(shares_E)
    return weighted_BT.masked_fill(~real_BT, 0).sum()


def counts_of_rows(routing: Routing, real_BT: Tensor) -> Tensor:
    """[B, 1 + E]: tokens of each row, and how often each expert was chosen for them."""
    chosen_BTE = torch.zeros_like(routing.probabilities).scatter(-1, routing.choices, 1.0).detach()
    kept_BT1 = real_BT[..., None].to(chosen_BTE.dtype)
    return torch.cat([kept_BT1.sum(1), (chosen_BTE * kept_BT1).sum(1)], dim=-1)


def over_sequences(routing: Routing, real_BT: Tensor, counts_BX: Tensor) -> Tensor:
    """Σ over rows of E Σₑ fₑ Pₑ, with shares of a row's choices and mean probabilities of its tokens (DeepSeek-AI 2024,
    equations 17 to 20): 1 a row where all is even. counts: as of `counts_of_rows`, over whole rows."""
    tokens_B1, chosen_BE = counts_BX[:, :1].clamp(min=1), counts_BX[:, 1:]
    shares_BE = chosen_BE / (tokens_B1 * routing.choices.shape[-1])
    summed_BE = routing.probabilities.masked_fill(~real_BT[..., None], 0).sum(1)
    return (shares_BE * summed_BE / tokens_B1).sum() * chosen_BE.shape[-1]


def of_logits(routing: Routing, real_BT: Tensor) -> Tensor:
    """Σₜ logsumexp(logits)² (Zoph et al. 2022, equation 5)."""
    return routing.logits.logsumexp(-1).square().masked_fill(~real_BT, 0).sum()
