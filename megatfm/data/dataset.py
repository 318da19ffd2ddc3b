"""Rows of packed tokens of one corpus, in training order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.corpus.byte_cache import ByteCache, count_bytes
from megatfm.corpus.corpus import Corpus
from megatfm.data.documents import BlockDocuments, DecodedBlock, Quarantine, read_block
from megatfm.data.order import Interleave, RowAddress, RowSlot, make_row_order
from megatfm.data.packed_rows import BinPackedRows, PackedBlock, RowSegments, collate, pack_chunked
from megatfm.data.packing_plan import load_or_build_packing_plan
from megatfm.data.sequences import Fields, PackingConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.rng import permutation

PACKING_VERSION = 2
"""Version of the packing rules; before 2, rows never spanned blocks. Part of an order's identity."""


class RowDataset(Protocol):
    """An endless sequence of rows that a `DataLoader` reads."""

    @property
    def seed(self) -> int: ...
    @property
    def row_tokens(self) -> int:
        """Token capacity of a row, summed over its sides."""
        ...

    @property
    def warnings(self) -> Sequence[str]:
        """Notes for the log on data that is left out or cut."""
        ...

    @property
    def can_split_rows(self) -> bool:
        """True if a row may be split into shorter ones."""
        ...

    def read_rows(self, positions: Sequence[int | None]) -> Fields:
        """Return the fields of the rows at positions: [n, length of the side, …] or [n, …]; None: a row of padding.

        Integers [n, length] are int64. "documents" (0, 1, … in the row; −1: padding) and "positions" [n, length] always
        exist; the objective adds other fields.
        """
        ...

    def epoch(self, position: int) -> int | str:
        """Return how many times the corpus was read before a position."""
        ...

    def order_config(self) -> dict[str, str | int | bool]:
        """Return the settings that determine the order, for a checkpoint to compare."""
        ...


class SizedRowDataset(RowDataset, Protocol):
    """A `RowDataset` of one corpus; `len` is the number of rows in an epoch."""

    def __len__(self) -> int: ...


def check_same_fields(name: str, rows: Fields, expected_rows: Fields) -> None:
    """Raise a UsageError that begins with `name` unless rows have the expected fields, types and shapes."""
    kinds, expected = (
        {field: f"{values.dtype}{list(values.shape[1:])}" for field, values in sorted(batch.items())}
        for batch in (rows, expected_rows)
    )
    if kinds != expected:
        raise UsageError(
            f"{name}: its rows have fields {kinds}, other sources have {expected}: give all sources the same "
            "objective and row lengths"
        )


def join_rows(batches: Sequence[Fields]) -> Fields:
    """Concatenate rows by field. Raises a UsageError if their fields differ, as those of mixture sources may."""
    for batch in batches[1:]:
        check_same_fields("data.mixture", batch, batches[0])
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@dataclass
class _CachedBlock:
    """A packed block, or group of blocks, in the cache."""

    packed: PackedBlock | BinPackedRows
    n_rows: int
    n_requests: Iterator[int] = field(default_factory=partial(count, 1))
    """Counts the requested rows. `itertools.count` is atomic, and the loader's threads share it."""

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


class PackedDataset:
    """Packed rows of a corpus in a reproducible, endless order (see `RowOrder`).

    `len` is the number of rows in an epoch. There are two ways of packing:
    - With `objective.max_tokens`, documents are split into chunks of that length and their sequences stay whole. Bin
      packing is planned once per group of blocks, from lengths alone, and is the same in all epochs.
    - Otherwise documents are joined, in a new order each epoch, and cut where rows end.

    Unused room is padding; `padding_fraction` is its share.

    streams: number of segments read round-robin, or an `Interleave`.
    plan_cache_key: identifies all settings that the objective's lengths depend on, so that the plan can be stored in
    the corpus folder; None: the plan is not stored.
    quarantine: samples that are replaced by padding; the order of all rows stays the same.

    Memory: 8 bytes per block, up to `cache_bytes` of packed blocks, and as much again of decoded blocks. The caches
    should hold one block, or group of blocks, per stream. `warnings` are notes for the log on data that is left out or
    cut.

    Raises a UsageError if the corpus is too short for one row.
    """

    def __init__(
        self,
        corpus: Corpus,
        packing: PackingConfig,
        *,
        streams: Interleave | int = 64,
        shuffle: bool = True,
        cache_bytes: int = 2**29,
        plan_cache_key: str | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.corpus = corpus
        self.packing, self.objective, self.seed = packing, packing.objective, packing.seed
        self.sequence_length = packing.row_lengths[0]
        self.shuffle = shuffle
        self.quarantine = quarantine or Quarantine()
        plan = load_or_build_packing_plan(corpus, self.objective, packing.row_lengths, self.seed, plan_cache_key)
        self._plan, self.padding_fraction, self.warnings = plan, plan.padding, list(plan.notes)
        if self.quarantine:
            self.warnings.append(f"{corpus.folder}: {len(self.quarantine):,} samples are in quarantine")
        self.order = make_row_order(
            plan.sizes,
            seed=self.seed,
            streams=streams if shuffle else 1,
            shuffle=shuffle,
            length=self.sequence_length if plan.groups is None else 1,
        )
        self._cache: ByteCache[tuple[int, int], _CachedBlock] = ByteCache(cache_bytes, count_bytes)
        self._decoded: ByteCache[int, DecodedBlock] = ByteCache(cache_bytes, count_bytes)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def row_tokens(self) -> int:
        return sum(self.packing.row_lengths)

    @property
    def can_split_rows(self) -> bool:
        return self.objective.max_tokens is None and len(self.packing.row_lengths) == 1

    def epoch(self, position: int) -> int:
        return position // len(self)

    def order_config(self) -> dict[str, str | int | bool]:
        """Return the settings that determine the order, for a checkpoint to compare."""
        _, *second = self.packing.row_lengths
        quarantine = {"quarantine": str(self.quarantine)} if self.quarantine else {}
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            **({"target_length": second[0]} if second else {}),
            "streams": self.order.streams,
            **({"turn": self.order.turn} if self.order.turn > 1 else {}),
            "shuffle": self.shuffle,
            "attend_across_documents": self.packing.attend_across_documents,
            "rows_per_epoch": len(self),
            "packing": PACKING_VERSION,
            **quarantine,
        }

    def find_row(self, position: int) -> RowAddress:
        """Return the address of the row at a global position ≥ 0."""
        return self.order.find_row(position)

    def read_row(self, position: int) -> Fields:
        """Return the fields of the row at a global position, integers [length of the field's side] as int64.

        Packing adds "documents" (0, 1, … in the row; −1: padding) and "positions" (from 0 in each document's chunk),
        for an objective with two sides also "encoder_documents" and "encoder_positions". The other fields come from
        the objective: for text "tokens" and "targets" (−100: ignored by the loss). With `attend_across_documents`, a
        row counts as one document.
        """
        return {name: values[0] for name, values in self.read_rows([position]).items()}

    def read_rows(self, positions: Sequence[int | None]) -> Fields:
        """Return the rows at global positions (see `RowDataset.read_rows`)."""
        return collate(self.locate_rows(positions))

    def locate_rows(self, positions: Sequence[int | None]) -> list[RowSegments]:
        """Return for each position the (packed block, row index) pairs that make up its row."""
        requested = np.array([-1 if at is None else at for at in positions], np.int64)
        slots = iter(self.order.find_slots(requested[requested >= 0]))
        return [self._padding if at is None else self._locate_row(next(slots)) for at in positions]

    def _locate_row(self, slot: RowSlot) -> RowSegments:
        epoch, block, _, begin = slot
        row_index = self.order.get_block_order(slot)[slot.row]
        block_data = self._get_block(epoch, block, begin)
        if isinstance(block_data, BinPackedRows):
            return [(block_data, row_index)]
        head, length = self.order.carry_length(begin), self.sequence_length
        segments: list[tuple[PackedBlock | BinPackedRows, int]] = [(block_data, row_index + (head > 0))]
        at, end = begin + int(self._plan.sizes[block]), begin + head + (row_index + 1) * length
        while at < min(end, self.order.size):
            block = self.order.find_block(epoch, at)
            block_data = self._get_block(epoch, block, at)
            segments.append((block_data, 0))
            at += int(self._plan.sizes[block])
        return segments

    @cached_property
    def _padding(self) -> RowSegments:
        # Any block with rows would do; the smallest is the cheapest.
        sizes = self._plan.sizes
        return [(self._pack(0, int(np.where(sizes, sizes, sizes.max()).argmin()), 0).padding, 0)]

    def _get_block(self, epoch: int, block: int, begin: int) -> PackedBlock | BinPackedRows:
        """Return the packed block, or group of blocks, of a requested row."""
        block_data = self._cache.get((epoch, block), partial(self._open, epoch, block, begin))
        if next(block_data.n_requests) == block_data.n_rows:
            # Frees its memory for the next block, since fresh pages are slow.
            self._cache.evict((epoch, block))
        return block_data.packed

    def _open(self, epoch: int, block: int, begin: int) -> _CachedBlock:
        packed = self._pack(epoch, block, self.order.carry_length(begin))
        return _CachedBlock(packed, packed.n_rows)

    def _pack(self, epoch: int, block: int, head: int) -> PackedBlock | BinPackedRows:
        groups, planned = self._plan.groups, int(self._plan.sizes[block])
        needs_files = self.objective.needs_files
        packed: PackedBlock | BinPackedRows
        if groups is not None:
            first, end = groups[block : block + 2].tolist()
            is_quarantined = self._mask_quarantined(first, end)
            documents = BlockDocuments(self.corpus, first, end, is_quarantined, self._decoded, needs_files)
            packed = BinPackedRows(documents, self.packing, epoch)
            size = packed.n_rows
        else:
            first = block
            block_data = read_block(self.corpus, block, self._mask_quarantined(block, block + 1), needs_files)
            order = (lambda n: permutation(n, self.seed, "documents", epoch, block)) if self.shuffle else None
            packed = pack_chunked(block_data, self.packing, epoch=epoch, order=order, carry_length=head)
            size = packed.sides[0].bounds[-1]
        if size != planned:
            unit = "tokens" if groups is None else "rows"
            raise MegatfmError(
                f"{self.corpus.folder}: block {first} has {size} {unit}, but its packing plan says {planned}: delete "
                "the subfolder .plans"
            )
        return packed

    def _mask_quarantined(self, first: int, end: int) -> NDArray[np.bool_] | None:
        if not self.quarantine:
            return None
        is_quarantined = self.quarantine.mask(int(self.corpus.blocks[first]), int(self.corpus.blocks[end]))
        return is_quarantined if is_quarantined.any() else None
