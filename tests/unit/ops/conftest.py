"""Kernels are tried on memory in which all that nobody wrote is not a number."""

from collections.abc import Iterator

import pytest

from tests.support.uninitialized_memory import memory_of_nan


@pytest.fixture(autouse=True)
def unwritten_is_not_a_number() -> Iterator[None]:
    """torch.empty gives NaN."""
    with memory_of_nan():
        yield
