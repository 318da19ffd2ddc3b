"""Packing by cutting: documents joined, and cut into rows of equal length."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import NO_DOCUMENT, Packing
from megatfm.data.tables import PackedBlock, fitting

FEW = 12
"""So many documents of a row are numbered one by one, which is faster then."""


@dataclass(frozen=True, eq=False)
class JoinedDocuments:
    """Joined documents that become rows as these are copied.

    Tables of all rows would take four times the memory, and a block with a document of millions of tokens, of which
    a corpus has few but a stream is long in one, would push the other streams' blocks out of the cache.
    """

    fields: Mapping[str, NDArray[np.integer]]
    """The objective's, [total] each."""
    starts: list[int]
    """Of the documents, and where the last one ends. None is empty."""
    blank: list[bool] | None
    """Which documents are padding."""
    fills: Mapping[str, int]
    """What stands in the padding of the fields, and then of "documents" and "positions"."""
    length: int
    as_one_document: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.fills)

    @property
    def n_rows(self) -> int:
        return -(-self.starts[-1] // self.length)

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values()) + 36 * len(self.starts)

    @property
    def padding(self) -> "JoinedDocuments":
        return replace(
            self, fields={name: field[:0].copy() for name, field in self.fields.items()}, starts=[0]
        )

    def copy_row(self, number: int, into: NDArray[np.int64]) -> None:
        begin = number * self.length
        n = max(0, min(self.length, self.starts[-1] - begin))
        for values, out in zip(self.fields.values(), into, strict=False):
            out[:n] = values[begin : begin + n]
        if n < self.length:
            into[:, n:] = np.array(list(self.fills.values()))[:, None]
        if n:
            self._number(begin, into[-2, :n], into[-1, :n])

    def _number(self, begin: int, documents: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Number the documents of a row from `begin` on, and the positions in their pieces."""
        n, ramp, starts = len(documents), _ramp(self.length), self.starts
        if self.as_one_document:
            documents[:], positions[:] = 0, ramp[:n]
            if self.blank is None:
                return
        first, after = bisect_right(starts, begin) - 1, bisect_left(starts, begin + n)
        if after - first > FEW and self.blank is None:
            bounds = np.clip(np.array(starts[first : after + 1]) - begin, 0, n)
            counts = np.diff(bounds)
            documents[:] = np.repeat(ramp[: after - first], counts)
            positions[:] = ramp[:n] - np.repeat(bounds[:-1], counts)
            return
        for number in range(first, after):
            piece = slice(max(starts[number] - begin, 0), min(starts[number + 1] - begin, n))
            if self.blank is not None and self.blank[number]:
                documents[piece], positions[piece] = NO_DOCUMENT, 0
            elif not self.as_one_document:
                documents[piece], positions[piece] = number - first, ramp[: piece.stop - piece.start]


def cut_rows(
    fields: Mapping[str, NDArray[np.integer]],
    lengths: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    how: Packing,
) -> PackedBlock:
    """Cut joined documents of these `lengths` [n]: `fields` [total]. blank [n]: those that are padding.

    Documents of length 0 take no place, and no number in a row.
    """
    (length,) = how.row_lengths
    kept = lengths > 0
    side = JoinedDocuments(
        fields={name: fitting(values, name) for name, values in fields.items()},
        starts=[0, *np.cumsum(lengths[kept]).tolist()],
        blank=None if blank is None else blank[kept].tolist(),
        fills=how.fills(fields),
        length=length,
        as_one_document=how.as_one_document,
    )
    return PackedBlock((side,))


@lru_cache(maxsize=64)
def _ramp(n: int) -> NDArray[np.int64]:
    ramp = np.arange(n)
    ramp.flags.writeable = False
    return ramp
