"""Kernels are tried on memory in which all that nobody wrote is not a number."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic


@pytest.fixture(autouse=True)
def unwritten_is_not_a_number() -> Iterator[None]:
    """torch.empty gives NaN: a kernel that reads what was not written, be it to multiply it by zero, is red."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    deterministic.fill_uninitialized_memory = before[1]
