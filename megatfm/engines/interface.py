"""What passes between the training loop and an engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
Arrays = Mapping[str, Tensor | NDArray[Any]]
"""A batch as the loader gives it."""


class Objective(Protocol):
    """The part of an objective that an engine needs (see `megatfm.objectives.Objective`)."""

    @property
    def weights(self) -> Mapping[str, float]: ...

    def counts(self, batch: Batch) -> dict[str, Tensor]: ...

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Sums:
    """Per loss term its sum and count over a whole global batch, the same on every rank."""

    sums: dict[str, float]
    counts: dict[str, int]
    weights: Mapping[str, float]

    @property
    def loss(self) -> float:
        """Σ weight · sum / count."""
        return sum(self.weights[term] * self.sums[term] / max(self.counts[term], 1) for term in self.sums)


StepStats = Sums


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that one optimizer moves, and what it must be shown of them.

    elementwise: any block of a tensor will do (AdamW). whole_tensor: the update of an element depends on others
    (Muon), so each tensor is gathered to one rank, which keeps its state.
    lr_ratio: this group's rate as a multiple of the run's.
    """

    names: Sequence[str]
    needs: Literal["elementwise", "whole_tensor"]
    make: Callable[[list[Tensor]], torch.optim.Optimizer]
    lr_ratio: float = 1.0
