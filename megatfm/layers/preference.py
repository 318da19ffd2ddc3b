"""Direct preference optimisation (Rafailov et al. 2023): pairs of answers at the head over the vocabulary.

The loss of a pair is −log σ(β Δ), where Δ is how much more the model than the reference prefers the chosen answer: the
log-ratio of chosen to rejected minus that of the reference, summed over the answers' tokens. It follows from the
tokens' cross-entropy, so the head is run twice: without gradients, for these, and with each token weighted by the
derivative of its pair's loss. Layouts treat it like a cross-entropy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B rows, T tokens, M tokens of all rows, S pairs of a row at most

PREFERENCE_TERMS = ("preference", "reward_accuracy", "reward_margin")
"""Sums over pairs: the loss, the number of pairs with Δ > 0, and β Δ."""
PAIR_FIELDS = ("pairs", "reference")
"""Fields of the batch that describe pairs, beside the targets."""
TokenLoss = Callable[[Tensor | None, Tensor | None], Tensor]
"""(losses [M] to fill, weights [M]) → weighted sum of the tokens' losses."""


FIRST_TARGET = 2
"""In the field `pairs`: the token of the chosen sequence before its answer, at which its pair is counted. 1: another of
the chosen sequence; −1: of the rejected one; 0: padding."""


class PairFields(NamedTuple):
    """Fields [B, T] of a batch of pairs, at this rank's T tokens of the rows.

    side: as FIRST_TARGET says. reference: the reference's log-ratio of chosen to rejected at FIRST_TARGET, 0 elsewhere.
    documents: two numbers for each pair, the chosen first. n_slots: an upper bound of a row's pairs.
    """

    side_BT: Tensor
    reference_BT: Tensor
    documents_BT: Tensor
    n_slots: int


class PairSums(nn.Module):
    """The identity on values [B, S] of pairs; context parallelism sums them over the ranks that share a row."""

    cp_plan = "all_reduce"

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = nn.Identity()

    def forward(self, values_BS: Tensor) -> Tensor:
        return self.all_reduce(values_BS)


@dataclass(frozen=True)
class Preference:
    """Options of the loss. beta: β. label_smoothing: assumed share of pairs with swapped labels."""

    beta: float = 0.1
    label_smoothing: float = 0.0


def compute_preference_terms(
    token_loss: TokenLoss,
    sum_over_ranks: Callable[[Tensor], Tensor],
    pairs: PairFields,
    options: Preference,
    dtype: torch.dtype,
) -> Tensor:
    """Return the sums [3] of PREFERENCE_TERMS over the pairs of a micro-batch; the first has gradients.

    sum_over_ranks: sums values of pairs over the ranks that share a row. dtype: that of the sums.
    """
    rows, length = pairs.side_BT.shape
    losses_M = torch.zeros(rows * length, dtype=dtype, device=pairs.side_BT.device)
    with torch.no_grad():
        token_loss(losses_M, None)
    # The documents of pair n are 2 n and 2 n + 1 in their row. Ranks may share the row's tokens.
    slots_BT = pairs.documents_BT.clamp(min=0) // 2
    log_ratios_BT = -pairs.side_BT.sign() * losses_M.view(rows, length) - pairs.reference_BT.to(dtype)
    empty_BS = losses_M.new_zeros(rows, pairs.n_slots)
    margins_BS = options.beta * sum_over_ranks(empty_BS.scatter_add(1, slots_BT, log_ratios_BT))
    counts_BS = empty_BS.scatter_add(1, slots_BT, (pairs.side_BT == FIRST_TARGET).to(dtype))
    share = options.label_smoothing
    losses_BS = -(1 - share) * F.logsigmoid(margins_BS) - share * F.logsigmoid(-margins_BS)
    values_3BS = torch.stack([losses_BS, (margins_BS > 0).to(dtype), margins_BS])
    terms = (values_3BS * counts_BS).sum((1, 2))  # a pair on several ranks is counted on one
    if not torch.is_grad_enabled():
        return terms
    slopes_BS = share * torch.sigmoid(margins_BS) - (1 - share) * torch.sigmoid(-margins_BS)
    weights_BT = -options.beta * slopes_BS.gather(1, slots_BT) * pairs.side_BT.sign()
    surrogate = token_loss(None, weights_BT.flatten())
    return torch.cat([(terms[0] + surrogate - surrogate.detach())[None], terms[1:]])
