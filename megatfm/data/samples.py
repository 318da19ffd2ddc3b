"""The samples of a corpus one by one, shuffled, at the speed at which their frames unpack."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatfm.data.corpus import Corpus
from megatfm.data.order import order_of

Numbered = tuple[int, NDArray[np.integer]]
Run = tuple[int, int, int]
"""Of `Order.runs`."""


class ShuffledSamples(Iterator[Numbered]):
    """An endless iterator over (sample number, read-only tokens [n]) in the order of `Order` over samples.

    Each epoch has each sample once; `position` counts those that were given, and an iterator that starts there goes
    on from there. For those who want documents rather than packed rows. Of each stream two frames are in memory: the
    one that is given, and the next, which `threads` unpack meanwhile. Of plain tars, frames are verified the first
    time, and their samples read one by one.
    """

    def __init__(
        self, corpus: Corpus, *, seed: int, streams: int = 64, position: int = 0, threads: int = 2
    ) -> None:
        self.corpus = corpus
        self.order = order_of(np.diff(corpus.blocks), seed=seed, streams=streams, shuffle=True)
        self.position = position
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="megatfm-samples")
        self._streams = self._epoch()

    def __next__(self) -> Numbered:
        try:
            found = next(self._streams)
        except StopIteration:
            self._streams = self._epoch()
            found = next(self._streams)
        self.position += 1
        return found

    def _epoch(self) -> Iterator[Numbered]:
        """What is left of the epoch in which `position` is."""
        epoch, done = divmod(self.position, len(self.order))
        turns, first = divmod(done, self.order.streams)
        readers = [
            self._stream(epoch, self.order.runs(stream, epoch, turns + (stream < first)))
            for stream in range(self.order.streams)
        ]
        while True:
            for reader in readers[first:]:
                found = next(reader, None)
                if found is None:
                    # The first streams are the longer ones, so the epoch ends at the first that does.
                    return
                yield found
            first = 0

    def _stream(self, epoch: int, runs: Iterator[Run]) -> Iterator[Numbered]:
        """The samples of a stream, the next run of which is made ready meanwhile."""
        ahead = self._ahead(epoch, next(runs, None))
        while (samples := ahead()) is not None:
            ahead = self._ahead(epoch, next(runs, None))
            yield from samples

    def _ahead(self, epoch: int, run: Run | None) -> Callable[[], Iterable[Numbered] | None]:
        """The samples of a run, if there is one, when they are called for."""
        if run is None:
            return lambda: None
        if self.corpus.lies_open(run[0]) and self.corpus.is_verified(run[0]):
            # Nothing is left to do that would be worth a thread.
            self.corpus.read_ahead(run[0])
            return partial(self._read, epoch, run)
        return self._executor.submit(self._read, epoch, run).result

    def _read(self, epoch: int, run: Run) -> Iterable[Numbered]:
        block, at, stop = run
        rows = self.order.block_order(epoch, block)[at:stop]
        if self.corpus.lies_open(block):
            if not self.corpus.is_verified(block):
                self.corpus.verify(block)
            return self.corpus.one_by_one(block, rows)
        samples = self.corpus.block(block)
        return [samples[row] for row in rows]
