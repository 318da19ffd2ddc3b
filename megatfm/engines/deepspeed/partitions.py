"""Where DeepSpeed 0.19 keeps weights, gradients and optimizer state: the one file that knows its insides.

Stage 0 leaves parameters alone. Stages 1 and 2 lay those of an optimizer's group one after another, and give each data
rank an equal part of that; stage 3 does so with each parameter by itself. So what a rank holds of a parameter is
elements that follow each other, and `FlatBox` says which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.deepspeed.library import quiet


@dataclass(frozen=True)
class Part:
    """What this rank's optimizer moves of a parameter: elements [start, start + size) of `owner`, which are those from
    `first` on of the flattened parameter. group: of the torch optimizer that moves it, by its number."""

    owner: Tensor
    start: int
    size: int
    first: int
    group: int

    def of(self, flat: Tensor) -> Tensor:
        """Its elements in a tensor of the owner's shape, as a view."""
        return flat.detach().view(-1)[self.start : self.start + self.size]


class Partitions:
    """What one of DeepSpeed's engines holds of named parameters, frozen ones left out.

    groups: the names in each group of the torch optimizer.
    """

    def __init__(
        self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]], stage: int
    ) -> None:
        self._engine, self._optimizer, self._stage = engine, engine.optimizer, stage
        self._parameters: Mapping[str, Any] = parameters  # which DeepSpeed has hung its own attributes on
        self.offloaded = stage in (1, 2) and self._optimizer.cpu_offload
        self.parts = {
            name: self._part(parameters[name], number)
            for number, names in enumerate(groups)
            for name in names
        }

    def _part(self, parameter: Any, group: int) -> Part:
        if self._stage == 0:
            return Part(parameter, 0, parameter.numel(), 0, group)
        if self._stage == 3:
            return self._shard(parameter, group)
        owner, mapping = self._optimizer.single_partition_of_fp32_groups[group], parameter._hp_mapping
        if mapping is None:  # all of it is other ranks'
            return Part(owner, 0, 0, 0, group)
        there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Part(owner, int(here.start), int(here.numel), int(there.start), group)

    def _shard(self, parameter: Any, group: int) -> Part:
        number, start, padded = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        first = min(rank * padded, parameter.ds_numel)
        size = min(padded, parameter.ds_numel - first)
        return Part(self._optimizer.fp32_partitioned_groups_flat[number], int(start), size, first, group)

    def gradients(self) -> dict[str, Tensor]:
        """Flattened views of what `backward` has left for these parts; none where nothing was computed."""
        return (
            {name: self._gradient(name, part) for name, part in self.parts.items()}
            if self._complete()
            else {}
        )

    def _complete(self) -> bool:
        if self._stage == 0:
            return any(self._parameters[name].grad is not None for name in self.parts)
        gradients = self._optimizer.averaged_gradients
        return self._offloads or (bool(gradients) and all(each is not None for each in gradients.values()))

    @property
    def _offloads(self) -> bool:
        return self.offloaded or (self._stage == 3 and bool(self._optimizer.offload_optimizer))

    def _gradient(self, name: str, part: Part) -> Tensor:
        parameter = self._parameters[name]
        if self._stage == 0:
            assert parameter.grad is not None
            return parameter.grad.view(-1)
        if self._offloads:
            return (
                part.of(part.owner.grad) if part.owner.grad is not None else part.owner.new_zeros(part.size)
            )
        if not part.size:
            return part.owner.detach().new_zeros(0)
        if self._stage == 3:
            number = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)][0]
            index = next(i for i, each in enumerate(self._optimizer.fp16_groups[number]) if each is parameter)
            return self._optimizer.averaged_gradients[number][index].view(-1)[: part.size]
        return parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)

    @quiet()
    def forget(self) -> None:
        """Drop the gradients as DeepSpeed itself does where a step overflows."""
        optimizer = self._optimizer
        if self._stage == 0:
            self._engine.zero_grad()
        elif self._stage == 3:
            optimizer._pre_step()
            optimizer._overflow_clean_up(1.0)
        else:
            optimizer.micro_step_id = -1
            optimizer.zero_grad(set_to_none=True)
            optimizer._release_preflattened_grad_buffers()
            if self.offloaded:
                optimizer.reset_cpu_buffers()
                return
            for number in list(optimizer.averaged_gradients):
                optimizer.averaged_gradients[number] = optimizer.all_grad_tensors[number] = None

    @quiet()
    @torch.no_grad()
    def weights_changed(self) -> None:
        """What the model computes with follows the parts."""
        optimizer = self._optimizer
        if self._stage in (1, 2):
            optimizer.update_lp_params()
        elif self._stage == 3:
            for number in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    @torch.no_grad()
    def set_frozen(self, parameter: Any, whole: Tensor) -> None:
        """Let the model compute with a frozen weight, of which this is all that tensor parallelism leaves here."""
        if self._stage < 3:
            parameter.copy_(whole)
            return
        shard = parameter.ds_tensor
        first = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        own = whole.reshape(-1)[first : first + shard.numel()]
        shard.view(-1)[: own.numel()].copy_(own)
