"""Access to the DeepSpeed package, imported on first use without compiling anything; and its settings."""

import importlib
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.cpp_extension import _get_build_directory, _import_module_from_library

from megatfm.config import Config
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.engines.deepspeed.nvme_offload import OffloadDirectory, add_buffers, install_aio_handle
from megatfm.engines.interface import EngineSetup, OptimizerGroup
from megatfm.errors import UsageError
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import DENSE_DATA_AXES, EXPERT, EXPERT_DATA_AXES, PIPELINE, TENSOR, Mesh
from megatfm.parallel.pipeline_stages import Pipeline
from megatfm.parallel.process_environment import read_process_environment

CACHED_METHOD = "_PartitionedParameterCoordinator__params_to_release"
"""A method whose cached results keep their models alive."""
COMPILE_COMMAND = "python -c 'from deepspeed.ops.op_builder import {name} as B; B().load()' does it, once"

log = logging.getLogger("megatfm")


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore warnings within this context: users can't act on DeepSpeed's use of deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed and set it up for a device, after torch's process groups. Raises UsageError if it is missing."""
    # Before the import, which would otherwise compile an operator to find the accelerator.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if "LOCAL_RANK" not in os.environ:
        environment = read_process_environment(os.environ)
        os.environ["LOCAL_RANK"] = str(environment.local_rank if device.index is None else device.index)
    with ignore_warnings():
        try:
            package = importlib.import_module("deepspeed")
        except ImportError as error:
            raise UsageError(
                f"parallel.engine = 'deepspeed': DeepSpeed can't be imported ({error}): `make deepspeed` installs it "
                "beside this torch; or set parallel.engine = 'native'"
            ) from error
        _reset_globals()
        # Otherwise it compiles an all-reduce through shared memory, for half a minute.
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "nccl" if device.type == "cuda" else "gloo"
        package.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return package


@contextmanager
def allow_fp16_on_cpu() -> Iterator[None]:
    """Let DeepSpeed build an engine with float16 on a CPU, within this context: it computes everywhere, if slowly.

    DeepSpeed 0.19.8 refuses float16 unless the CPU is fast at it. Then it also stores float32 weights in files as
    bfloat16, silently: `dtype or torch.float16 if … else …` (partition_parameters.py) means `(dtype or …) if … else …`.
    """
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        vars(accelerator).pop("is_fp16_supported", None)


def _reset_globals() -> None:
    """Reset DeepSpeed's global state: process groups that may no longer exist, and the counters that number modules and
    parameters, which must be equal on all ranks."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups = importlib.import_module("deepspeed.utils.groups")
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    parameters = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    groups._release_process_group_references()
    comm.cdb = None
    (count,) = offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = parameters.Init.param_id = 0


def release(engine: Any) -> None:
    """Remove an unused engine's hooks from its parameters, and its model from DeepSpeed's global state. Otherwise these
    keep the model and its process groups alive."""
    with _tolerate_missing_group():
        engine.destroy()
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    offload.FWD_MODULE_STACK[:] = [
        module for module in offload.FWD_MODULE_STACK if module is not engine.module
    ]
    method: Any = getattr(coordinator.PartitionedParameterCoordinator, CACHED_METHOD)
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


@contextmanager
def _tolerate_missing_group() -> Iterator[None]:
    """Let `get_rank` return -1 after the process groups are destroyed; DeepSpeed only prints it."""
    comm = importlib.import_module("deepspeed.comm")
    original_get_rank = comm.get_rank
    if not torch.distributed.is_initialized():
        comm.get_rank = lambda group=None: -1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        comm.get_rank = original_get_rank  # type: ignore[attr-defined]


def clear_module_stack() -> None:
    """Clear DeepSpeed's stack of running modules after the passes: a recomputation may stop before a module's end,
    which would stay on the stack."""
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()


def register_experts(
    parameters: Mapping[str, Any], layout: ModelLayout, mesh: Mesh, zero: int
) -> nn.Module | None:
    """Mark the parameters of sharded experts for DeepSpeed, with the group over which their gradients are summed.

    Returns a module to add to DeepSpeed's model, by which it recognises experts; None if it needs none.
    """
    groups = importlib.import_module("deepspeed.utils.groups")
    experts = [
        parameter for name, parameter in parameters.items() if layout[name].data_axes == EXPERT_DATA_AXES
    ]
    if not experts:
        return None
    groups._EXPERT_PARALLEL_GROUP[EXPERT] = mesh.group(EXPERT)
    groups._EXPERT_DATA_PARALLEL_GROUP[EXPERT] = data = mesh.flat_group(EXPERT_DATA_AXES.all)
    for parameter in experts:
        parameter.allreduce, parameter.group_name = False, EXPERT
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_group_name, parameter.ds_zero_partition_process_group = EXPERT, data
    return _make_moe_marker() if zero < 3 and any(p.requires_grad for p in experts) else None


def _make_moe_marker() -> nn.Module:
    layer = importlib.import_module("deepspeed.moe.layer")

    class MoEMarker(layer.MoE):  # type: ignore[name-defined, misc]
        """DeepSpeed takes a model for one with experts if a module has this class. Nothing calls it."""

        num_experts = 0

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def set_deepspeed_parallelism(self, *_: Any) -> None:
            """Do nothing: the groups exist."""

    return MoEMarker()


class ModelParallelUnit:
    """Our process groups by the interface of Megatron-LM's `mpu`, which DeepSpeed calls.

    Context-parallel ranks are data ranks to DeepSpeed: gradients are summed, and ZeRO shards, over them too.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._data = mesh.flat_group(DENSE_DATA_AXES.all)
        self._model = mesh.flat_group((PIPELINE, TENSOR))

    def get_model_parallel_rank(self) -> int:
        """Return this process's rank in the group that holds one copy of the model together."""
        return torch.distributed.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that hold one copy of the model together."""
        return torch.distributed.get_world_size(self._model)

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Return the group of ranks that hold one copy of the model together."""
        return self._model

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank in the group that processes different rows, or different parts of rows."""
        return torch.distributed.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks that process different rows, or different parts of rows."""
        return torch.distributed.get_world_size(self._data)

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Return the group of ranks that process different rows, or different parts of rows."""
        return self._data


def parameter_groups(
    group: OptimizerGroup,
    trained: Mapping[str, nn.Parameter],
    layout: ModelLayout,
    pipeline: Pipeline | None,
) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return names and torch's parameter group of parameters that share options.

    DeepSpeed partitions the concatenated parameters of a group, so a parameter's neighbours shift its partitions. If
    these must be equal on several ranks, parameters form groups of their own: those that tensor parallelism replicates,
    as it may shard others unevenly, and those that the same pipeline ranks share. So do experts, whose gradients are
    summed over other ranks. Raises UsageError, on all ranks, if one has no weight to train.
    """
    _refuse_frozen_ranks(pipeline)
    names, options = [], []
    for group_names, group_options in group.parameter_groups(trained):
        names_by_kind: dict[tuple[bool, bool, tuple[int, ...]], list[str]] = {}
        for name in group_names:
            holders = pipeline.parameter_ranks[name] if pipeline else ()
            is_expert = layout[name].data_axes == EXPERT_DATA_AXES
            kind = is_expert, bool(layout[name].shards), holders if len(holders) > 1 else ()
            names_by_kind.setdefault(kind, []).append(name)
        for (is_expert, _, _), kind_names in sorted(names_by_kind.items()):
            expert_options = {"moe": True, "name": EXPERT} if is_expert else {}
            parameters = [trained[name] for name in kind_names]
            names.append(kind_names)
            options.append({**group_options, **expert_options, "params": parameters})
    return names, options


def _refuse_frozen_ranks(pipeline: Pipeline | None) -> None:
    if pipeline is None:
        return
    for rank in range(pipeline.ranks):
        local_names = {name for name, holders in pipeline.parameter_ranks.items() if rank in holders}
        if local_names <= pipeline.frozen:
            raise UsageError(
                f"parallel.engine = 'deepspeed': train.freeze leaves pipeline rank {rank} no weight to train, and "
                "DeepSpeed makes no optimizer of none: set a smaller parallel.pp, or parallel.engine = 'native'"
            )


def require_single_group(optimizers: Sequence[OptimizerGroup]) -> OptimizerGroup:
    """Return the only optimizer group. Raises UsageError for several, or for one that needs whole tensors."""
    (group, *more_optimizers) = optimizers
    if more_optimizers or group.granularity != "elementwise":
        raise UsageError(
            "parallel.engine = 'deepspeed': its ZeRO shards flattened tensors, but this optimizer needs whole ones: "
            "set optimizer.name = 'adamw', 'lion' or 'schedule_free_adamw', or parallel.engine = 'native'"
        )
    return group


@ignore_warnings()
def load_quantizer(package: ModuleType, device: torch.device, feature: str) -> None:
    """Load DeepSpeed's operator that quantizes to 8 and 4 bits. Raises UsageError if it can't be loaded.

    feature: the config keys that need it, for the message.
    """
    if device.type != "cuda":
        raise UsageError(
            f"{feature} on {device.type!r}: its operator needs CUDA: leave it out, or run on GPUs"
        )
    _load(package, "QuantizerBuilder", feature, "or leave it out")


def _load(package: ModuleType, name: str, feature: str, way_out: str) -> None:
    """Load a compiled operator and register it with DeepSpeed, which otherwise compiles it, perhaps a second time."""
    builder = getattr(package.ops.op_builder, name)()
    version_info: Any = importlib.import_module("deepspeed.git_version_info")
    if not version_info.installed_ops.get(builder.name) and builder.name not in builder._loaded_ops:
        requirement = f"{feature} needs DeepSpeed's operator {builder.name}"
        builder._loaded_ops[builder.name] = _load_compiled(
            builder, requirement, f"{COMPILE_COMMAND.format(name=name)}, {way_out}"
        )
    builder.load(verbose=False)


def _load_compiled(builder: Any, requirement: str, way_out: str) -> ModuleType:
    """Load an operator from the folder of torch's compiled extensions. Raises UsageError if it isn't there."""
    folder = Path(_get_build_directory(builder.name, verbose=False))
    library, lock = folder / f"{builder.name}.so", folder / "lock"
    if lock.exists():
        raise UsageError(
            f"{requirement}, and {lock} exists, so it is being compiled: wait for that, or, if nothing compiles here "
            "(`megatfm doctor` tells), remove that file"
        )
    if library.exists():
        try:
            module: ModuleType = _import_module_from_library(builder.name, str(folder), True)
        except ImportError as error:
            reason = f"{library} can't be loaded ({error}): remove {folder}, and compile it for this torch"
            raise UsageError(f"{requirement}, but {reason}: {way_out}") from None
        return module
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise UsageError(
            f"{requirement}, which isn't compiled, and there is no compiler: apt-get install g++; {way_out}"
        )
    if not builder.is_compatible(verbose=False):
        raise UsageError(f"{requirement}, which doesn't compile here: `megatfm doctor` tells more; {way_out}")
    raise UsageError(f"{requirement}, which isn't compiled yet: {way_out}")


@dataclass(frozen=True)
class Settings:
    """DeepSpeed's configuration. folder: this engine's directory for offloaded state; None if it needs none."""

    json: dict[str, Any]
    folder: OffloadDirectory | None

    def remove(self) -> None:
        """Remove the offloaded files."""
        if self.folder:
            self.folder.remove()


def build_settings(config: Config, setup: EngineSetup, package: ModuleType) -> Settings:
    """Return DeepSpeed's configuration of a run, and create its directory for offloaded state.

    Raises UsageError for features that this machine or the number of ranks doesn't support.
    """
    options, folder = config.deepspeed, None
    if (ranks := setup.mesh.gradient_ranks) % options.zero_hpz_partition_size:
        raise UsageError(
            f"deepspeed.zero_hpz_partition_size = {options.zero_hpz_partition_size} doesn't divide the {ranks} ranks "
            "of parallel.dp_shard and parallel.cp: set a number that does"
        )
    if options.quantized_keys:
        keys = " and ".join(f"deepspeed.{key}" for key in options.quantized_keys)
        load_quantizer(package, setup.device, keys)
        log.warning("%s: %s", keys, options.INEXACT)
    if options.nvme_path and options.offloads_to_nvme:
        install_aio_handle(package)
        folder = OffloadDirectory(Path(options.nvme_path))
    derived = make_deepspeed_json(config, setup.precision, folder.path if folder else None)
    add_buffers(derived, setup)
    return Settings(derived, folder)
