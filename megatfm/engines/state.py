"""Weights, optimizer state and float16's loss scale as the table that a checkpoint holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.interface import StateDict
from megatfm.engines.loss_scale import LossScale
from megatfm.engines.optimizers import State, WholeTensorOptimizer


class StatefulOptimizer(Protocol):
    """What is asked of the optimizers of an engine, beside their steps."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What the optimizer moves: name → block."""

    def refresh(self) -> None:
        """The weights were set from outside: look again, where there are copies of them."""

    def averaged(self) -> dict[str, Tensor]:
        """The weights to evaluate and save, of the blocks for which these are not the trained ones."""

    def state(self) -> State:
        """Name → key → tensor; not copies, and empty before the first step."""

    def load(self, state: State) -> None:
        """Take over what `state` gave."""


class TrainState:
    """The blocks that this rank's optimizers move (weights: name → block), and what they remember of them."""

    def __init__(
        self,
        weights: Mapping[str, ShardedTensor],
        optimizers: Sequence[StatefulOptimizer],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.weights, self.optimizers, self._loss_scale = weights, optimizers, loss_scale

    def state_dict(self) -> StateDict:
        """Weights as model.NAME, those to evaluate where these are others; optimizer state as optimizer.NAME.KEY; the
        loss scale as engine.KEY."""
        averaged = self._averaged()
        state: StateDict = {
            f"model.{name}": self._like(name, averaged.get(name, box.tensor))
            for name, box in self.weights.items()
        }
        for optimizer in self.optimizers:
            for name, values in optimizer.state().items():
                for key, value in values.items():
                    state[f"optimizer.{name}.{key}"] = self._stored(optimizer, name, value)
        return {**state, **(self._loss_scale.state() if self._loss_scale else {})}

    def empty_state_dict(self, stored: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> StateDict:
        """Room for what a checkpoint holds (name → dtype, global shape): weights in place, fresh optimizer state."""
        state: StateDict = {f"model.{name}": box for name, box in self.weights.items()}
        for optimizer in self.optimizers:
            for name, block in optimizer.tensors().items():
                prefix = f"optimizer.{name}."
                for full_name, (dtype, shape) in stored.items():
                    if full_name.startswith(prefix):
                        # On the device scalars too: a fused optimizer's step count lies beside the weights.
                        held = shape if isinstance(optimizer, WholeTensorOptimizer) else block.shape
                        value = torch.zeros(held if shape else (), dtype=dtype, device=block.device)
                        state[full_name] = self._stored(optimizer, name, value)
        scale = self._loss_scale.state() if self._loss_scale else {}
        return state | {name: value for name, value in scale.items() if name in stored}

    def load_state_dict(self, state: Mapping[str, ShardedTensor | Tensor]) -> None:
        """Take over optimizer state and loss scale from what `empty_state_dict` made and a checkpoint filled."""
        if self._loss_scale:
            self._loss_scale.load(state)
        for optimizer in self.optimizers:
            values: dict[str, dict[str, Tensor]] = {name: {} for name in optimizer.tensors()}
            for full_name, value in state.items():
                kind, _, rest = full_name.partition(".")
                name, _, key = rest.rpartition(".")
                if kind == "optimizer" and name in values:
                    values[name][key] = value.tensor if isinstance(value, ShardedTensor) else value
            optimizer.load(values)

    def refresh(self) -> None:
        """The weights were set from outside: optimizers that have copies of them look again."""
        for optimizer in self.optimizers:
            optimizer.refresh()

    @contextmanager
    def averaged_weights(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Have the weights to evaluate in place for a while. The trained ones come back from a copy, so to the last
        bit. on_change: called whenever the weights were."""
        averaged = self._averaged()
        trained = {name: self.weights[name].tensor.clone() for name in averaged}
        self._set(averaged, on_change)
        try:
            yield
        finally:
            self._set(trained, on_change)

    def _averaged(self) -> dict[str, Tensor]:
        """The weights to evaluate and save that are not the ones that are trained."""
        return {name: value for optimizer in self.optimizers for name, value in optimizer.averaged().items()}

    def _set(self, values: Mapping[str, Tensor], changed: Callable[[], None]) -> None:
        for name, value in values.items():
            self.weights[name].tensor.copy_(value)
        if values:
            changed()

    def _like(self, name: str, block: Tensor) -> ShardedTensor:
        """A block shaped like the one of the weight `name`."""
        return self.weights[name].with_tensor(block)

    def _stored(self, optimizer: StatefulOptimizer, name: str, value: Tensor) -> ShardedTensor | Tensor:
        if value.dim() == 0 or isinstance(optimizer, WholeTensorOptimizer):
            return value
        return self._like(name, value)
