"""How a rank takes micro-batches through its model: one after another, or in turn with other pipeline ranks."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from megatfm.engines.interface import Batch, LossFunction

Terms = dict[str, Tensor]
LossScaler = Callable[[Terms], Tensor]
"""The terms of a micro-batch → its share of the global batch's loss, a scalar."""


class GradientSync(Protocol):
    """Who has to know when passes begin, because gradients are reduced in some of them."""

    def begin(self, is_last: bool) -> None:
        """Before the forward pass of each micro-batch. is_last: of this step, so that what is accumulated is
        reduced."""

    def start_pipeline_step(self, keep_unsharded: bool) -> None:
        """Instead of `begin`, once a step, where the passes of micro-batches take turns; gradients are reduced at its
        end. keep_unsharded: weights must stay as they are between the parts of a backward pass."""


class ForwardBackward(Protocol):
    """One way to run forward and backward passes."""

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        """Add the gradients of all micro-batches up; the terms that were computed here."""

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        """The terms of one micro-batch that are computed here."""


class SequentialForwardBackward:
    """Forward and backward of each micro-batch in turn."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, data: GradientSync
    ) -> list[Terms]:
        found = []
        for batch in batches:
            data.begin(is_last=batch is batches[-1])
            terms = objective(self._model, batch)
            scale_loss(terms).backward()
            found.append({name: term.detach() for name, term in terms.items()})
        return found

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        return objective(self._model, batch)
