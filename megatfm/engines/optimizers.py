"""Torch optimizers over the blocks that a rank holds, or over the whole tensors that it owns."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.whole_tensor import WholeTensors
from megatfm.parallel.layout import Box

State = Mapping[str, Mapping[str, Tensor]]
"""Parameter name → key → tensor."""


class ElementwiseOptimizer:
    """An optimizer whose update of an element depends on no other, over local blocks."""

    def __init__(self, group: OptimizerGroup, local: Mapping[str, Tensor]) -> None:
        self._blocks, self._ratio = dict(local), group.lr_ratio
        self._optimizer = group.make(list(self._blocks.values()))

    def blocks(self) -> Mapping[str, Tensor]:
        """What the optimizer moves: name → block."""
        return self._blocks

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        _step(self._optimizer, self._blocks, gradients, lr * self._ratio)

    def refresh(self) -> None:
        """Nothing: the blocks are the weights themselves."""

    def state(self) -> State:
        return {name: self._optimizer.state[block] for name, block in self._blocks.items()}

    def load(self, state: State) -> None:
        for name, block in self._blocks.items():
            self._optimizer.state[block] = dict(state[name])


class WholeTensorOptimizer:
    """An optimizer that must see whole tensors, over those that this rank owns."""

    def __init__(
        self,
        group: OptimizerGroup,
        local: Mapping[str, Tensor],
        boxes: Mapping[str, Sequence[Box]],
        shapes: Mapping[str, Sequence[int]],
        ranks: ProcessGroup,
    ) -> None:
        self._whole = WholeTensors(local, boxes, shapes, ranks)
        self._whole.refresh()
        self._ratio = group.lr_ratio
        # A rank may own nothing, and torch refuses an optimizer without parameters.
        self._optimizer = group.make(list(self._whole.full.values())) if self._whole.full else None

    def blocks(self) -> Mapping[str, Tensor]:
        return self._whole.full

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        gathered = self._whole.gather(gradients)
        if self._optimizer:
            _step(self._optimizer, self._whole.full, gathered, lr * self._ratio)
        self._whole.scatter()

    def refresh(self) -> None:
        """Copy the weights anew from their blocks."""
        self._whole.refresh()

    def state(self) -> State:
        return {
            name: self._optimizer.state[tensor] for name, tensor in self.blocks().items() if self._optimizer
        }

    def load(self, state: State) -> None:
        self.refresh()
        for name, tensor in self.blocks().items():
            if self._optimizer:
                self._optimizer.state[tensor] = dict(state[name])


def _step(
    optimizer: torch.optim.Optimizer, blocks: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
) -> None:
    for parameters in optimizer.param_groups:
        parameters["lr"] = lr
    for name, block in blocks.items():
        block.grad = gradients[name]
    optimizer.step()
    for block in blocks.values():
        block.grad = None
