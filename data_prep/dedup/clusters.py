"""Mark near duplicates but for the first of each cluster: linear as `first_occurrence.py`, in the same kind of tasks.

1. `sort`, a task for each chunk of signatures: for each band its hashes in order, with the rows.
2. `buckets`, a task for each range of each band: rows with the same hash are a bucket, whose signatures are compared.
   Of those that are similar the range notes a tree: edges between rows, by the chunk of the higher one.
3. `gather`, a task for each chunk: its edges, each once.
4. `clusters`, one task, from the last chunk to the first. A row is the first of its cluster unless the edges of its
   chunk join it to a lower one: of a cluster that reaches below the chunk an edge for each lower row is passed down,
   so that nothing is lost of it. A chunk's edges are held, and no more are passed on than came.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.files import disk_errors_as_megatfm_errors
from megatfm.data_prep.dedup.hashing import Hashes, band_hashes
from megatfm.data_prep.dedup.key_table import (
    DedupContext,
    Facts,
    KeyTable,
    Partitioning,
    PartitionsWriter,
    RowIndices,
    read_array,
    read_partition,
    slices,
    write_keys,
)
from megatfm.data_prep.execution.progress import UpdateProgress

SMALL = 32
"""In a bucket of up to so many rows all are compared with all; in a larger one each with the first of those that are
left, until none is."""
PAIRS = 2**13
"""Pairs whose signatures are compared at a time, at most: 7 MB."""
JOIN_BYTES = 80
"""Bytes that reading a row of a bucket holds, as tracemalloc measures it."""
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
        self._rows, self._similarity, self._memory, self._leftover_path = (
            rows,
            similarity,
            memory_bytes,
            leftover_path,
        )
        # Signatures take a third of the memory.
        self._at_once = max(2, memory_bytes // (3 * rows.columns * 4))
        self._pairs = max(64, min(PAIRS, memory_bytes // (16 * rows.columns)))

    def edges(self, parts: list[Slice], low: int, high: int) -> Iterator[Edges]:
        """Yield similar rows whose hashes lie from `low` up to `high`; in halves if they don't fit the memory."""
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
            destination = slice(at, at := at + len(records))
            hashes[destination], places[destination] = records["hash"], records["place"]
            places[destination] += part.base
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
                chunks = (places[at : min(at + self._at_once, ends[bucket])] for at in batch_rows)
                yield from self._compare_on_disk(iter([chunks]))
            bucket, begin = last, int(ends[last - 1])

    def _compared(self, places: RowIndices, sizes: NDArray[np.int64]) -> Edges:
        """Return what is alike in buckets of these sizes, one after the other."""
        numbers, members = np.unique(places, return_inverse=True)
        signs = self._rows.pick(numbers)
        similar_pairs = [np.empty((0, 2), np.int64)]
        while len(members):
            is_small = np.repeat(sizes <= SMALL, sizes)
            for pairs in _all_pairs(members[is_small], sizes[sizes <= SMALL]):
                similar_pairs.append(pairs[self._alike(signs, pairs)])
            members, sizes = members[~is_small], sizes[sizes > SMALL]
            heads = np.repeat(members[np.cumsum(sizes) - sizes], sizes)
            pairs = np.stack([heads, members], axis=1)
            alike = self._alike(signs, pairs)
            similar_pairs.append(pairs[alike & (heads != members)])
            buckets = np.repeat(np.arange(len(sizes)), sizes)[~alike]
            members, sizes = members[~alike], np.bincount(buckets, minlength=len(sizes))
            sizes = sizes[sizes > 0]
        return numbers[np.concatenate(similar_pairs)]

    def _alike(self, signs: NDArray[Any], pairs: Edges) -> NDArray[np.bool_]:
        alike = np.empty(len(pairs), np.bool_)
        for at in range(0, len(pairs), self._pairs):
            left, right = pairs[at : at + self._pairs].T
            alike[at : at + self._pairs] = (signs[left] == signs[right]).mean(axis=1) >= self._similarity
        return alike

    def _compare_on_disk(self, parts: Iterator[Iterator[RowIndices]]) -> Iterator[Edges]:
        """Compare rows of a bucket that doesn't fit the memory, in as many passes as it has different signatures."""
        chunks: Iterator[RowIndices] = (places for part in parts for places in part)
        files = [self._leftover_path.with_name(f"{self._leftover_path.name}.{number}") for number in (0, 1)]
        try:
            while True:
                left, head = 0, None
                with disk_errors_as_megatfm_errors(files[0]), open(files[0], "wb") as file:
                    for places in chunks:
                        signs = self._rows.pick(places)
                        head = (int(places[0]), signs[0].copy()) if head is None else head
                        alike = (signs == head[1]).mean(axis=1) >= self._similarity
                        del signs
                        similar = places[alike & (places != head[0])]
                        yield np.stack([np.full(len(similar), head[0]), similar], axis=1)
                        file.write(places[~alike].tobytes())
                        left += int((~alike).sum())
                files.reverse()
                if left <= self._at_once:
                    break
                chunks = _read_places(files[1], left, self._at_once)
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


# What a task holds of a row, as tracemalloc measures it: the signatures, or the edges, one for each band at most.
_SORT_BYTES, _SIGN_BYTES, _EDGE_BYTES = 96, 4, 80
_EDGE = np.dtype("<u8")


def mark_near_duplicates(rows: KeyTable, index: DedupContext, bands: int, similarity: float) -> Facts:
    """Mark all rows but the first of each cluster, as `index.marks`; a row is a signature of `bands`.

    Returns `each`, the rows of a file of marks.
    """
    return _Search(rows, index, bands, similarity).run()


class _Search:
    def __init__(self, rows: KeyTable, index: DedupContext, bands: int, similarity: float) -> None:
        self._rows, self._index, self._bands = rows, index, bands
        self._similarity = similarity
        sort_bytes = max(_SORT_BYTES + _SIGN_BYTES * rows.columns, _EDGE_BYTES * bands)
        self._divided = Partitioning.of(len(rows), index.memory_bytes, sort_bytes, JOIN_BYTES)

    def run(self) -> Facts:
        divided, run, total = self._divided, self._index.run_tasks, len(self._rows)
        run("sort", divided.chunks, total, self._sort)
        run("buckets", self._bands * divided.ranges, total * self._bands, self._join)
        run("gather", divided.chunks, total, self._gather)
        return run("clusters", 1, total, self._cluster, lambda _: {"each": divided.chunk_rows})

    def _sort(self, chunk: int, advance: UpdateProgress) -> Facts:
        begin, end = self._divided.chunk(chunk)
        signs = self._rows.read(begin, end)
        width = self._rows.columns // self._bands
        partitions = self._bands * self._divided.ranges
        with PartitionsWriter(self._index.path("sorted", chunk), partitions) as writer:
            for band in range(self._bands):
                hashes = band_hashes(signs, band, width)
                order = ordered(hashes)
                records = np.empty(len(order), RECORD)
                records["hash"], records["place"] = hashes[order], order
                writer.add(records, self._divided.by_range(records["hash"]))
            writer.commit()
        advance(end - begin)
        return {}

    def _join(self, number: int, advance: UpdateProgress) -> Facts:
        divided = self._divided
        ranges, of_band = divided.ranges, number % divided.ranges
        parts = [
            Slice(self._index.path("sorted", chunk), chunk * divided.chunk_rows, begin, end)
            for chunk in range(divided.chunks)
            for begin, end in slices(self._index.path("sorted", chunk), self._bands * ranges, number)
        ]
        low, high = of_band * 2**64 // ranges, (of_band + 1) * 2**64 // ranges
        buckets = Buckets(
            self._rows, self._similarity, self._index.memory_bytes, self._index.path("rest", number)
        )
        with PartitionsWriter(self._index.path("joined", number), divided.chunks) as writer:
            for edges in buckets.edges(parts, low, high):
                edges = spanning_forest(edges)
                edges = edges[np.argsort(edges[:, 1])]
                writer.add(self._packed(edges), divided.by_chunk(edges[:, 1]))
            writer.commit()
        advance(divided.total // ranges)
        return {}

    def _gather(self, chunk: int, advance: UpdateProgress) -> Facts:
        edges = np.empty(0, _EDGE)
        for new_edges in self._in_batches(self._joined(chunk)):
            edges = np.unique(np.concatenate([edges, new_edges]))
        write_keys(self._index.path("edges", chunk), [edges])
        begin, end = self._divided.chunk(chunk)
        advance(end - begin)
        return {}

    def _joined(self, chunk: int) -> Iterator[NDArray[Any]]:
        for number in range(self._bands * self._divided.ranges):
            yield from read_partition(self._index.path("joined", number), _EDGE, self._divided.chunks, chunk)

    def _cluster(self, _: int, advance: UpdateProgress) -> Facts:
        forwarded = [self._index.path("passed", chunk) for chunk in range(self._divided.chunks)]
        for path in forwarded:
            path.unlink(missing_ok=True)  # of one who died here
        for chunk in reversed(range(self._divided.chunks)):
            begin, end = self._divided.chunk(chunk)
            marks = np.zeros(end - begin, np.uint8)
            edges = np.empty((0, 2), np.int64)
            for packed_edges in self._in_batches(self._edges_of(chunk)):
                edges = spanning_forest(np.concatenate([edges, self._unpacked(packed_edges, chunk)]))
                lower = edges[edges[:, 1] < begin]
                edges = edges[edges[:, 1] >= begin]
                order = np.argsort(lower[:, 1])
                at = 0
                for other, count in enumerate(self._divided.by_chunk(lower[order, 1]).tolist()):
                    if count:
                        with (
                            disk_errors_as_megatfm_errors(forwarded[other]),
                            open(forwarded[other], "ab") as file,
                        ):
                            file.write(self._packed(lower[order[at : at + count]]).tobytes())
                    at += count
            marks[edges[:, 1] - begin] = 1
            write_keys(self._index.path("marks", chunk), [marks])
            advance(end - begin)
        return {}

    def _edges_of(self, chunk: int) -> Iterator[NDArray[Any]]:
        """Those that its rows have with lower ones, and those that were passed down to it."""
        step = self._batch()
        for kind in ("edges", "passed"):
            path = self._index.path(kind, chunk)
            count = path.stat().st_size // _EDGE.itemsize if path.exists() else 0
            for at in range(0, count, step):
                yield read_array(path, _EDGE, at, min(step, count - at))

    def _in_batches(self, arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        batch: list[NDArray[Any]] = []
        for array in arrays:
            batch.append(array)
            if sum(map(len, batch)) >= self._batch():
                yield np.concatenate(batch)
                batch = []
        if batch:
            yield np.concatenate(batch)

    def _batch(self) -> int:
        return max(1, self._index.memory_bytes // (4 * _EDGE_BYTES))

    def _packed(self, edges: Edges) -> NDArray[Any]:
        """Edges by chunk: the higher row, counted from the chunk's first, and the lower one in one number."""
        high, low = (edges[:, column].astype(_EDGE) for column in (1, 0))
        return high % np.uint64(self._divided.chunk_rows) * np.uint64(self._divided.total) + low

    def _unpacked(self, packed: NDArray[Any], chunk: int) -> Edges:
        high, low = np.divmod(packed, np.uint64(self._divided.total))
        return np.stack(
            [low.astype(np.int64), high.astype(np.int64) + chunk * self._divided.chunk_rows], axis=1
        )


def spanning_forest(edges: Edges) -> Edges:
    """Edges [n, 2] that join the same rows with as few: from the lowest row of each cluster to all others."""
    from scipy.sparse import coo_array  # by name, since it takes longer to import than many a corpus to clean
    from scipy.sparse.csgraph import connected_components

    if not len(edges):
        return edges
    rows, ends = np.unique(edges, return_inverse=True)
    ends = ends.reshape(edges.shape).astype(np.int32)
    graph = coo_array((np.ones(len(ends), np.bool_), (ends[:, 0], ends[:, 1])), shape=(len(rows), len(rows)))
    count, labels = connected_components(graph, directed=False)
    lowest = np.empty(count, np.int64)
    lowest[labels[::-1]] = np.arange(len(rows))[::-1]  # of what is written to one place, the last stays
    members = np.flatnonzero(lowest[labels] != np.arange(len(rows)))
    return np.stack([rows[lowest[labels[members]]], rows[members]], axis=1)
