"""Signals that ask a run to stop: all ranks agree at a step boundary, save, and leave."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """While entered, remembers SIGTERM, SIGINT and SIGUSR1; a second SIGINT interrupts at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {name: signal.signal(name, self._remember) for name in ASK_TO_STOP}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def agreed(self) -> str | None:
        """The signal's name if any rank has received one; the same answer on every rank. A collective."""
        number = torch.tensor([self._received or 0], dtype=torch.int64, device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return signal.Signals(int(number)).name if number else None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signal.Signals(number)
