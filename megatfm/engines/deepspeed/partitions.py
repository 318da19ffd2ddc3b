"""Where DeepSpeed 0.19 keeps weights, gradients and optimizer state: with `swapped.py` all that knows its insides.

Stage 0 leaves parameters alone. Stages 1 and 2 lay those of an optimizer's group one after another, and give each data
rank an equal part of that; stage 3 does so with each parameter by itself. So what a rank holds of a parameter is
elements that follow each other, and `FlatShardedTensor` says which.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.deepspeed.library import quiet
from megatfm.engines.deepspeed.swapped import SwappedGroups

BY_PARAMETER = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Stage 3's gradients, by the numbers that DeepSpeed gives to parameters."""

READ_AHEAD = "_PartitionedParameterCoordinator__prefetch_nvme"
"""Whether weights are read from files before they are needed."""


@dataclass(frozen=True)
class Part:
    """What this rank's optimizer moves of a parameter: elements [start, start + size) of `owner`, which are those from
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
    """What one of DeepSpeed's engines holds of named parameters, frozen ones left out.

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
        """What the model computes with follows the parts."""

    @torch.no_grad()
    def set_frozen(self, parameter: Any, whole: Tensor) -> None:
        """Let the model compute with a frozen weight, of which this is all that tensor parallelism leaves here."""
        parameter.copy_(whole)

    def optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What torch's optimizer remembers of an owner, where it can be read."""
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
    """Of stage 0."""

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
        """Nothing to do: they are what the model computes with."""


class FlatPartitions(Partitions):
    """Of stages 1 and 2."""

    OWNERS = "single_partition_of_fp32_groups"

    def _part(self, parameter: Any, group: int) -> Part:
        owner, mapping = getattr(self._optimizer, self.OWNERS)[group], parameter._hp_mapping
        if mapping is None:  # all of it is other ranks'
            return Part(owner, 0, 0, 0, group, owner)
        there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Part(owner, int(here.start), int(here.numel), int(there.start), group, owner)

    def _complete(self) -> bool:
        gradients = self._optimizer.averaged_gradients
        return self._optimizer.cpu_offload or (
            bool(gradients) and all(each is not None for each in gradients.values())
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
    """Of stage 1 in bf16, where DeepSpeed adds each micro-batch's gradients up in float32, over whole weights."""

    OWNERS = "fp32_groups_flat_partition"

    def _complete(self) -> bool:
        return any(any(there) for there in self._optimizer.fp32_groups_has_gradients)

    def _gradient(self, parameter: Any, part: Part) -> Tensor:
        return part.view_in(self._optimizer.fp32_groups_gradient_flat_partition[part.group])

    @quiet()
    def forget(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)


class ShardedPartitions(Partitions):
    """Of stage 3."""

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
        return bool(gradients) and all(each is not None for each in gradients.values())

    def _gradient(self, parameter: Any, part: Part) -> Tensor:
        gradient: Tensor = getattr(self._optimizer, BY_PARAMETER)[parameter.ds_id]
        return gradient.view(-1)[: part.size]

    @quiet()
    def prepare_step(self) -> None:
        """DeepSpeed copies what it offloads as it is reduced; here it waits, so that clipping comes before."""
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
    def set_frozen(self, parameter: Any, whole: Tensor) -> None:
        shard = parameter.ds_tensor
        first = torch.distributed.get_rank(parameter.ds_process_group) * shard.ds_numel
        own = whole.reshape(-1)[first : first + shard.ds_numel]
        with self._swapped.swap_in_parameter(parameter):
            shard.view(-1)[: own.numel()].copy_(own)
        parameter.ds_secondary_tensor = None

    def optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._swapped.states(owner, state)

    def set_optimizer_state(self, owner: Tensor, state: Mapping[str, Tensor]) -> None:
        if not self._swapped.put_states(owner, state):
            super().set_optimizer_state(owner, state)


def partitions(
    engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]], stage: int
) -> Partitions:
    """What an engine of DeepSpeed keeps, read as its stage and precision lay it."""
    if hasattr(engine.optimizer, Bf16OptimizerPartitions.OWNERS):
        return Bf16OptimizerPartitions(engine, parameters, groups)
    if stage == 0:
        return UnpartitionedParameters(engine, parameters, groups)
    if stage == 3:
        return ShardedPartitions(engine, parameters, groups)
    return FlatPartitions(engine, parameters, groups)
