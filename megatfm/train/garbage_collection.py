"""Garbage collection at the same steps on all ranks, as in torchtitan and Megatron-LM (`--manual-gc`).

Python collects when enough objects were allocated, which each rank reaches at another time. Hundreds of milliseconds of
one rank are waited for by all others in the next collective, so that a step may wait for a rank on each node.
"""

import gc
from typing import Self

MANY_OBJECTS = 100_000
"""Too many to traverse at each collection. PyTorch alone makes half a million, which a caller may have frozen."""


class GarbageCollection:
    """Context manager that collects every `every` steps, and at no other time; 0: leaves collections to Python.

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
