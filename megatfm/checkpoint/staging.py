"""The staging copy: what a rank saves, in host memory, where no later step can touch it.

Copies from a GPU use a separate stream, while training goes on:

| Stream | | |---|---| | training | step → `mark_ready` (records an event) → next forward and backward →
`unblock_training` (waits for the copies) → update | | copies | waits for that event → copies |

The host waits for neither: only the thread that writes waits, by `synchronize`, until the copies are there.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatfm.checkpoint.chunked_io import BLOCK_BYTES
from megatfm.checkpoint.planner import WriteItem
from megatfm.errors import MegatfmError
from megatfm.ops.transfer import LINE_BYTES, aligned_bytes

log = logging.getLogger("megatfm")

PART_BYTES = 4 * 2**20
"""Copied at once: nobody waits long for a part that a thread has begun and is not let finish."""
Part = tuple[np.ndarray, np.ndarray]
"""Target and source."""


class Staging:
    """One buffer, as large as this rank's data, reused by every save.

    cuda: what makes streams and events.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._gpu: torch.device | None = None
        self._stream: Any = None
        self._ready_event: Any = None  # events: what comes before the copies is done, and these are
        self._copied: Any = None
        self._copy_event: Any = None
        self._copying: _CopyQueue | None = None
        self._assist_lock = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def mark_ready(self, tensors: Iterable[Tensor]) -> None:
        """Record, on the current stream, the point at which the tensors hold the values to save."""
        self._gpu = next((tensor.device for tensor in tensors if is_cuda(tensor)), None)
        self._ready_event = self._copied = self._copy_event = None
        if self._gpu is not None:
            self._ready_event = self._cuda.Event()
            self._ready_event.record(self._cuda.current_stream(self._gpu))

    def copy(self, pieces: Mapping[WriteItem, Tensor]) -> dict[WriteItem, Tensor]:
        """Copies of the pieces, valid until the next call. Complete when this returns, those from a GPU when
        `synchronize` does."""
        # A thread's own device may be another, where it would begin to use memory.
        with nullcontext() if self._gpu is None else self._cuda.device(self._gpu):
            return self._copy(pieces)

    def unblock_training(self) -> None:
        """Let the current stream wait for the copies: kernels launched from now on may modify the tensors."""
        copied, self._copy_event = self._copy_event, None
        if copied is not None:
            self._cuda.current_stream(self._gpu).wait_event(copied)

    def synchronize(self) -> None:
        """Wait until the copies from a GPU are there."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, pieces: Mapping[WriteItem, Tensor]) -> dict[WriteItem, Tensor]:
        places, end = {}, 0
        # Pieces of whole disk blocks are aligned to blocks, so that they can be written directly.
        for index, piece in sorted(pieces.items(), key=lambda item: item[1].nbytes % BLOCK_BYTES > 0):
            places[index] = end
            end += piece.nbytes + -piece.nbytes % LINE_BYTES
        if end > len(self._buffer):
            self._allocate(end)
        copies = {}
        for index, piece in pieces.items():
            flat = self._buffer[places[index] : places[index] + piece.nbytes]
            copies[index] = flat.view(piece.dtype).view(piece.shape)
        self._copy_from_gpu({i: piece for i, piece in pieces.items() if is_cuda(piece)}, copies)
        parts: list[Part] = []
        for index, piece in pieces.items():
            if is_cuda(piece):
                continue
            if (
                piece.is_contiguous()
            ):  # NumPy takes less time for it than torch where it writes past the caches
                parts.extend(_parts(copies[index], piece.detach()))
            else:
                copies[index].copy_(piece.detach())
        copying = self._copying = _CopyQueue(parts)
        copying.run()
        with self._assist_lock:  # no thread assists any more
            self._copying = None
        copying.finish_interrupted()
        return copies

    def _copy_from_gpu(self, pieces: Mapping[WriteItem, Tensor], copies: Mapping[WriteItem, Tensor]) -> None:
        if not pieces:
            return
        self._stream = self._stream or self._cuda.Stream(self._gpu)
        self._stream.wait_event(self._ready_event)
        with self._cuda.stream(self._stream):
            for index, piece in pieces.items():
                copies[index].copy_(piece.detach(), non_blocking=self._pinned)
        copied = self._cuda.Event()
        copied.record(self._stream)
        self._copied = self._copy_event = copied

    def assist(self) -> None:
        """Copy some of the remaining parts in the calling thread, since the staging thread runs at the lowest
        priority."""
        with self._assist_lock:
            if self._copying is not None:
                self._copying.run()

    def _allocate(self, size: int) -> None:
        self._release()
        try:
            # In huge pages, so that the first copy takes half the time.
            memory = aligned_bytes(size, BLOCK_BYTES)
        except MemoryError as error:
            raise MegatfmError(
                f'no memory for a copy of what this rank saves ({size / 2**30:.2g} GiB): set checkpoint.mode = "sync", '
                "or shard over more ranks"
            ) from error
        self._buffer = torch.from_numpy(memory)
        if self._gpu is not None:  # torch's own pinned memory comes in powers of two, up to twice the size
            self._pinned = int(self._cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), size, 0)) == 0
            if not self._pinned:
                log.warning(
                    "no memory of %.2g GiB that stays where it is: copies of what is saved are slower",
                    size / 2**30,
                )

    def _release(self) -> None:
        if self._pinned:
            self._cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._pinned = False

    def __del__(self) -> None:
        self._release()


def is_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU."""
    return tensor.is_cuda


class _CopyQueue:
    """Parts that two threads may copy together, each of them taking the next one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._next = parts, iter(range(len(parts)))
        self._done = bytearray(len(parts))

    def run(self) -> None:
        for number in self._next:
            _copy(*self._parts[number])
            self._done[number] = 1

    def finish_interrupted(self) -> None:
        """Finish interrupted copies; no other thread works on it."""
        for part, event in zip(self._parts, self._done, strict=True):
            if not event:
                _copy(*part)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """One part. Other threads may run Python meanwhile."""
    np.copyto(target, source)


def _parts(target: Tensor, source: Tensor) -> Iterator[Part]:
    target_bytes, of = _bytes(target), _bytes(source)
    for start in range(0, len(of), PART_BYTES):
        yield target_bytes[start : start + PART_BYTES], of[start : start + PART_BYTES]


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
