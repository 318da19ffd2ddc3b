"""Access to DeepSpeed 0.19's weights, gradients and optimizer state; only `nvme_offload.py` uses its internals, too.

Stage 0 leaves parameters alone. Stages 1 and 2 lay those of an optimizer's group one after another, and give each data
rank an equal part of that; stage 3 does so with each parameter by itself. So a rank holds consecutive elements of a
parameter, and `FlatShardedTensor` says which.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.deepspeed.library import quiet
from megatfm.engines.deepspeed.nvme_offload import SwappedGroups
from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.optimizers import TRAINED, State
from megatfm.errors import MegatfmError

BY_PARAMETER = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Stage 3's gradients, by the numbers that DeepSpeed gives to parameters."""

READ_AHEAD = "_PartitionedParameterCoordinator__prefetch_nvme"
"""Whether weights are read from files before they are needed."""


@dataclass(frozen=True)
class Part:
    """Part of a parameter that this rank's optimizer moves: elements [start, start + size) of `owner`, those from
    `first` on of the flattened parameter. group: of the torch optimizer that moves it, by its number. resident:
    where the owner's elements are between steps; the owner itself, unless they are in a file."""

    flat: Tensor
    start: int
    size: int
    offset: int
    group: int
    resident: Tensor

    def view_in(self, flat: Tensor) -> Tensor:
        """Its elements in a tensor of the owner's shape, as a view."""
        return flat.detach().view(-1)[self.start : self.start + self.size]

    @property
    def weights(self) -> Tensor:
        """Its elements, as a view."""
        return self.view_in(self.resident)


class Partitions(ABC):
    """The parts that one of DeepSpeed's engines holds of named parameters, frozen ones left out.

    groups: the names in each group of the torch optimizer.
    """

    def __init__(
        self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]
    ) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._parameters: Mapping[str, Any] = parameters  # which DeepSpeed has hung its own attributes on
        self.parts = {
            name: self._part(parameters[name], number)
            for number, names in enumerate(groups)
            for name in names
        }

    def gradients(self) -> dict[str, Tensor]:
        """Flattened views of what `backward` has left for these parts; none where nothing was computed."""
        if not self._complete():
            return {}
        return {name: self._gradient(self._parameters[name], part) for name, part in self.parts.items()}

    def prepare_step(self) -> None:
        """Before a step: DeepSpeed's optimizer is to take the gradients as they are now."""
        self._engine.set_gradient_accumulation_boundary(True)

    @abstractmethod
    def forget(self) -> None:
        """Drop the gradients as DeepSpeed itself does where a step overflows."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Set the weights that the model computes with from the parts."""

    @torch.no_grad()
    def set_frozen(self, parameter: Any, full: Tensor) -> None:
        """Let the model compute with a frozen weight, of which this is all that tensor parallelism leaves here."""
        parameter.copy_(full)

    def optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state of torch's optimizer for an owner, where it can be read."""
        return state

    def set_optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> None:
        """Let torch's optimizer remember this of an owner instead."""
        self._engine.basic_optimizer.state[owner] = {
            key: value.view_as(owner) if value.dim() else value for key, value in state.items()
        }

    @abstractmethod
    def _part(self, parameter: Any, group: int) -> Part: ...

    @abstractmethod
    def _complete(self) -> bool: ...

    @abstractmethod
    def _gradient(self, parameter: Any, part: Part) -> Tensor: ...


class UnpartitionedParameters(Partitions):
    """Parts under stage 0: whole tensors."""

    def _part(self, parameter: Any, group: int) -> Part:
        return Part(parameter, 0, parameter.numel(), 0, group, parameter)

    def _complete(self) -> bool:
        return any(self._parameters[name].grad is not None for name in self.parts)

    def _gradient(self, parameter: Any, part: Part) -> Tensor:
        gradient: Tensor = parameter.grad.view(-1)
        return gradient

    @quiet()
    def forget(self) -> None:
        self._engine.zero_grad()

    def weights_changed(self) -> None:
        """Nothing to do: they are the model's compute weights."""


class FlatPartitions(Partitions):
    """Parts under stages 1 and 2."""

    OWNERS = "single_partition_of_fp32_groups"

    def _part(self, parameter: Any, group: int) -> Part:
        owner, mapping = getattr(self._optimizer, self.OWNERS)[group], parameter._hp_mapping
        if mapping is None:  # all of it is other ranks'
            return Part(owner, 0, 0, 0, group, owner)
        in_parameter, in_shard = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Part(owner, int(in_shard.start), int(in_shard.numel), int(in_parameter.start), group, owner)

    def _complete(self) -> bool:
        gradients = self._optimizer.averaged_gradients
        return self._optimizer.cpu_offload or (
            bool(gradients) and all(gradient is not None for gradient in gradients.values())
        )

    def _gradient(self, parameter: Any, part: Part) -> Tensor:
        if self._optimizer.cpu_offload:
            return (
                part.view_in(part.flat.grad) if part.flat.grad is not None else part.flat.new_zeros(part.size)
            )
        if not part.size:
            return part.flat.detach().new_zeros(0)
        gradient: Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return gradient.view(-1)

    @quiet()
    def forget(self) -> None:
        optimizer = self._optimizer
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            return
        for number in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[number] = optimizer.all_grad_tensors[number] = None

    @quiet()
    @torch.no_grad()
    def weights_changed(self) -> None:
        self._optimizer.update_lp_params()


class Bf16OptimizerPartitions(FlatPartitions):
    """Parts under stage 1 in bf16, where DeepSpeed adds micro-batches' gradients up in float32, over whole weights."""

    OWNERS = "fp32_groups_flat_partition"

    def _complete(self) -> bool:
        return any(any(has_gradients) for has_gradients in self._optimizer.fp32_groups_has_gradients)

    def _gradient(self, parameter: Any, part: Part) -> Tensor:
        return part.view_in(self._optimizer.fp32_groups_gradient_flat_partition[part.group])

    @quiet()
    def forget(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)


class ShardedPartitions(Partitions):
    """Parts under stage 3."""

    def __init__(
        self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]
    ) -> None:
        self._swapped = SwappedGroups(engine.optimizer)
        # Ahead of time it would read a file twice at once where a weight is used twice soon, and fail.
        setattr(engine.optimizer.parameter_offload.param_coordinator, READ_AHEAD, False)
        super().__init__(engine, parameters, groups)

    def _part(self, parameter: Any, group: int) -> Part:
        number, start, padded = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        first = min(rank * padded, parameter.ds_numel)
        size = min(padded, parameter.ds_numel - first)
        owner = self._optimizer.fp32_partitioned_groups_flat[number]
        return Part(owner, int(start), size, first, group, self._swapped.weights(number))

    def _complete(self) -> bool:
        if self._optimizer.offload_optimizer:
            return bool(self._optimizer._offload_boundary_param_ids)
        gradients = self._optimizer.averaged_gradients
        return bool(gradients) and all(gradient is not None for gradient in gradients.values())

    def _gradient(self, parameter: Any, part: Part) -> Tensor:
        gradient: Tensor = getattr(self._optimizer, BY_PARAMETER)[parameter.ds_id]
        return gradient.view(-1)[: part.size]

    @quiet()
    def prepare_step(self) -> None:
        """DeepSpeed copies offloaded gradients as they are reduced; here it waits, so that clipping comes before."""
        super().prepare_step()
        self._optimizer.finalize_gradient_accumulation_boundary()

    @quiet()
    def forget(self) -> None:
        self._optimizer._pre_step()
        self._optimizer._overflow_clean_up(1.0)

    @quiet()
    @torch.no_grad()
    def weights_changed(self) -> None:
        optimizer = self._optimizer
        for number in range(len(optimizer.fp16_groups)):
            with self._swapped.swap_in(number):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()

    @torch.no_grad()
    def set_frozen(self, parameter: Any, full: Tensor) -> None:
        shard = parameter.ds_tensor
        first = torch.distributed.get_rank(parameter.ds_process_group) * shard.ds_numel
        local = full.reshape(-1)[first : first + shard.ds_numel]
        with self._swapped.swap_in_parameter(parameter):
            shard.view(-1)[: local.numel()].copy_(local)
        parameter.ds_secondary_tensor = None

    def optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._swapped.states(owner, state)

    def set_optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> None:
        if not self._swapped.put_states(owner, state):
            super().set_optimizer_state(owner, state)


def partitions(
    engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]], stage: int
) -> Partitions:
    """Read the state of a DeepSpeed engine, in the layout of its stage and precision."""
    if hasattr(engine.optimizer, Bf16OptimizerPartitions.OWNERS):
        return Bf16OptimizerPartitions(engine, parameters, groups)
    if stage == 0:
        return UnpartitionedParameters(engine, parameters, groups)
    if stage == 3:
        return ShardedPartitions(engine, parameters, groups)
    return FlatPartitions(engine, parameters, groups)


class FlatOptimizer:
    """The state of the one torch optimizer that moves DeepSpeed's flat partitions, by names of parameters: each one's
    part of the state of its flat tensor (see `engines.state.StatefulOptimizer`)."""

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
        """Elements that the optimizer moves, flattened, by name."""
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
        states_by_flat: dict[Tensor, dict[str, Tensor]] = {}
        for name, part in self._parts.items():
            flat_state = states_by_flat.setdefault(part.flat, {})
            values = dict(state[name])
            if TRAINED in values:
                self._blocks[name].copy_(values.pop(TRAINED))
            for key in self._group.counters:
                if key in values:
                    options = self._options(name)
                    options[key] = type(options[key])(values.pop(key).item())
            for key, value in values.items():
                if value.dim():
                    flat = flat_state.setdefault(
                        key, torch.zeros_like(part.resident.detach(), dtype=value.dtype).view(-1)
                    )
                    part.view_in(flat).copy_(value)
                elif not torch.equal(flat_state.setdefault(key, value), value):
                    raise MegatfmError(
                        f"the checkpoint has {key} = {value.item():g} of {name} and {flat_state[key].item():g} of a "
                        "parameter beside it, and DeepSpeed has one for both: resume under parallel.engine = 'native'"
                    )
        for owner, values in states_by_flat.items():
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
