"""Indexes of all shards of a corpus: the recently used ones in memory, or all in a file that processes share.

Reading a document's tokens needs its span: 8 bytes. For a large corpus, each rank and each of its workers would hold
spans of millions of documents. Instead, the first process writes the spans of all documents to a file in the cache
folder, named by a hash of the manifest's shards, and all processes of the machine map it read-only. A page that several
processes use is in memory once. The system may drop any page, and each process unmaps the spans of shards that it used
least recently.

On disk: `HEADER_BYTES` with a line of JSON, then the arrays of `_Tables`, one after another.
"""

import fcntl
import json
import logging
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from megatfm.corpus.byte_cache import ByteCache, count_bytes
from megatfm.corpus.manifest import CorpusShard, Manifest
from megatfm.corpus.shard_index import FRAME_DTYPE, SPAN_DTYPE, ShardIndex, compute_running_sum
from megatfm.corpus.storage import INDEX_FOLDER, ShardCacheConfig, ShardStorage, acquire_lock, make_room
from megatfm.errors import MegatfmError

INDEX_CACHE_BYTES = 2**26
"""Enough for the spans of eight million samples: the shards that a rank's streams read at a time."""
COMPLETE_CACHE_BYTES = 2**24
SHARED_FROM_SAMPLES = 2**21
"""Samples from which a corpus's indexes are shared. Smaller ones take little memory in each process."""
MAPPED_BYTES = 2**24
"""Bytes of shared spans that a process keeps mapped, before it unmaps the least recently used."""
HEADER_BYTES = 4096
_HAS_HASHES, _HAS_PACKED_FRAMES = 1, 2

log = logging.getLogger("megatfm")


class Indexes:
    """The indexes of a corpus. Each is read when it is needed, and verified against the manifest each time.

    `indexes[shard]` holds the samples' spans only, which is enough to read tokens; `complete(shard)` holds all columns.
    At most `INDEX_CACHE_BYTES` of spans are in memory, or one index if that is larger. `blocks` [n_blocks + 1] holds
    the first sample of each frame of all shards, `first_blocks` [n_shards + 1] the first frame of each shard.
    """

    first_blocks: NDArray[np.int64]
    blocks: NDArray[np.int64]

    def __init__(self, store: ShardStorage, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._cache: ByteCache[int, ShardIndex] = ByteCache(INDEX_CACHE_BYTES, count_bytes)
        self._complete: ByteCache[int, ShardIndex] = ByteCache(COMPLETE_CACHE_BYTES, count_bytes)
        # Copies, since a view would keep the whole index in memory.
        counts = [index.frames["samples"].copy() for index in self]
        self.first_blocks = compute_running_sum(list(map(len, counts)))
        self.blocks = compute_running_sum(np.concatenate(counts))

    def __len__(self) -> int:
        return len(self._manifest.shards)

    def __getitem__(self, shard: int) -> ShardIndex:
        shard = range(len(self))[shard]
        return self._cache.get(shard, partial(self._load, shard))

    def __iter__(self) -> Iterator[ShardIndex]:
        return (self[shard] for shard in range(len(self)))

    def complete(self, shard: int) -> ShardIndex:
        """Return the index of a shard with all columns: keys and text sizes, too."""
        return self._complete.get(shard, partial(self._open, self._manifest.shards[shard]))

    def _load(self, shard: int) -> ShardIndex:
        return self._open(self._manifest.shards[shard]).without_keys()

    def _open(self, shard: CorpusShard) -> ShardIndex:
        self._store.check(shard.index)
        data = self._store.read(shard.index, 0, shard.index.bytes)
        try:
            if blake3(data).hexdigest() != shard.index.blake3:
                raise MegatfmError("its BLAKE3 hash is not the manifest's")
            return ShardIndex.decode(data, shard, self._manifest.dtype.itemsize)
        except MegatfmError as error:
            raise MegatfmError(f"{self._store.path(shard.index)}: {error}: {self._store.remedy}") from error


class SharedIndexes(Indexes):
    """Indexes in one file that all processes of a machine map.

    One process writes the file while the others wait for its lock. Each process verifies the file's hash when it opens
    the file, and holds a shared lock until it exits, since `make_room` removes no locked file. The constructor raises
    an OSError if the file can't be written or mapped.
    """

    def __init__(self, store: ShardStorage, manifest: Manifest, cache: ShardCacheConfig) -> None:
        self._store, self._manifest, self._shared_cache = store, manifest, cache
        for shard in manifest.shards:
            store.check(shard.index)
        self._complete = ByteCache(COMPLETE_CACHE_BYTES, count_bytes)
        key = _hash_shards(manifest)
        path = cache.folder.expanduser() / INDEX_FOLDER / key
        if (file := _open_tables(path, key, manifest)) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = acquire_lock(path.with_name(f".{key}.lock"))
            try:
                if (file := _open_tables(path, key, manifest)) is None:
                    self._write(path, key)
                    file = _open_tables(path, key, manifest)
            finally:
                os.close(lock)
        if file is None:
            raise OSError(f"{path} does not hold what was written")
        descriptor, tables = file
        with suppress(OSError):
            os.utime(path)
        try:
            self._memory = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)  # the mapping has a duplicate, which keeps the lock
        self._arrays = tables.views(self._memory)
        self.first_blocks, self.blocks = self._arrays["first_blocks"], self._arrays["blocks"]
        self._first_samples = compute_running_sum([shard.samples for shard in manifest.shards])
        self._cache = ByteCache(MAPPED_BYTES, count_bytes, self._release)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_indexes, (self._store, self._manifest, self._shared_cache)

    def _load(self, shard: int) -> ShardIndex:
        frames, samples = (
            slice(*ends[shard : shard + 2].tolist()) for ends in (self.first_blocks, self._first_samples)
        )
        flags = int(self._arrays["kinds"][shard])
        hashes = self._arrays["hashes"][frames] if flags & _HAS_HASHES else None
        spans = self._arrays["spans"][samples]
        return ShardIndex(self._arrays["frames"][frames], spans, hashes, bool(flags & _HAS_PACKED_FRAMES))

    def _release(self, shard: int) -> None:
        """Unmap the pages of a shard's spans. A thread that still reads them maps them in again."""
        start, end = (HEADER_BYTES + SPAN_DTYPE.itemsize * self._first_samples[shard : shard + 2]).tolist()
        start -= start % mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _write(self, path: Path, key: str) -> None:
        n_samples = sum(shard.samples for shard in self._manifest.shards)
        size = HEADER_BYTES + SPAN_DTYPE.itemsize * n_samples
        if size > self._shared_cache.limit:
            raise OSError(f"{size:,} bytes are more than data.cache_bytes = {self._shared_cache.limit:,}")
        make_room(self._shared_cache, size)
        disk = os.statvfs(path.parent)
        if size > disk.f_bavail * disk.f_frsize:
            raise OSError(f"{size:,} bytes don't fit on the disk of {path.parent}")
        log.info(f"writing the indexes of {n_samples:,} documents to {path}, for all processes of this machine")
        frames, hashes, kinds = [], [], []
        with _write_atomically(path) as file:
            for shard in self._manifest.shards:
                index = self._open(shard).without_keys()
                file.write(index.samples.tobytes())
                n = len(index.frames)
                frames.append(index.frames)
                hashes.append(np.zeros(n, "<u8") if index.frame_hashes is None else index.frame_hashes)
                kinds.append(
                    _HAS_HASHES * (index.frame_hashes is not None) + _HAS_PACKED_FRAMES * index.has_packed_frames
                )
            all_frames = np.concatenate(frames)
            first_blocks, blocks = (
                compute_running_sum(list(map(len, frames))),
                compute_running_sum(all_frames["samples"]),
            )
            for array in (first_blocks, np.array(kinds), blocks, np.concatenate(hashes), all_frames):
                file.write(array.tobytes())
            file.header = {"key": key, "blocks": len(all_frames)}


class _Tables(NamedTuple):
    """The arrays of a file of shared indexes, described by their sizes."""

    samples: int
    shards: int
    blocks: int

    def fields(self) -> Iterator[tuple[str, np.dtype[Any], int]]:
        """Yield name, type and length of each array, in stored order."""
        yield "spans", SPAN_DTYPE, self.samples
        yield "first_blocks", np.dtype("<i8"), self.shards + 1
        yield "kinds", np.dtype("<i8"), self.shards
        yield "blocks", np.dtype("<i8"), self.blocks + 1
        yield "hashes", np.dtype("<u8"), self.blocks
        yield "frames", FRAME_DTYPE, self.blocks

    @property
    def size(self) -> int:
        return HEADER_BYTES + sum(dtype.itemsize * n for _, dtype, n in self.fields())

    def views(self, memory: mmap.mmap) -> dict[str, NDArray[Any]]:
        offset, arrays = HEADER_BYTES, {}
        for name, dtype, n in self.fields():
            arrays[name] = np.frombuffer(memory, dtype, n, offset)
            offset += dtype.itemsize * n
        return arrays


class _HashedFile:
    """A file in progress: a header of one page, and hashed content after it."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb")
        self._file.write(bytes(HEADER_BYTES))
        self._hash = blake3()
        self.header: dict[str, Any] = {}

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(json.dumps({**self.header, "blake3": self._hash.hexdigest()}).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # errors of writing were raised before
            self._file.close()


@contextmanager
def _write_atomically(path: Path) -> Iterator[_HashedFile]:
    """Write a file under a temporary name, and rename it to `path` at the end.

    The caller holds a lock, so every process uses the same temporary name and overwrites what a killed one left.
    """
    partial_path = path.with_name(f".{path.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = _HashedFile(os.open(partial_path, flags, 0o666))
    try:
        yield file
        file.finish()
        partial_path.replace(path)
    finally:
        file.close()
        partial_path.unlink(missing_ok=True)


def open_indexes(store: ShardStorage, manifest: Manifest, cache: ShardCacheConfig | None) -> Indexes:
    """Open the indexes of a corpus.

    They are shared in the folder of `cache` if it is given, the corpus is large (`SHARED_FROM_SAMPLES`) and the folder
    can be used; else this process has its own.
    """
    if cache is None or sum(shard.samples for shard in manifest.shards) < SHARED_FROM_SAMPLES:
        return Indexes(store, manifest)
    try:
        return SharedIndexes(store, manifest, cache)
    except (OSError, RuntimeError) as error:  # the latter of a user without a home
        log.warning(
            f"{store.folder}: its indexes are not shared ({error}), so every process holds up to "
            f"{INDEX_CACHE_BYTES // 2**20} MiB of them: choose a folder on a disk of this machine as data.cache_dir"
        )
        return Indexes(store, manifest)


def _hash_shards(manifest: Manifest) -> str:
    """Return a hash of everything that determines the tables."""
    shards = [shard.model_dump(mode="json") for shard in manifest.shards]
    content = json.dumps([1, manifest.token_dtype, shards], sort_keys=True)
    return blake3(content.encode()).hexdigest()


def _open_tables(path: Path, key: str, manifest: Manifest) -> tuple[int, _Tables] | None:
    """Open the file of tables under a shared lock; return its descriptor and tables, None if missing or damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if (tables := _read_header(descriptor, key, manifest)) is not None:
            result, descriptor = (descriptor, tables), -1
            return result
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _read_header(descriptor: int, key: str, manifest: Manifest) -> _Tables | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        header = json.loads(os.pread(descriptor, HEADER_BYTES, 0).partition(b"\n")[0])
        samples = sum(shard.samples for shard in manifest.shards)
        tables = _Tables(samples, len(manifest.shards), int(header["blocks"]))
        if header["key"] != key or status.st_size != tables.size:
            return None
        digest, offset = blake3(), HEADER_BYTES
        while data := os.pread(descriptor, 2**20, offset):
            digest.update(data)
            offset += len(data)
        return tables if header["blake3"] == digest.hexdigest() else None
    return None
