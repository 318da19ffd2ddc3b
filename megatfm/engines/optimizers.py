"""Optimizers over this rank's blocks (elementwise), or over full tensors that it owns (Muon and the like).

Each full tensor has an owner among the ranks that hold its blocks. The owner keeps a full copy and the optimizer state.
One all-to-all gathers gradients, another scatters weights: 2·(N−1)/N of the parameters' size per step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatfm.engines.interface import NeedsShardLocations, OptimizerGroup, ShardLocation
from megatfm.errors import MegatfmError
from megatfm.ops.transfer import align
from megatfm.parallel.layout import Region


class OwnedTensors:
    """Full copies of the tensors that this rank owns.

    local: name → this rank's block. regions: name → region of each rank of `group`, in group order; of ranks with the
    same region, only the first sends it. shapes: name → global shape.
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        regions: Mapping[str, Sequence[Region]],
        shapes: Mapping[str, Sequence[int]],
        group: ProcessGroup,
    ) -> None:
        self.local, self.regions, self.group = local, regions, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._first_ranks = {name: _find_first_ranks(by_rank) for name, by_rank in regions.items()}
        self.owners = _assign_owners({name: torch.Size(shape).numel() for name, shape in shapes.items()}, self.ranks)
        self.full = {
            name: torch.zeros(tuple(shapes[name]), dtype=block.dtype, device=block.device)
            for name, block in local.items()
            if self.owners[name] == self.rank
        }

    def gather(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather the blocks of all ranks to full tensors on their owners."""
        send_buffers = [self._pack(blocks, owner) for owner in range(self.ranks)]
        received = [[name for name in self.full if self._is_sender(name, source)] for source in range(self.ranks)]
        sizes = [
            sum(_count_elements(self.regions[name][source]) for name in names) for source, names in enumerate(received)
        ]
        flat = self._exchange(send_buffers, sizes)
        full = {name: torch.empty_like(tensor) for name, tensor in self.full.items()}
        for source, names in enumerate(received):
            regions = [self.regions[name][source] for name in names]
            flat_blocks = flat[source].split([_count_elements(region) for region in regions])
            for name, region, flat_block in zip(names, regions, flat_blocks, strict=True):
                _view_region(full[name], region).copy_(flat_block.view(region[1]))
        return full

    def refresh(self) -> None:
        """Update the full copies from the blocks, after these were loaded."""
        for name, tensor in self.gather(self.local).items():
            self.full[name].copy_(tensor)

    def scatter(self) -> None:
        """Update the blocks of all ranks from the owners' full copies."""
        for name, block in self.scatter_blocks(self.full).items():
            self.local[name].copy_(block)

    def scatter_blocks(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's blocks of tensors that their owners have in full, shaped like the weights."""
        send_buffers = []
        for target in range(self.ranks):
            views = (_view_region(tensor, self.regions[name][target]) for name, tensor in full.items())
            send_buffers.append(self._concatenate([view.reshape(-1) for view in views]))
        owned = [[name for name in self.local if self.owners[name] == owner] for owner in range(self.ranks)]
        flat = self._exchange(send_buffers, [sum(self.local[name].numel() for name in names) for names in owned])
        blocks: dict[str, Tensor] = {}
        for names, values in zip(owned, flat, strict=True):
            flat_blocks = values.split([self.local[name].numel() for name in names])
            for name, flat_block in zip(names, flat_blocks, strict=True):
                blocks[name] = flat_block.view_as(self.local[name])
        return blocks

    def _is_sender(self, name: str, rank: int) -> bool:
        return self._first_ranks[name][self.regions[name][rank]] == rank

    def _pack(self, blocks: Mapping[str, Tensor], owner: int) -> Tensor:
        names = [name for name in self.local if self.owners[name] == owner and self._is_sender(name, self.rank)]
        return self._concatenate([blocks[name].reshape(-1) for name in names])

    def _concatenate(self, tensors: list[Tensor]) -> Tensor:
        first = next(iter(self.local.values()))
        return torch.cat(tensors) if tensors else first.new_empty(0)

    def _exchange(self, send_buffers: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
        if self.ranks == 1:
            return tuple(send_buffers)
        flat = torch.cat(send_buffers)
        received = flat.new_empty(sum(sizes))
        dist.all_to_all_single(received, flat, sizes, [buffer.numel() for buffer in send_buffers], group=self.group)
        return received.split(sizes)


def _assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each tensor, the largest first, to the rank with the least load."""
    load = [0] * ranks
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += sizes[name]
    return owners


def _find_first_ranks(regions: Sequence[Region]) -> dict[Region, int]:
    """Return the first rank that has each region."""
    return {region: rank for rank, region in reversed(list(enumerate(regions)))}


def _count_elements(region: Region) -> int:
    return torch.Size(region[1]).numel()


def _view_region(tensor: Tensor, region: Region) -> Tensor:
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(*region, strict=True))]


State = Mapping[str, Mapping[str, Tensor]]
"""Parameter name → key → tensor."""

TRAINED = "trained"
"""Key of the trained weights in the state of an optimizer that saves averaged ones as the model's."""


class TorchOptimizer:
    """A torch optimizer over named tensors, with its state as a table of tensors.

    Values that it changes in its parameter groups (`counters`) are saved as float64 scalars of each parameter.
    """

    def __init__(self, group: OptimizerGroup, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.counters, self._stacked = dict(tensors), group.counters, group.stacked_names
        self._state_dtype = group.state_dtype
        groups = group.make_param_groups(self.tensors)
        self._torch_params = {name: self._split(name, tensor) for name, tensor in self.tensors.items()}
        """Name → tensors that torch's optimizer updates: the tensor itself, or those that are stacked in it."""
        for names, options in groups:
            options["params"] = [param for name in names for param in self._torch_params[name]]
        # torch refuses an optimizer without parameters, and a rank may own none.
        self.optimizer = group.build([options for _, options in groups]) if groups else None
        # torch's protocol (`torch.amp.GradScaler`): with `found_inf` = 1 on the device, the kernel skips the step.
        self.can_skip = self.optimizer is None or getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._previous_counters: list[dict[str, Any]] = []  # before the last step
        param_groups = self.optimizer.param_groups if self.optimizer else []
        self.options: dict[str, dict[str, Any]] = {
            name: options for (names, _), options in zip(groups, param_groups, strict=True) for name in names
        }

    def step(self, gradients: Mapping[str, Tensor], lr: float, found_inf: Tensor | None = None) -> None:
        """Update the tensors. lr: learning rate, before each group's ratio. Does nothing if the rank owns no tensors.

        found_inf: only with `can_skip`: float32 scalar on the device. If it is 1, tensors stay unchanged, but counters
        advance, as the host doesn't know; `restore_counters` then resets them.
        """
        if self.optimizer is None:
            return
        self._previous_counters = [{key: group[key] for key in self.counters} for group in self.optimizer.param_groups]
        if found_inf is not None:
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        for options in self.optimizer.param_groups:
            options["lr"] = lr * options["lr_ratio"]
        for name, params in self._torch_params.items():
            for param, gradient in zip(params, self._split(name, gradients[name]), strict=True):
                param.grad = gradient
        self.optimizer.step()
        if found_inf is not None:
            del self.optimizer.found_inf  # type: ignore[attr-defined]
        for param in (param for params in self._torch_params.values() for param in params):
            param.grad = None
            state = self.optimizer.state[param]
            # LAPACK returns column-major tensors, a resume would have row-major ones.
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = align(value)

    def restore_counters(self) -> None:
        """Reset counters after a step that was skipped on the device."""
        if self.optimizer is not None:
            for options, counters in zip(self.optimizer.param_groups, self._previous_counters, strict=True):
                options.update(counters)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensor name → state with counters. Not copied (except stacks); empty before the first step."""
        return {name: self._get_state(name) for name in self.tensors}

    def _get_state(self, name: str) -> dict[str, Tensor]:
        assert self.optimizer is not None
        states = [self.optimizer.state[param] for param in self._torch_params[name]]
        state = dict(states[0])
        if name in self._stacked:  # scalars, such as the step count, are common to all
            for key, value in states[0].items():
                state[key] = torch.stack([param_state[key] for param_state in states]) if value.dim() else value
        if state:
            for key in self.counters:
                state[key] = torch.tensor(self.options[name][key], dtype=torch.float64)
        return state

    def load(self, state: State) -> None:
        """Load the result of `state` for exactly these tensors. Raises KeyError for a missing one."""
        for name, params in self._torch_params.items():
            assert self.optimizer is not None
            values = {key: align(value) for key, value in state[name].items()}
            for key in self.counters:
                if key in values:
                    self.options[name][key] = type(self.options[name][key])(values.pop(key).item())
            for i, param in enumerate(params):
                values = {key: self._cast_state(value, param) for key, value in values.items()}
                param_state = values
                if name in self._stacked:  # only these have a row for each part; a shard may have no rows at all
                    param_state = {key: (v[i] if v.dim() else v).clone() for key, v in values.items()}
                self.optimizer.state[param] = param_state

    def _cast_state(self, value: Tensor, weight: Tensor) -> Tensor:
        """Cast state to the configured dtype, which may differ from the saved one."""
        if not value.dim() or not (self._state_dtype or value.dtype == torch.bfloat16):
            return value
        return value.to(self._state_dtype or weight.dtype)

    def _split(self, name: str, tensor: Tensor) -> list[Tensor]:
        return list(tensor) if name in self._stacked else [tensor]


class ElementwiseOptimizer:
    """An optimizer over local blocks, for updates where each element is independent of the others (AdamW)."""

    def __init__(self, group: OptimizerGroup, local: Mapping[str, Tensor]) -> None:
        self._torch, self._averaged = TorchOptimizer(group, local), group.averaged
        self.can_skip = self._torch.can_skip

    def set_shard_locations(self, locations: Mapping[str, ShardLocation]) -> None:
        """Pass the location of each block in its full tensor to an optimizer that needs it."""
        if isinstance(self._torch.optimizer, NeedsShardLocations):
            self._torch.optimizer.set_shard_locations(
                {block: locations[name] for name, block in self.tensors().items()}
            )

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the blocks that the optimizer updates, by name."""
        return self._torch.tensors

    def step(self, gradients: Mapping[str, Tensor], lr: float, found_inf: Tensor | None = None) -> None:
        """Update the blocks in place. gradients: by name, shaped like blocks. found_inf: see `TorchOptimizer.step`."""
        self._torch.step(gradients, lr, found_inf)

    def restore_counters(self) -> None:
        """Reset counters after a step that was skipped on the device."""
        self._torch.restore_counters()

    def refresh(self) -> None:
        """Do nothing: the optimizer has no copies of the weights."""

    def averaged(self) -> dict[str, Tensor]:
        """Return averaged weights to evaluate and save, as new tensors; empty if the optimizer keeps none."""
        if self._averaged is None:
            return {}
        state, options = self._torch.state(), self._torch.options
        return {
            name: self._averaged(block, state[name], options[name])
            for name, block in self.tensors().items()
            if state[name]
        }

    def state(self) -> State:
        """Return name → key → state tensor. Raises MegatfmError if a shape differs from its block's."""
        state = self._torch.state()
        for name, block in self.tensors().items():
            for key, value in state[name].items():
                if value.dim() and value.shape != block.shape:
                    raise MegatfmError(
                        f"optimizer state {key} of {name} is {list(value.shape)}, its block {list(block.shape)}: this "
                        "optimizer looks at whole tensors, so its group must have granularity='whole_tensor'"
                    )
            if self._averaged and state[name]:
                state[name][TRAINED] = block
        return state

    def load(self, state: State) -> None:
        """Load the result of `state`; where averaged weights were saved, restore the trained ones."""
        values = {name: dict(state[name]) for name in self.tensors()}
        for name, block in self.tensors().items():
            if TRAINED in values[name]:
                block.copy_(values[name].pop(TRAINED))
        self._torch.load(values)


class WholeTensorOptimizer:
    """An optimizer that needs full tensors (Muon), over those that this rank owns."""

    def __init__(
        self,
        group: OptimizerGroup,
        local: Mapping[str, Tensor],
        regions: Mapping[str, Sequence[Region]],
        shapes: Mapping[str, Sequence[int]],
        ranks: ProcessGroup,
    ) -> None:
        self._owned = OwnedTensors(local, regions, shapes, ranks)
        self._owned.refresh()
        self._torch, self._averaged = TorchOptimizer(group, self._owned.full), group.averaged
        self.can_skip = False  # a skipped step must skip the communication, so the host must know

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the full tensors that this rank owns, by name."""
        return self._owned.full

    def step(self, gradients: Mapping[str, Tensor], lr: float, found_inf: Tensor | None = None) -> None:
        """Gather gradients to the owners, update the tensors, scatter them to the blocks. A collective."""
        assert found_inf is None, "can_skip is False"
        self._torch.step(self._owned.gather(gradients), lr)
        self._owned.scatter()

    def restore_counters(self) -> None:
        """Do nothing: no step is skipped on the device."""

    def refresh(self) -> None:
        """Update the full copies from the blocks."""
        self._owned.refresh()

    def averaged(self) -> dict[str, Tensor]:
        """Return this rank's blocks of the averaged weights, as new tensors; empty if the optimizer keeps none.

        Before the first step these are the weights. A collective.
        """
        if self._averaged is None:
            return {}
        state, options = self._torch.state(), self._torch.options
        full = {name: self._averaged(weight, state[name], options[name]) for name, weight in self.tensors().items()}
        return {name: align(block) for name, block in self._owned.scatter_blocks(full).items()}

    def state(self) -> State:
        """Return the state of the tensors that this rank owns, in the optimizer's shapes."""
        state = self._torch.state()
        for name, weight in self.tensors().items():
            if self._averaged and state[name]:
                state[name][TRAINED] = weight
        return state

    def load(self, state: State) -> None:
        """Load the result of `state`, and update the full copies from the blocks. A collective.

        Where averaged weights were saved, the trained ones are restored, in full and in the blocks.
        """
        values = {name: dict(state[name]) for name in self.tensors()}
        self.refresh()
        for name, weight in self.tensors().items():
            if TRAINED in values[name]:
                weight.copy_(values[name].pop(TRAINED))
        self._owned.scatter()
        self._torch.load(values)
