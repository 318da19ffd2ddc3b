"""Rows that are alike are marked but for the first of each cluster: linear as `later.py`, in the same kind of tasks.

1. `sort`, a task for each chunk of signatures: for each band its hashes in order, with the rows.
2. `join`, a task for each range of each band: rows with the same hash are a bucket, whose signatures are compared. Of
   those that are alike the range notes a tree: edges between rows, by the chunk of the higher one.
3. `gather`, a task for each chunk: its edges, each once.
4. `cluster`, one task, from the last chunk to the first. A row is the first of its cluster unless the edges of its
   chunk join it to a lower one: of a cluster that reaches below the chunk an edge for each lower row is passed down,
   so that nothing is lost of it. What is held is a chunk's edges, and no more are passed on than came.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.files import disk_errors_as_megatfm_errors
from megatfm.data_prep.duplicates.buckets import JOIN_BYTES, RECORD, Buckets, Edges, Slice, ordered
from megatfm.data_prep.duplicates.index import (
    DedupContext,
    Facts,
    KeyTable,
    KeyTableWriter,
    Partitioning,
    read_array,
)
from megatfm.data_prep.duplicates.partitions import PartitionsWriter, read_partition, slices
from megatfm.data_prep.minhash import band_hashes
from megatfm.data_prep.progress import UpdateProgress

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
        run("join", self._bands * divided.ranges, total * self._bands, self._join)
        run("gather", divided.chunks, total, self._gather)
        return run("cluster", 1, total, self._cluster, lambda _: {"each": divided.chunk_rows})

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
        found = np.empty(0, _EDGE)
        for some in self._in_batches(self._joined(chunk)):
            found = np.unique(np.concatenate([found, some]))
        KeyTableWriter(self._index.path("edges", chunk)).write(iter([found]))
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
            for some in self._in_batches(self._edges_of(chunk)):
                edges = spanning_forest(np.concatenate([edges, self._unpacked(some, chunk)]))
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
            KeyTableWriter(self._index.path("marks", chunk)).write(iter([marks]))
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
    others = np.flatnonzero(lowest[labels] != np.arange(len(rows)))
    return np.stack([rows[lowest[labels[others]]], rows[others]], axis=1)
