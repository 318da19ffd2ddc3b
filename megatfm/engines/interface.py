"""What passes between the training loop and an engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

    @property
    def terms(self) -> dict[str, float]:
        """The mean of each term where there are several; else nothing that `loss` would not say."""
        if len(self.sums) == 1:
            return {}
        return {term: total / max(self.counts[term], 1) for term, total in self.sums.items()}


StepStats = Sums


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that one optimizer moves, and what it must be shown of them.

    elementwise: any block of a tensor will do (AdamW). whole_tensor: the update of an element depends on others
    (Muon), so each tensor is gathered to one rank, which keeps its state.
    make: from parameter groups as torch takes them, each with the options that its names share.
    options: name → its options, such as weight_decay. lr_ratios: name → its rate as a multiple of the run's, else 1.
    counters: options that the optimizer itself changes from step to step, and which are saved with the state.
    averaged: (block, state, options) → the weights to evaluate and save, where these are not the ones that are
    trained; elementwise only.
    """

    names: Sequence[str]
    needs: Literal["elementwise", "whole_tensor"]
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lr_ratios: Mapping[str, float] = field(default_factory=dict)
    counters: Sequence[str] = ()
    averaged: Callable[[Tensor, Mapping[str, Tensor], Mapping[str, Any]], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.averaged and self.needs != "elementwise":
            raise ValueError("averaged weights are computed from local blocks: needs must be 'elementwise'")

    def parameter_groups(self, tensors: Mapping[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
        """Names with the same options and rate, and torch's parameter group of their tensors."""
        groups: list[tuple[list[str], dict[str, Any]]] = []
        for name, tensor in tensors.items():
            options = {**self.options.get(name, {}), "lr_ratio": self.lr_ratios.get(name, 1.0)}
            for names, known in groups:
                if options == {key: value for key, value in known.items() if key != "params"}:
                    names.append(name)
                    known["params"].append(tensor)
                    break
            else:
                groups.append(([name], {"params": [tensor], **options}))
        return groups
