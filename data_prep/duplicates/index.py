"""Rows of numbers of all parts, on disk, and equal ones among them, in bounded memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.words import Hashes
from megatfm.data.files import WholeFile, writing

# What finding equal numbers holds of each, as tracemalloc measures it: the number and its place three times (as they
# were found, as one, and sorted), the order of sorting, and what groups are made of.
_BYTES_EACH = 96
_CHUNK = 2**20


class Rows:
    """The rows of all parts, one after the other; each part is a file of its own."""

    def __init__(self, files: Sequence[Path], dtype: str, columns: int) -> None:
        self._parts = [_mapped(file, dtype, columns) for file in files]
        self.begins = np.concatenate([[0], np.cumsum([len(part) for part in self._parts])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of these numbers, in their order."""
        which = np.searchsorted(self.begins, numbers, side="right") - 1
        result = np.empty((len(numbers), self._parts[0].shape[1]), self._parts[0].dtype)
        for part in np.unique(which):
            here = which == part
            result[here] = self._parts[part][numbers[here] - self.begins[part]]
        return result

    def equal(
        self, column: Callable[[NDArray[Any]], Hashes], memory_bytes: int
    ) -> Iterator[NDArray[np.int64]]:
        """The numbers of rows whose hash, which `column` makes of rows, is that of another row as well.

        Yields `places` [n, 2]: the row, and the first row with that hash, in groups that belong together and in
        order inside them; the hashes of one range after the other, so that each range fits the memory.
        """
        ranges = max(1, -(-len(self) * _BYTES_EACH // memory_bytes))
        for number in range(ranges):
            low, high = (
                np.uint64(2**64 * edge // ranges - (edge == ranges)) for edge in (number, number + 1)
            )
            last = number + 1 == ranges
            hashes, places = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
            for begin, part in zip(self.begins, self._parts, strict=False):
                for at in range(0, len(part), max(1, memory_bytes // 256)):
                    some = column(part[at : at + max(1, memory_bytes // 256)])
                    inside = np.flatnonzero((some >= low) & ((some < high) | last))
                    hashes.append(some[inside])
                    places.append(inside + (begin + at))
            yield _groups(np.concatenate(hashes), np.concatenate(places))


class RowsWriter:
    """Writes the rows of a part to a file."""

    def __init__(self, path: Path) -> None:
        self._file = WholeFile(path)
        self.rows = 0

    def write(self, rows: Iterator[NDArray[Any]]) -> int:
        """Write all, and commit. Returns how many there were."""
        try:
            for some in rows:
                self._file.write(np.ascontiguousarray(some).tobytes())
                self.rows += len(some)
            self._file.commit()
        finally:
            self._file.discard()
        return self.rows


def array_on_disk(path: Path, dtype: type[np.generic], count: int) -> np.memmap[Any, Any]:
    """Zeros in a .npy file that is mapped. All of its room is taken at once, so that a full disk is an error here; a
    write to a page that finds no room would end the process. Needs `count` > 0."""
    with writing(path):
        array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), (count,))
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
    return array


def numbers_on_disk(path: Path, count: int) -> np.memmap[Any, Any]:
    """0 … count − 1 as such an array."""
    array = array_on_disk(path, np.int64, count)
    for at in range(0, count, _CHUNK):
        array[at : at + _CHUNK] = np.arange(at, min(at + _CHUNK, count))
    return array


def _groups(hashes: Hashes, places: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(hashes, kind="stable")  # so that places, which ascend, still do in each group
    hashes, places = hashes[order], places[order]
    same = hashes[1:] == hashes[:-1]
    after = np.concatenate([[False], same])  # like the one before it
    in_group = after | np.concatenate([same, [False]])
    begins = np.flatnonzero(~after)
    sizes = np.diff(np.append(begins, len(hashes)))
    firsts = np.repeat(places[begins], sizes)
    return np.stack([places[in_group], firsts[in_group]], axis=1)


def _mapped(path: Path, dtype: str, columns: int) -> NDArray[Any]:
    if path.stat().st_size == 0:  # which can't be mapped
        return np.empty((0, columns), dtype)
    return np.memmap(path, dtype, mode="r").reshape(-1, columns)
