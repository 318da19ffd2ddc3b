from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.registry import Registry

Batch = Mapping[str, Tensor]
"""int64 tensors [rows, sequence] of a micro-batch: tokens, targets, positions, documents."""

Terms = dict[str, Tensor]
"""Name of a loss term → its sum over a micro-batch, a scalar."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that objectives need."""

    bos: int
    eos: int
    pad: int


class Objective(Protocol):
    """The loss is Σ over terms of weight · sum / count; counts are taken over the whole global batch."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Each term's weight."""

    def lengths(self, n_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths [n] of the built documents of `n_tokens` [n] tokens each."""

    def build(self, tokens: NDArray[np.integer], key: tuple[int, int, int]) -> dict[str, NDArray[np.integer]]:
        """Fields of one document, all of the length that `lengths` told; key is (seed, epoch, sample)."""

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """How many targets each term has in a micro-batch, from the batch alone."""

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        """Run the model; the sum of each term."""


OBJECTIVES: Registry[Callable[[SpecialTokens], Objective]] = Registry("objective")
