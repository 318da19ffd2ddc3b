"""Storage of packed rows: one side of a block, whose rows are built when they are copied into a batch."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatfm.data.sequences import PAD_DOCUMENT_ID, Field, Fields, PackingConfig
from megatfm.errors import MegatfmError

LOOP_LIMIT = 12
"""A Python loop numbers the documents of rows with at most this many, for which it is faster than NumPy."""


class TypedField(NamedTuple):
    """A field other than integers [length]."""

    field: Field
    values: NDArray[Any] | list[NDArray[Any]]
    """[total, *shape], or [rows, *shape] for one value per row; as a list the tokens of each row, [n, *shape]."""


@dataclass(frozen=True, eq=False)
class RowStore:
    """One side of a block: its documents joined in row order. Rows are built when they are copied into a batch.

    Finished rows would take several times the memory, and one block with a document of millions of tokens would evict
    the blocks of other streams from the cache.
    """

    fields: Mapping[str, NDArray[np.integer]]
    """The objective's plain integer fields, joined [total], of at most 32 bits."""
    typed: Mapping[str, TypedField]
    """The objective's other fields."""
    starts: list[int]
    """Starts of the documents, none of them empty, and the end of the last."""
    bounds: list[int]
    """Starts of the rows, and the end of the last."""
    is_padding: list[bool] | None
    """True for each document that is padding; None: there are none."""
    pad_values: Mapping[str, float]
    """Padding values of `fields`, followed by those of "documents" and "positions"."""
    length: int
    as_one_document: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the integer fields that `write_row` writes, in order."""
        return tuple(self.pad_values)

    @property
    def n_rows(self) -> int:
        """Number of rows of `length`."""
        return len(self.bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        arrays = list(self.fields.values())
        for _, values in self.typed.values():
            arrays += values if isinstance(values, list) else [values]
        return sum(array.nbytes for array in arrays) + 36 * (len(self.starts) + len(self.bounds))

    @property
    def padding(self) -> "RowStore":
        """A store without rows, so that every row of it is padding."""
        fields = {name: field[:0].copy() for name, field in self.fields.items()}
        empty = {name: TypedField(field, values[:0]) for name, (field, values) in self.typed.items()}
        return replace(self, fields=fields, typed=empty, starts=[0], bounds=[0])

    def allocate(self, rows: int) -> Fields:
        """Allocate arrays [rows, …] for the `typed` fields."""
        return {
            name: np.empty((rows, *([self.length] if field.per == "tokens" else []), *field.shape), field.dtype)
            for name, (field, _) in self.typed.items()
        }

    def write_typed(self, row: int, target: Fields, target_row: int, offset: int = 0) -> None:
        """Write the `typed` fields of `row` into row `target_row` of `target` from `offset`, then padding."""
        begin, n = self._get_extent(row)
        for name, (field, values) in self.typed.items():
            out = target[name]
            if field.per == "row":
                out[target_row] = values[row] if row < self.n_rows else field.pad_value
            else:
                if n:
                    tokens = values[row] if isinstance(values, list) else values[begin : begin + n]
                    out[target_row, offset : offset + n] = tokens
                out[target_row, offset + n :] = field.pad_value

    def _get_extent(self, row: int) -> tuple[int, int]:
        """Return the start and length of a row; the length is 0 past the last row."""
        begin, *ends = self.bounds[row : row + 2] or (0,)
        return begin, ends[0] - begin if ends else 0

    def write_row(self, row: int, target: NDArray[np.int64], offset: int = 0, documents: int = 0) -> tuple[int, int]:
        """Write the integer fields of a row into `target` [fields, length] from `offset`, then padding.

        A row past the last is all padding. documents: number of documents before `offset`. Returns the end of the row,
        and the number of documents up to it.
        """
        begin, n = self._get_extent(row)
        end = offset + n
        for values, out in zip(self.fields.values(), target, strict=False):
            out[offset:end] = values[begin : begin + n]
        if end < self.length:
            target[:, end:] = np.array(list(self.pad_values.values()))[:, None]
        if not n:
            return end, documents
        document_ids, positions = target[-2:, offset:end]
        documents_added = self._number_documents(begin, document_ids, positions)
        if offset and self.as_one_document:
            positions += offset if self.is_padding is None else offset * (document_ids != PAD_DOCUMENT_ID)
        elif documents:
            document_ids += documents if self.is_padding is None else documents * (document_ids != PAD_DOCUMENT_ID)
        return end, documents + documents_added

    def _number_documents(self, begin: int, documents: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
        """Write document ids and positions of a row that starts at `begin`; return its number of documents."""
        n, ramp, starts = len(documents), _get_arange(self.length), self.starts
        if self.as_one_document:
            documents[:], positions[:] = 0, ramp[:n]
            if self.is_padding is None:
                return 1
        first, end = bisect_right(starts, begin) - 1, bisect_left(starts, begin + n)
        if end - first > LOOP_LIMIT and self.is_padding is None:
            bounds = np.clip(np.array(starts[first : end + 1]) - begin, 0, n)
            counts = np.diff(bounds)
            documents[:] = np.repeat(ramp[: end - first], counts)
            positions[:] = ramp[:n] - np.repeat(bounds[:-1], counts)
            return end - first
        for document in range(first, end):
            chunk = slice(max(starts[document] - begin, 0), min(starts[document + 1] - begin, n))
            if self.is_padding is not None and self.is_padding[document]:
                documents[chunk], positions[chunk] = PAD_DOCUMENT_ID, 0
            elif not self.as_one_document:
                documents[chunk], positions[chunk] = document - first, ramp[: chunk.stop - chunk.start]
        return end - first


def split_plain_fields(
    fields: Mapping[str, NDArray[Any]], packing: PackingConfig
) -> tuple[dict[str, NDArray[np.integer]], dict[str, TypedField]]:
    """Split fields into plain integers [total], of at most 32 bits, and others. Raises a MegatfmError on overflow."""
    field_of = {name: packing.field(name) for name in fields}
    plain = {name for name, field in field_of.items() if is_plain(field)}
    return (
        {name: to_int32(values, name) for name, values in fields.items() if name in plain},
        {name: TypedField(field_of[name], values) for name, values in fields.items() if name not in plain},
    )


def is_plain(field: Field) -> bool:
    """Return True for integers [length], which a row has in int64."""
    return (field.per, field.shape, field.dtype) == ("tokens", (), "int64")


def to_int32(values: NDArray[np.integer], name: str) -> NDArray[np.integer]:
    """Return integers in at most 32 bits. Raises a MegatfmError for those that need more."""
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values
    if len(values) and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise MegatfmError(f"the objective's field {name!r} has values that do not fit 32-bit integers")
    return values.astype(np.int32)


@lru_cache(maxsize=64)
def _get_arange(n: int) -> NDArray[np.int64]:
    ramp = np.arange(n)
    ramp.flags.writeable = False
    return ramp
