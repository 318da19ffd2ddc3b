"""Tables of keys on disk, the partitioned files that a search sorts them into, and its division into tasks."""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.files import RESTORE, AtomicFile, read_at
from megatfm.data_prep.dedup.hashing import Hashes
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.errors import MegatfmError

RowIndices = NDArray[np.int64]
Facts = dict[str, Any]

# A search is divided at least so finely if its tasks have so many rows then: for a few dozen processes, and so that a
# sort stays near the cache.
TASKS = 64
TASK_ROWS = 2**18


class KeyTable:
    """The rows of all parts, one after the other; each part is a file of its own, of `counts` rows.

    No file is looked at before its rows are read: they may be gone once all that needed them is done.
    """

    def __init__(self, files: Sequence[Path], dtype: str, columns: int, counts: Sequence[int]) -> None:
        self._files, self._dtype, self.columns = files, np.dtype(dtype), columns
        self.begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.begins[-1])

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """[end − begin, columns]: rows that follow one another."""
        result = np.empty((end - begin, self.columns), self._dtype)
        for part in range(*np.searchsorted(self.begins, (begin + 1, end), "left") - (1, 0)):
            first, last = max(begin, int(self.begins[part])), min(end, int(self.begins[part + 1]))
            at = (first - int(self.begins[part])) * self.columns
            values = read_array(self._files[part], self._dtype, at, (last - first) * self.columns)
            result[first - begin : last - begin] = values.reshape(-1, self.columns)
        return result

    def pick(self, numbers: RowIndices) -> NDArray[Any]:
        """The rows of these numbers, which ascend."""
        result = np.empty((len(numbers), self.columns), self._dtype)
        at = 0
        while at < len(numbers):
            part = int(np.searchsorted(self.begins, numbers[at], "right")) - 1
            end = int(np.searchsorted(numbers, self.begins[part + 1], "left"))
            shape = (int(self.begins[part + 1] - self.begins[part]), self.columns)
            mapped = np.memmap(self._files[part], self._dtype, "r", shape=shape)
            # Clipping changes no number, but spares a copy.
            np.take(mapped, numbers[at:end] - self.begins[part], 0, out=result[at:end], mode="clip")
            at = end
        return result


def write_keys(path: Path, rows: Iterable[NDArray[Any]]) -> int:
    """Write the rows of a part to a file, and commit it. Returns how many there were."""
    file, count = AtomicFile(path), 0
    try:
        for batch in rows:
            file.write(np.ascontiguousarray(batch).tobytes())
            count += len(batch)
        file.commit()
    finally:
        file.discard()
    return count


class RunTasks(Protocol):
    """Has tasks 0 … count − 1 of a step done, by whoever is free, each once for all."""

    def __call__(
        self,
        step: str,
        count: int,
        total: int,
        work: Callable[[int, UpdateProgress], Facts],
        join: Callable[[Iterable[Facts]], Facts] = lambda _: {},
    ) -> Facts:
        """`work` tells of its progress towards `total`. Returns what `join` makes of all results."""
        ...


@dataclass(frozen=True)
class DedupContext:
    """Where the search lies while it goes on, what a task may hold in memory, and who has its tasks done."""

    folder: Path
    memory_bytes: int
    run_tasks: RunTasks

    def path(self, kind: str, number: int) -> Path:
        """File number `number` of a kind, such as `marks.00003`."""
        return self.folder / f"{kind}.{number:05d}"

    def is_duplicate(self, total: int, marks_per_file: int) -> KeyTable:
        """[total, 1]: 1 for each row that goes, else 0; in files of `marks_per_file`."""
        counts = [min(marks_per_file, total - begin) for begin in range(0, total, marks_per_file)]
        return KeyTable([self.path("marks", number) for number in range(len(counts))], "u1", 1, counts)


@dataclass(frozen=True)
class Partitioning:
    """Rows divided into chunks of `chunk_rows`, and hashes into `ranges`; neither changes what is found."""

    total: int
    chunk_rows: int
    ranges: int

    @classmethod
    def of(cls, total: int, memory_bytes: int, sort_bytes: int, join_bytes: int) -> "Partitioning":
        """Divide rows such that a chunk, of `sort_bytes` a row, and a range, of `join_bytes` a row, fit the memory."""
        most = min(2**31, 2**64 // max(1, total))  # so that a place fits 4 bytes, and a pair of rows 8
        rows_per_part = min(memory_bytes // sort_bytes, max(TASK_ROWS, total // TASKS), most)
        # A fourth more than it takes on the average, so that hardly any has to be halved.
        ranges = max(-(-total * join_bytes * 5 // (4 * memory_bytes)), min(TASKS, total // TASK_ROWS), 1)
        return cls(total, max(1, rows_per_part), ranges)

    @property
    def chunks(self) -> int:
        """Number of chunks, the last of which may be shorter."""
        return -(-self.total // self.chunk_rows)

    def chunk(self, number: int) -> tuple[int, int]:
        """The rows of a chunk: the first, and the one after the last."""
        return number * self.chunk_rows, min(self.total, (number + 1) * self.chunk_rows)

    def by_range(self, hashes: Hashes) -> RowIndices:
        """[ranges]: how many of these hashes, which ascend, each range has."""
        lows = np.array([number * 2**64 // self.ranges for number in range(self.ranges)], np.uint64)
        return np.diff(np.append(np.searchsorted(hashes, lows), len(hashes)))

    def by_chunk(self, rows: RowIndices) -> RowIndices:
        """[chunks]: how many of these rows, which ascend, each chunk has."""
        return np.diff(np.searchsorted(rows, np.arange(self.chunks + 1) * self.chunk_rows))


def read_array(path: Path, dtype: np.dtype[Any], at: int, count: int) -> NDArray[Any]:
    """`count` items of a file, from item `at` on."""
    result = np.fromfile(path, dtype, count, offset=at * dtype.itemsize)
    if len(result) != count:
        raise MegatfmError(f"{path}: ends before item {at + count}: {RESTORE}")
    return result


_NUMBER = np.dtype("<i8")
_SIZE = _NUMBER.itemsize


class PartitionsWriter:
    """Records, and after them a table of where each partition of each batch begins."""

    def __init__(self, path: Path, partitions: int) -> None:
        self._file = AtomicFile(path)
        self._partitions = partitions
        self._counts: list[RowIndices] = []

    def add(self, records: NDArray[Any], counts: RowIndices) -> None:
        """Records in the order of their partitions, and how many each has. A batch may come in several pieces."""
        self._file.write(np.ascontiguousarray(records).tobytes())
        self._counts.append(counts)

    def commit(self) -> None:
        """Append the table of edges and its length, sync the file and give it its name."""
        counts = np.concatenate([np.empty(0, np.int64), *self._counts])
        edges = np.concatenate([[0], np.cumsum(counts)])
        self._file.write(edges.astype(_NUMBER).tobytes())
        self._file.write(np.array([len(edges)], _NUMBER).tobytes())
        self._file.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.discard()


def slices(path: Path, partitions: int, number: int) -> list[tuple[int, int]]:
    """Return where the records of a partition begin and end in every batch that has some."""
    with open(path, "rb", buffering=0) as file:
        descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size - _SIZE
        (edges,) = _numbers(descriptor, path, end, 1)
        table = end - edges * _SIZE
        places = range(table + number * _SIZE, end - _SIZE, partitions * _SIZE)
        ranges = [_numbers(descriptor, path, place, 2) for place in places]
    return [(begin, last) for begin, last in ranges if last > begin]


def read_partition(path: Path, dtype: np.dtype[Any], partitions: int, number: int) -> Iterator[NDArray[Any]]:
    """The records of a partition, batch by batch."""
    for begin, end in slices(path, partitions, number):
        yield read_array(path, dtype, begin, end - begin)


def _numbers(descriptor: int, path: Path, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", read_at(descriptor, path, at, count * _SIZE))
