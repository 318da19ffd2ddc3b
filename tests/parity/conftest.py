"""Layouts are compared on memory in which all that nobody wrote is not a number, on one device and on all ranks."""

from collections.abc import Iterator

import pytest

from tests.support.tensors import fill_memory_with_nan
from tests.support.workers import Workers


@pytest.fixture(autouse=True)
def unwritten_is_not_a_number(workers: Workers) -> Iterator[None]:
    """For every test of this folder, here and in the workers."""
    workers.memory_of_nan = True
    try:
        with fill_memory_with_nan():
            yield
    finally:
        workers.memory_of_nan = False
