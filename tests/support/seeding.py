"""Seeds of a test, by its name: what it draws without a seed of its own is the same at each run, in any order."""

import zlib
from functools import cache

import numpy as np
import torch


def seed_by_name(name: str) -> int:
    """Seed the global generators of torch and NumPy; returns the seed.

    Python's own is left alone: ports are drawn from it, and two runs of a test beside one another need unlike ones.
    """
    seed = zlib.crc32(name.encode())
    if has_gpu():
        torch.manual_seed(seed)
    else:  # `manual_seed` keeps its stack for each kind of device that may yet come: a millisecond, for each fixture
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    return seed


@cache
def has_gpu() -> bool:
    """Whether torch sees a GPU, asked before any test acts as one."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()
