"""Kernels run on memory filled with NaN, so that reading unwritten memory shows."""

from collections.abc import Iterator

import pytest

from tests.support.tensors import fill_memory_with_nan


@pytest.fixture(autouse=True)
def fill_new_memory_with_nan() -> Iterator[None]:
    """Fill new memory with NaN, also that of torch.empty."""
    with fill_memory_with_nan():
        yield
