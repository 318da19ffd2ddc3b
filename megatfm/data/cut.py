"""Packing by cutting: documents joined, and cut into rows of equal length."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packed import JoinedRows, PackedBlock, told_apart
from megatfm.data.packing import Packing


def cut_rows(
    fields: Mapping[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    how: Packing,
) -> PackedBlock:
    """Cut joined documents of these `lengths` [n]: `fields` [total, …]. blank [n]: those that are padding.

    Documents of length 0 take no place, and no number in a row.
    """
    (length,), kept = how.row_lengths, lengths > 0
    starts = [0, *np.cumsum(lengths[kept]).tolist()]
    plain, typed = told_apart(fields, how)
    side = JoinedRows(
        fields=plain,
        typed=typed,
        starts=starts,
        bounds=[*range(0, starts[-1], length), starts[-1]],
        blank=None if blank is None else blank[kept].tolist(),
        fills=how.fills(plain),
        length=length,
        as_one_document=how.as_one_document,
    )
    return PackedBlock((side,))
