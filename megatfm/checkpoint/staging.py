"""Staging: copies of a rank's state in host memory, which training can't change.

Copies from a GPU run on a separate stream, while training goes on:

| Stream | Order |
|---|---|
| training | step, `mark_ready` (records an event), forward, backward, `unblock_training` (waits for copies), update |
| copies | wait for that event, copy |

The training thread never blocks; only the writing thread waits for the copies, in `synchronize`.
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
from megatfm.checkpoint.sharded_tensor import view_as_bytes
from megatfm.errors import MegatfmError
from megatfm.ops.transfer import LINE_BYTES, allocate_aligned

log = logging.getLogger("megatfm")

CHUNK_BYTES = 4 * 2**20
"""Bytes of a chunk; small, so that little is left of a chunk whose thread was descheduled."""
Chunk = tuple[np.ndarray, np.ndarray]
"""Target and source bytes."""


class Staging:
    """One host buffer, as large as this rank's data, reused by every save.

    cuda: module that creates streams and events (replaced in tests).
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._gpu: torch.device | None = None
        self._stream: Any = None
        self._ready_event: Any = None  # event: the tensors hold the values to save
        self._copy_event: Any = None  # event: copies from the GPU are complete
        self._training_must_wait = False  # the training stream hasn't waited for `_copy_event` yet
        self._queue: _CopyQueue | None = None
        self._assist_lock = threading.Lock()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def mark_ready(self, tensors: Iterable[Tensor]) -> None:
        """Record, on the current stream, the point at which the tensors hold the values to save."""
        self._gpu = next((tensor.device for tensor in tensors if is_cuda(tensor)), None)
        self._ready_event = self._copy_event = None
        self._training_must_wait = False
        if self._gpu is not None:
            self._ready_event = self._cuda.Event()
            self._ready_event.record(self._cuda.current_stream(self._gpu))

    def copy(self, pieces: Mapping[WriteItem, Tensor]) -> dict[WriteItem, Tensor]:
        """Copy the pieces to the buffer, valid until the next call.

        CPU pieces are complete when this returns, GPU pieces when `synchronize` returns.
        """
        # The thread's current device may be another GPU, on which it would allocate memory.
        with nullcontext() if self._gpu is None else self._cuda.device(self._gpu):
            return self._copy(pieces)

    def unblock_training(self) -> None:
        """Make the current stream wait for the copies, so that later kernels may modify the tensors."""
        must_wait, self._training_must_wait = self._training_must_wait, False
        if must_wait:
            self._cuda.current_stream(self._gpu).wait_event(self._copy_event)

    def synchronize(self) -> None:
        """Wait until copies from a GPU are complete."""
        if self._copy_event is not None:
            self._copy_event.synchronize()

    def _copy(self, pieces: Mapping[WriteItem, Tensor]) -> dict[WriteItem, Tensor]:
        offsets, end = {}, 0
        # Pieces of full disk blocks come first, aligned to blocks, so that they can be written with O_DIRECT.
        for index, piece in sorted(pieces.items(), key=lambda item: item[1].nbytes % BLOCK_BYTES > 0):
            offsets[index] = end
            end += piece.nbytes + -piece.nbytes % LINE_BYTES
        if end > len(self._buffer):
            self._allocate(end)
        copies = {}
        for index, piece in pieces.items():
            flat = self._buffer[offsets[index] : offsets[index] + piece.nbytes]
            copies[index] = flat.view(piece.dtype).view(piece.shape)
        self._copy_from_gpu({i: piece for i, piece in pieces.items() if is_cuda(piece)}, copies)
        chunks: list[Chunk] = []
        for index, piece in pieces.items():
            if is_cuda(piece):
                continue
            if piece.is_contiguous():  # by NumPy, which is faster than torch: it bypasses the caches
                chunks.extend(_split_into_chunks(copies[index], piece.detach()))
            else:
                copies[index].copy_(piece.detach())
        queue = self._queue = _CopyQueue(chunks)
        queue.run()
        with self._assist_lock:  # no thread assists any more
            self._queue = None
        queue.finish_interrupted()
        return copies

    def _copy_from_gpu(self, pieces: Mapping[WriteItem, Tensor], copies: Mapping[WriteItem, Tensor]) -> None:
        if not pieces:
            return
        self._stream = self._stream or self._cuda.Stream(self._gpu)
        self._stream.wait_event(self._ready_event)
        with self._cuda.stream(self._stream):
            for index, piece in pieces.items():
                copies[index].copy_(piece.detach(), non_blocking=self._pinned)
        copy_event = self._cuda.Event()
        copy_event.record(self._stream)
        self._copy_event, self._training_must_wait = copy_event, True

    def assist(self) -> None:
        """Copy remaining chunks in the calling thread, as the staging thread has the lowest priority."""
        with self._assist_lock:
            if self._queue is not None:
                self._queue.run()

    def _allocate(self, size: int) -> None:
        self._release()
        try:
            # Huge pages halve the time of the first copy.
            memory = allocate_aligned(size, BLOCK_BYTES)
        except MemoryError as error:
            raise MegatfmError(
                f'no memory for a copy of what this rank saves ({size / 2**30:.2g} GiB): set checkpoint.mode = "sync", '
                "or shard over more ranks"
            ) from error
        self._buffer = torch.from_numpy(memory)
        if self._gpu is not None:  # torch's own pinned memory comes in powers of two, up to twice the size
            self._pinned = self._pin(self._buffer.data_ptr(), size)
            if not self._pinned:
                log.warning(
                    "could not pin %.2g GiB of host memory: staging copies of checkpoints will be slower", size / 2**30
                )

    def _pin(self, address: int, size: int) -> bool:
        """Pin host memory, and return whether that succeeded.

        In a thread of its own: a call that fails leaves its error set in the calling thread, where the next kernel
        launch would raise it, and torch has no function that clears it.
        """
        results: list[int] = []

        def register() -> None:
            with self._cuda.device(self._gpu):  # a new thread starts on GPU 0
                results.append(int(self._cuda.cudart().cudaHostRegister(address, size, 0)))

        thread = threading.Thread(target=register, name="megatfm-pin", daemon=True)
        thread.start()
        thread.join()
        return results == [0]

    def _release(self) -> None:
        if self._pinned:
            self._cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
            self._pinned = False

    def __del__(self) -> None:
        self._release()


def is_cuda(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU (replaced in tests)."""
    return tensor.is_cuda


class _CopyQueue:
    """Chunks that several threads copy, each taking the next one."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks, self._next = chunks, iter(range(len(chunks)))
        self._done = bytearray(len(chunks))

    def run(self) -> None:
        for index in self._next:
            _copy(*self._chunks[index])
            self._done[index] = 1

    def finish_interrupted(self) -> None:
        """Copy chunks that another thread took but didn't finish. No other thread may run."""
        for chunk, is_done in zip(self._chunks, self._done, strict=True):
            if not is_done:
                _copy(*chunk)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy one chunk. NumPy releases the GIL meanwhile."""
    np.copyto(target, source)


def _split_into_chunks(target: Tensor, source: Tensor) -> Iterator[Chunk]:
    target_bytes, source_bytes = (view_as_bytes(tensor).numpy() for tensor in (target, source))
    for start in range(0, len(source_bytes), CHUNK_BYTES):
        yield target_bytes[start : start + CHUNK_BYTES], source_bytes[start : start + CHUNK_BYTES]
