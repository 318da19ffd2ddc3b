"""Rows by field, from several readers or sources, joined to a batch."""

from collections.abc import Sequence

import numpy as np

from megatfm.data.sequences import Fields
from megatfm.errors import UsageError


def check_same_fields(name: str, rows: Fields, expected_rows: Fields) -> None:
    """Raise a UsageError that begins with `name` unless rows have the fields of others, in their types and shapes."""
    kinds, expected = (
        {field: f"{values.dtype}{list(values.shape[1:])}" for field, values in sorted(batch.items())}
        for batch in (rows, expected_rows)
    )
    if kinds != expected:
        raise UsageError(
            f"{name}: its rows are {kinds}, those of others {expected}: give all sources the same objective and row "
            "lengths"
        )


def join_rows(parts: Sequence[Fields]) -> Fields:
    """Concatenate rows by field. Raises a UsageError if the parts have unlike fields, as sources of a mixture may."""
    for part in parts[1:]:
        check_same_fields("data.mixture", part, parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
