"""Files of records that are divided into partitions: written in batches, read one partition at a time."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatfm.data.files import AtomicFile, read_at
from megatfm.data_prep.duplicates.index import RowIndices, read_array

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
    """Of every batch, where the records of a partition begin and end, if it has some."""
    with open(path, "rb", buffering=0) as file:
        descriptor, end = file.fileno(), os.fstat(file.fileno()).st_size - _SIZE
        (edges,) = _numbers(descriptor, path, end, 1)
        table = end - edges * _SIZE
        places = range(table + number * _SIZE, end - _SIZE, partitions * _SIZE)
        found = [_numbers(descriptor, path, place, 2) for place in places]
    return [(begin, last) for begin, last in found if last > begin]


def read_partition(path: Path, dtype: np.dtype[Any], partitions: int, number: int) -> Iterator[NDArray[Any]]:
    """The records of a partition, batch by batch."""
    for begin, end in slices(path, partitions, number):
        yield read_array(path, dtype, begin, end - begin)


def _numbers(descriptor: int, path: Path, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}q", read_at(descriptor, path, at, count * _SIZE))
