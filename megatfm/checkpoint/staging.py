"""The staging copy: a rank's share in host memory, where no later step can touch it."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatfm.checkpoint.flow import BLOCK_BYTES
from megatfm.errors import MegatfmError
from megatfm.ops.aligned import LINE_BYTES, aligned_bytes

log = logging.getLogger("megatfm")

PART_BYTES = 4 * 2**20
"""Copied at once: nobody waits long for a part that a thread has begun and is not let finish."""
Part = tuple[np.ndarray, np.ndarray]
"""Target and source."""


class Staging:
    """One buffer, as large as what this rank writes, and used again by every save."""

    def __init__(self) -> None:
        self._copying: _Copying | None = None
        self._helping = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def copy(self, pieces: Mapping[MetadataIndex, Tensor]) -> dict[MetadataIndex, Tensor]:
        """Copies of the pieces, complete when this returns and valid until the next call."""
        places, end = {}, 0
        # Those of whole blocks of the disk lie at blocks, so that they can be written right from there.
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
        parts: list[Part] = []
        for index, piece in pieces.items():
            if piece.is_cuda or not piece.is_contiguous():
                copies[index].copy_(piece.detach(), non_blocking=self._pinned)
            else:  # NumPy takes less time for it than torch where it writes past the caches
                parts.extend(_parts(copies[index], piece.detach()))
        copying = self._copying = _Copying(parts)
        copying.go_on()
        with self._helping:  # whoever helps has left
            self._copying = None
        copying.complete()
        if gpu:  # the thread's own device may be another
            torch.cuda.current_stream(gpu).synchronize()
        return copies

    def help(self) -> None:
        """Take part in what another thread copies: it has the lowest priority, and here somebody waits for it."""
        with self._helping:
            if self._copying is not None:
                self._copying.go_on()

    def _allocate(self, size: int, pin: bool) -> None:
        self._release()
        try:
            # In huge pages, so that the first copy takes half the time.
            memory = aligned_bytes(size, BLOCK_BYTES)
        except MemoryError as error:
            raise MegatfmError(
                f'no memory for a copy of what this rank saves ({size / 1e9:.2g} GB): set checkpoint.mode = "sync", '
                "or shard over more ranks"
            ) from error
        self._buffer = torch.from_numpy(memory)
        if pin:  # torch's own pinned memory comes in powers of two, up to twice the size
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0)) == 0

    def _release(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._pinned = False

    def __del__(self) -> None:
        self._release()


class _Copying:
    """Parts that two threads may copy together, each of them taking the next one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._next = parts, iter(range(len(parts)))
        self._done = bytearray(len(parts))

    def go_on(self) -> None:
        for number in self._next:
            _copy(*self._parts[number])
            self._done[number] = 1

    def complete(self) -> None:
        """Copy what was begun and interrupted; nobody else is at it any more."""
        for part, done in zip(self._parts, self._done, strict=True):
            if not done:
                _copy(*part)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """One part. Other threads may run Python meanwhile."""
    np.copyto(target, source)


def _parts(target: Tensor, source: Tensor) -> Iterator[Part]:
    to, of = _bytes(target), _bytes(source)
    for start in range(0, len(of), PART_BYTES):
        yield to[start : start + PART_BYTES], of[start : start + PART_BYTES]


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
