"""Memory of this process: how much it holds, what to do when there is no more, and a habit of the allocator."""

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from megatfm.errors import MegatfmError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
SNAPSHOT_DIR = "memory"
"""Folder of a run's directory that is there once a rank has run out of memory on a GPU."""
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MB instead of giving them back to the system.

    Otherwise every large activation is mapped, zeroed page by page and unmapped again: 5 to 10 % of a CPU step.
    Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def should_record_allocations(folder: Path, asked: bool) -> bool:
    """Whether to record where allocations come from: on request, and once a run has run out of memory."""
    return asked or (folder / SNAPSHOT_DIR).is_dir()


def record_allocations() -> None:
    """Have the GPU's allocator remember where in Python each block came from, for the snapshot.

    2 µs an allocation (docstring of torch.cuda.memory._record_memory_history), and the last 100,000 of them in memory.
    """
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")


def memory_bytes(device: torch.device) -> int:
    """Most memory that this process held on the GPU, or what it holds now on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


@contextlib.contextmanager
def explain_out_of_memory(folder: Path, rank: int) -> Iterator[None]:
    """Turn running out of memory into one line, and on a GPU leave a snapshot of what is in it.

    The snapshot is memory/rank-K.pickle of the run directory, for https://pytorch.org/memory_viz; what
    `record_allocations` remembers is in it. Raises MegatfmError.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        wanted = _requested_memory(error)
        if wanted is None:
            raise
        held = memory_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        raise MegatfmError(
            f"rank {rank} is out of memory: it held {held / 1e9:.3g} GB{wanted}{_snapshot(folder, rank)}. Lower "
            "train.micro_batch, set train.recompute = 'full', or spread the model out: a higher parallel.zero, "
            "parallel.dp_shard, parallel.tp or parallel.pp"
        ) from error


def _requested_memory(error: BaseException) -> str | None:
    """What could not be had, in words; None for an error of another kind."""
    if isinstance(error, MemoryError):
        return ""
    text = str(error)
    if found := re.search(r"tried to allocate (\d+) bytes", text):  # torch's allocator of the CPU
        return f" and asked for {int(found[1]) / 1e9:.3g} GB more"
    if isinstance(error, torch.OutOfMemoryError):
        found = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        return f" and asked for {found[1]} more" if found else ""
    return None


def _snapshot(folder: Path, rank: int) -> str:
    """Where the GPU's snapshot lies, in words."""
    if not torch.cuda.is_available():
        return ""
    path = folder / SNAPSHOT_DIR / f"rank-{rank}.pickle"
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"; what is in it could not be written to {path}: {error}"
    return f"; what is in it: {path}"
