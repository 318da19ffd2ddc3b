"""Kernels are tried on memory in which all that nobody wrote is not a number."""

from collections.abc import Iterator

import pytest

from tests.support.uninitialized_memory import fill_memory_with_nan


@pytest.fixture(autouse=True)
def unwritten_is_not_a_number() -> Iterator[None]:
    """torch.empty gives NaN."""
    with fill_memory_with_nan():
        yield
