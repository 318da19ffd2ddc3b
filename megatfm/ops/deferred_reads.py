"""Numbers on the device that the host looks at, read so that it seldom waits."""

from collections.abc import Callable

import torch
from torch import Tensor


class DeferredReads:
    """Numbers on the device that the host will look at: once it needs one, all that wait are read together.

    A read waits until the device has done all that was asked of it before the numbers were sent, so a step should have
    one.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, list[float]]] = []
        self._sent: list[tuple[Tensor, list[float]]] = []
        self._there: torch.cuda.Event | None = None

    def defer(self, values: Tensor) -> Callable[[], list[float]]:
        """Float64 values [n] → what gives them, reading if that was not done."""
        numbers: list[float] = []
        self._waiting.append((values, numbers))

        def finish() -> list[float]:
            if not numbers:
                self.read()
            return numbers

        return finish

    def start_copy(self) -> None:
        """Have the device copy all that wait to the host: a read then waits for that, and for nothing asked later."""
        values = torch.cat([values for values, _ in self._waiting])
        if values.device.type != "cpu":
            sent = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = sent.copy_(values, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()
        places = [values.numel() for values, _ in self._waiting]
        self._sent += zip(values.split(places), [target for _, target in self._waiting], strict=True)
        self._waiting = []

    def read(self) -> None:
        """Read all that wait, or were sent."""
        if self._waiting:
            self.start_copy()
        if self._there:
            self._there.synchronize()
        for values, target in self._sent:
            target.extend(values.tolist())
        self._sent, self._there = [], None
