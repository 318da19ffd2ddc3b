"""Packing by cutting: documents joined, and cut into rows of equal length."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packing import NO_DOCUMENT, Packing
from megatfm.data.tables import PackedBlock, Table, fitting


def cut_rows(
    fields: Mapping[str, NDArray[np.integer]],
    lengths: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    how: Packing,
) -> PackedBlock:
    """Cut joined documents of these `lengths` [n]: `fields` [total]. blank [n]: those that are padding.

    Documents of length 0 take no place, and no number in a row.
    """
    total, (length,), fills = int(lengths.sum()), how.row_lengths, how.fills(fields)
    table = Table.empty(fills, -(-total // length), length)
    for name, values in fields.items():
        flat = table.flat(name)
        flat[:total] = fitting(values, name)
        flat[total:] = fills[name]
    _number(table, lengths[lengths > 0], None if blank is None else blank[lengths > 0], how.as_one_document)
    return PackedBlock((table,))


def _number(
    table: Table, lengths: NDArray[np.int64], blank: NDArray[np.bool_] | None, as_one_document: bool
) -> None:
    """Fill in "documents" and "positions", by stretches of one document in one row."""
    documents, positions = table.flat("documents"), table.flat("positions")
    total, row_length = int(lengths.sum()), table.values.shape[2]
    starts = np.cumsum(lengths) - lengths
    row_starts = np.arange(0, total, row_length)
    begins = row_starts if as_one_document and blank is None else np.union1d(starts, row_starts)
    counts = np.diff(begins, append=total)
    number = np.searchsorted(starts, begins, side="right") - 1  # of the document, in the block
    in_row = number - number[np.searchsorted(begins, begins // row_length * row_length)]
    if as_one_document:
        in_row = np.zeros_like(in_row)
        from_ = begins // row_length * row_length
    else:
        from_ = begins
    if blank is not None:
        in_row = np.where(blank[number], NO_DOCUMENT, in_row)
    documents[:total] = np.repeat(in_row.astype(np.int32), counts)
    positions[:total] = np.arange(total, dtype=np.int32)
    positions[:total] -= np.repeat(from_.astype(np.int32), counts)
    if blank is not None:
        positions[:total][documents[:total] == NO_DOCUMENT] = 0
    documents[total:], positions[total:] = NO_DOCUMENT, 0
