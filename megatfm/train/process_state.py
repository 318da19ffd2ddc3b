"""State of a rank's process: global random generators, the garbage collector, and the C library's allocator.

megatfm itself doesn't draw from the global generators (see `megatfm.rng`), but plugins may, so checkpoints store their
state.
"""

import ctypes
import gc
import random
from collections.abc import Collection, Mapping
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megatfm import rng

MANY_OBJECTS = 100_000
"""Too many to traverse at each collection. PyTorch alone makes half a million, which a caller may have frozen."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more


def seed_all(seed: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and the GPU, differently on every rank."""
    start = int(rng.bit_generator(seed, "generators", rank).random_raw()) % 2**32
    random.seed(start)
    np.random.seed(start)
    torch.manual_seed(start)


def rng_state_dict(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the state of this rank's generators as tensors under rank-specific names.

    Integers are stored as float64, which is exact below 2⁵³.
    """
    _, integers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    twister, numpy_gauss = numpy["state"], [numpy["has_gauss"], numpy["gauss"]]
    generators = {
        "python": torch.tensor([*integers, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*twister["key"].tolist(), twister["pos"], *numpy_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{kind}": tensor for kind, tensor in generators.items()}


def empty_rng_state_dict(names: Collection[str], rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    """Return tensors into which this rank's state can be loaded; empty if the checkpoint has no state, or was saved
    with another world size. names: tensors in the checkpoint."""
    current = rng_state_dict(rank, device)
    has_same_world_size = f"rng.{world - 1}.torch" in names and f"rng.{world}.torch" not in names
    return current if has_same_world_size and current.keys() <= set(names) else {}


def load_rng_state_dict(stored: Mapping[str, Tensor], rank: int, device: torch.device) -> None:
    """Restore this rank's generators from a stored state. An empty state changes nothing."""
    tensors = {kind: stored.get(f"rng.{rank}.{kind}") for kind in ("python", "numpy", "torch", "cuda")}
    if (python := tensors["python"]) is not None:
        *integers, has_gauss, gauss = python.tolist()
        random.setstate((3, tuple(int(value) for value in integers), gauss if has_gauss else None))
    if (numpy := tensors["numpy"]) is not None:
        *keys, position, has_gauss, gauss = numpy.tolist()
        twister = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", twister, int(position), int(has_gauss), gauss))
    if tensors["torch"] is not None:
        torch.set_rng_state(tensors["torch"])
    if tensors["cuda"] is not None:
        torch.cuda.set_rng_state(tensors["cuda"], device)


class GarbageCollection:
    """Context manager that collects every `every` steps, and at no other time; 0: leaves collections to Python.

    As in torchtitan and Megatron-LM (`--manual-gc`): Python collects when enough objects were allocated, which each
    rank reaches at another time. The others wait for its hundreds of milliseconds in the next collective, so that a
    step may wait for a rank on each node.

    After the first step, all objects are taken for permanent (`gc.freeze`), so that a collection traverses only newer
    ones; not if the caller has done so before, whose objects stay frozen. Does nothing if the caller has disabled
    automatic collections, as it then collects on its own.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._is_first_step = True

    def __enter__(self) -> Self:
        self._is_active = self._every > 0 and gc.isenabled()
        n_objects = len(gc.get_objects()) if self._is_active else 0
        # `gc.unfreeze` would release what the caller has frozen, too. Python 3.12 freezes a few objects itself.
        self._freezes = n_objects > MANY_OBJECTS and gc.get_freeze_count() < n_objects
        if self._is_active:
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect after the first step in this context, and after each step divisible by `every`."""
        if self._is_active and (self._is_first_step or step % self._every == 0):
            gc.collect()
            if self._is_first_step and self._freezes:
                gc.freeze()
            self._is_first_step = False

    def __exit__(self, *_: object) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._is_active:
            gc.enable()


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU device, let glibc keep freed blocks of up to 32 MB instead of returning them to the system.

    Otherwise every large activation is mapped, zeroed page by page and unmapped again: 5 to 10 % of a CPU step.
    Does nothing with another C library.
    """
    if device.type != "cpu":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
