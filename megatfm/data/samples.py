"""The samples of a corpus one by one, shuffled, at the speed at which their frames unpack."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from megatfm.data.corpus import Corpus
from megatfm.data.order import Order, order_of

Numbered = tuple[int, NDArray[np.integer]]


class ShuffledSamples(Iterator[Numbered]):
    """An endless iterator over (sample number, read-only tokens [n]) in the order of `Order` over samples.

    Each epoch has each sample once; `position` counts those that were given, and an iterator that starts there goes
    on from there. For those who want documents rather than packed rows. Of each stream two frames are in memory: the
    one that is given, and the next, which `threads` unpack meanwhile.
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
        n, streams = len(self.order), self.order.streams
        epoch, done = divmod(self.position, n)
        turns, first = divmod(done, streams)
        end = (epoch + 1) * n
        begins = [epoch * n + (turns + (stream < first)) * streams + stream for stream in range(streams)]
        readers = [self._stream(self._unpack(begin, end), begin, end) for begin in begins]
        while True:
            for reader in readers[first:]:
                found = next(reader, None)
                if (
                    found is None
                ):  # the first streams are the longer ones, so the epoch ends at the first that does
                    return
                yield found
            first = 0

    def _stream(self, ahead: Future[list[Numbered]], position: int, end: int) -> Iterator[Numbered]:
        """What a stream gives from a position on."""
        while position < end:
            samples = ahead.result()
            position += self.order.streams * len(samples)
            ahead = self._unpack(position, end)
            yield from samples

    def _unpack(self, position: int, end: int) -> Future[list[Numbered]]:
        return self._executor.submit(_rest_of_block, self.corpus, self.order, position, end)


def _rest_of_block(corpus: Corpus, order: Order, position: int, end: int) -> list[Numbered]:
    """What the stream that has a position gives from there on, to the end of the block or before `end`."""
    if position >= end:
        return []
    (slot,) = order.slots(np.array([position]))
    rows = order.block_order(slot.epoch, slot.block)[slot.row :]
    samples = corpus.block(slot.block)
    return [samples[row] for row in rows[: -(-(end - position) // order.streams)]]
