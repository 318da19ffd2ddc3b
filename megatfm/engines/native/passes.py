"""How a rank takes micro-batches through its model: one after another, or in turn with other pipeline ranks."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from megatfm.engines.interface import Batch, LossFunction
from megatfm.engines.native.data_parallel import DataParallel

Terms = dict[str, Tensor]
Weigh = Callable[[Terms], Tensor]
"""The terms of a micro-batch → its share of the global batch's loss, a scalar."""


class Passes(Protocol):
    """One way to run forward and backward passes."""

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, weigh: Weigh, data: DataParallel
    ) -> list[Terms]:
        """Add the gradients of all micro-batches up; the terms that were computed here."""

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        """The terms of one micro-batch that are computed here."""


class WholeModel:
    """Forward and backward of each micro-batch in turn."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, weigh: Weigh, data: DataParallel
    ) -> list[Terms]:
        found = []
        for batch in batches:
            data.begin(last=batch is batches[-1])
            terms = objective(self._model, batch)
            weigh(terms).backward()
            found.append({name: term.detach() for name, term in terms.items()})
        return found

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        return objective(self._model, batch)
