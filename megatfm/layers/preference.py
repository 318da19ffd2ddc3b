"""Direct preference optimisation (Rafailov et al. 2023): pairs of answers at the head over the vocabulary.

The loss of a pair is −log σ(β Δ), where Δ is how much more the model than the reference prefers the chosen answer: the
log-ratio of chosen to rejected minus that of the reference, summed over the answers' tokens. It follows from the
tokens' cross-entropy, so the head is run twice: without gradients, for these, and with each token weighted by the
derivative of its pair's loss. No layout has to know more of it than of a cross-entropy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatfm.ops.cross_entropy import IGNORE

# B rows, T tokens, M tokens of all rows, P pairs

PREFERENCE_TERMS = ("preference", "reward_accuracy", "reward_margin")
"""Sums over pairs: the loss; how many are preferred as they should be; β Δ."""
PAIR_FIELDS = ("pairs", "reference")
"""Fields of the batch that pairs are told by, beside the targets."""
TokenLoss = Callable[[Tensor | None, Tensor | None], Tensor]
"""(losses [M] to fill, weights [M]) → the sum of the tokens' losses, each by its weight."""


@dataclass(frozen=True)
class Preference:
    """beta: strength β. label_smoothing: share of pairs that are taken to be labelled the wrong way round."""

    beta: float = 0.1
    label_smoothing: float = 0.0


def preference_terms(
    token_loss: TokenLoss,
    targets_BT: Tensor,
    pairs_BT: Tensor,
    reference_BT: Tensor,
    options: Preference,
    dtype: torch.dtype,
) -> Tensor:
    """Sums of PREFERENCE_TERMS [3] over the pairs of a micro-batch; the first has gradients.

    targets_BT: the answers' tokens, −100 elsewhere. pairs_BT: at each of a pair's tokens its number from 1 on, negative
    in the rejected sequence; 0: padding. reference_BT: the reference's log-ratio of chosen to rejected, at one target
    of the pair, 0 elsewhere. dtype: in which losses are summed.
    """
    losses_M = torch.zeros(targets_BT.numel(), dtype=dtype, device=targets_BT.device)
    with torch.no_grad():
        token_loss(losses_M, None)
    rows_BT = torch.arange(len(pairs_BT), device=pairs_BT.device)[:, None].expand_as(pairs_BT)
    at_M = ((targets_BT != IGNORE) & (pairs_BT != 0)).flatten().nonzero()[:, 0]
    names = torch.stack([rows_BT.flatten()[at_M], pairs_BT.flatten()[at_M].abs()])
    n_pairs, place = names.unique(dim=1, return_inverse=True)
    signs = pairs_BT.flatten()[at_M].sign().to(dtype)
    gained = -signs * losses_M[at_M] - reference_BT.flatten()[at_M].to(dtype)
    margins_P = options.beta * losses_M.new_zeros(n_pairs.shape[1]).index_add(0, place, gained)
    share = options.label_smoothing
    losses_P = -(1 - share) * F.logsigmoid(margins_P) - share * F.logsigmoid(-margins_P)
    terms = torch.stack([losses_P.sum(), (margins_P > 0).to(dtype).sum(), margins_P.sum()])
    if not torch.is_grad_enabled():
        return terms
    slopes_P = share * torch.sigmoid(margins_P) - (1 - share) * torch.sigmoid(-margins_P)
    weights_M = losses_M.new_zeros(len(losses_M)).index_copy(0, at_M, -options.beta * slopes_P[place] * signs)
    surrogate = token_loss(None, weights_M)
    return torch.cat([(terms[0] + surrogate - surrogate.detach())[None], terms[1:]])
