"""Access to DeepSpeed 0.19's weights, gradients and optimizer state, by its internals (as in `nvme_offload.py`).

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

from megatfm.engines.deepspeed.library import ignore_warnings
from megatfm.engines.deepspeed.nvme_offload import SwappedGroups
from megatfm.engines.interface import OptimizerGroup
from megatfm.engines.optimizers import TRAINED, State
from megatfm.errors import MegatfmError

GRADIENT_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
"""Attribute with stage 3's gradients, by DeepSpeed's parameter ids."""

PREFETCH_NVME = "_PartitionedParameterCoordinator__prefetch_nvme"
"""Attribute that says whether weights are read from files ahead of time."""


@dataclass(frozen=True)
class Part:
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
    """Partitions of trained parameters that a DeepSpeed engine holds on this rank.

    engine: DeepSpeed's. parameters: by name, frozen ones too. groups: the names in each group of the torch optimizer.
    """

    def __init__(
        self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]
    ) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._parameters: Mapping[str, Any] = parameters  # with attributes that DeepSpeed adds
        self.parts = {
            name: self._find_part(parameters[name], group)
            for group, names in enumerate(groups)
            for name in names
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return flat views of the gradients of these partitions; empty before a backward pass."""
        if not self._has_gradients():
            return {}
        return {name: self._get_gradient(self._parameters[name], part) for name, part in self.parts.items()}

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
    def _find_part(self, parameter: Any, group: int) -> Part: ...

    @abstractmethod
    def _has_gradients(self) -> bool: ...

    @abstractmethod
    def _get_gradient(self, parameter: Any, part: Part) -> Tensor: ...


class UnpartitionedParameters(Partitions):
    """Partitions of stage 0: whole tensors."""

    def _find_part(self, parameter: Any, group: int) -> Part:
        return Part(parameter, 0, parameter.numel(), 0, group, parameter)

    def _has_gradients(self) -> bool:
        return any(self._parameters[name].grad is not None for name in self.parts)

    def _get_gradient(self, parameter: Any, part: Part) -> Tensor:
        gradient: Tensor = parameter.grad.view(-1)
        return gradient

    @ignore_warnings()
    def drop_gradients(self) -> None:
        self._engine.zero_grad()

    def sync_weights(self) -> None:
        """Do nothing: the partitions are the weights that the model computes with."""


class FlatPartitions(Partitions):
    """Partitions of stages 1 and 2."""

    FLAT_TENSORS = "single_partition_of_fp32_groups"

    def _find_part(self, parameter: Any, group: int) -> Part:
        flat, mapping = getattr(self._optimizer, self.FLAT_TENSORS)[group], parameter._hp_mapping
        if mapping is None:  # other ranks have all of its elements
            return Part(flat, 0, 0, 0, group, flat)
        in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Part(flat, int(in_flat.start), int(in_flat.numel), int(in_parameter.start), group, flat)

    def _has_gradients(self) -> bool:
        gradients = self._optimizer.averaged_gradients
        return self._optimizer.cpu_offload or (
            bool(gradients) and all(gradient is not None for gradient in gradients.values())
        )

    def _get_gradient(self, parameter: Any, part: Part) -> Tensor:
        if self._optimizer.cpu_offload:
            return (
                part.view_in(part.flat.grad) if part.flat.grad is not None else part.flat.new_zeros(part.size)
            )
        if not part.size:
            return part.flat.detach().new_zeros(0)
        gradient: Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return gradient.view(-1)

    @ignore_warnings()
    def drop_gradients(self) -> None:
        optimizer = self._optimizer
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            return
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None

    @ignore_warnings()
    @torch.no_grad()
    def sync_weights(self) -> None:
        self._optimizer.update_lp_params()


class Bf16OptimizerPartitions(FlatPartitions):
    """Partitions of stage 1 in bf16, where DeepSpeed accumulates gradients in float32, over whole weights."""

    FLAT_TENSORS = "fp32_groups_flat_partition"

    def _has_gradients(self) -> bool:
        return any(any(has_gradients) for has_gradients in self._optimizer.fp32_groups_has_gradients)

    def _get_gradient(self, parameter: Any, part: Part) -> Tensor:
        return part.view_in(self._optimizer.fp32_groups_gradient_flat_partition[part.group])

    @ignore_warnings()
    def drop_gradients(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)


class ShardedPartitions(Partitions):
    """Partitions of stage 3."""

    def __init__(
        self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]
    ) -> None:
        self._swapped = SwappedGroups(engine.optimizer)
        # With prefetching, a weight that is soon used twice has its file read twice at once, which fails.
        setattr(engine.optimizer.parameter_offload.param_coordinator, PREFETCH_NVME, False)
        super().__init__(engine, parameters, groups)

    def _find_part(self, parameter: Any, group: int) -> Part:
        subgroup, start, padded_size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        offset = min(rank * padded_size, parameter.ds_numel)
        size = min(padded_size, parameter.ds_numel - offset)
        flat = self._optimizer.fp32_partitioned_groups_flat[subgroup]
        return Part(flat, int(start), size, offset, group, self._swapped.weights(subgroup))

    def _has_gradients(self) -> bool:
        if self._optimizer.offload_optimizer:
            return bool(self._optimizer._offload_boundary_param_ids)
        gradients = self._optimizer.averaged_gradients
        return bool(gradients) and all(gradient is not None for gradient in gradients.values())

    def _get_gradient(self, parameter: Any, part: Part) -> Tensor:
        gradient: Tensor = getattr(self._optimizer, GRADIENT_PARTITIONS)[parameter.ds_id]
        return gradient.view(-1)[: part.size]

    @ignore_warnings()
    def prepare_step(self) -> None:
        """See `Partitions`. Offloaded gradients are copied now, after clipping, not when they are reduced."""
        super().prepare_step()
        self._optimizer.finalize_gradient_accumulation_boundary()

    @ignore_warnings()
    def drop_gradients(self) -> None:
        self._optimizer._pre_step()
        self._optimizer._overflow_clean_up(1.0)

    @ignore_warnings()
    @torch.no_grad()
    def sync_weights(self) -> None:
        optimizer = self._optimizer
        for subgroup in range(len(optimizer.fp16_groups)):
            with self._swapped.swap_in(subgroup):
                optimizer._reassign_or_swap_out_partitioned_parameters(subgroup)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()

    @torch.no_grad()
    def set_frozen(self, parameter: Any, full: Tensor) -> None:
        shard = parameter.ds_tensor
        start = torch.distributed.get_rank(parameter.ds_process_group) * shard.ds_numel
        local = full.reshape(-1)[start : start + shard.ds_numel]
        with self._swapped.swap_in_parameter(parameter):
            shard.view(-1)[: local.numel()].copy_(local)
        parameter.ds_secondary_tensor = None

    def optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._swapped.optimizer_state(flat, state)

    def set_optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> None:
        if not self._swapped.set_optimizer_state(flat, state):
            super().set_optimizer_state(flat, state)


def build_partitions(
    engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]], stage: int
) -> Partitions:
    """Return the partitions of a DeepSpeed engine, by its stage and precision."""
    if hasattr(engine.optimizer, Bf16OptimizerPartitions.FLAT_TENSORS):
        return Bf16OptimizerPartitions(engine, parameters, groups)
    if stage == 0:
        return UnpartitionedParameters(engine, parameters, groups)
    if stage == 3:
        return ShardedPartitions(engine, parameters, groups)
    return FlatPartitions(engine, parameters, groups)


class FlatOptimizer:
    """State of the torch optimizer over DeepSpeed's flat tensors, by names of parameters.

    See `engines.state.StatefulOptimizer`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, partitions: Partitions, group: OptimizerGroup
    ) -> None:
        self._torch, self._partitions, self._group = optimizer, partitions, group
        self._parts = partitions.parts
        self._blocks = {name: part.weights for name, part in self._parts.items()}

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
        for name, part in self._parts.items():
            flat_state = states_by_flat.setdefault(part.flat, {})
            values = dict(state[name])
            if TRAINED in values:
                self._blocks[name].copy_(values.pop(TRAINED))
            for key in self._group.counters:
                if key in values:
                    options = self._get_options(name)
                    options[key] = type(options[key])(values.pop(key).item())
            for key, value in values.items():
                if value.dim():
                    zeros = torch.zeros_like(part.resident.detach(), dtype=value.dtype).view(-1)
                    part.view_in(flat_state.setdefault(key, zeros)).copy_(value)
                elif not torch.equal(flat_state.setdefault(key, value), value):
                    raise MegatfmError(
                        f"the checkpoint has {key} = {value.item():g} of {name} and {flat_state[key].item():g} of a "
                        "parameter beside it, and DeepSpeed has one for both: resume under parallel.engine = 'native'"
                    )
        for flat, values in states_by_flat.items():
            self._partitions.set_optimizer_state(flat, values)

    def _read_state(self) -> dict[str, dict[str, Tensor]]:
        flat_tensors = {part.flat for part in self._parts.values()}
        states = {
            flat: self._partitions.optimizer_state(flat, self._torch.state.get(flat, {}))
            for flat in flat_tensors
        }
        return {
            name: {
                key: part.view_in(value) if value.dim() else value for key, value in states[part.flat].items()
            }
            for name, part in self._parts.items()
        }

    def _get_options(self, name: str) -> dict[str, Any]:
        return self._torch.param_groups[self._parts[name].group]
