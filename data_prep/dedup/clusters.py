"""Mark near duplicates except the first of each cluster: in linear time, with parts as in `first_occurrence.py`.

1. `sort`, a part for each chunk of signatures: sort the hashes of each band, with their rows.
2. `buckets`, a part for each range of each band: rows with the same hash are a bucket, whose signatures are compared.
   Similar rows become edges of a tree, which are stored by the chunk of the higher row.
3. `gather`, a part for each chunk: collect its edges, each once.
4. `clusters`, one part, from the last chunk to the first. A row is the first of its cluster unless the edges of its
   chunk join it to a lower one. A cluster that reaches below the chunk passes an edge for each lower row down to that
   row's chunk. A chunk's edges are held in memory, and never more are passed down than came in.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data_prep.dedup.hashing import Hashes, hash_bands
from megatfm.data_prep.dedup.key_table import (
    DedupContext,
    HashRange,
    KeyTable,
    Partitioning,
    PartitionsWriter,
    RowIndices,
    count_records,
    find_hash_ranges,
    iter_fitting_ranges,
    read_array,
    read_hash_ranges,
    read_partition,
    write_keys,
)
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.files import name_write_errors

SMALL_BUCKET = 32
"""A bucket of at most this size compares all pairs; a larger one compares all remaining rows with the first of them,
until none remains."""
MAX_PAIRS = 2**13
"""Most pairs whose signatures are compared at a time: 7 MB."""
JOIN_BYTES = 80
"""Bytes of memory for each row of a bucket that is read, as measured with tracemalloc."""
RECORD = np.dtype([("hash", "<u8"), ("place", "<u4")])

Edges = NDArray[np.int64]
"""[n, 2]: pairs of similar rows, the lower one first."""


class Buckets:
    """Compares the rows of buckets. leftover_path: file of remaining rows of a bucket that doesn't fit the memory."""

    def __init__(self, rows: KeyTable, similarity: float, memory_bytes: int, leftover_path: Path) -> None:
        self._rows, self._similarity = rows, similarity
        self._memory_bytes, self._leftover_path = memory_bytes, leftover_path
        # Signatures take a third of the memory.
        self._max_rows = max(2, memory_bytes // (3 * rows.columns * 4))
        self._max_pairs = max(64, min(MAX_PAIRS, memory_bytes // (16 * rows.columns)))

    def find_edges(self, parts: list[HashRange], low: int, high: int) -> Iterator[Edges]:
        """Yield edges of rows whose hashes lie from `low` up to `high`; in halves if they don't fit the memory."""
        max_records = self._memory_bytes // JOIN_BYTES
        for fitting_parts in iter_fitting_ranges(parts, low, high, max_records):
            if count_records(fitting_parts) <= max_records:
                yield from self._compare_in_memory(fitting_parts)
            else:
                yield from self._compare_on_disk(_read_rows(part, self._max_rows) for part in fitting_parts)

    def _compare_in_memory(self, parts: list[HashRange]) -> Iterator[Edges]:
        hashes, row_indices, _ = read_hash_ranges(parts)
        order = argsort_stable(hashes)
        hashes, row_indices = hashes[order], row_indices[order]
        begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)])
        sizes = np.diff(np.append(begins, len(hashes)))
        row_indices, sizes = row_indices[np.repeat(sizes > 1, sizes)], sizes[sizes > 1]
        del hashes, order
        ends = np.cumsum(sizes)
        bucket = begin = 0
        while bucket < len(sizes):
            last = int(np.searchsorted(ends, begin + self._max_rows, "right"))
            if last > bucket:
                yield self._compare(row_indices[begin : ends[last - 1]], sizes[bucket:last])
            else:
                last = bucket + 1
                bucket_rows = row_indices[begin : int(ends[bucket])]
                batch_starts = range(0, len(bucket_rows), self._max_rows)
                batches = (bucket_rows[start : start + self._max_rows] for start in batch_starts)
                yield from self._compare_on_disk(iter([batches]))
            bucket, begin = last, int(ends[last - 1])

    def _compare(self, row_indices: RowIndices, sizes: NDArray[np.int64]) -> Edges:
        """Return the similar pairs in consecutive buckets of these sizes."""
        distinct_rows, members = np.unique(row_indices, return_inverse=True)
        signatures = self._rows.pick(distinct_rows)
        similar_pairs = [np.empty((0, 2), np.int64)]
        while len(members):
            is_small = np.repeat(sizes <= SMALL_BUCKET, sizes)
            for pairs in _iter_pairs(members[is_small], sizes[sizes <= SMALL_BUCKET]):
                similar_pairs.append(pairs[self._are_similar(signatures, pairs)])
            members, sizes = members[~is_small], sizes[sizes > SMALL_BUCKET]
            first_members = np.repeat(members[np.cumsum(sizes) - sizes], sizes)
            pairs = np.stack([first_members, members], axis=1)
            is_similar = self._are_similar(signatures, pairs)
            similar_pairs.append(pairs[is_similar & (first_members != members)])
            buckets = np.repeat(np.arange(len(sizes)), sizes)[~is_similar]
            members, sizes = members[~is_similar], np.bincount(buckets, minlength=len(sizes))
            sizes = sizes[sizes > 0]
        return distinct_rows[np.concatenate(similar_pairs)]

    def _are_similar(self, signatures: NDArray[Any], pairs: Edges) -> NDArray[np.bool_]:
        is_similar = np.empty(len(pairs), np.bool_)
        for start in range(0, len(pairs), self._max_pairs):
            left, right = pairs[start : start + self._max_pairs].T
            is_similar[start : start + self._max_pairs] = (signatures[left] == signatures[right]).mean(
                axis=1
            ) >= self._similarity
        return is_similar

    def _compare_on_disk(self, parts: Iterator[Iterator[RowIndices]]) -> Iterator[Edges]:
        """Compare rows of a bucket that doesn't fit the memory, in one pass for each distinct signature."""
        chunks: Iterator[RowIndices] = (row_indices for part in parts for row_indices in part)
        files = [self._leftover_path.with_name(f"{self._leftover_path.name}.{index}") for index in (0, 1)]
        try:
            while True:
                n_left, first_row = 0, None
                with name_write_errors(files[0]), open(files[0], "wb") as file:
                    for row_indices in chunks:
                        signatures = self._rows.pick(row_indices)
                        first_row = (int(row_indices[0]), signatures[0].copy()) if first_row is None else first_row
                        is_similar = (signatures == first_row[1]).mean(axis=1) >= self._similarity
                        del signatures
                        similar = row_indices[is_similar & (row_indices != first_row[0])]
                        yield np.stack([np.full(len(similar), first_row[0]), similar], axis=1)
                        file.write(row_indices[~is_similar].tobytes())
                        n_left += int((~is_similar).sum())
                files.reverse()
                if n_left <= self._max_rows:
                    break
                chunks = _read_row_file(files[1], n_left, self._max_rows)
            if n_left > 1:
                row_indices = read_array(files[1], np.dtype(np.int64), 0, n_left)
                yield self._compare(row_indices, np.array([n_left]))
        finally:
            for path in files:
                path.unlink(missing_ok=True)


def argsort_stable(hashes: Hashes) -> RowIndices:
    """Sort hashes stably, as np.argsort with kind="stable" does, in a third of its time."""
    order = np.argsort(hashes)
    values = hashes[order]
    is_equal = values[1:] == values[:-1]
    in_group = np.flatnonzero(np.concatenate([[False], is_equal]) | np.concatenate([is_equal, [False]]))[: len(hashes)]
    if len(in_group):
        groups = np.cumsum(np.concatenate([[0], ~is_equal]))[in_group]
        order[in_group] = np.sort(groups * len(hashes) + order[in_group]) % len(hashes)
    return order


def _iter_pairs(members: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[Edges]:
    """Yield all pairs inside consecutive groups of these sizes."""
    ends = np.cumsum(sizes)
    for size in np.unique(sizes):
        groups = members[(ends[sizes == size] - size)[:, None] + np.arange(size)]
        left, right = np.triu_indices(size, 1)
        yield np.stack([groups[:, left].ravel(), groups[:, right].ravel()], axis=1)


def _read_rows(part: HashRange, batch_rows: int) -> Iterator[RowIndices]:
    for start in range(part.begin, part.end, batch_rows):
        records = part._replace(begin=start, end=min(start + batch_rows, part.end)).read()
        yield records["place"].astype(np.int64) + part.base


def _read_row_file(path: Path, count: int, batch_rows: int) -> Iterator[RowIndices]:
    for start in range(0, count, batch_rows):
        yield read_array(path, np.dtype(np.int64), start, min(batch_rows, count - start))


# Bytes of memory for each row, as measured with tracemalloc: of signatures, or of edges, at most one a band.
_SORT_BYTES, _SIGN_BYTES, _EDGE_BYTES = 96, 4, 80
_EDGE = np.dtype("<u8")


def mark_near_duplicates(rows: KeyTable, context: DedupContext, bands: int, similarity: float) -> StageResult:
    """Mark all rows except the first of each cluster, as `context.marks`; a row is a signature of `bands` bands.

    Returns `marks_per_file`.
    """
    return _ClusterSearch(rows, context, bands, similarity).run()


class _ClusterSearch:
    def __init__(self, rows: KeyTable, context: DedupContext, bands: int, similarity: float) -> None:
        self._rows, self._context, self._bands = rows, context, bands
        self._similarity = similarity
        sort_bytes = max(_SORT_BYTES + _SIGN_BYTES * rows.columns, _EDGE_BYTES * bands)
        self._partitioning = Partitioning.fit_memory(len(rows), context.memory_bytes, sort_bytes, JOIN_BYTES)

    def run(self) -> StageResult:
        partitioning, run, total = self._partitioning, self._context.run_parts, len(self._rows)
        run("sort", partitioning.chunks, total, self._sort)
        run("buckets", self._bands * partitioning.ranges, total * self._bands, self._join)
        run("gather", partitioning.chunks, total, self._gather)
        return run("clusters", 1, total, self._cluster_chunk, lambda _: {"marks_per_file": partitioning.chunk_rows})

    def _sort(self, chunk: int, advance: UpdateProgress) -> StageResult:
        begin, end = self._partitioning.chunk(chunk)
        signatures = self._rows.read(begin, end)
        width = self._rows.columns // self._bands
        partitions = self._bands * self._partitioning.ranges
        with PartitionsWriter(self._context.path("sorted", chunk), partitions) as writer:
            for band in range(self._bands):
                hashes = hash_bands(signatures, band, width)
                order = argsort_stable(hashes)
                records = np.empty(len(order), RECORD)
                records["hash"], records["place"] = hashes[order], order
                writer.add(records, self._partitioning.count_by_range(records["hash"]))
            writer.commit()
        advance(end - begin)
        return {}

    def _join(self, partition: int, advance: UpdateProgress) -> StageResult:
        partitioning = self._partitioning
        partitions = self._bands * partitioning.ranges
        parts = find_hash_ranges(self._context, partitioning, RECORD, partitions, partition)
        bounds = partitioning.hash_bounds(partition % partitioning.ranges)
        buckets = Buckets(
            self._rows, self._similarity, self._context.memory_bytes, self._context.path("rest", partition)
        )
        with PartitionsWriter(self._context.path("joined", partition), partitioning.chunks) as writer:
            for edges in buckets.find_edges(parts, *bounds):
                edges = spanning_forest(edges)
                edges = edges[np.argsort(edges[:, 1])]
                writer.add(self._pack(edges), partitioning.count_by_chunk(edges[:, 1]))
            writer.commit()
        advance(partitioning.total // partitioning.ranges)
        return {}

    def _gather(self, chunk: int, advance: UpdateProgress) -> StageResult:
        edges = np.empty(0, _EDGE)
        for new_edges in self._in_batches(self._read_edges(chunk)):
            edges = np.unique(np.concatenate([edges, new_edges]))
        write_keys(self._context.path("edges", chunk), [edges])
        begin, end = self._partitioning.chunk(chunk)
        advance(end - begin)
        return {}

    def _read_edges(self, chunk: int) -> Iterator[NDArray[Any]]:
        for partition in range(self._bands * self._partitioning.ranges):
            yield from read_partition(self._context.path("joined", partition), _EDGE, self._partitioning.chunks, chunk)

    def _cluster_chunk(self, _: int, advance: UpdateProgress) -> StageResult:
        forwarded_paths = [self._context.path("passed", chunk) for chunk in range(self._partitioning.chunks)]
        for path in forwarded_paths:
            path.unlink(missing_ok=True)  # left by a process that died here
        for chunk in reversed(range(self._partitioning.chunks)):
            begin, end = self._partitioning.chunk(chunk)
            marks = np.zeros(end - begin, np.uint8)
            edges = np.empty((0, 2), np.int64)
            for packed_edges in self._in_batches(self._iter_chunk_edges(chunk)):
                edges = spanning_forest(np.concatenate([edges, self._unpack(packed_edges, chunk)]))
                self._forward_edges(edges[edges[:, 1] < begin], forwarded_paths)
                edges = edges[edges[:, 1] >= begin]
            marks[edges[:, 1] - begin] = 1
            write_keys(self._context.path("marks", chunk), [marks])
            advance(end - begin)
        return {}

    def _forward_edges(self, edges: Edges, paths: Sequence[Path]) -> None:
        """Append edges to the files of their higher rows' chunks. paths: by chunk."""
        order, start = np.argsort(edges[:, 1]), 0
        for path, count in zip(paths, self._partitioning.count_by_chunk(edges[order, 1]).tolist(), strict=True):
            if count:
                with name_write_errors(path), open(path, "ab") as file:
                    file.write(self._pack(edges[order[start : start + count]]).tobytes())
            start += count

    def _iter_chunk_edges(self, chunk: int) -> Iterator[NDArray[Any]]:
        """Yield the edges of a chunk's rows to lower ones, and those that were passed down to it."""
        step = self._choose_batch_size()
        for kind in ("edges", "passed"):
            path = self._context.path(kind, chunk)
            count = path.stat().st_size // _EDGE.itemsize if path.exists() else 0
            for start in range(0, count, step):
                yield read_array(path, _EDGE, start, min(step, count - start))

    def _in_batches(self, arrays: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        batch: list[NDArray[Any]] = []
        for array in arrays:
            batch.append(array)
            if sum(map(len, batch)) >= self._choose_batch_size():
                yield np.concatenate(batch)
                batch = []
        if batch:
            yield np.concatenate(batch)

    def _choose_batch_size(self) -> int:
        return max(1, self._context.memory_bytes // (4 * _EDGE_BYTES))

    def _pack(self, edges: Edges) -> NDArray[Any]:
        """Pack edges into integers: the higher row, counted from its chunk's first, times all rows, plus the lower
        row."""
        high, low = (edges[:, column].astype(_EDGE) for column in (1, 0))
        return high % np.uint64(self._partitioning.chunk_rows) * np.uint64(self._partitioning.total) + low

    def _unpack(self, packed: NDArray[Any], chunk: int) -> Edges:
        high, low = np.divmod(packed, np.uint64(self._partitioning.total))
        return np.stack([low.astype(np.int64), high.astype(np.int64) + chunk * self._partitioning.chunk_rows], axis=1)


def spanning_forest(edges: Edges) -> Edges:
    """Return a spanning forest: edges [n, 2] from the lowest row of each cluster to all its others."""
    from scipy.sparse import coo_array  # imported on use, since it takes seconds
    from scipy.sparse.csgraph import connected_components

    if not len(edges):
        return edges
    rows, ends = np.unique(edges, return_inverse=True)
    ends = ends.reshape(edges.shape).astype(np.int32)
    graph = coo_array((np.ones(len(ends), np.bool_), (ends[:, 0], ends[:, 1])), shape=(len(rows), len(rows)))
    count, labels = connected_components(graph, directed=False)
    lowest = np.empty(count, np.int64)
    lowest[labels[::-1]] = np.arange(len(rows))[::-1]  # the last write to an index stays: the lowest row
    members = np.flatnonzero(lowest[labels] != np.arange(len(rows)))
    return np.stack([rows[lowest[labels[members]]], rows[members]], axis=1)
