"""The state of the one torch optimizer that moves DeepSpeed's flat partitions, by names of parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatfm.engines.deepspeed.partitions import Partitions
from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.optimizers import TRAINED, State
from megatfm.errors import MegatfmError


class FlatOptimizer:
    """See `engines.state.StatefulOptimizer`: each parameter's part of what the optimizer remembers of its owner."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, partitions: Partitions, group: OptimizerGroup
    ) -> None:
        self._torch, self._partitions, self._group = optimizer, partitions, group
        self._parts = partitions.parts
        self._blocks = {name: part.weights for name, part in self._parts.items()}

    def set_lr(self, lr: float) -> None:
        """The run's rate, before each group's own ratio."""
        for options in self._torch.param_groups:
            options["lr"] = lr * options["lr_ratio"]

    def tensors(self) -> Mapping[str, Tensor]:
        """What the optimizer moves: name → elements, flattened."""
        return self._blocks

    def refresh(self) -> None:
        """Nothing: the blocks are the weights themselves."""

    def averaged(self) -> dict[str, Tensor]:
        """New tensors: the weights to evaluate and save, where these are not the trained ones."""
        if self._group.averaged is None:
            return {}
        return {
            name: self._group.averaged(self._blocks[name], state, self._options(name))
            for name, state in self._state().items()
            if state
        }

    def state(self) -> State:
        """Parameter name → key → elements, or a scalar that the owner has for all of its parameters."""
        state = self._state()
        for name, values in state.items():
            if values:
                for key in self._group.counters:
                    values[key] = torch.tensor(self._options(name)[key], dtype=torch.float64)
                if self._group.averaged:
                    values[TRAINED] = self._blocks[name]
        return state

    def load(self, state: State) -> None:
        """Take over what `state` gave. Raises MegatfmError where parameters that share a step count differ in it."""
        whole: dict[Tensor, dict[str, Tensor]] = {}
        for name, part in self._parts.items():
            own = whole.setdefault(part.flat, {})
            values = dict(state[name])
            if TRAINED in values:
                self._blocks[name].copy_(values.pop(TRAINED))
            for key in self._group.counters:
                if key in values:
                    options = self._options(name)
                    options[key] = type(options[key])(values.pop(key).item())
            for key, value in values.items():
                if value.dim():
                    flat = own.setdefault(
                        key, torch.zeros_like(part.resident.detach(), dtype=value.dtype).view(-1)
                    )
                    part.view_in(flat).copy_(value)
                elif not torch.equal(own.setdefault(key, value), value):
                    raise MegatfmError(
                        f"the checkpoint has {key} = {value.item():g} of {name} and {own[key].item():g} of a parameter "
                        "beside it, and DeepSpeed has one for both: resume under parallel.engine = 'native'"
                    )
        for owner, values in whole.items():
            self._partitions.set_optimizer_state(owner, values)

    def _state(self) -> dict[str, dict[str, Tensor]]:
        owners = {part.flat for part in self._parts.values()}
        states = {
            owner: self._partitions.optimizer_state(owner, self._torch.state.get(owner, {}))
            for owner in owners
        }
        return {
            name: {
                key: part.view_in(value) if value.dim() else value for key, value in states[part.flat].items()
            }
            for name, part in self._parts.items()
        }

    def _options(self, name: str) -> dict[str, Any]:
        return self._torch.param_groups[self._parts[name].group]
