"""Memory of this process: how much it holds, and a habit of the allocator that costs time on a CPU."""

import ctypes

import psutil
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
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


def memory_bytes(device: torch.device) -> int:
    """Most memory that this process held on the GPU, or what it holds now on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
