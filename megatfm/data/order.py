"""The order of training: global position → row, a pure function of (corpus, objective, seed)."""

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.data.cache import ByteCache
from megatfm.data.corpus import Corpus
from megatfm.data.packing import Fields, Objective, PackedBlock, pack
from megatfm.errors import MegatfmError, UsageError
from megatfm.keyed import permutation


class Place(NamedTuple):
    """Where a row is: in which pass over the corpus, block, and row of the packed block."""

    epoch: int
    block: int
    row: int


class _Epoch(NamedTuple):
    blocks: NDArray[np.int64]
    """Block numbers [n_blocks] in the epoch's order."""
    first_rows: NDArray[np.int64]
    """Numbers [n_blocks + 1] of their first rows in the epoch's list of rows."""


class PackedRows:
    """Rows of `sequence_length` tokens in a reproducible order without end; `len` is the rows of an epoch.

    An epoch lists the blocks in a permuted order, and cuts that list of N rows into `streams` contiguous
    segments that are read in turn: neighbours in the order come from different places of the corpus, while
    each stream reads on. Inside a block, documents and rows are permuted. All permutations are keyed by
    (seed, epoch), so row(g) needs nothing but g, and each epoch has each row once. `shuffle=False` gives
    the stored order in every epoch.

    Rows never span blocks: the last row of a block is padded with `pad_id`. Memory grows with the number of
    blocks, and by at most `cache_bytes` of packed blocks; the cache should hold one block per stream.

    Raises a UsageError if the corpus is too short for one row.
    """

    def __init__(
        self,
        corpus: Corpus,
        objective: Objective,
        *,
        sequence_length: int,
        seed: int,
        streams: int = 64,
        shuffle: bool = True,
        attend_across_documents: bool = False,
        pad_id: int = 0,
        cache_bytes: int = 2**29,
    ) -> None:
        self.corpus = corpus
        self.objective = objective
        self.sequence_length = sequence_length
        self.seed = int(seed)
        self.streams = streams if shuffle else 1
        self.shuffle = shuffle
        self._as_one_document = attend_across_documents
        self._pad_id = pad_id
        self._rows_of_block = _plan(corpus, objective, sequence_length)
        self._n_rows = int(self._rows_of_block.sum())
        self._cache: ByteCache[tuple[int, int], PackedBlock] = ByteCache(cache_bytes, lambda b: b.nbytes)
        # For two epochs, since the loader may fetch ahead into the next one.
        self._epoch = lru_cache(maxsize=2)(self._order)
        self._row_order = lru_cache(maxsize=2 * streams)(self._rows_in_order)

    def __len__(self) -> int:
        return self._n_rows

    def identity(self) -> dict[str, str | int | bool]:
        """What determines the order, for a checkpoint to compare."""
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "streams": self.streams,
            "shuffle": self.shuffle,
            "attend_across_documents": self._as_one_document,
            "rows_per_epoch": len(self),
        }

    def place(self, position: int) -> Place:
        """Where the row at a global position ≥ 0 is."""
        epoch, k = divmod(int(position), len(self))  # a NumPy integer would make another key
        step, stream = divmod(k, self.streams)
        rows, longer = divmod(len(self), self.streams)  # the first `longer` streams have one row more
        index = stream * rows + min(stream, longer) + step
        order = self._epoch(epoch)
        at = int(np.searchsorted(order.first_rows, index, side="right")) - 1
        block, row = int(order.blocks[at]), index - int(order.first_rows[at])
        if self.shuffle:
            row = int(self._row_order(epoch, block)[row])
        return Place(epoch, block, row)

    def row(self, position: int) -> Fields:
        """The row at a global position: int64 arrays [sequence_length] by name.

        "tokens", "targets" (−100: not counted), "documents" (0, 1, … in the row; −1: padding), "positions"
        (from 0 in each document's piece), and whatever else the objective makes. With
        `attend_across_documents`, a row counts as one document.
        """
        epoch, block, row = self.place(position)
        return self._block(epoch, block).row(row, self.sequence_length, self._as_one_document)

    def padding(self) -> Fields:
        """A row of nothing but padding, with the fields of `row`."""
        block = int(self._rows_of_block.argmax())
        return self._block(0, block).row(int(self._rows_of_block[block]), self.sequence_length)

    def _order(self, epoch: int) -> _Epoch:
        n = len(self._rows_of_block)
        blocks = permutation(n, self.seed, "blocks", epoch) if self.shuffle else np.arange(n, dtype=np.int64)
        return _Epoch(blocks, np.concatenate([[0], np.cumsum(self._rows_of_block[blocks])]))

    def _rows_in_order(self, epoch: int, block: int) -> NDArray[np.int64]:
        return permutation(int(self._rows_of_block[block]), self.seed, "rows", epoch, block)

    def _block(self, epoch: int, block: int) -> PackedBlock:
        return self._cache.get((epoch, block), partial(self._pack, epoch, block))

    def _pack(self, epoch: int, block: int) -> PackedBlock:
        samples = self.corpus.block(block)
        if self.shuffle:
            order = permutation(len(samples), self.seed, "documents", epoch, block)
            samples = [samples[i] for i in order]
        documents = []
        for number, tokens in samples:
            document = self.objective.build(tokens, (self.seed, epoch, number))
            planned = int(self.objective.lengths(np.array([len(tokens)], np.int64))[0])
            if any(len(field) != planned for field in document.values()):
                found = {name: len(field) for name, field in document.items()}
                raise MegatfmError(f"the objective built sample {number} with lengths {found}, not {planned}")
            documents.append(document)
        return pack(documents, self._pad_id)


def _plan(corpus: Corpus, objective: Objective, sequence_length: int) -> NDArray[np.int64]:
    """The rows of every block [n_blocks]."""
    built = np.add.reduceat(objective.lengths(corpus.lengths()), corpus.blocks[:-1])
    total = int(built.sum())
    if total < sequence_length:
        raise UsageError(
            f"{corpus.folder}: its {corpus.n_samples} documents make {total} tokens, too few for one sequence of "
            f"{sequence_length}: set data.sequence_length to at most {total} or prepare more text"
        )
    return -(-built // sequence_length)
