"""DeepSpeed's internals, in this chapter alone: global state, partitions of weights and gradients, swapped files.

DeepSpeed has no public way to any of them. Names and meanings are those of DeepSpeed 0.19.8, which `pyproject.toml`
pins; an upgrade begins here. `runtime/…` in comments is a file of DeepSpeed.
"""

import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.engines.deepspeed.partitions import Partition, Partitions
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import EXPERT, EXPERT_DATA_AXES, Mesh

# Names that Python mangles: `__name` of a class is `_Class__name` outside of it.
CACHED_METHOD = "_PartitionedParameterCoordinator__params_to_release"
GRADIENT_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
PREFETCH_NVME = "_PartitionedParameterCoordinator__prefetch_nvme"


def _import(name: str) -> Any:
    return importlib.import_module(f"deepspeed.{name}")


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore warnings within this context: users can't act on DeepSpeed's use of deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---------------------------------------------------------------------------------------------- global state


def reset_globals() -> None:
    """Reset process groups that may no longer exist, and the counters that number modules and parameters, which must
    be equal on all ranks."""
    _import("utils.groups")._release_process_group_references()
    _import("comm.comm").cdb = None
    offload = _import("runtime.zero.parameter_offload").DeepSpeedZeRoOffload
    (count,) = offload._register_deepspeed_module.__defaults__
    count[0] = _import("runtime.zero.partition_parameters").Init.param_id = 0
    # Otherwise an all-reduce through shared memory is compiled, for half a minute.
    _import("ops").__compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def allow_fp16_on_cpu() -> Iterator[None]:
    """Let DeepSpeed build an engine with float16 on a CPU, within this context: it computes everywhere, if slowly.

    DeepSpeed refuses float16 unless the CPU is fast at it. Then it also stores float32 weights in files as bfloat16,
    silently: `dtype or torch.float16 if … else …` (runtime/zero/partition_parameters.py) means
    `(dtype or …) if … else …`.
    """
    accelerator = _import("accelerator").get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        vars(accelerator).pop("is_fp16_supported", None)


def release(engine: Any) -> None:
    """Remove an unused engine's hooks from its parameters, and its model from global state. Otherwise these keep the
    model and its process groups alive."""
    comm = _import("comm")
    original_get_rank = comm.get_rank
    if not torch.distributed.is_initialized():
        comm.get_rank = lambda group=None: -1  # it is only printed
    try:
        engine.destroy()
    finally:
        comm.get_rank = original_get_rank
    running = _import("runtime.zero.parameter_offload").FWD_MODULE_STACK
    running[:] = [module for module in running if module is not engine.module]
    coordinator = _import("runtime.zero.partitioned_param_coordinator").PartitionedParameterCoordinator
    # Its cached results hold parameters.
    inspect.getclosurevars(getattr(coordinator, CACHED_METHOD)).nonlocals["func"].cache_clear()


def clear_module_stack() -> None:
    """Clear the stack of running modules after the passes: a recomputation may stop before a module's end, which would
    stay on the stack."""
    _import("runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()


def install_aio_handle(package: ModuleType, handle: type) -> None:
    """Let DeepSpeed read and write files by a class with the methods of its `aio_handle`, which it would compile."""
    builder = type(package.ops.op_builder.AsyncIOBuilder())
    builder.load = lambda self, verbose=True: SimpleNamespace(aio_handle=handle)


def get_min_swapped_bytes() -> int:
    """Return the size from which on a rank's shard of a weight goes to files."""
    return int(_import("runtime.swap_tensor.utils").MIN_AIO_BYTES)


def register_experts(parameters: Mapping[str, Any], layout: ModelLayout, mesh: Mesh, zero: int) -> nn.Module | None:
    """Mark the parameters of sharded experts, with the group over which their gradients are summed.

    Returns a module to add to DeepSpeed's model, by which it recognises experts; None if it needs none.
    """
    experts = [p for name, p in parameters.items() if layout[name].data_axes == EXPERT_DATA_AXES]
    if not experts:
        return None
    groups = _import("utils.groups")
    groups._EXPERT_PARALLEL_GROUP[EXPERT] = mesh.group(EXPERT)
    groups._EXPERT_DATA_PARALLEL_GROUP[EXPERT] = data = mesh.flat_group(EXPERT_DATA_AXES.all)
    for parameter in experts:
        parameter.allreduce, parameter.group_name = False, EXPERT
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_group_name, parameter.ds_zero_partition_process_group = EXPERT, data
    return _make_moe_marker() if zero < 3 and any(p.requires_grad for p in experts) else None


def _make_moe_marker() -> nn.Module:
    layer = _import("moe.layer")

    class MoEMarker(layer.MoE):  # type: ignore[name-defined, misc]
        """DeepSpeed takes a model for one with experts if a module has this class. Nothing calls it."""

        num_experts = 0

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def set_deepspeed_parallelism(self, *_: Any) -> None:
            """Do nothing: the groups exist."""

    return MoEMarker()


# ------------------------------------------------------------------------------------ weights and gradients


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


class UnpartitionedParameters(Partitions):
    """Partitions of stage 0: whole tensors."""

    def _find_partition(self, parameter: Any, group: int) -> Partition:
        return Partition(parameter, 0, parameter.numel(), 0, group, parameter)

    def _has_gradients(self) -> bool:
        return any(self._parameters[name].grad is not None for name in self.by_name)

    def _get_gradient(self, parameter: Any, partition: Partition) -> Tensor:
        gradient: Tensor = parameter.grad.view(-1)
        return gradient

    @ignore_warnings()
    def drop_gradients(self) -> None:
        self._engine.zero_grad()

    def sync_weights(self) -> None:
        """Do nothing: the partitions are the weights that the model computes with."""


class FlatPartitions(Partitions):
    """Partitions of stages 1 and 2 (runtime/zero/stage_1_and_2.py)."""

    FLAT_TENSORS = "single_partition_of_fp32_groups"

    def _find_partition(self, parameter: Any, group: int) -> Partition:
        flat, mapping = getattr(self._optimizer, self.FLAT_TENSORS)[group], parameter._hp_mapping
        if mapping is None:  # other ranks have all of its elements
            return Partition(flat, 0, 0, 0, group, flat)
        in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Partition(flat, int(in_flat.start), int(in_flat.numel), int(in_parameter.start), group, flat)

    def _has_gradients(self) -> bool:
        return self._optimizer.cpu_offload or _are_complete(self._optimizer.averaged_gradients)

    def _get_gradient(self, parameter: Any, partition: Partition) -> Tensor:
        if self._optimizer.cpu_offload:
            gradients = partition.flat.grad
            return partition.flat.new_zeros(partition.size) if gradients is None else partition.view_in(gradients)
        if not partition.size:
            return partition.flat.detach().new_zeros(0)
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
        # Also with offloading: in 16 bits gradients are added up there, and DeepSpeed's own overflow path keeps them.
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None

    @ignore_warnings()
    @torch.no_grad()
    def sync_weights(self) -> None:
        self._optimizer.update_lp_params()


class Bf16OptimizerPartitions(FlatPartitions):
    """Partitions of stage 1 in bf16, where gradients accumulate in float32, over whole weights
    (runtime/bf16_optimizer.py)."""

    FLAT_TENSORS = "fp32_groups_flat_partition"

    def _has_gradients(self) -> bool:
        return any(any(has_gradients) for has_gradients in self._optimizer.fp32_groups_has_gradients)

    def _get_gradient(self, parameter: Any, partition: Partition) -> Tensor:
        return partition.view_in(self._optimizer.fp32_groups_gradient_flat_partition[partition.group])

    @ignore_warnings()
    def drop_gradients(self) -> None:
        self._optimizer.clear_hp_grads()
        self._optimizer.clear_lp_grads(set_to_none=True)


class ShardedPartitions(Partitions):
    """Partitions of stage 3 (runtime/zero/stage3.py), in "sub-groups" of an optimizer group that DeepSpeed updates, and
    keeps in files, one by one."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], groups: Sequence[Sequence[str]]) -> None:
        self._swapped = SwappedGroups(engine.optimizer)
        # With prefetching, a weight that is soon used twice has its file read twice at once, which fails.
        setattr(engine.optimizer.parameter_offload.param_coordinator, PREFETCH_NVME, False)
        super().__init__(engine, parameters, groups)

    def _find_partition(self, parameter: Any, group: int) -> Partition:
        subgroup, start, padded_size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        offset = min(rank * padded_size, parameter.ds_numel)
        size = min(padded_size, parameter.ds_numel - offset)
        flat = self._optimizer.fp32_partitioned_groups_flat[subgroup]
        return Partition(flat, int(start), size, offset, group, self._swapped.weights(subgroup))

    def _has_gradients(self) -> bool:
        if self._optimizer.offload_optimizer:
            return bool(self._optimizer._offload_boundary_param_ids)
        return _are_complete(self._optimizer.averaged_gradients)

    def _get_gradient(self, parameter: Any, partition: Partition) -> Tensor:
        gradient: Tensor = getattr(self._optimizer, GRADIENT_PARTITIONS)[parameter.ds_id]
        return gradient.view(-1)[: partition.size]

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
        in_file = shard.status.name == "NOT_AVAILABLE"
        if in_file:
            parameter.nvme_swapper.swap_in([parameter], async_op=False)
        shard.view(-1)[: local.numel()].copy_(local)
        if in_file:
            parameter.nvme_swapper.swap_out_and_release([parameter])
        parameter.ds_secondary_tensor = None

    def optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._swapped.optimizer_state(flat, state)

    def set_optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> None:
        if not self._swapped.set_optimizer_state(flat, state):
            super().set_optimizer_state(flat, state)


def _are_complete(gradients: Mapping[int, Any]) -> bool:
    """Return whether all groups have gradients: `averaged_gradients` is empty or has None before a backward pass."""
    return bool(gradients) and all(gradient is not None for gradient in gradients.values())


# --------------------------------------------------------------------------------------------------- files


class SwappedGroups:
    """Sub-groups of a stage 3 optimizer whose weights and state are in files, except during their part of a step.

    DeepSpeed keeps sub-groups below 1 MiB a rank in memory. Between steps the files are mapped (`mmap`), so that
    checkpoints and loading don't need all of their contents in memory at once. `SyncIOHandle` goes through the same
    cache.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._mapped: dict[str, Tensor] = {}
        self._groups = {
            id(flat): group
            for group, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
            if optimizer._swappable_optimizer_subgroup(group)
        }

    def weights(self, group: int) -> Tensor:
        """Return a group's flat weights, in memory or mapped, to be read and written between steps."""
        flat: Tensor = self._optimizer.fp32_partitioned_groups_flat[group]
        if id(flat) not in self._groups:
            return flat
        (weights, *_) = self._get_info(flat).tensors
        return self._map(weights.swap_path, group)

    @contextmanager
    def swap_in(self, group: int) -> Iterator[None]:
        """Hold a group's weights in memory within this context, to read them."""
        is_swapped = group in self._groups.values()
        if is_swapped:
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
        try:
            yield
        finally:
            if is_swapped:
                self._optimizer._release_swap_buffers(group)

    def optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state of a group between steps, mapped from its files if it is swapped."""
        if id(flat) not in self._groups:
            return state
        paths = {id(info.compute_tensor): info.swap_path for info in self._get_info(flat).tensors}
        group = self._groups[id(flat)]
        return {
            key: self._map(paths[id(value)], group) if id(value) in paths else value for key, value in state.items()
        }

    def set_optimizer_state(self, flat: Tensor, state: Mapping[str, Tensor]) -> bool:
        """Write a group's state to its files; returns False if the group is not swapped."""
        if id(flat) not in self._groups:
            return False
        optimizer, group, info = self._optimizer, self._groups[id(flat)], self._get_info(flat)
        info.tensors, info.has_state_tensors = info.tensors[:1], False
        optimizer.optimizer.state[flat] = {}
        optimizer._optimizer_states_and_gradient_swap_in(group)
        optimizer.optimizer.state[flat] = dict(state)
        optimizer._optimizer_states_and_gradient_swap_out(group)
        return True

    def _get_info(self, flat: Any) -> Any:
        return self._optimizer.optimizer_swapper.swap_params_info[flat.ds_id]

    def _map(self, path: str, group: int) -> Tensor:
        if path not in self._mapped:
            size = int(self._optimizer.fp16_partitioned_groups_flat_numel[group])
            dtype = self._optimizer.master_weights_and_grads_dtype
            self._mapped[path] = torch.from_file(path, shared=True, size=size, dtype=dtype)
        return self._mapped[path]
