"""Auxiliary outputs of blocks: terms of the loss, and counts for state that is updated once a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from megatfm.layers.sequence import SequenceMetadata

# B batch, T tokens


class BlockOutput(NamedTuple):
    """Output with auxiliary losses and counts, which a sublayer may return.

    It is a tuple, which FSDP2, recomputation and compile go through.

    y: the output. losses: by term, their sums over the micro-batch, scalars. counts: what the sublayer's
    `accumulate_counts` is to be told in training, once a forward pass, outside of what is compiled or recomputed. Of a
    block, counts are by the sublayer's name.
    """

    y: Any
    losses: dict[str, Tensor]
    counts: dict[str, Any]


@dataclass(frozen=True)
class AuxiliaryLoss:
    """A term of the loss that a part adds: weight · sum / count, with the count over the whole global batch.

    normalised_by: what it is counted by: "tokens", all that go through a block and are no padding, of which
    `TokenSum` takes the sum; or "rows". The sums of several blocks add up.
    """

    weight: float
    normalised_by: Literal["tokens", "rows"]


class TokenSum(nn.Module):
    """The sum of a number for each token [B, T], padding left out: the seam at which ranks that share rows add up."""

    tp_plan = (("", "sum_real_tokens"),)

    def real(self, sequence: SequenceMetadata) -> Tensor:
        """Boolean [B, T], which of the tokens that are here are no padding."""
        return sequence.non_padding_mask

    def forward(self, numbers_BT: Tensor, sequence: SequenceMetadata) -> Tensor:
        return numbers_BT.masked_fill(~self.real(sequence), 0).sum()


class AuxiliaryCollector:
    """Gathers what sublayers give besides their outputs."""

    def __init__(self) -> None:
        self.losses: dict[str, Tensor] = {}
        self.statistics: dict[str, dict[str, Tensor]] = {}

    def unwrap(self, name: str, output: Any) -> Any:
        """The output of the sublayer `name`."""
        if not isinstance(output, BlockOutput):
            return output
        self.losses = add_by_name(self.losses, output.losses)
        if output.counts:
            self.statistics[name] = add_by_name(self.statistics.get(name, {}), output.counts)
        return output.y

    def wrap(self, x: Any) -> Any:
        """A block's output, with the rest beside it where there is any."""
        return BlockOutput(x, self.losses, self.statistics) if self.losses or self.statistics else x


def add_by_name(terms: Mapping[str, Tensor], more_terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both, the values of the same name added."""
    sums = dict(terms)
    for name, value in more_terms.items():
        sums[name] = sums[name] + value if name in sums else value
    return sums
