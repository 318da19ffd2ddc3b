"""Rows of packed tokens of one corpus, in training order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.data.batch_schedule import Streams
from megatfm.data.block import pack
from megatfm.data.cache import ByteCache, nbytes
from megatfm.data.corpus import Corpus
from megatfm.data.order import RowAddress, order_of
from megatfm.data.packed import PackedBlock, batch_of
from megatfm.data.packing import Fields, Packing, SequenceBuilder
from megatfm.data.plan import stored_plan
from megatfm.data.quarantine import Quarantine
from megatfm.errors import MegatfmError
from megatfm.keyed import permutation


class Rows(Protocol):
    """What a loader reads: an endless order of rows, whatever is in them."""

    @property
    def seed(self) -> int: ...
    @property
    def row_tokens(self) -> int:
        """Tokens that a row has room for, of all its sides."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the log, on what is not read as one would think."""
        ...

    @property
    def splits(self) -> bool:
        """Whether a row may be cut into shorter ones."""
        ...

    def rows(self, positions: Sequence[int | None]) -> Fields:
        """The rows at positions by name, [n, length of the field's side, …] or [n, …]; None is a row of padding.

        Integers [n, length] are int64. "documents" (0, 1, … in the row; −1: padding) and "positions" [n, length] are
        always there, whatever the other fields are.
        """
        ...

    def epoch(self, position: int) -> int | str:
        """How often the corpus was read before a position."""
        ...

    def identity(self) -> dict[str, str | int | bool]:
        """What determines the order, for a checkpoint to compare."""
        ...


class CorpusRows(Rows, Protocol):
    """The rows of one corpus; `len` is those of an epoch."""

    def __len__(self) -> int: ...


@dataclass
class _Held:
    """A packed block while it is read."""

    packed: PackedBlock
    order: list[int]
    """Its rows as they come in the epoch."""
    n_rows: int
    asked: Iterator[int] = field(default_factory=partial(count, 1))
    """Counts the rows that were asked for. One of `itertools`, since the loader's threads share it: no number twice."""

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


class PackedRows:
    """Rows of `sequence_length` tokens in a reproducible order without end (see `Order`); `len` is those of an epoch.

    Rows never span blocks. An objective with `max_tokens` gets pieces of that length, and its sequences stay whole:
    which share a row is planned once, from their lengths, and is the same in all epochs. Other documents are joined
    in another order each epoch and cut where rows end. What room is left is padding, with `pad_id` for tokens.
    target_length: row length of an objective's second side (an encoder-decoder's decoder).

    streams: how many places are read in turn (and how many rows of each).
    plan_name: tells what decides the objective's lengths, so that the plan can be kept beside the corpus.
    quarantine: samples that become padding; their places, and all others', stay.

    Memory grows by 8 bytes a block, and by at most `cache_bytes` of packed blocks; the cache should hold one
    block per stream. `notes` are lines for the log, on what of the corpus is not read as one would think.

    Raises a UsageError if the corpus is too short for one row.
    """

    def __init__(
        self,
        corpus: Corpus,
        objective: SequenceBuilder,
        *,
        sequence_length: int,
        target_length: int | None = None,
        seed: int,
        streams: Streams | int = 64,
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
        read = Streams(streams) if isinstance(streams, int) else streams
        self.streams, turn = read if shuffle else Streams(1)
        self.shuffle = shuffle
        self.quarantine = quarantine or Quarantine()
        lengths = (sequence_length, target_length or sequence_length)[: len(objective.sides)]
        self._packing = Packing(objective, lengths, self.seed, pad_id, attend_across_documents)
        plan = stored_plan(corpus, objective, lengths, self.seed, plan_name)
        self._rows_of_block = plan.rows
        self.notes = list(plan.notes)
        if self.quarantine:
            self.notes.append(f"{corpus.folder}: {len(self.quarantine):,} samples are in quarantine")
        self.order = order_of(plan.rows, seed=self.seed, streams=self.streams, turn=turn, shuffle=shuffle)
        self._cache: ByteCache[tuple[int, int], _Held] = ByteCache(cache_bytes, nbytes)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def row_tokens(self) -> int:
        return sum(self._packing.row_lengths)

    @property
    def splits(self) -> bool:
        return self.objective.max_tokens is None and len(self._packing.row_lengths) == 1

    def epoch(self, position: int) -> int:
        return position // len(self)

    def identity(self) -> dict[str, str | int | bool]:
        """What determines the order, for a checkpoint to compare."""
        _, *second = self._packing.row_lengths
        quarantine = {"quarantine": str(self.quarantine)} if self.quarantine else {}
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            **({"target_length": second[0]} if second else {}),
            "streams": self.streams,
            **({"turn": self.order.turn} if self.order.turn > 1 else {}),
            "shuffle": self.shuffle,
            "attend_across_documents": self._packing.as_one_document,
            "rows_per_epoch": len(self),
            **quarantine,
        }

    def place(self, position: int) -> RowAddress:
        """Where the row at a global position ≥ 0 is."""
        return self.order.place(position)

    def row(self, position: int) -> Fields:
        """The row at a global position by name, integers [length of the field's side] as int64.

        "documents" (0, 1, … in the row; −1: padding), "positions" (from 0 in each document's piece), and what the
        objective makes: of text "tokens" and "targets" (−100: not counted); of an objective with two sides also
        "encoder_documents" and "encoder_positions". With `attend_across_documents`, a row counts as one document.
        """
        return {name: values[0] for name, values in self.rows([position]).items()}

    def padding(self) -> Fields:
        """A row of nothing but padding, with the fields of `row`."""
        return {name: values[0] for name, values in self.rows([None]).items()}

    def rows(self, positions: Sequence[int | None]) -> Fields:
        """The rows at global positions, as `Rows` says."""
        return batch_of(self.find(positions))

    def find(self, positions: Sequence[int | None]) -> list[tuple[PackedBlock, int]]:
        """The packed block of each position, and the row in it."""
        wanted = np.array([-1 if at is None else at for at in positions], np.int64)
        slots = iter(self.order.slots(wanted[wanted >= 0]))
        return [self._padding if at is None else self._found(*next(slots)) for at in positions]

    def _found(self, epoch: int, block: int, slot: int) -> tuple[PackedBlock, int]:
        held = self._block(epoch, block)
        if next(held.asked) == held.n_rows:
            # So that the next block gets its memory, since fresh memory is slow.
            self._cache.forget((epoch, block))
        return held.packed, held.order[slot]

    @cached_property
    def _padding(self) -> tuple[PackedBlock, int]:
        # Of the smallest block that has rows, since any would do.
        rows = self._rows_of_block
        return self._block(0, int(np.where(rows, rows, rows.max()).argmin())).packed.padding, 0

    def _block(self, epoch: int, block: int) -> _Held:
        return self._cache.get((epoch, block), partial(self._open, epoch, block))

    def _open(self, epoch: int, block: int) -> _Held:
        packed = self._pack(epoch, block)
        return _Held(packed, self.order.block_order(epoch, block), packed.n_rows)

    def _pack(self, epoch: int, block: int) -> PackedBlock:
        blank = self._blank(block)
        documents, members = self._documents(block, blank)
        packed = pack(
            documents,
            self._packing,
            epoch=epoch,
            first=int(self.corpus.blocks[block]),
            order=(lambda n: permutation(n, self.seed, "documents", epoch, block)) if self.shuffle else None,
            blank=blank,
            members=members,
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

    def _documents(
        self, block: int, blank: NDArray[np.bool_] | None
    ) -> tuple[list[NDArray[np.integer]], list[Mapping[str, bytes]] | None]:
        """The documents of a block, and their files if the objective needs them.

        Of those that are `blank` only the lengths, and if all are, nothing is read.
        """
        read: list[NDArray[np.integer]] = []
        members: list[Mapping[str, bytes]] | None = None
        if blank is None or not blank.all():
            if self.objective.needs_members:
                samples = self.corpus.samples(block)
                read, members = [one.tokens for one in samples], [one.members for one in samples]
            else:
                read = [tokens for _, tokens in self.corpus.block(block)]
        if blank is None:
            return read, members
        lengths = self.corpus.block_lengths(block)
        return [
            np.zeros(int(n), np.int64) if empty else read[i]
            for i, (n, empty) in enumerate(zip(lengths, blank, strict=True))
        ], members
