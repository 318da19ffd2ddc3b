"""Stop signals: all ranks agree on them after a step, save a checkpoint, and exit."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatfm.ops.transfer import DeferredReads, move_to_device
from megatfm.terminal import list_hangup_signals, mute_closed_streams

log = logging.getLogger("megatfm")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
INTERRUPTED = 128 + signal.SIGINT
GRACE_SECONDS = 2.0
"""Time that the main thread has to handle a second SIGINT."""


Agree = Callable[[bool], tuple[str | None, bool]]
"""`StopSignals.agree` or `agree_deferred`."""


class StopRequested(Exception):
    """Raised on all ranks after a signal, between two batches or sampled tokens of an evaluation; its text is the
    signal's name."""


class StopSignals:
    """Context manager that records SIGTERM, SIGINT, SIGUSR1, and SIGHUP unless it is ignored. A second SIGINT
    interrupts at once.

    Python runs signal handlers in the main thread only. If that is stuck inside a collective, a second thread, which
    reads the signals' numbers from a socket, ends the process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received: signal.Signals | None = None
        self._interrupts = 0
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._exited = threading.Event()
        self._pending: DeferredReads | None = None
        self._read_result: Callable[[], list[float]] = list

    def __enter__(self) -> Self:
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._wakeup_writer.setblocking(False)
        self._thread = threading.Thread(target=self._exit_if_stuck, name="megatfm-signals", daemon=True)
        self._thread.start()
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "training runs outside the main thread, and only that one handles signals: no signal makes it save"
            )
            return self
        stop_signals = (*STOP_SIGNALS, *list_hangup_signals())
        self._previous_handlers = {name: signal.signal(name, self._handle) for name in stop_signals}
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)  # the launcher may have blocked them
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handlers:
            signal.set_wakeup_fd(self._wakeup_before)
        for name, handler in self._previous_handlers.items():
            signal.signal(name, handler)
        self._exited.set()
        self._wakeup_writer.close()
        self._thread.join()
        self._wakeup_reader.close()

    def agree(self, busy: bool = False) -> tuple[str | None, bool]:
        """Return the signal's name if any rank has received one, and whether any rank is busy. A collective."""
        self._start(busy)
        return self._finish()

    def agree_deferred(self, busy: bool = False) -> tuple[str | None, bool]:
        """Like `agree`, but return the result of the previous call, and (None, True) at the first.

        The GPU has computed that result by now, so the host need not wait until the GPU has finished its queue.
        """
        result = self._finish() if self._pending is not None else (None, True)
        self._start(busy)
        return result

    def _start(self, busy: bool) -> None:
        """Start the all-reduce of the signal numbers and busy flags, and the copy of its result to the host."""
        state = move_to_device(torch.tensor([self._received or 0, int(busy)], dtype=torch.int64), self._device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        self._pending = DeferredReads()
        self._read_result = self._pending.defer(state)
        self._pending.start_copy()

    def _finish(self) -> tuple[str | None, bool]:
        signum, any_busy = self._read_result()
        self._pending = None
        return signal.Signals(int(signum)).name if signum else None, bool(any_busy)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if signum == signal.SIGHUP:
            mute_closed_streams()
        self._received = signal.Signals(signum)

    def _exit_if_stuck(self) -> None:
        interrupts = 0
        while interrupts < 2:
            with contextlib.suppress(OSError):
                if not (signums := self._wakeup_reader.recv(64)):
                    return
                interrupts += signums.count(signal.SIGINT)
        if not self._exited.wait(GRACE_SECONDS):
            os.write(2, b"error: interrupted while stuck, so nothing is saved\n")
            os._exit(INTERRUPTED)
