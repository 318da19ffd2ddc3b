"""Deferred reads of device tensors, so that the host waits at most once a step."""

from collections.abc import Callable

import torch
from torch import Tensor


class DeferredReads:
    """Device values that the host needs later. The first access copies all deferred values in one transfer.

    A transfer waits for all earlier work of the device, so a step should have one only.
    """

    def __init__(self) -> None:
        self._deferred: list[tuple[Tensor, list[float]]] = []
        self._copied: list[tuple[Tensor, list[float]]] = []
        self._copy_done: torch.cuda.Event | None = None

    def defer(self, values: Tensor) -> Callable[[], list[float]]:
        """Defer the read of float64 values [n]; return a function that returns them, and reads them if necessary."""
        results: list[float] = []
        self._deferred.append((values, results))

        def finish() -> list[float]:
            if not results:
                self.read()
            return results

        return finish

    def start_copy(self) -> None:
        """Start an asynchronous copy of all deferred values; a read then waits for it, and not for later work."""
        values = torch.cat([values for values, _ in self._deferred])
        if values.device.type != "cpu":
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()
        sizes = [values.numel() for values, _ in self._deferred]
        self._copied += zip(values.split(sizes), [target for _, target in self._deferred], strict=True)
        self._deferred = []

    def read(self) -> None:
        """Read all deferred values, waiting for a started copy."""
        if self._deferred:
            self.start_copy()
        if self._copy_done:
            self._copy_done.synchronize()
        for values, target in self._copied:
            target.extend(values.tolist())
        self._copied, self._copy_done = [], None
