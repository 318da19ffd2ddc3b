"""The staging copy: a rank's share in host memory, where no later step can touch it."""

import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatfm.errors import MegatfmError

log = logging.getLogger("megatfm")

ALIGNMENT = 64
"""Bytes, of each piece in the buffer: a processor's cache line."""


PARALLEL_BYTES = 64 * 2**20
"""From here on several threads copy: one alone doesn't use up the memory's bandwidth."""
MOST_THREADS = 4


class Staging:
    """One buffer, as large as what this rank writes, and used again by every save."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, pieces: Mapping[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies of the pieces, complete when this returns and valid until the next call."""
        places, end = {}, 0
        for index, piece in pieces.items():
            places[index] = end
            end += math.ceil(piece.nbytes / ALIGNMENT) * ALIGNMENT
        gpu = next((piece.device for piece in pieces.values() if piece.is_cuda), None)
        if end > len(self._buffer):
            self._allocate(end, gpu is not None)
        copies = {}
        for index, piece in pieces.items():
            flat = self._buffer[places[index] : places[index] + piece.nbytes]
            copies[index] = flat.view(piece.dtype).view(piece.shape)
        if gpu or end < PARALLEL_BYTES:
            for index, piece in pieces.items():
                copies[index].copy_(piece.detach(), non_blocking=self._pinned)
        else:
            with ThreadPoolExecutor(_cores()) as pool:
                list(pool.map(lambda index: copies[index].copy_(pieces[index].detach()), pieces))
        if gpu:  # the thread's own device may be another
            torch.cuda.current_stream(gpu).synchronize()
        return copies

    def _allocate(self, size: int, pin: bool) -> None:
        self._release()
        try:
            # NumPy asks the kernel for huge pages, torch doesn't: the first copy then takes half the time.
            self._buffer = torch.from_numpy(np.empty(size, np.uint8))
        except MemoryError as error:
            raise MegatfmError(
                f'no memory for a copy of what this rank saves ({size / 1e9:.2g} GB): set checkpoint.mode = "sync", '
                "or shard over more ranks"
            ) from error
        if pin:  # torch's own pinned memory comes in powers of two, up to twice the size
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0)) == 0

    def _release(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._pinned = False

    def __del__(self) -> None:
        self._release()


def _cores() -> int:
    """This rank's share of the processor."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))
