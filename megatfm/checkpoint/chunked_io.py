"""Chunked reads and writes of an open file, hashed in a parallel thread, with O_DIRECT where that is faster."""

import errno
import fcntl
import itertools
import mmap
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import numpy as np
from blake3 import blake3

CHUNK_BYTES = 4 * 2**20
"""Unit of reads, writes and hashing; small, so that disk and hash rarely wait for each other."""
BLOCK_BYTES = 4096
"""Unit of direct writes: the largest block size of current disks."""
MAX_QUEUED_CHUNKS = 4
"""Chunks that the hash may lag behind."""
MIN_DIRECT_BYTES = 2**20
"""Smaller writes are buffered together with the next one: a separate write would take longer."""
READAHEAD = 2
"""Direct reads in flight, so that the disk never waits while a finished read is copied."""


_progress = itertools.count(1)
_done = 0


def note_progress() -> None:
    """Count one more unit of slow work between training steps, so that the hang watchdog sees progress."""
    global _done
    _done = next(_progress)


def count_progress() -> int:
    """Return the number of such units that this process has done."""
    return _done


class ThreadedBlake3:
    """A BLAKE3 hash computed in a separate thread, while the caller reads or writes the next chunk.

    Buffers must not change until `hexdigest`. The thread starts only after the first chunk: most files are smaller.
    """

    def __init__(self) -> None:
        self._digest = blake3()
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(maxsize=MAX_QUEUED_CHUNKS)
        self._thread: threading.Thread | None = None
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()

    def update(self, chunk: memoryview) -> None:
        """Add a chunk, whose memory must not change until `hexdigest`."""
        self._size += chunk.nbytes
        note_progress()
        if self._thread is None and self._size < CHUNK_BYTES:
            self._digest.update(chunk)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._hash_chunks, name="megatfm-hash", daemon=True)
            self._thread.start()
        self._chunks.put(chunk)

    def hexdigest(self) -> str:
        """Wait for the thread and return the hash of all chunks so far, in hexadecimal. More chunks may follow."""
        self._join()
        return self._digest.hexdigest()

    def _hash_chunks(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._digest.update(chunk)

    def _join(self) -> None:
        if self._thread is not None:
            self._chunks.put(None)
            self._thread.join()
            self._thread = None


class FileWriter:
    """Writes bytes to a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, chunk: memoryview) -> None:
        """Append the full chunk, also if the kernel writes it in parts. Raises OSError on a full disk."""
        while chunk.nbytes:
            chunk = chunk[os.write(self._fd, chunk) :]

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


class DirectFileWriter(FileWriter):
    """Writes with O_DIRECT in blocks of 4 KiB.

    A large chunk whose address and file offset are block-aligned is written without a copy; anything else goes through
    a buffer, and the last partial block through the page cache.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._buffer = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES), np.uint8)
        self._buffered = 0

    def write(self, chunk: memoryview) -> None:
        data = np.frombuffer(chunk, np.uint8)
        aligned = len(data) // BLOCK_BYTES * BLOCK_BYTES
        if aligned >= MIN_DIRECT_BYTES and not (data.ctypes.data % BLOCK_BYTES or self._buffered % BLOCK_BYTES):
            self._write_blocks(self._buffer[: self._buffered])
            self._write_blocks(data[:aligned])
            self._buffered, data = 0, data[aligned:]
        while len(data):
            n_copied = min(len(data), CHUNK_BYTES - self._buffered)
            self._buffer[self._buffered : self._buffered + n_copied] = data[:n_copied]
            self._buffered += n_copied
            data = data[n_copied:]
            if self._buffered == CHUNK_BYTES:
                self._write_blocks(self._buffer)
                self._buffered = 0

    def flush(self) -> None:
        aligned = self._buffered // BLOCK_BYTES * BLOCK_BYTES
        self._write_blocks(self._buffer[:aligned])
        _disable_direct_io(self._fd)
        super().write(self._buffer[aligned : self._buffered].data)

    def _write_blocks(self, blocks: np.ndarray) -> None:
        n_written = 0
        try:
            n_written = os.write(self._fd, blocks.data) if len(blocks) else 0
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if n_written < len(blocks):  # the rest may be part of a block, or the filesystem has no O_DIRECT
            _disable_direct_io(self._fd)
            super().write(blocks[n_written:].data)


class FileReader:
    """Reads a file sequentially."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_into(self, target: memoryview) -> int:
        """Fill the beginning of `target`; returns the number of bytes, 0 at the end of the file."""
        return os.readv(self._fd, [target[:CHUNK_BYTES]])

    def close(self) -> None:
        """Stop reading; the caller closes the file descriptor."""


class DirectFileReader(FileReader):
    """Reads chunks with O_DIRECT, some of them ahead of the requests."""

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(fd)
        self._size, self._submitted = size, 0
        self._pool = ThreadPoolExecutor(READAHEAD, "megatfm-read")
        self._pending_reads: deque[tuple[mmap.mmap, Future[int]]] = deque()
        self._chunk = np.empty(0, np.uint8)
        for _ in range(READAHEAD + 1):
            self._submit_read(mmap.mmap(-1, CHUNK_BYTES))

    def read_into(self, target: memoryview) -> int:
        if not len(self._chunk) and self._pending_reads:
            buffer, size = self._pending_reads[0]
            self._chunk = np.frombuffer(buffer, np.uint8, size.result())
        n_copied = min(target.nbytes, len(self._chunk))
        np.copyto(np.frombuffer(target, np.uint8, n_copied), self._chunk[:n_copied])
        self._chunk = self._chunk[n_copied:]
        if not len(self._chunk) and self._pending_reads:
            self._submit_read(self._pending_reads.popleft()[0])
        return n_copied

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _submit_read(self, buffer: mmap.mmap) -> None:
        if self._submitted < self._size:
            future = self._pool.submit(self._read_chunk, memoryview(buffer), self._submitted)
            self._pending_reads.append((buffer, future))
            self._submitted += CHUNK_BYTES

    def _read_chunk(self, buffer: memoryview, offset: int) -> int:
        """Read a chunk and return its size, which is less than the buffer only at the end of the file."""
        n_read, is_buffered = 0, False
        while n_read < len(buffer):
            try:
                n_bytes = os.preadv(self._fd, [buffer[n_read:]], offset + n_read)
            except OSError as error:
                if error.errno != errno.EINVAL or is_buffered:
                    raise
            else:
                if not n_bytes:
                    break
                n_read += n_bytes
            if n_read < len(buffer):  # the rest may be part of a block, or the filesystem has no O_DIRECT
                _disable_direct_io(self._fd)
                is_buffered = True
        return n_read


def open_reader(fd: int, size: int, direct: bool) -> FileReader:
    """Return a reader of a file of `size` bytes.

    direct: bypass the page cache, unless it holds the file or the filesystem has no O_DIRECT.
    """
    if not direct or _is_in_page_cache(fd, size):
        return FileReader(fd)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return FileReader(fd)
    return DirectFileReader(fd, size)


def _is_in_page_cache(fd: int, size: int) -> bool:
    """Return whether the page cache holds a file, sampled at three bytes."""
    try:
        return all(os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) for offset in (0, size // 2, size - 1))
    except OSError:
        return False


def _disable_direct_io(fd: int) -> None:
    """Use the page cache from now on."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
