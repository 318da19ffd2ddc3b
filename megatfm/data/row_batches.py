"""Joins rows from several readers or sources into a batch."""

from collections.abc import Sequence

import numpy as np

from megatfm.data.sequences import Fields
from megatfm.errors import UsageError


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


def join_rows(parts: Sequence[Fields]) -> Fields:
    """Concatenate rows by field. Raises a UsageError if their fields differ, as those of mixture sources may."""
    for part in parts[1:]:
        check_same_fields("data.mixture", part, parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
