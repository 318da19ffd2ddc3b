"""DeepSpeed itself: imported only here, on the first use, quietly, and without compiling anything."""

import importlib
import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from megatfm.errors import UsageError
from megatfm.parallel.mesh import PIPELINE, TENSOR, Mesh

REMEMBERED = "_PartitionedParameterCoordinator__params_to_release"
"""A method whose results are cached for ever, with the models that they are of."""


def load(device: torch.device) -> ModuleType:
    """The package, set up for this device in a process whose groups torch has made. Raises UsageError where it is
    missing."""
    # What is asked for before the import decides; else it compiles one operator to find out what it may compile.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with quiet():
        try:
            package = importlib.import_module("deepspeed")
        except ImportError as error:
            raise UsageError(
                f"parallel.engine = 'deepspeed': DeepSpeed can't be imported ({error}): `make deepspeed` installs it "
                "beside this torch; or set parallel.engine = 'native'"
            ) from error
        _forget_engines_before()
        # An all-reduce through shared memory would be compiled here, for half a minute.
        package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "nccl" if device.type == "cuda" else "gloo"
        package.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return package


def _forget_engines_before() -> None:
    """What DeepSpeed keeps for a process: groups of a world that may be gone, models, and numbers that it gives to
    modules and parameters, which must be the same on all ranks."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    groups = importlib.import_module("deepspeed.utils.groups")
    offload = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    parameters = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    groups._release_process_group_references()
    comm.cdb = None
    offload.FWD_MODULE_STACK.clear()
    method: Any = getattr(coordinator.PartitionedParameterCoordinator, REMEMBERED)
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()
    (count,) = offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = parameters.Init.param_id = 0


def release(engine: Any) -> None:
    """Take the hooks of an engine that nobody uses any more off its parameters: they would keep it, and its groups."""
    engine.destroy()
    _forget_engines_before()


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed's own calls of what torch or Python deprecate are nothing that a user here could mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ModelParallelUnit:
    """Our groups, as DeepSpeed asks for Megatron-LM's (`mpu`)."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._data = mesh.flat_group(mesh.data_axes)
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
        """This rank among those that see other rows."""
        return self._mesh.data_rank

    def get_data_parallel_world_size(self) -> int:
        """How many these are."""
        return self._mesh.data_ranks

    def get_data_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Their group."""
        return self._data
