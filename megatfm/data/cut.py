"""Packing by cutting: documents joined, and cut into rows of equal length."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.data.packed import PackedBlock, RowStore, split_plain_fields
from megatfm.data.packing import PackingConfig


def concat_and_chunk(
    fields: Mapping[str, NDArray[Any]],
    lengths: NDArray[np.int64],
    blank: NDArray[np.bool_] | None,
    packing: PackingConfig,
    carry_length: int = 0,
) -> PackedBlock:
    """Cut joined documents of these `lengths` [n]: `fields` [total, …]. blank [n]: those that are padding.

    Documents of length 0 take no place, and no number in a row. carry_length: how much is the end of a row of the block
    before; then that is row 0.
    """
    (length,), kept = packing.row_lengths, lengths > 0
    starts = [0, *np.cumsum(lengths[kept]).tolist()]
    total = starts[-1]
    heads = [0] if 0 < carry_length < total else []
    plain, typed = split_plain_fields(fields, packing)
    side = RowStore(
        fields=plain,
        typed=typed,
        starts=starts,
        bounds=[*heads, *range(carry_length if heads else 0, total, length), total],
        blank=None if blank is None else blank[kept].tolist(),
        fills=packing.fills(plain),
        length=length,
        as_one_document=packing.attend_across_documents,
    )
    return PackedBlock((side,))
