"""Worker processes that build rows for a loader: each builds a fixed share of every step, so reads do not overlap."""

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from megatfm.data.dataset import RowDataset, join_rows
from megatfm.data.sequences import Fields
from megatfm.errors import MegatfmError

END_SECONDS = 10.0
"""Seconds that workers have to exit before they are killed."""
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Stop signals, which SLURM and a terminal send to workers, too. The trainer may need rows until it has saved."""


class RowWorkers:
    """Builds rows in `n` processes with copies of `rows`, or in the calling thread if n = 0.

    Processes start at the first request. The result is the same for every n. An error in a worker is raised here; the
    death of a worker raises a MegatfmError. Close it when done; if this process dies, the workers exit.
    """

    def __init__(self, rows: RowDataset, n: int) -> None:
        self._own_rows, self._n = rows, n
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Process ids; empty before the first request and after `close`."""
        return [process.pid for process in self._processes]

    def read_rows(self, positions: Sequence[int | None]) -> Fields:
        """Return the rows [n] at positions (see `RowDataset.read_rows`)."""
        if not self._n:
            return self._own_rows.read_rows(positions)
        with self._lock:
            if not self._processes:
                self._start()
            processes, pipes = self._processes, self._pipes
        bounds = np.linspace(0, len(positions), len(processes) + 1).astype(int).tolist()
        requests = []
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin < end:
                with contextlib.suppress(OSError):  # The worker died; `_receive_answer` reports it.
                    pipes[number].send(list(positions[begin:end]))
                requests.append(number)
        # Reads all answers, also after an error, so that no stale answer is left for the next call.
        answers = [_receive_answer(number, processes[number], pipes[number]) for number in requests]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return join_rows([answer for answer in answers if isinstance(answer, dict)])

    def close(self) -> None:
        """Stop the processes, and kill those still alive after `END_SECONDS`; a later request starts new ones.

        A request that waits in another thread gets an error. Pipes are shut down here, but closed only when that
        thread drops them: a descriptor closed during a read could already belong to another file.
        """
        with self._lock:
            processes, pipes = self._processes, self._pipes
            self._processes, self._pipes = [], []
        _end_workers(processes, pipes)

    def _start(self) -> None:
        # Spawn, not fork: a fork copies the locks of torch's and the network's threads in whatever state they are.
        context, pickled = multiprocessing.get_context("spawn"), pickle.dumps(self._own_rows)
        # A process that exits without `close` would wait for ever for daemons that block SIGTERM.
        Finalize(self, _end_workers, (self._processes, self._pipes), exitpriority=0)
        resource_tracker.ensure_running()  # the first start of a process would unblock SIGINT and SIGTERM
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # workers inherit it
        try:
            for number in range(self._n):
                parent_pipe, worker_pipe = context.Pipe()
                process = context.Process(
                    target=worker_loop, args=(worker_pipe, pickled), name=f"megatfm-data-{number}", daemon=True
                )
                process.start()
                worker_pipe.close()
                self._processes.append(process)
                self._pipes.append(parent_pipe)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_workers(processes: Sequence[Any], pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # the worker reads end of file
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _receive_answer(number: int, process: Any, pipe: Connection) -> Fields | BaseException:
    try:
        answer: Fields | BaseException = pipe.recv()
        return answer
    except (EOFError, OSError):
        code = _exit_code(process)
        reason = "its error is on stderr"
        if code is None or code < 0:
            reason = "the machine may be short of memory: set data.workers to fewer"
        return MegatfmError(f"data worker {number} (pid {process.pid}) died with exit code {code}: {reason}")


def _exit_code(process: Any) -> int | None:
    """Return the exit code of a process that died or is about to; None if it does not."""
    end = time.monotonic() + END_SECONDS
    process.join(END_SECONDS)
    # If two threads wait for a process at once, the system tells only one, and the other's `join` may return early.
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    code: int | None = process.exitcode
    return code


def worker_loop(pipe: Connection, pickled: bytes) -> None:
    """Receive lists of positions and send back their rows, until the pipe closes."""
    try:
        rows = pickle.loads(pickled)
    except Exception as error:
        rows = error
    while True:
        try:
            positions = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if isinstance(rows, Exception):
                raise rows
            answer: Fields | Exception = rows.read_rows(positions)
        except Exception as error:
            answer = make_picklable_error(error)
        try:
            pipe.send(answer)
        except OSError:
            return


def make_picklable_error(error: Exception) -> Exception:
    """Return the error with its traceback as a note, or a MegatfmError with its message if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return MegatfmError(f"a data worker failed: {type(error).__name__}: {error}")
    return error
