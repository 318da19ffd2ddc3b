"""Auxiliary outputs of blocks: loss terms, and counts for buffers that are updated once a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens


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
