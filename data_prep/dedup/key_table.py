"""Tables of keys on disk, the partitioned files that a search sorts them into, and its division into parts."""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.files import RESTORE, AtomicFile, read_at
from megatfm.data_prep.dedup.hashing import Hashes
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.errors import MegatfmError

RowIndices = NDArray[np.int64]

# A search has at least MIN_PARTS parts if each then has PART_ROWS rows: enough for a few dozen processes, and small
# enough to sort near the cache.
MIN_PARTS = 64
PART_ROWS = 2**18


class KeyTable:
    """The rows of all parts in order; each part is a file of `counts` rows.

    A file is opened only when its rows are read, since it may be removed once no stage needs it.
    """

    def __init__(self, files: Sequence[Path], dtype: str, columns: int, counts: Sequence[int]) -> None:
        self._files, self._dtype, self.columns = files, np.dtype(dtype), columns
        self.begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.begins[-1])

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Read consecutive rows [end − begin, columns]."""
        result = np.empty((end - begin, self.columns), self._dtype)
        for part in range(*np.searchsorted(self.begins, (begin + 1, end), "left") - (1, 0)):
            first, last = max(begin, int(self.begins[part])), min(end, int(self.begins[part + 1]))
            offset = (first - int(self.begins[part])) * self.columns
            values = read_array(self._files[part], self._dtype, offset, (last - first) * self.columns)
            result[first - begin : last - begin] = values.reshape(-1, self.columns)
        return result

    def pick(self, rows: RowIndices) -> NDArray[Any]:
        """Read the rows [n, columns] with these ascending numbers."""
        result = np.empty((len(rows), self.columns), self._dtype)
        start = 0
        while start < len(rows):
            part = int(np.searchsorted(self.begins, rows[start], "right")) - 1
            end = int(np.searchsorted(rows, self.begins[part + 1], "left"))
            shape = (int(self.begins[part + 1] - self.begins[part]), self.columns)
            mapped = np.memmap(self._files[part], self._dtype, "r", shape=shape)
            # mode="clip" changes no number, but spares a copy.
            np.take(mapped, rows[start:end] - self.begins[part], 0, out=result[start:end], mode="clip")
            start = end
        return result


def write_keys(path: Path, rows: Iterable[NDArray[Any]]) -> int:
    """Write the rows of a part to a file, and commit it. Returns the number of rows."""
    count = 0
    with AtomicFile(path) as file:
        for batch in rows:
            file.write(np.ascontiguousarray(batch).tobytes())
            count += len(batch)
        file.commit()
    return count


class RunParts(Protocol):
    """Runs parts 0 … count − 1 of a step, each once over all processes."""

    def __call__(
        self,
        step: str,
        count: int,
        total: int,
        work: Callable[[int, UpdateProgress], StageResult],
        join: Callable[[Iterable[StageResult]], StageResult] = lambda _: {},
    ) -> StageResult:
        """Run the parts. work: reports its progress towards `total`. Returns `join` of all results."""
        ...


@dataclass(frozen=True)
class DedupContext:
    """The folder of a search, the memory of a process, and the function that runs its parts."""

    folder: Path
    memory_bytes: int
    run_parts: RunParts

    def path(self, kind: str, index: int) -> Path:
        """Return the path of a file of a kind, such as `marks.00003`."""
        return self.folder / f"{kind}.{index:05d}"

    def open_marks(self, total: int, marks_per_file: int) -> KeyTable:
        """Return the marks [total, 1]: 1 for a duplicate row, else 0; in files of `marks_per_file`."""
        counts = [min(marks_per_file, total - begin) for begin in range(0, total, marks_per_file)]
        return KeyTable([self.path("marks", index) for index in range(len(counts))], "u1", 1, counts)


@dataclass(frozen=True)
class Partitioning:
    """The division of rows into chunks of `chunk_rows`, and of hashes into `ranges`; the result doesn't depend on
    it."""

    total: int
    chunk_rows: int
    ranges: int

    @classmethod
    def fit_memory(cls, total: int, memory_bytes: int, sort_bytes: int, join_bytes: int) -> "Partitioning":
        """Divide rows such that a chunk, of `sort_bytes` a row, and a range, of `join_bytes` a row, fit the memory."""
        max_rows = min(2**31, 2**64 // max(1, total))  # so that a place fits 4 bytes, and a pair of rows 8
        rows_per_part = min(memory_bytes // sort_bytes, max(PART_ROWS, total // MIN_PARTS), max_rows)
        # A fourth more than the average needs, so that hardly any range has to be halved.
        ranges = max(-(-total * join_bytes * 5 // (4 * memory_bytes)), min(MIN_PARTS, total // PART_ROWS), 1)
        return cls(total, max(1, rows_per_part), ranges)

    @property
    def chunks(self) -> int:
        """Number of chunks, the last of which may be shorter."""
        return -(-self.total // self.chunk_rows)

    def hash_bounds(self, index: int) -> tuple[int, int]:
        """Return the hashes of a range: the least, and the one after the greatest."""
        return index * 2**64 // self.ranges, (index + 1) * 2**64 // self.ranges

    def chunk(self, index: int) -> tuple[int, int]:
        """Return the rows of a chunk: the first, and the one after the last."""
        return index * self.chunk_rows, min(self.total, (index + 1) * self.chunk_rows)

    def count_by_range(self, hashes: Hashes) -> RowIndices:
        """Count the ascending hashes in each range: [ranges]."""
        lows = np.array([self.hash_bounds(index)[0] for index in range(self.ranges)], np.uint64)
        return np.diff(np.append(np.searchsorted(hashes, lows), len(hashes)))

    def count_by_chunk(self, rows: RowIndices) -> RowIndices:
        """Count the ascending rows in each chunk: [chunks]."""
        return np.diff(np.searchsorted(rows, np.arange(self.chunks + 1) * self.chunk_rows))


def read_array(path: Path, dtype: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
    """Read `count` items of a file, from item `start` on. Raises MegatfmError if the file is shorter."""
    result = np.fromfile(path, dtype, count, offset=start * dtype.itemsize)
    if len(result) != count:
        raise MegatfmError(f"{path}: ends before item {start + count}: {RESTORE}")
    return result


_INTEGER = np.dtype("<i8")
_SIZE = _INTEGER.itemsize


class PartitionsWriter:
    """Writes records, and after them a table of the beginnings of each partition in each batch."""

    def __init__(self, path: Path, partitions: int) -> None:
        self._file = AtomicFile(path)
        self._partitions = partitions
        self._counts: list[RowIndices] = []

    def add(self, records: NDArray[Any], counts: RowIndices) -> None:
        """Append records in the order of their partitions; counts: records of each. A batch may come in several
        pieces."""
        self._file.write(np.ascontiguousarray(records).tobytes())
        self._counts.append(counts)

    def commit(self) -> None:
        """Append the table of edges and its length, sync the file and give it its name."""
        counts = np.concatenate([np.empty(0, np.int64), *self._counts])
        edges = np.concatenate([[0], np.cumsum(counts)])
        self._file.write(edges.astype(_INTEGER).tobytes())
        self._file.write(np.array([len(edges)], _INTEGER).tobytes())
        self._file.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.discard()


def find_slices(path: Path, partitions: int, partition: int) -> list[tuple[int, int]]:
    """Return begin and end of the records of a partition in every batch that has some."""
    with open(path, "rb", buffering=0) as file:
        descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size - _SIZE
        (edges,) = _read_integers(descriptor, path, end, 1)
        table = end - edges * _SIZE
        table_offsets = range(table + partition * _SIZE, end - _SIZE, partitions * _SIZE)
        ranges = [_read_integers(descriptor, path, table_offset, 2) for table_offset in table_offsets]
    return [(begin, slice_end) for begin, slice_end in ranges if slice_end > begin]


def read_partition(path: Path, dtype: np.dtype[Any], partitions: int, partition: int) -> Iterator[NDArray[Any]]:
    """Yield the records of a partition, batch by batch."""
    for begin, end in find_slices(path, partitions, partition):
        yield read_array(path, dtype, begin, end - begin)


class HashRange(NamedTuple):
    """Records `begin` … `end` − 1 in the file of a chunk, ordered by hash and row. base: first row of the chunk."""

    path: Path
    dtype: np.dtype[Any]
    base: int
    begin: int
    end: int

    def read(self) -> NDArray[Any]:
        """Read the records; their rows, `place`, count from `base`."""
        return read_array(self.path, self.dtype, self.begin, self.end - self.begin)


def find_hash_ranges(
    context: DedupContext, partitioning: Partitioning, dtype: np.dtype[Any], partitions: int, partition: int
) -> list[HashRange]:
    """Return the records of a partition in the files `sorted` of all chunks."""
    paths = [context.path("sorted", chunk) for chunk in range(partitioning.chunks)]
    return [
        HashRange(path, dtype, chunk * partitioning.chunk_rows, begin, end)
        for chunk, path in enumerate(paths)
        for begin, end in find_slices(path, partitions, partition)
    ]


def count_records(parts: list[HashRange]) -> int:
    """Return the number of records of all parts."""
    return sum(part.end - part.begin for part in parts)


def read_hash_ranges(parts: list[HashRange]) -> tuple[Hashes, RowIndices, Hashes | None]:
    """Read hash, row and, if it is stored, `check` of each record [n]."""
    size, start = count_records(parts), 0
    hashes, rows = np.empty(size, np.uint64), np.empty(size, np.int64)
    check = np.empty(size, np.uint64) if parts and "check" in (parts[0].dtype.names or ()) else None
    for part in parts:
        records = part.read()
        destination = slice(start, start := start + len(records))
        hashes[destination], rows[destination] = records["hash"], records["place"]
        rows[destination] += part.base
        if check is not None:
            check[destination] = records["check"]
    return hashes, rows, check


def iter_fitting_ranges(parts: list[HashRange], low: int, high: int, max_records: int) -> Iterator[list[HashRange]]:
    """Yield the records with hashes from `low` up to `high`, halved by hash until at most `max_records` are left.

    Records of a single hash are not divided.
    """
    if count_records(parts) <= max_records or high - low <= 1:
        yield parts
        return
    middle = (low + high) // 2
    lower, upper = split_hash_ranges(parts, middle)
    del parts
    yield from iter_fitting_ranges(lower, low, middle, max_records)
    yield from iter_fitting_ranges(upper, middle, high, max_records)


def split_hash_ranges(parts: list[HashRange], middle: int) -> tuple[list[HashRange], list[HashRange]]:
    """Split the records of each part into those with hashes below `middle`, and the others."""
    lower, upper = [], []
    for part in parts:
        mapped = np.memmap(part.path, part.dtype, "r", shape=(part.end,))
        edge = part.begin + int(np.searchsorted(mapped["hash"][part.begin :], np.uint64(middle)))
        lower.append(part._replace(end=edge))
        upper.append(part._replace(begin=edge))
    return lower, upper


def _read_integers(descriptor: int, path: Path, offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", read_at(descriptor, path, offset, count * _SIZE))
