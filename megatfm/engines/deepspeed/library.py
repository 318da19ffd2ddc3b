"""DeepSpeed itself: imported only here, on the first use, quietly, and without compiling anything."""

import importlib
import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatfm.errors import UsageError
from megatfm.parallel.layout import ModelLayout
from megatfm.parallel.mesh import DENSE_DATA_AXES, EXPERT, EXPERT_DATA_AXES, PIPELINE, TENSOR, Mesh
from megatfm.parallel.process_environment import read_process_environment

CACHED_METHOD = "_PartitionedParameterCoordinator__params_to_release"
"""A method whose results are cached for ever, with the models that they are of."""


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed's own calls of what torch or Python deprecate are nothing that a user here could mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(device: torch.device) -> ModuleType:
    """The package, set up for this device in a process whose groups torch has made. Raises UsageError where it is
    missing."""
    # What is asked for before the import decides; else it compiles one operator to find out what it may compile.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if "LOCAL_RANK" not in os.environ:
        place = read_process_environment(os.environ)
        os.environ["LOCAL_RANK"] = str(place.local_rank if device.index is None else device.index)
    with quiet():
        try:
            package = importlib.import_module("deepspeed")
        except ImportError as error:
            raise UsageError(
                f"parallel.engine = 'deepspeed': DeepSpeed can't be imported ({error}): `make deepspeed` installs it "
                "beside this torch; or set parallel.engine = 'native'"
            ) from error
        _reset_globals()
        # An all-reduce through shared memory would be compiled here, for half a minute.
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "nccl" if device.type == "cuda" else "gloo"
        package.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return package


@contextmanager
def allow_fp16_on_cpu() -> Iterator[None]:
    """While an engine is made: float16 computes on every host, if slowly. DeepSpeed 0.19.8 asks whether it is fast, and
    where it isn't, as on most hosts, refuses it; and takes float32 weights that it is to put in files for bfloat16,
    silently: `dtype or torch.float16 if … else …` (partition_parameters.py) is read as `(dtype or torch.float16) if …`.
    """
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        vars(accelerator).pop("is_fp16_supported", None)


def _reset_globals() -> None:
    """What DeepSpeed keeps for a process: groups of a world that may be gone, and numbers that it gives to modules and
    parameters, which must be the same on all ranks."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups = importlib.import_module("deepspeed.utils.groups")
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    parameters = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    groups._release_process_group_references()
    comm.cdb = None
    (count,) = offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = parameters.Init.param_id = 0


def release(engine: Any) -> None:
    """Take the hooks of an engine that nobody uses any more off its parameters, and the model out of what DeepSpeed
    keeps for a process: they would keep it, and its groups."""
    with _tolerate_missing_group():
        engine.destroy()
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    offload.FWD_MODULE_STACK[:] = [each for each in offload.FWD_MODULE_STACK if each is not engine.module]
    method: Any = getattr(coordinator.PartitionedParameterCoordinator, CACHED_METHOD)
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


@contextmanager
def _tolerate_missing_group() -> Iterator[None]:
    """Where the groups are gone already: DeepSpeed asks for its rank, and does with it nothing but print."""
    comm = importlib.import_module("deepspeed.comm")
    asked = comm.get_rank
    if not torch.distributed.is_initialized():
        comm.get_rank = lambda group=None: -1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        comm.get_rank = asked  # type: ignore[attr-defined]


def clear_module_stack() -> None:
    """After passes: where modules are computed again, and not to their ends, which nobody needs, DeepSpeed would
    believe for ever that they are running."""
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()


def register_experts(
    parameters: Mapping[str, Any], layout: ModelLayout, mesh: Mesh, zero: int
) -> nn.Module | None:
    """Tell DeepSpeed which parameters are experts that lie on different ranks, and over whom each one's gradients are
    summed. Returns what must be a part of its model, for it looks for experts there."""
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
        """DeepSpeed has a model for one with experts where a module is of this class; nothing calls it."""

        num_experts = 0

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def set_deepspeed_parallelism(self, *_: Any) -> None:
            """The groups are there."""

    return MoEMarker()


class ModelParallelUnit:
    """Our groups, as DeepSpeed asks for Megatron-LM's (`mpu`). Those who see other parts of the same rows are data
    ranks to it: gradients are summed over them, and ZeRO cuts over them, too."""

    def __init__(self, mesh: Mesh) -> None:
        self._data = mesh.flat_group(DENSE_DATA_AXES.all)
        self._model = mesh.flat_group((PIPELINE, TENSOR))

    def get_model_parallel_rank(self) -> int:
        """This rank among those that hold the other parts of its copy of the model."""
        return torch.distributed.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        """How many these are."""
        return torch.distributed.get_world_size(self._model)

    def get_model_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Their group."""
        return self._model

    def get_data_parallel_rank(self) -> int:
        """This rank among those that see other rows, or other parts of rows."""
        return torch.distributed.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        """How many these are."""
        return torch.distributed.get_world_size(self._data)

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Their group."""
        return self._data
