"""Rows of packed tokens of one corpus, in training order."""

from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.data.block import PackedBlock, pack
from megatfm.data.cache import ByteCache, nbytes
from megatfm.data.corpus import Corpus
from megatfm.data.order import Place, order_of
from megatfm.data.packing import Fields, Objective
from megatfm.data.plan import stored_plan
from megatfm.data.quarantine import Quarantine
from megatfm.errors import MegatfmError
from megatfm.keyed import permutation


class Rows(Protocol):
    """What a loader reads: an endless order of rows."""

    @property
    def seed(self) -> int: ...
    @property
    def row_tokens(self) -> int:
        """Tokens that a row has room for, of all its sides."""
        ...

    @property
    def splits(self) -> bool:
        """Whether a row may be cut into shorter ones."""
        ...

    def row(self, position: int) -> Fields: ...
    def padding(self) -> Fields: ...
    def epoch(self, position: int) -> int | str:
        """How often the corpus was read before a position."""
        ...

    def identity(self) -> dict[str, str | int | bool]: ...


class PackedRows:
    """Rows of `sequence_length` tokens in a reproducible order without end (see `Order`); `len` is those of an epoch.

    Rows never span blocks. An objective with `max_tokens` gets pieces of that length, and its sequences stay whole:
    which share a row is planned once, from their lengths, and is the same in all epochs. Other documents are joined
    in another order each epoch and cut where rows end. What room is left is padding, with `pad_id` for tokens.
    target_length: row length of an objective's second side (an encoder-decoder's decoder).

    plan_name: tells what decides the objective's lengths, so that the plan can be kept beside the corpus.
    quarantine: samples that become padding; their places, and all others', stay.

    Memory grows by 8 bytes a block, and by at most `cache_bytes` of packed blocks; the cache should hold one
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
        turn: int = 1,
        shuffle: bool = True,
        attend_across_documents: bool = False,
        pad_id: int = 0,
        cache_bytes: int = 2**29,
        plan_name: str | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.corpus = corpus
        self.objective = objective
        self.sequence_length = sequence_length
        self.seed = int(seed)
        self.streams, turn = (streams, turn) if shuffle else (1, 1)
        self.shuffle = shuffle
        self.quarantine = quarantine or Quarantine()
        self._as_one_document = attend_across_documents
        self._pad_id = pad_id
        self._lengths = (sequence_length, target_length or sequence_length)[: len(objective.sides)]
        plan = stored_plan(corpus, objective, self._lengths, self.seed, plan_name)
        self._rows_of_block = plan.rows
        self.notes = list(plan.notes)
        if self.quarantine:
            self.notes.append(f"{corpus.folder}: {len(self.quarantine):,} samples are in quarantine")
        self.order = order_of(plan.rows, seed=self.seed, streams=self.streams, turn=turn, shuffle=shuffle)
        self._cache: ByteCache[tuple[int, int], PackedBlock] = ByteCache(cache_bytes, nbytes)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def row_tokens(self) -> int:
        return sum(self._lengths)

    @property
    def splits(self) -> bool:
        return self.objective.max_tokens is None and len(self._lengths) == 1

    def epoch(self, position: int) -> int:
        return position // len(self)

    def identity(self) -> dict[str, str | int | bool]:
        """What determines the order, for a checkpoint to compare."""
        second = {"target_length": self._lengths[1]} if len(self._lengths) > 1 else {}
        quarantine = {"quarantine": str(self.quarantine)} if self.quarantine else {}
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            **second,
            "streams": self.streams,
            **({"turn": self.order.turn} if self.order.turn > 1 else {}),
            "shuffle": self.shuffle,
            "attend_across_documents": self._as_one_document,
            "rows_per_epoch": len(self),
            **quarantine,
        }

    def place(self, position: int) -> Place:
        """Where the row at a global position ≥ 0 is."""
        return self.order.place(position)

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

    def _block(self, epoch: int, block: int) -> PackedBlock:
        return self._cache.get((epoch, block), partial(self._pack, epoch, block))

    def _pack(self, epoch: int, block: int) -> PackedBlock:
        blank = self._blank(block)
        packed = pack(
            self._documents(block, blank),
            self.objective,
            row_lengths=self._lengths,
            seed=self.seed,
            epoch=epoch,
            first=int(self.corpus.blocks[block]),
            pad_id=self._pad_id,
            order=(lambda n: permutation(n, self.seed, "documents", epoch, block)) if self.shuffle else None,
            blank=blank,
        )
        if packed.n_rows != self._rows_of_block[block]:
            raise MegatfmError(
                f"{self.corpus.folder}: block {block} makes {packed.n_rows} rows, its plan says "
                f"{self._rows_of_block[block]}: delete the folder .plans in it"
            )
        return packed

    def _blank(self, block: int) -> NDArray[np.bool_] | None:
        if not self.quarantine:
            return None
        blank = self.quarantine.of(*map(int, self.corpus.blocks[block : block + 2]))
        return blank if blank.any() else None

    def _documents(self, block: int, blank: NDArray[np.bool_] | None) -> list[NDArray[np.integer]]:
        """The documents of a block; of those that are `blank` only the lengths, and if all are, nothing is read."""
        if blank is None:
            return [tokens for _, tokens in self.corpus.block(block)]
        lengths = self.corpus.block_lengths(block)
        read = {} if blank.all() else dict(enumerate(tokens for _, tokens in self.corpus.block(block)))
        return [
            np.zeros(int(n), np.int64) if empty else read[i]
            for i, (n, empty) in enumerate(zip(lengths, blank, strict=True))
        ]
