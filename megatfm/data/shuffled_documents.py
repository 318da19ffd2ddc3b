"""Iterates over the samples of a corpus in shuffled order, about as fast as their frames decompress."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.corpus import Corpus
from megatfm.data.order import RowSlot, make_row_order
from megatfm.errors import MegatfmError

NumberedDocument = tuple[int, NDArray[np.integer]]
Run = tuple[int, int, int]
"""A run of `RowOrder.iter_stream_blocks`."""
FRAMES_PER_CALL = 16
"""Frames that a thread decompresses per call. One frame per call takes about 1.5 times as long."""


class ShuffledDocuments(Iterator[NumberedDocument]):
    """An endless iterator over (sample number, read-only tokens [n]) in the order of `RowOrder` over samples.

    Each epoch has each sample once; `position` counts the documents so far, and an iterator that starts there
    continues. Each stream holds the current frame, and the next one, which `threads` decompress in the background.
    Frames decompressed together stay in memory until all of them were yielded, so memory is about three times that.
    Frames of plain tars are verified at their first use; their samples are then read one by one.
    """

    def __init__(self, corpus: Corpus, *, seed: int, streams: int = 64, position: int = 0, threads: int = 2) -> None:
        self.corpus = corpus
        self.order = make_row_order(np.diff(corpus.blocks), seed=seed, streams=streams, shuffle=True)
        self.position = position
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="megatfm-samples")
        self._streams = self._iter_epoch()

    def __next__(self) -> NumberedDocument:
        try:
            document = next(self._streams)
        except StopIteration:
            self._streams = self._iter_epoch()
            document = next(self._streams)
        self.position += 1
        return document

    def _iter_epoch(self) -> Iterator[NumberedDocument]:
        """Yield the remaining samples of the epoch that contains `position`."""
        epoch, n_drawn = divmod(self.position, len(self.order))
        turns, first = divmod(n_drawn, self.order.streams)
        prefetched = self._prefetch(epoch, self._read_sequence(epoch, turns, first))
        streams: list[Iterator[NumberedDocument]] = [iter(()) for _ in range(self.order.streams)]
        while True:
            for stream in range(first, len(streams)):
                document = next(streams[stream], None)
                if document is None:
                    # Runs arrive in the order of use; at the end of the epoch none is left.
                    streams[stream] = iter(next(prefetched, ()))
                    document = next(streams[stream], None)
                    if document is None:
                        return
                yield document
            first = 0

    def _read_sequence(self, epoch: int, turns: int, first: int) -> Iterator[Run]:
        """Yield the runs of all streams in the order of use; streams before `first` are one turn ahead."""
        begin = [(turns + (stream < first), stream) for stream in range(self.order.streams)]
        runs = [self.order.iter_stream_blocks(stream, epoch, turn) for turn, stream in begin]
        heapq.heapify(begin)
        while begin:
            turn, stream = begin[0]
            run = next(runs[stream], None)
            if run is None:
                heapq.heappop(begin)
                continue
            yield run
            heapq.heapreplace(begin, (turn + run[2] - run[1], stream))

    def _prefetch(self, epoch: int, runs: Iterator[Run]) -> Iterator[Iterable[NumberedDocument]]:
        """Yield the samples of each run, decompressed by background threads."""
        batches = iter(lambda: list(islice(runs, FRAMES_PER_CALL)), [])
        pending = deque(
            self._executor.submit(self._read, epoch, batch)
            for batch in islice(batches, -(-self.order.streams // FRAMES_PER_CALL) + 1)
        )
        while pending:
            ready = pending.popleft().result()
            pending.extend(self._executor.submit(self._read, epoch, batch) for batch in islice(batches, 1))
            yield from ready

    def _read(self, epoch: int, runs: list[Run]) -> list[Iterable[NumberedDocument]]:
        packed = [block for block, _, _ in runs if not self.corpus.is_uncompressed(block)]
        try:
            unpacked = dict(zip(packed, self.corpus.read_blocks(packed), strict=True))
        except MegatfmError:  # raised again by the one that is damaged, when its turn comes
            unpacked = {}
        runs_of_samples: list[Iterable[NumberedDocument]] = []
        for block, at, stop in runs:
            rows = self.order.get_block_order(RowSlot(epoch, block, at, 0))[at:stop]
            if samples := unpacked.get(block):
                runs_of_samples.append([samples[row] for row in rows])
            else:
                runs_of_samples.append(
                    self._read_raw(block, rows) if self.corpus.is_uncompressed(block) else self._read_block(block, rows)
                )
        return runs_of_samples

    def _read_block(self, block: int, rows: list[int]) -> Iterator[NumberedDocument]:
        samples = self.corpus.read_block(block)
        yield from (samples[row] for row in rows)

    def _read_raw(self, block: int, rows: list[int]) -> Iterator[NumberedDocument]:
        if not self.corpus.is_verified(block):
            try:
                self.corpus.verify(block)
            except MegatfmError:
                return self._read_block(block, rows)
        self.corpus.prefetch_block(block)
        return self.corpus.read_samples(block, rows)
