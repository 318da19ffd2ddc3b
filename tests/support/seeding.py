"""Seeds of a test, by its name: what it draws without a seed of its own is the same at each run, in any order."""

import zlib

import numpy as np
import torch


def seed_by_name(name: str) -> int:
    """Seed the global generators of torch and NumPy; returns the seed.

    Python's own is left alone: ports are drawn from it, and two runs of a test beside one another need unlike ones.
    """
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    return seed
