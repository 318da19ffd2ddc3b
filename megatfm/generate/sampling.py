"""How the next token is chosen from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatfm import keyed
from megatfm.errors import MegatfmError, UsageError

# B rows, V vocabulary


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; else a draw from softmax(logits / temperature), cut to the likeliest tokens.

    top_k: at most so many tokens (0: all). top_p: the fewest that hold this share of the probability left by top_k
    (Holtzman et al. 2020). vocab_size: only ids below it; a model may have more rows than its tokenizer has ids.
    A draw depends on (seed, row, position) and on nothing else. Raises UsageError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(
                f"temperature = {self.temperature}: choose 0 (the likeliest token) or more, e.g. 0.8"
            )
        if self.top_k < 0:
            raise UsageError(f"top_k = {self.top_k}: choose 0 (no limit) or more, e.g. 50")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p}: choose more than 0 and at most 1 (no limit), e.g. 0.95")

    def sample(self, logits_BV: Tensor, position: int | Sequence[int]) -> Tensor:
        """The token [B] of each row at its `position` of the sequence. Raises as `check_logits` does."""
        logits_BV = logits_BV[:, : self.vocab_size]
        positions = [position] * len(logits_BV) if isinstance(position, int) else position
        check_logits(logits_BV, positions)
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        sorted_BV, ids_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
        # From the largest down, so that no temperature, however low, can overflow.
        scaled_BV = (sorted_BV - sorted_BV[:, :1]) / self.temperature
        probabilities_BV = scaled_BV[:, : self.top_k or None].softmax(-1)
        mass_BV = probabilities_BV.cumsum(-1)
        kept_B1 = (mass_BV - probabilities_BV < self.top_p).sum(-1, keepdim=True)
        share_B = [
            float(keyed.uniform(1, self.seed, "sample", row, position)[0])
            for row, position in enumerate(positions)
        ]
        point_B1 = mass_BV.gather(1, kept_B1 - 1) * mass_BV.new_tensor(share_B)[:, None]
        chosen_B1 = torch.searchsorted(mass_BV, point_B1, right=True).minimum(kept_B1 - 1)
        return ids_BV.gather(1, chosen_B1)[:, 0]


def check_logits(logits_BV: Tensor, positions: Sequence[int]) -> None:
    """Raise a MegatfmError, naming row and position, for logits that are no distribution.

    −∞ is allowed, by which a head masks ids, but not at every id.
    """
    highest_B = logits_BV.amax(-1)  # NaN where there is any
    broken = torch.nonzero(~torch.isfinite(highest_B)).flatten().tolist()
    if broken:
        row = broken[0]
        raise MegatfmError(
            f"the logits of text {row + 1} at position {positions[row]} are not finite: the weights are, or the "
            "training was, broken; use an earlier checkpoint"
        )
