"""Mark every row whose key an earlier row has: linear in bytes read and written, in any memory, by any number of
processes.

1. `sort`, a part for each chunk of rows: sort them by hash. All but the first of equal keys *of a chunk* are repeats
   whatever the other chunks contain, so they are recorded at once and not passed on: a hash that half of all rows
   share leaves one row a chunk. The beginnings of the ranges of hashes are stored beside the rows.
2. `join`, a part for each range of hashes: read its slice of each chunk, and record all but the first of equal keys, by
   chunk.
3. `mark`, a part for each chunk: mark its own repeats, and those that each range recorded for it.

Processes share a folder and nothing else. A part may be interrupted, repeated or done twice; the result depends
neither on the memory nor on which process does which part.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data_prep.dedup.hashing import Hashes
from megatfm.data_prep.dedup.key_table import (
    DedupContext,
    KeyTable,
    Partitioning,
    PartitionsWriter,
    RowIndices,
    find_hash_ranges,
    iter_fitting_ranges,
    read_array,
    read_hash_ranges,
    read_partition,
    write_keys,
)
from megatfm.data_prep.documents import EXAMPLES
from megatfm.data_prep.execution.executors import StageResult
from megatfm.data_prep.execution.progress import UpdateProgress

# Bytes of memory for each row in a part, as measured with tracemalloc.
SORT_BYTES, JOIN_BYTES = 72, 80


def mark_repeats(rows: KeyTable, context: DedupContext) -> StageResult:
    """Mark the rows whose key (the first number, or the first two) an earlier row has, as `context.marks`.

    Returns `marks_per_file`, and for two numbers some `examples`: [row, first row].
    """
    return _RepeatSearch(rows, context).run()


class _RepeatSearch:
    def __init__(self, rows: KeyTable, context: DedupContext) -> None:
        self._rows, self._context = rows, context
        self._partitioning = Partitioning.fit_memory(len(rows), context.memory_bytes, SORT_BYTES, JOIN_BYTES)
        self._is_checked = rows.columns > 1
        check = [("check", "<u8")] if self._is_checked else []
        first = [("first", "<i8")] if self._is_checked else []
        self._record_dtype = np.dtype([("hash", "<u8"), ("place", "<u4"), *check])
        self._repeat_dtype = np.dtype([("place", "<u4"), *first])

    def run(self) -> StageResult:
        partitioning, run = self._partitioning, self._context.run_parts
        run("sort", partitioning.chunks, partitioning.total, self._sort)
        run("join", partitioning.ranges, partitioning.total, self._join)
        return run("mark", partitioning.chunks, partitioning.total, self._mark, self._join_facts)

    def _sort(self, chunk: int, advance: UpdateProgress) -> StageResult:
        begin, end = self._partitioning.chunk(chunk)
        columns = self._rows.read(begin, end)
        hashes = np.ascontiguousarray(columns[:, 0])
        check = np.ascontiguousarray(columns[:, 1]) if self._is_checked else None
        del columns
        firsts, repeats, first_of_repeat = group_equal_keys(hashes, check)
        records = np.empty(len(firsts), self._record_dtype)
        records["hash"], records["place"] = hashes[firsts], firsts
        if check is not None:
            records["check"] = check[firsts]
        with PartitionsWriter(self._context.path("sorted", chunk), self._partitioning.ranges) as writer:
            writer.add(records, self._partitioning.count_by_range(hashes[firsts]))
            writer.commit()
        write_keys(self._context.path("later", chunk), [self._repeat_records(repeats, first_of_repeat + begin)])
        advance(end - begin)
        return {"later": len(repeats)}

    def _join(self, hash_range: int, advance: UpdateProgress) -> StageResult:
        partitioning = self._partitioning
        parts = find_hash_ranges(self._context, partitioning, self._record_dtype, partitioning.ranges, hash_range)
        with PartitionsWriter(self._context.path("joined", hash_range), partitioning.chunks) as writer:
            bounds, max_records = partitioning.hash_bounds(hash_range), self._context.memory_bytes // JOIN_BYTES
            for fitting_parts in iter_fitting_ranges(parts, *bounds, max_records):
                hashes, row_indices, check = read_hash_ranges(fitting_parts)
                _, repeats, firsts = group_equal_keys(hashes, check)
                rows, firsts = row_indices[repeats], row_indices[firsts]
                order = np.argsort(rows)
                rows, firsts = rows[order], firsts[order]
                writer.add(
                    self._repeat_records(rows % partitioning.chunk_rows, firsts), partitioning.count_by_chunk(rows)
                )
            writer.commit()
        advance(partitioning.total // partitioning.ranges)
        return {}

    def _mark(self, chunk: int, advance: UpdateProgress) -> StageResult:
        begin, end = self._partitioning.chunk(chunk)
        marks = np.zeros(end - begin, np.uint8)
        firsts = np.arange(begin, end) if self._is_checked else None
        for repeats in self._iter_chunk_repeats(chunk):
            marks[repeats["place"]] = 1
            if firsts is not None:
                firsts[repeats["place"]] = repeats["first"]
        write_keys(self._context.path("marks", chunk), [marks])
        advance(end - begin)
        if firsts is None:
            return {}
        examples = []
        for index in np.flatnonzero(marks)[:EXAMPLES].tolist():
            first = int(firsts[index])  # if in this chunk, it may be a repeat itself
            examples.append([begin + index, int(firsts[first - begin]) if first >= begin else first])
        return {"examples": examples}

    def _iter_chunk_repeats(self, chunk: int) -> Iterator[NDArray[Any]]:
        path = self._context.path("later", chunk)
        yield read_array(path, self._repeat_dtype, 0, path.stat().st_size // self._repeat_dtype.itemsize)
        for hash_range in range(self._partitioning.ranges):
            path = self._context.path("joined", hash_range)
            yield from read_partition(path, self._repeat_dtype, self._partitioning.chunks, chunk)

    def _join_facts(self, parts: Iterable[StageResult]) -> StageResult:
        examples = islice((example for part in parts for example in part.get("examples", ())), EXAMPLES)
        return {"marks_per_file": self._partitioning.chunk_rows, "examples": list(examples)}

    def _repeat_records(self, row_indices: RowIndices, firsts: RowIndices) -> NDArray[Any]:
        records = np.empty(len(row_indices), self._repeat_dtype)
        records["place"] = row_indices
        if self._is_checked:
            records["first"] = firsts
        return records


def group_equal_keys(hashes: Hashes, check: Hashes | None = None) -> tuple[RowIndices, RowIndices, RowIndices]:
    """Return the first row of each key, sorted by hash; all other rows; and for each of those its first row."""
    if not len(hashes):
        return (np.empty(0, np.int64),) * 3
    order = np.argsort(hashes)  # the default kind is vectorized; a stable one takes three times as long
    sorted_hashes = hashes[order]
    is_first = np.concatenate([[True], sorted_hashes[1:] != sorted_hashes[:-1]])
    if check is not None and not is_first.all():
        sorted_check = check[order]
        has_shared_hash = (sorted_check[1:] != sorted_check[:-1]) & ~is_first[1:]
        if has_shared_hash.any():  # two keys with one hash: very rare
            order = np.lexsort((check, hashes))
            sorted_hashes, sorted_check = hashes[order], check[order]
            is_first[1:] = (sorted_hashes[1:] != sorted_hashes[:-1]) | (sorted_check[1:] != sorted_check[:-1])
    begins = np.flatnonzero(is_first)
    firsts = np.minimum.reduceat(order, begins)
    if len(firsts) == len(order):
        return firsts, np.empty(0, np.int64), np.empty(0, np.int64)
    first_of_row = np.repeat(firsts, np.diff(np.append(begins, len(order))))
    is_later = order != first_of_row
    return firsts, order[is_later], first_of_row[is_later]
