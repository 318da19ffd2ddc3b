"""Bytes on their way between memory and an open file: hashed meanwhile, and past the page cache where that helps."""

import fcntl
import mmap
import os
import queue
import threading
from types import TracebackType
from typing import Self

import numpy as np
from blake3 import blake3

CHUNK_BYTES = 4 * 2**20
"""Handed to the disk and to the hash at once, so that neither waits long for the other."""
BLOCK_BYTES = 4096
"""What direct writes are made of: the largest block of the disks that there are."""
QUEUED = 4
"""Chunks that the hash may be behind."""


class Hash:
    """A BLAKE3 that is computed in a thread of its own, while the caller reads or writes the next chunk.

    What it is given must not change until `hexdigest`. The first small chunks make no thread: most files have no
    others.
    """

    def __init__(self) -> None:
        self._digest = blake3()
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(maxsize=QUEUED)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._join()

    def update(self, chunk: memoryview) -> None:
        if self._thread is None and chunk.nbytes < CHUNK_BYTES:
            self._digest.update(chunk)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="megatfm-hash", daemon=True)
            self._thread.start()
        self._chunks.put(chunk)

    def hexdigest(self) -> str:
        self._join()
        return self._digest.hexdigest()

    def _work(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._digest.update(chunk)

    def _join(self) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()
            self._thread = None


class Output:
    """Bytes on their way to a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, chunk: memoryview) -> None:
        while chunk.nbytes:
            chunk = chunk[os.write(self._fd, chunk) :]

    def flush(self) -> None:
        """Nothing is held back."""


class DirectOutput(Output):
    """The same past the page cache: whole blocks, out of memory that begins at a page; the rest the usual way."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._buffer = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES), np.uint8)
        self._held = 0

    def write(self, chunk: memoryview) -> None:
        data = np.frombuffer(chunk, np.uint8)
        while len(data):
            taken = min(len(data), CHUNK_BYTES - self._held)
            self._buffer[self._held : self._held + taken] = data[:taken]
            self._held += taken
            data = data[taken:]
            if self._held == CHUNK_BYTES:
                self._put(CHUNK_BYTES)

    def flush(self) -> None:
        whole = self._held // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            self._put(whole)
        self._as_usual()
        super().write(self._buffer[: self._held].data)

    def _put(self, size: int) -> None:
        """Write the first bytes of the buffer, and move the others to its front."""
        done = os.write(self._fd, self._buffer[:size].data)
        if done < size:  # what is left may not be whole blocks
            self._as_usual()
            super().write(self._buffer[done:size].data)
        self._buffer[: self._held - size] = self._buffer[size : self._held].copy()
        self._held -= size

    def _as_usual(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
