"""The samples of a corpus one by one, shuffled, at the speed at which their frames unpack."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatfm.data.corpus import Corpus
from megatfm.data.order import order_of

Numbered = tuple[int, NDArray[np.integer]]


class ShuffledSamples(Iterator[Numbered]):
    """An endless iterator over (sample number, read-only tokens [n]) in the order of `Order` over samples.

    Each epoch has each sample once; `position` counts those that were given, and an iterator that starts there goes
    on from there. For those who want documents rather than packed rows; a frame for each stream is in memory.
    """

    def __init__(self, corpus: Corpus, *, seed: int, streams: int = 64, position: int = 0) -> None:
        self.corpus = corpus
        self.order = order_of(np.diff(corpus.blocks), seed=seed, streams=streams, shuffle=True)
        self.position = position
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
        n, streams = len(self.order), self.order.streams
        epoch, done = divmod(self.position, n)
        turns, first = divmod(done, streams)
        readers = [
            self._stream(epoch * n + turn * streams + stream, (epoch + 1) * n)
            for stream in range(streams)
            for turn in (turns + (stream < first),)
        ]
        while True:
            for reader in readers[first:]:
                found = next(reader, None)
                if (
                    found is None
                ):  # the first streams are the longer ones, so the epoch ends at the first that does
                    return
                yield found
            first = 0

    def _stream(self, position: int, end: int) -> Iterator[Numbered]:
        """What a stream gives from a position on."""
        while position < end:
            epoch, block, first = self.order.place(position)
            samples, rows = self.corpus.block(block), self.order.block_order(epoch, block)
            for row in rows[rows.index(first) :]:  # one look at the order for many samples
                if position >= end:
                    return
                yield samples[row]
                position += self.order.streams
