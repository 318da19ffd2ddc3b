"""Rows of numbers of all parts, on disk, and how the search among them is divided into tasks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.data.files import RESTORE, AtomicFile
from megatfm.data_prep.progress import UpdateProgress
from megatfm.data_prep.words import Hashes
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
            some = read_array(self._files[part], self._dtype, at, (last - first) * self.columns)
            result[first - begin : last - begin] = some.reshape(-1, self.columns)
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


class KeyTableWriter:
    """Writes the rows of a part to a file."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self.write_keys = 0

    def write(self, rows: Iterator[NDArray[Any]]) -> int:
        """Write all, and commit. Returns how many there were."""
        try:
            for some in rows:
                self._file.write(np.ascontiguousarray(some).tobytes())
                self.write_keys += len(some)
            self._file.commit()
        finally:
            self._file.discard()
        return self.write_keys


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

    def is_duplicate(self, total: int, each: int) -> KeyTable:
        """[total, 1]: 1 for each row that goes, else 0; in files of `each`."""
        counts = [min(each, total - begin) for begin in range(0, total, each)]
        return KeyTable([self.path("marks", number) for number in range(len(counts))], "u1", 1, counts)


@dataclass(frozen=True)
class Partitioning:
    """Rows divided into chunks of `each`, and hashes into `ranges`; neither changes what is found."""

    total: int
    chunk_rows: int
    ranges: int

    @classmethod
    def of(cls, total: int, memory_bytes: int, sort_bytes: int, join_bytes: int) -> "Partitioning":
        """Such that a chunk, of `sort_bytes` a row, and a range, of `join_bytes` a row, fit the memory."""
        most = min(2**31, 2**64 // max(1, total))  # so that a place fits 4 bytes, and a pair of rows 8
        each = min(memory_bytes // sort_bytes, max(TASK_ROWS, total // TASKS), most)
        # A fourth more than it takes on the average, so that hardly any has to be halved.
        ranges = max(-(-total * join_bytes * 5 // (4 * memory_bytes)), min(TASKS, total // TASK_ROWS), 1)
        return cls(total, max(1, each), ranges)

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
