"""Rows that a corpus is packed into: one, an epoch, the batches of all ranks; and their comparison."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatfm.data.dataset import RowDataset
from megatfm.data.loader import DataLoader
from megatfm.data.sequences import Fields


def read_row(rows: RowDataset, position: int | None) -> Fields:
    """A single row; without a position, one of padding."""
    return {name: values[0] for name, values in rows.read_rows([position]).items()}


def read_epoch(rows: RowDataset, epoch: int = 0) -> list[Fields]:
    """All rows of an epoch in their order."""
    n_rows = len(rows)  # type: ignore[arg-type]
    return [read_row(rows, position) for position in range(epoch * n_rows, (epoch + 1) * n_rows)]


def read_global_batches(
    rows: RowDataset, ranks: int, steps: int, position: int = 0, *, global_batch: int, workers: int = 0
) -> list[Fields]:
    """The global batch of each step, put together from all ranks."""
    options: dict[str, Any] = {"global_batch": global_batch, "position": position, "workers": workers}
    loaders = [DataLoader(rows, micro_batch=2, data_rank=rank, data_ranks=ranks, **options) for rank in range(ranks)]
    try:
        parts = [[batch for loader in loaders for batch in next(loader)] for _ in range(steps)]
    finally:
        for loader in loaders:
            loader.close()
    # A batch whose rows are one document each has no numbers of documents.
    names = [set.intersection(*map(set, step)) for step in parts]
    return [
        {name: np.concatenate([batch[name] for batch in step]) for name in shared}
        for step, shared in zip(parts, names, strict=True)
    ]


def assert_same_fields(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that rows have the same fields, types and numbers."""
    assert actual.keys() == expected.keys()
    for name, values in actual.items():
        assert values.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(values, expected[name], name)
