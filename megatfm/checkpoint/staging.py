"""The staging copy: a rank's share in host memory, where no later step can touch it."""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatfm.checkpoint.flow import BLOCK_BYTES
from megatfm.errors import MegatfmError

log = logging.getLogger("megatfm")

LINE_BYTES = 64
"""A processor's cache line, at which each piece in the buffer begins; those of whole blocks of the disk lie at blocks,
so that they can be written right from there."""


class Staging:
    """One buffer, as large as what this rank writes, and used again by every save."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, pieces: Mapping[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies of the pieces, complete when this returns and valid until the next call."""
        places, end = {}, 0
        for index, piece in sorted(pieces.items(), key=lambda item: item[1].nbytes % BLOCK_BYTES > 0):
            places[index] = end
            end += piece.nbytes + -piece.nbytes % LINE_BYTES
        gpu = next((piece.device for piece in pieces.values() if piece.is_cuda), None)
        if end > len(self._buffer):
            self._allocate(end, gpu is not None)
        copies = {}
        for index, piece in pieces.items():
            flat = self._buffer[places[index] : places[index] + piece.nbytes]
            copies[index] = flat.view(piece.dtype).view(piece.shape)
        for index, piece in pieces.items():
            _copy(copies[index], piece.detach(), self._pinned)
        if gpu:  # the thread's own device may be another
            torch.cuda.current_stream(gpu).synchronize()
        return copies

    def _allocate(self, size: int, pin: bool) -> None:
        self._release()
        try:
            # NumPy asks the kernel for huge pages, torch doesn't: the first copy then takes half the time.
            memory = np.empty(size + BLOCK_BYTES, np.uint8)
        except MemoryError as error:
            raise MegatfmError(
                f'no memory for a copy of what this rank saves ({size / 1e9:.2g} GB): set checkpoint.mode = "sync", '
                "or shard over more ranks"
            ) from error
        start = -memory.ctypes.data % BLOCK_BYTES
        self._buffer = torch.from_numpy(memory[start : start + size])
        if pin:  # torch's own pinned memory comes in powers of two, up to twice the size
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0)) == 0

    def _release(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._pinned = False

    def __del__(self) -> None:
        self._release()


def _copy(target: Tensor, source: Tensor, pinned: bool) -> None:
    """One piece. One thread does it: training has better use for the other cores meanwhile."""
    if source.is_cuda or not source.is_contiguous():
        target.copy_(source, non_blocking=pinned)
    else:  # NumPy writes past the caches, in half of torch's time
        np.copyto(_bytes(target), _bytes(source))


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
