"""NCCL's flight recorder: the last collectives of every rank, for when a run hangs on GPUs."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

NUMERIC_ENV_VARS = {
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),  # collectives that are remembered
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "{folder}/logs/nccl-"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("", "1"),
}
"""Variable → its older name, and its value."""


def start_flight_recorder(folder: Path, device: str) -> None:
    """Switch the recorder on, where there are GPUs; before the process group is made. What is set already stays.

    A rank whose collective times out leaves `logs/nccl-RANK`, a pickle for torch's flight recorder analyzer.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return
    for name, (old_name, value) in NUMERIC_ENV_VARS.items():
        if old_name not in os.environ:
            os.environ.setdefault(name, value.format(folder=folder))


def dump_flight_recorder(file: int, rank: int) -> None:
    """Write this rank's unfinished collectives, as JSON, to an open file. Does nothing without NCCL."""
    if not (dist.is_initialized() and dist.is_nccl_available() and "nccl" in str(dist.get_backend_config())):
        return
    from torch._C import _distributed_c10d

    # NCCL's groups have a recorder of their own, which that of all backends need not know of.
    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    dump = dump or _distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
    trace = dump(includeCollectives=True, onlyActive=True)
    os.write(file, f"Unfinished collectives of rank {rank}: ".encode() + trace + b"\n")
