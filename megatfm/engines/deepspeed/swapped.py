"""What ZeRO 3 keeps in files ("nvme"): weights and optimizer state of groups of parameters, read in for their part of a
step and written back after it; and weights to compute with.

Between steps such files are looked at as memory (`mmap`), which the system reads as it is touched, so checkpoints and
loading don't need all of it at once. `files.py` writes and reads them through the same cache, so it is the same bytes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SwappedGroups:
    """The groups of a stage 3 optimizer that are in files; those below 1 MiB a rank DeepSpeed keeps in memory."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._mapped: dict[str, Tensor] = {}
        owners = optimizer.fp32_partitioned_groups_flat
        self._numbers = {
            id(owner): number
            for number, owner in enumerate(owners)
            if optimizer._swappable_optimizer_subgroup(number)
        }

    def weights(self, number: int) -> Tensor:
        """A group's weights, to be read and written between steps."""
        owner: Tensor = self._optimizer.fp32_partitioned_groups_flat[number]
        if id(owner) not in self._numbers:
            return owner
        (own, *_) = self._info(owner).tensors
        return self._map(own.swap_path, number)

    @contextmanager
    def swap_in(self, number: int) -> Iterator[None]:
        """Have a group's weights in memory, to read them."""
        optimizer = self._optimizer
        swapped = id(optimizer.fp32_partitioned_groups_flat[number]) in self._numbers
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
        finally:
            if swapped:
                optimizer._release_swap_buffers(number)

    def states(self, owner: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The state of a group, as it is between steps."""
        if id(owner) not in self._numbers:
            return state
        paths = {id(each.compute_tensor): each.swap_path for each in self._info(owner).tensors}
        number = self._numbers[id(owner)]
        return {
            key: self._map(paths[id(value)], number) if id(value) in paths else value
            for key, value in state.items()
        }

    def put_states(self, owner: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Write a group's state to its files; false where it has none."""
        if id(owner) not in self._numbers:
            return False
        optimizer, number, info = self._optimizer, self._numbers[id(owner)], self._info(owner)
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        optimizer.optimizer.state[owner] = {}
        optimizer._optimizer_states_and_gradient_swap_in(number)
        optimizer.optimizer.state[owner] = dict(state)
        optimizer._optimizer_states_and_gradient_swap_out(number)
        return True

    @contextmanager
    def swap_in_parameter(self, parameter: Any) -> Iterator[None]:
        """Have this rank's shard of what the model computes with in memory, to set it."""
        shard = parameter.ds_tensor
        in_file = shard.status.name == "NOT_AVAILABLE"
        if in_file:
            parameter.nvme_swapper.swap_in([parameter], async_op=False)
        try:
            yield
        finally:
            if in_file:
                parameter.nvme_swapper.swap_out_and_release([parameter])

    def _info(self, owner: Any) -> Any:
        return self._optimizer.optimizer_swapper.swap_params_info[owner.ds_id]

    def _map(self, path: str, number: int) -> Tensor:
        if path not in self._mapped:
            size = int(self._optimizer.fp16_partitioned_groups_flat_numel[number])
            dtype = self._optimizer.master_weights_and_grads_dtype
            self._mapped[path] = torch.from_file(path, shared=True, size=size, dtype=dtype)
        return self._mapped[path]
