"""The order of training: global position → row, a pure function of (corpus, objective, seed)."""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.data.block import PackedBlock, pack
from megatfm.data.cache import ByteCache
from megatfm.data.corpus import Corpus
from megatfm.data.packing import Fields, Objective
from megatfm.data.pieces import Pieces, pieces_of
from megatfm.data.whole import best_fit
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


SAMPLES_AT_ONCE = 2**18
"""Documents whose pieces are planned together, so that planning needs little memory."""


class PackedRows:
    """Rows of `sequence_length` tokens in a reproducible order without end; `len` is the rows of an epoch.

    An epoch lists the blocks in a permuted order, and cuts that list of N rows into `streams` contiguous
    segments that are read in turn: neighbours in the order come from different places of the corpus, while
    each stream reads on. Inside a block, documents and rows are permuted. All permutations are keyed by
    (seed, epoch), so row(g) needs nothing but g, and each epoch has each row once. `shuffle=False` gives
    the stored order in every epoch.

    Rows never span blocks. An objective with `max_tokens` gets pieces of that length, and its sequences stay whole:
    which share a row is planned once, from their lengths, and is the same in all epochs. Other documents are joined
    in another order each epoch and cut where rows end. What room is left is padding, with `pad_id` for tokens.
    target_length: row length of an objective's second side (an encoder-decoder's decoder).

    Memory grows with the number of blocks, and by at most `cache_bytes` of packed blocks; the cache should hold one
    block per stream. `notes` are lines for the log, on what of the corpus is not read as one would think.

    Raises a UsageError if the corpus is too short for one row.
    """

    def __init__(
        self,
        corpus: Corpus,
        objective: Objective,
        *,
        sequence_length: int,
        target_length: int | None = None,
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
        self._lengths = (sequence_length, target_length or sequence_length)[: len(objective.sides)]
        self.notes: list[str] = []
        self._rows_of_block = self._plan()
        self._n_rows = int(self._rows_of_block.sum())
        self._cache: ByteCache[tuple[int, int], PackedBlock] = ByteCache(cache_bytes, lambda b: b.nbytes)
        # For two epochs, since the loader may fetch ahead into the next one.
        self._epoch = lru_cache(maxsize=2)(self._order)
        self._row_order = lru_cache(maxsize=2 * streams)(self._rows_in_order)

    def __len__(self) -> int:
        return self._n_rows

    def identity(self) -> dict[str, str | int | bool]:
        """What determines the order, for a checkpoint to compare."""
        second = {"target_length": self._lengths[1]} if len(self._lengths) > 1 else {}
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            **second,
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
        """The row at a global position: int64 arrays [length of the field's side] by name.

        "tokens", "targets" (−100: not counted), "documents" (0, 1, … in the row; −1: padding), "positions"
        (from 0 in each document's piece), and whatever else the objective makes; of an objective with two sides
        also "encoder_documents" and "encoder_positions". With `attend_across_documents`, a row counts as one
        document.
        """
        epoch, block, row = self.place(position)
        return self._block(epoch, block).row(row, self._as_one_document)

    def padding(self) -> Fields:
        """A row of nothing but padding, with the fields of `row`."""
        block = int(self._rows_of_block.argmax())
        return self._block(0, block).row(int(self._rows_of_block[block]))

    def _order(self, epoch: int) -> _Epoch:
        n = len(self._rows_of_block)
        blocks = permutation(n, self.seed, "blocks", epoch) if self.shuffle else np.arange(n, dtype=np.int64)
        return _Epoch(blocks, np.concatenate([[0], np.cumsum(self._rows_of_block[blocks])]))

    def _rows_in_order(self, epoch: int, block: int) -> NDArray[np.int64]:
        return permutation(int(self._rows_of_block[block]), self.seed, "rows", epoch, block)

    def _block(self, epoch: int, block: int) -> PackedBlock:
        return self._cache.get((epoch, block), partial(self._pack, epoch, block))

    def _pack(self, epoch: int, block: int) -> PackedBlock:
        return pack(
            [tokens for _, tokens in self.corpus.block(block)],
            self.objective,
            row_lengths=self._lengths,
            seed=self.seed,
            epoch=epoch,
            first=int(self.corpus.blocks[block]),
            pad_id=self._pad_id,
            order=(lambda n: permutation(n, self.seed, "documents", epoch, block)) if self.shuffle else None,
        )

    def _plan(self) -> NDArray[np.int64]:
        """The rows of every block [n_blocks]."""
        blocks, n_tokens = self.corpus.blocks, self.corpus.lengths()
        if self.objective.max_tokens is None:
            built = np.concatenate(
                [
                    np.add.reduceat(pieces.lengths[:, 0], starts[:-1])
                    for _, starts, pieces in self._planned(n_tokens)
                ]
            )
            self._check_size(int(built.sum()))
            return -(-built // self.sequence_length)
        counts, total, dropped, alone = np.zeros(len(blocks) - 1, np.int64), 0, 0, 0
        for block, pieces in self._pieces_by_block(n_tokens):
            kept = pieces.with_sequences()
            self._check_lengths(kept)
            rows = best_fit(kept.lengths, self._lengths)
            counts[block] = int(rows.max(initial=-1)) + 1
            total, dropped = total + len(kept), dropped + len(pieces) - len(kept)
            alone += len(kept) if np.count_nonzero(n_tokens[blocks[block] : blocks[block + 1]]) == 1 else 0
        if not total:
            raise UsageError(
                f"{self.corpus.folder}: none of its {self.corpus.n_samples} documents is long enough for the objective"
            )
        if dropped:
            self.notes.append(
                f"{self.corpus.folder}: {dropped:,} of {total + dropped:,} pieces of documents are too short for the "
                "objective and are left out"
            )
        if alone and self.objective.needs_partners:
            self.notes.append(
                f"{self.corpus.folder}: {alone:,} of {total:,} sequences lie in blocks with no other document, so "
                "they have no partner"
            )
        return counts

    def _planned(self, n_tokens: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], Pieces]]:
        """Some blocks at once: the number of the first, where the pieces of each start [n + 1], and the pieces."""
        blocks, begin = self.corpus.blocks, 0
        while begin < len(blocks) - 1:
            end = max(begin + 1, int(np.searchsorted(blocks, blocks[begin] + SAMPLES_AT_ONCE, "right")) - 1)
            first = int(blocks[begin])
            pieces = pieces_of(n_tokens[first : blocks[end]], self.objective, first, self.seed)
            yield begin, np.searchsorted(pieces.documents, blocks[begin : end + 1] - first), pieces
            begin = end

    def _pieces_by_block(self, n_tokens: NDArray[np.int64]) -> Iterator[tuple[int, Pieces]]:
        for begin, starts, pieces in self._planned(n_tokens):
            for number in range(len(starts) - 1):
                yield begin + number, pieces.take(np.arange(*starts[number : number + 2]))

    def _check_lengths(self, pieces: Pieces) -> None:
        if (pieces.lengths > np.array(self._lengths)).any() or (pieces.lengths == 0).any():
            at = int(((pieces.lengths > np.array(self._lengths)) | (pieces.lengths == 0)).any(1).argmax())
            n_tokens = int(pieces.ends[at] - pieces.starts[at])
            raise MegatfmError(
                f"the objective makes sequences of lengths {pieces.lengths[at].tolist()} of {n_tokens} tokens, for "
                f"rows of {list(self._lengths)}: its max_tokens = {self.objective.max_tokens} is wrong"
            )

    def _check_size(self, total: int) -> None:
        if total < self.sequence_length:
            raise UsageError(
                f"{self.corpus.folder}: its {self.corpus.n_samples} documents make {total} tokens, too few for one "
                f"sequence of {self.sequence_length}: set data.sequence_length to at most {total} or prepare more text"
            )
