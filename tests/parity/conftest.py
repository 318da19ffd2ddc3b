"""Layouts are compared on memory in which all that nobody wrote is not a number, on one device and on all ranks."""

from collections.abc import Iterator

import pytest

from tests.unwritten import unwritten_is_nan
from tests.workers import Workers


@pytest.fixture(autouse=True)
def unwritten_is_not_a_number(workers: Workers) -> Iterator[None]:
    """For every test of this folder, here and in the workers."""
    workers.unwritten_is_nan = True
    try:
        with unwritten_is_nan():
            yield
    finally:
        workers.unwritten_is_nan = False
