"""Memory in which all that nobody wrote is not a number, so that code which reads it is found."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


@contextmanager
def memory_of_nan() -> Iterator[None]:
    """Have torch.empty give NaN: a kernel that reads what was not written, be it to multiply it by zero, is red."""
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]
