"""Partitions of parameters that a rank updates under DeepSpeed's ZeRO, and the optimizer's state over them.

Stage 0 leaves parameters whole. Stages 1 and 2 concatenate the parameters of an optimizer group, and divide the flat
tensor equally among data ranks; stage 3 divides each flattened parameter. So a rank holds consecutive elements of a
parameter, which `FlatShardedTensor` describes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.optimizers import TRAINED, State
from megatfm.errors import MegatfmError


@dataclass(frozen=True)
class Partition:
    """Partition of a parameter that this rank's optimizer updates.

    It is elements [start, start + size) of `flat`, a flat tensor of the optimizer, and elements [offset, offset + size)
    of the flattened parameter. group: index of its parameter group. resident: holds the elements of `flat` between
    steps; `flat` itself, unless they are in a file.
    """

    flat: Tensor
    start: int
    size: int
    offset: int
    group: int
    resident: Tensor

    def view_in(self, flat: Tensor) -> Tensor:
        """Return a view of its elements in a tensor with the shape of `flat`."""
        return flat.detach().view(-1)[self.start : self.start + self.size]

    @property
    def weights(self) -> Tensor:
        """View of its elements."""
        return self.view_in(self.resident)


class Partitions(ABC):
    """Partitions of trained parameters that a DeepSpeed engine holds on this rank; `internals.py` has one kind a stage.

    engine: DeepSpeed's. parameters: by name, frozen ones too. groups: the names in each group of the torch optimizer.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._parameters: Mapping[str, Any] = parameters  # with attributes that DeepSpeed adds
        self.by_name = {
            name: self._find_partition(parameters[name], group) for group, names in enumerate(groups) for name in names
        }
        """Trained parameter → the partition of it that this rank updates."""

    def gradients(self) -> dict[str, Tensor]:
        """Return flat views of the gradients of these partitions; empty before a backward pass."""
        if not self._has_gradients():
            return {}
        return {name: self._get_gradient(self._parameters[name], partition) for name, partition in self.by_name.items()}

    def prepare_step(self) -> None:
        """Prepare DeepSpeed's optimizer for a step with the gradients as they are now."""
        self._engine.set_gradient_accumulation_boundary(True)

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop all gradients, as DeepSpeed does if a step overflows."""

    @abstractmethod
    def sync_weights(self) -> None:
        """Set the weights that the model computes with from the partitions."""

    @torch.no_grad()
    def set_frozen(self, parameter: Any, full: Tensor) -> None:
        """Set a frozen weight. full: this rank's tensor-parallel shard."""
        parameter.copy_(full)

    def optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the optimizer's state of a flat tensor, in memory or mapped from its file."""
        return state

    def set_optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> None:
        """Replace the optimizer's state of a flat tensor."""
        self._engine.basic_optimizer.state[flat] = {
            key: value.view_as(flat) if value.dim() else value for key, value in state.items()
        }

    @abstractmethod
    def _find_partition(self, parameter: Any, group: int) -> Partition: ...

    @abstractmethod
    def _has_gradients(self) -> bool: ...

    @abstractmethod
    def _get_gradient(self, parameter: Any, partition: Partition) -> Tensor: ...


class FlatOptimizer:
    """State of the torch optimizer over DeepSpeed's flat tensors, by names of parameters.

    See `engines.state.StatefulOptimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, partitions: Partitions, group: OptimizerGroup) -> None:
        self._torch, self._partitions, self._group = optimizer, partitions, group
        self._blocks = {name: partition.weights for name, partition in self._partitions.by_name.items()}

    def set_lr(self, lr: float) -> None:
        """Set the learning rate, times each group's ratio."""
        for options in self._torch.param_groups:
            options["lr"] = lr * options["lr_ratio"]

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the flat blocks that the optimizer updates, by name."""
        return self._blocks

    def refresh(self) -> None:
        """Do nothing: the optimizer has no copies of the weights."""

    def averaged(self) -> dict[str, Tensor]:
        """Return averaged weights to evaluate and save, as new tensors; empty if the optimizer keeps none."""
        if self._group.averaged is None:
            return {}
        return {
            name: self._group.averaged(self._blocks[name], state, self._get_options(name))
            for name, state in self._read_state().items()
            if state
        }

    def state(self) -> State:
        """Return parameter name → key → flat block, or a scalar that all parameters of a flat tensor share."""
        state = self._read_state()
        for name, values in state.items():
            if values:
                for key in self._group.counters:
                    values[key] = torch.tensor(self._get_options(name)[key], dtype=torch.float64)
                if self._group.averaged:
                    values[TRAINED] = self._blocks[name]
        return state

    def load(self, state: State) -> None:
        """Load the result of `state`. Raises MegatfmError if parameters that share a step count differ in it."""
        states_by_flat: dict[Tensor, dict[str, Tensor]] = {}
        for name, partition in self._partitions.by_name.items():
            flat_state = states_by_flat.setdefault(partition.flat, {})
            values = dict(state[name])
            if TRAINED in values:
                self._blocks[name].copy_(values.pop(TRAINED))
            for key in self._group.counters:
                if key in values:
                    options = self._get_options(name)
                    options[key] = type(options[key])(values.pop(key).item())
            for key, value in values.items():
                if value.dim():
                    zeros = torch.zeros_like(partition.resident.detach(), dtype=value.dtype).view(-1)
                    partition.view_in(flat_state.setdefault(key, zeros)).copy_(value)
                elif not torch.equal(flat_state.setdefault(key, value), value):
                    raise MegatfmError(
                        f"the checkpoint has {key} = {value.item():g} of {name} and {flat_state[key].item():g} of a "
                        "parameter beside it, and DeepSpeed has one for both: resume under parallel.engine = 'native'"
                    )
        for flat, values in states_by_flat.items():
            self._partitions.set_optimizer_state(flat, values)

    def _read_state(self) -> dict[str, dict[str, Tensor]]:
        flat_tensors = {partition.flat for partition in self._partitions.by_name.values()}
        states = {
            flat: self._partitions.optimizer_state(flat, self._torch.state.get(flat, {})) for flat in flat_tensors
        }

        def view_state(partition: Partition) -> dict[str, Tensor]:
            flat_state = states[partition.flat].items()
            return {key: partition.view_in(value) if value.dim() else value for key, value in flat_state}

        return {name: view_state(partition) for name, partition in self._partitions.by_name.items()}

    def _get_options(self, name: str) -> dict[str, Any]:
        return self._torch.param_groups[self._partitions.by_name[name].group]
