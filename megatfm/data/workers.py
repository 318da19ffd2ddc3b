"""Processes that make rows for a loader, each a fixed part of every step, so that none reads another's text."""

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
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatfm.data.dataset import RowDataset
from megatfm.data.row_batches import join_rows
from megatfm.data.sequences import Fields
from megatfm.errors import MegatfmError

END_SECONDS = 10.0
"""Time in which workers may end by themselves."""


class RowWorkers:
    """`n` processes with copies of `rows`, started with the first request; with n = 0 the calling thread does the work.

    The rows of a list of positions are the same for every n. A worker that fails raises its error here, one that dies
    a MegatfmError. Close it when done; if this process dies, the workers end.
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

    def rows(self, positions: Sequence[int | None]) -> Fields:
        """The rows [n] at positions, as `Rows` says."""
        if not self._n:
            return self._own_rows.rows(positions)
        with self._lock:
            if not self._processes:
                self._start()
            processes, pipes = self._processes, self._pipes
        bounds = np.linspace(0, len(positions), len(processes) + 1).astype(int).tolist()
        requests = []
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if begin < end:
                with contextlib.suppress(OSError):  # of a worker that died, which its answer tells
                    pipes[number].send(list(positions[begin:end]))
                requests.append(number)
        # All are heard, also after an error, so that the next call finds no old answers.
        answers = [_answer(number, processes[number], pipes[number]) for number in requests]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return join_rows([answer for answer in answers if isinstance(answer, dict)])

    def close(self) -> None:
        """End the processes, and kill those that still work after `END_SECONDS`; a later request starts new ones.

        A request that waits for them in another thread gets an error. Its ends of the pipes are closed when it lets go
        of them, since a number that is closed while it is read from may be another file's by then.
        """
        with self._lock:
            processes, pipes = self._processes, self._pipes
            self._processes, self._pipes = [], []
        for pipe in pipes:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # which a worker takes as the end
        deadline = time.monotonic() + END_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _start(self) -> None:
        # Spawned, since a fork would copy the threads' locks of torch and of the network as they happen to be.
        context, pickled = multiprocessing.get_context("spawn"), pickle.dumps(self._own_rows)
        for number in range(self._n):
            parent_pipe, worker_pipe = context.Pipe()
            process = context.Process(
                target=_main, args=(worker_pipe, pickled), name=f"megatfm-data-{number}", daemon=True
            )
            process.start()
            worker_pipe.close()
            self._processes.append(process)
            self._pipes.append(parent_pipe)


def _answer(number: int, process: Any, pipe: Connection) -> Fields | BaseException:
    try:
        answer: Fields | BaseException = pipe.recv()
        return answer
    except (EOFError, OSError):
        return MegatfmError(
            f"data worker {number} (pid {process.pid}) died with exit code {_exit_code(process)}: the machine may "
            "be short of memory: set data.workers to fewer"
        )


def _exit_code(process: Any) -> int | None:
    """Return the exit code of a process that died or is about to; None if it does not."""
    end = time.monotonic() + END_SECONDS
    process.join(END_SECONDS)
    # If two threads wait for a process at once, the system tells only one, and the other's `join` may return early.
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    code: int | None = process.exitcode
    return code


def _main(pipe: Connection, pickled: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer ends its workers itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_loop(pipe, pickled)


def worker_loop(pipe: Connection, pickled: bytes) -> None:
    """Answer lists of positions with rows, until the other end closes."""
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
            answer: Fields | Exception = rows.rows(positions)
        except Exception as error:
            answer = picklable_error(error)
        try:
            pipe.send(answer)
        except OSError:
            return


def picklable_error(error: Exception) -> Exception:
    """The error, with its traceback in words, or where it can't travel, its words alone."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return MegatfmError(f"a data worker failed: {type(error).__name__}: {error}")
    return error
