"""Kernels are tried on memory in which all that nobody wrote is not a number."""

from collections.abc import Iterator

import pytest

from tests.unwritten import unwritten_is_nan


@pytest.fixture(autouse=True)
def unwritten_is_not_a_number() -> Iterator[None]:
    """torch.empty gives NaN."""
    with unwritten_is_nan():
        yield
