"""Terms of the loss beside the cross-entropy: auxiliary ones of blocks, and direct preference optimisation.

Blocks return auxiliary losses, and counts for buffers that are updated once a step.

Direct preference optimisation (Rafailov et al. 2023) compares pairs of answers at the head over the vocabulary. The
loss of a pair is −log σ(β Δ), where Δ is how much more the model than the reference prefers the chosen answer: the
log-ratio of chosen to rejected minus that of the reference, summed over the answers' tokens. It follows from the
tokens' cross-entropy, so the head is run twice: without gradients, for these, and with each token weighted by the
derivative of its pair's loss. Layouts treat it like a cross-entropy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.layers.sequence import SequenceMetadata

# B rows, T tokens, M tokens of all rows, S pairs of a row at most


class BlockOutput(NamedTuple):
    """Output of a sublayer or block with auxiliary losses and counts.

    A tuple, because FSDP2, activation checkpointing and torch.compile traverse tuples.

    y: the output. losses: sums over the micro-batch by loss term, scalars. counts: input of the sublayer's
    `accumulate_counts`, which is called once a training forward pass, outside of compiled or recomputed code. In a
    block's output, counts are keyed by sublayer.
    """

    y: Any
    losses: dict[str, Tensor]
    counts: dict[str, Any]


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A loss term that a module adds: weight · sum / count, with sum and count over the global batch.

    normalised_by: the count: "tokens" (without padding; see `TokenSum`) or "rows". Sums of several blocks are added.
    """

    weight: float
    normalised_by: Literal["tokens", "rows"]


class TokenSum(nn.Module):
    """Sum values [B, T] over tokens, padding excepted; tensor parallelism sums over ranks that share rows."""

    tp_plan = (("", "sum_non_padding_tokens"),)

    def non_padding_mask(self, sequence: SequenceMetadata) -> Tensor:
        """Return boolean [B, T], false for padding."""
        return sequence.non_padding_mask

    def forward(self, values_BT: Tensor, sequence: SequenceMetadata) -> Tensor:
        return values_BT.masked_fill(~self.non_padding_mask(sequence), 0).sum()


class AuxiliaryCollector:
    """Collects the auxiliary losses and counts of a block's sublayers."""

    def __init__(self) -> None:
        self.losses: dict[str, Tensor] = {}
        self.counts: dict[str, dict[str, Tensor]] = {}

    def unwrap(self, name: str, output: Any) -> Any:
        """Return the plain output of the sublayer `name`, and collect its losses and counts."""
        if not isinstance(output, BlockOutput):
            return output
        self.losses = add_by_name(self.losses, output.losses)
        if output.counts:
            self.counts[name] = add_by_name(self.counts.get(name, {}), output.counts)
        return output.y

    def wrap(self, x: Any) -> Any:
        """Return a block's output, as a BlockOutput if any sublayer had losses or counts."""
        return BlockOutput(x, self.losses, self.counts) if self.losses or self.counts else x


def add_by_name(terms: Mapping[str, Tensor], more_terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge two mappings; add values of the same name."""
    sums = dict(terms)
    for name, value in more_terms.items():
        sums[name] = sums[name] + value if name in sums else value
    return sums


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
