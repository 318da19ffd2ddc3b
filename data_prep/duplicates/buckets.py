"""Rows with the same hash of a band, and which of them are alike by their whole signatures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.data.files import disk_errors_as_megatfm_errors
from megatfm.data_prep.duplicates.index import KeyTable, RowIndices, read_array
from megatfm.data_prep.words import Hashes

SMALL = 32
"""In a bucket of up to so many rows all are compared with all; in a larger one each with the first of those that are
left, until none is."""
PAIRS = 2**13
"""Pairs whose signatures are compared at a time, at most: 7 MB."""
JOIN_BYTES = 80
"""What reading a row of a bucket holds, as tracemalloc measures it."""
RECORD = np.dtype([("hash", "<u8"), ("place", "<u4")])

Edges = NDArray[np.int64]
"""[n, 2]: two rows that are alike, the lower one first."""


class Slice(NamedTuple):
    """Records of a chunk, whose rows begin with `base`, ordered by hash and row: from where to where in their file."""

    path: Path
    base: int
    begin: int
    end: int


class Buckets:
    """Compares the rows of buckets. `rest` is where what is left of a bucket lies that doesn't fit the memory."""

    def __init__(self, rows: KeyTable, similarity: float, memory_bytes: int, leftover_path: Path) -> None:
        self._rows, self._similarity, self._memory, self._rest = rows, similarity, memory_bytes, leftover_path
        # Signatures take a third of the memory.
        self._at_once = max(2, memory_bytes // (3 * rows.columns * 4))
        self._pairs = max(64, min(PAIRS, memory_bytes // (16 * rows.columns)))

    def edges(self, parts: list[Slice], low: int, high: int) -> Iterator[Edges]:
        """What is alike among rows whose hashes lie from `low` up to `high`; in halves if they don't fit the memory."""
        size = sum(part.end - part.begin for part in parts)
        if size * JOIN_BYTES <= self._memory:
            yield from self._in_memory(parts, size)
        elif high - low > 1:
            middle = (low + high) // 2
            edges = [_search(part, middle) for part in parts]
            lower = [part._replace(end=edge) for part, edge in zip(parts, edges, strict=True)]
            upper = [part._replace(begin=edge) for part, edge in zip(parts, edges, strict=True)]
            yield from self.edges(lower, low, middle)
            yield from self.edges(upper, middle, high)
        else:
            yield from self._compare_on_disk(_places(part, self._at_once) for part in parts)

    def _in_memory(self, parts: list[Slice], size: int) -> Iterator[Edges]:
        hashes, places, at = np.empty(size, np.uint64), np.empty(size, np.int64), 0
        for part in parts:
            records = _records(part)
            here = slice(at, at := at + len(records))
            hashes[here], places[here] = records["hash"], records["place"]
            places[here] += part.base
        order = ordered(hashes)
        hashes, places = hashes[order], places[order]
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)])
        sizes = np.diff(np.append(begins, len(hashes)))
        places, sizes = places[np.repeat(sizes > 1, sizes)], sizes[sizes > 1]
        del hashes, order
        ends = np.cumsum(sizes)
        bucket = begin = 0
        while bucket < len(sizes):
            last = int(np.searchsorted(ends, begin + self._at_once, "right"))
            if last > bucket:
                yield self._compared(places[begin : ends[last - 1]], sizes[bucket:last])
            else:
                last = bucket + 1
                batch_rows = range(begin, int(ends[bucket]), self._at_once)
                some = (places[at : min(at + self._at_once, ends[bucket])] for at in batch_rows)
                yield from self._compare_on_disk(iter([some]))
            bucket, begin = last, int(ends[last - 1])

    def _compared(self, places: RowIndices, sizes: NDArray[np.int64]) -> Edges:
        """What is alike in whole buckets of these sizes, one after the other."""
        numbers, members = np.unique(places, return_inverse=True)
        signs = self._rows.pick(numbers)
        found = [np.empty((0, 2), np.int64)]
        while len(members):
            is_small = np.repeat(sizes <= SMALL, sizes)
            for pairs in _all_pairs(members[is_small], sizes[sizes <= SMALL]):
                found.append(pairs[self._alike(signs, pairs)])
            members, sizes = members[~is_small], sizes[sizes > SMALL]
            heads = np.repeat(members[np.cumsum(sizes) - sizes], sizes)
            pairs = np.stack([heads, members], axis=1)
            alike = self._alike(signs, pairs)
            found.append(pairs[alike & (heads != members)])
            buckets = np.repeat(np.arange(len(sizes)), sizes)[~alike]
            members, sizes = members[~alike], np.bincount(buckets, minlength=len(sizes))
            sizes = sizes[sizes > 0]
        return numbers[np.concatenate(found)]

    def _alike(self, signs: NDArray[Any], pairs: Edges) -> NDArray[np.bool_]:
        alike = np.empty(len(pairs), np.bool_)
        for at in range(0, len(pairs), self._pairs):
            left, right = pairs[at : at + self._pairs].T
            alike[at : at + self._pairs] = (signs[left] == signs[right]).mean(axis=1) >= self._similarity
        return alike

    def _compare_on_disk(self, parts: Iterator[Iterator[RowIndices]]) -> Iterator[Edges]:
        """The same of a bucket that doesn't fit the memory, in as many passes as it has different signatures."""
        some: Iterator[RowIndices] = (places for part in parts for places in part)
        files = [self._rest.with_name(f"{self._rest.name}.{number}") for number in (0, 1)]
        try:
            while True:
                left, head = 0, None
                with disk_errors_as_megatfm_errors(files[0]), open(files[0], "wb") as file:
                    for places in some:
                        signs = self._rows.pick(places)
                        head = (int(places[0]), signs[0].copy()) if head is None else head
                        alike = (signs == head[1]).mean(axis=1) >= self._similarity
                        del signs
                        others = places[alike & (places != head[0])]
                        yield np.stack([np.full(len(others), head[0]), others], axis=1)
                        file.write(places[~alike].tobytes())
                        left += int((~alike).sum())
                files.reverse()
                if left <= self._at_once:
                    break
                some = _read_places(files[1], left, self._at_once)
            if left > 1:
                places = read_array(files[1], np.dtype(np.int64), 0, left)
                yield self._compared(places, np.array([left]))
        finally:
            for path in files:
                path.unlink(missing_ok=True)


def ordered(hashes: Hashes) -> RowIndices:
    """The order of hashes; equal ones stay in theirs, and it takes a third of a stable sort's time."""
    order = np.argsort(hashes)
    values = hashes[order]
    same = values[1:] == values[:-1]
    in_group = np.flatnonzero(np.concatenate([[False], same]) | np.concatenate([same, [False]]))[
        : len(hashes)
    ]
    if len(in_group):
        groups = np.cumsum(np.concatenate([[0], ~same]))[in_group]
        order[in_group] = np.sort(groups * len(hashes) + order[in_group]) % len(hashes)
    return order


def _all_pairs(members: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[Edges]:
    """All pairs inside groups of these sizes, which lie one after the other."""
    ends = np.cumsum(sizes)
    for size in np.unique(sizes):
        groups = members[(ends[sizes == size] - size)[:, None] + np.arange(size)]
        left, right = np.triu_indices(size, 1)
        yield np.stack([groups[:, left].ravel(), groups[:, right].ravel()], axis=1)


def _search(part: Slice, middle: int) -> int:
    """Where the hashes from `middle` on begin."""
    mapped = np.memmap(part.path, RECORD, "r", shape=(part.end,))
    return part.begin + int(np.searchsorted(mapped["hash"][part.begin :], np.uint64(middle)))


def _records(part: Slice) -> NDArray[Any]:
    return read_array(part.path, RECORD, part.begin, part.end - part.begin)


def _places(part: Slice, batch_rows: int) -> Iterator[RowIndices]:
    for at in range(part.begin, part.end, batch_rows):
        records = _records(part._replace(begin=at, end=min(at + batch_rows, part.end)))
        yield records["place"].astype(np.int64) + part.base


def _read_places(path: Path, count: int, batch_rows: int) -> Iterator[RowIndices]:
    for at in range(0, count, batch_rows):
        yield read_array(path, np.dtype(np.int64), at, min(batch_rows, count - at))
