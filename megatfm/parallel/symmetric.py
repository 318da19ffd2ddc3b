"""Memory that the GPUs of one machine read of one another, by which async tensor parallelism sends."""

import socket
import warnings
from importlib.util import find_spec

import torch
import torch.distributed as dist

from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.mesh import TENSOR, Mesh
from megatfm.ranks import machine, run_on_all_ranks

HOW_TO_DISABLE = "set parallel.async_tp = false"


def enable_symmetric_memory(mesh: Mesh, device: torch.device) -> None:
    """Open the memory through which tensor-parallel ranks read one another's. A collective.

    Raises UsageError on a CPU and where torch has none of it, and on all ranks MegatfmError where it can't be opened.
    """
    if device.type != "cuda":
        raise UsageError(
            f"parallel.async_tp = true has GPUs read one another's memory, and this run is on {device.type}: "
            f"{HOW_TO_DISABLE}"
        )
    if not dist.is_nccl_available() or not find_spec("torch.distributed._symmetric_memory"):
        raise UsageError(
            f"parallel.async_tp = true: torch {torch.__version__} was built without NCCL, or has no symmetric "
            f"memory: take torch 2.11 or newer for CUDA, or {HOW_TO_DISABLE}"
        )
    run_on_all_ranks("parallel.async_tp = true", lambda: _open(mesh))


def _open(mesh: Mesh) -> None:
    from torch.distributed import _symmetric_memory as memory

    places = dict(mesh.gather_objects((machine(), socket.gethostname()), (TENSOR,)))
    if len(places) > 1:
        hosts = sorted(places.values())
        raise MegatfmError(
            f"a group of {mesh.size(TENSOR)} tensor-parallel ranks is on {' and '.join(hosts)}, and memory is read on "
            f"one machine alone: take a parallel.tp that divides the GPUs of one, or {HOW_TO_DISABLE}"
        )
    name = mesh.group(TENSOR).group_name
    with warnings.catch_warnings():
        # torch 2.13 says that this isn't needed any more; its pass still asks whether it was called.
        warnings.simplefilter("ignore", FutureWarning)
        memory.enable_symm_mem_for_group(name)
    try:
        memory.get_symm_mem_workspace(name, min_size=1)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise MegatfmError(
            f"GPUs can't read one another's memory here ({reason}): {HOW_TO_DISABLE}"
        ) from error
