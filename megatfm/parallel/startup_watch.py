"""Watchdogs of the rendezvous: they report ranks stopped by a signal (SIGSTOP) long before the timeout.

The rendezvous blocks inside torch or MPI, so only ending the process interrupts it. There are two watchdogs. A thread
in each rank (`StartupWatch`) watches the ranks on its machine. A small process beside each rank (the sentinel), forked
before torch is imported, watches that rank, in case it is alone on its machine. The sentinel reports a stopped rank
through the store, then kills it, which the launcher notices.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Self

import psutil

from megatfm.errors import EXIT_FAILED, EXIT_REQUEUE, MegatfmError
from megatfm.parallel.process_environment import ProcessEnvironment, read_process_environment

log = logging.getLogger("megatfm")

POLL_SECONDS = 0.2
NOTICE_POLLS = 75
"""Polls after which a rank says that it waits: fifteen seconds."""
STOPPED_POLLS = 100
"""Consecutive polls that find a rank stopped before it counts as lost: twenty seconds of this process running."""
SIGNALLED_POLLS = 50
"""Polls to wait after a stop signal, while ranks are missing: the signal may reach them later."""
SENTINEL_POLLS = 125
"""Polls of a sentinel: five seconds more than the threads of other ranks on the machine, which report first."""
SERVE_SECONDS = 20.0
"""How long rank 0 keeps its address open: the others retry every few seconds."""
STOPPED_KEY = "megatfm/stopped"
"""Key in the store that names the stopped rank."""
WORLD_SIZE_VARS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
STOP_SIGNALS = {signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP}

_sentinels: list[tuple[int, int]] = []
"""Process id of each sentinel, and the file descriptor whose closing ends it."""


class StartupWatch:
    """Context that ends this process if a rank on the machine stays stopped, or if a stop signal has been pending.

    The first rank of a machine also logs that it waits; `wait_for_all_ranks` says on rank 0 for whom.
    """

    def __init__(self, env: ProcessEnvironment) -> None:
        self._env = env
        self._finished = threading.Event()
        self._exit_lock = threading.Lock()  # so that the watch can't end the process once the ranks have met
        self._thread = threading.Thread(target=self._watch, name="megatfm-startup-watch", daemon=True)

    def __enter__(self) -> Self:
        if self._env.world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._exit_lock:
            self._finished.set()
        end_sentinel()

    def _watch(self) -> None:
        env, stopped, n_polls, n_stop_signals = self._env, Counter[int](), 0, 0
        while not self._finished.wait(POLL_SECONDS):
            n_polls += 1
            if n_polls == NOTICE_POLLS and env.rank and env.local_rank == 0:
                place = f" at {env.address}:{env.port}" if env.address else ""
                log.warning(
                    "rank %d of %d on %s waits to meet rank 0 and the others%s: check rank 0's log and node",
                    env.rank, env.world_size, socket.gethostname(), place,
                )  # fmt: skip
            stopped = Counter({rank: stopped[rank] + 1 for rank in find_stopped_ranks(self._env)})
            if stopped_ranks := [rank for rank, n_polls in stopped.items() if n_polls > STOPPED_POLLS]:
                self._end(
                    EXIT_FAILED,
                    f"error: rank {stopped_ranks[0]} of {self._env.world_size} on {socket.gethostname()} is stopped "
                    "(SIGSTOP), and was not continued while the others waited to meet it",
                )
            n_stop_signals += bool(signal.sigpending() & STOP_SIGNALS)
            if n_stop_signals > SIGNALLED_POLLS:
                self._end(EXIT_REQUEUE, "a signal stopped the run before all ranks had met: there is nothing to save")

    def _end(self, code: int, text: str) -> None:
        with self._exit_lock:
            if not self._finished.is_set():
                os.write(2, f"{text}\n".encode())
                os._exit(code)


def find_stopped_ranks(env: ProcessEnvironment) -> list[int]:
    """Return the stopped ranks of this run among the children of this process's parent."""
    ranks = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            stopped = _read_stopped(process)
            if stopped and (stopped.launcher, stopped.world_size) == (env.launcher, env.world_size):
                ranks.append(stopped.rank)
    return ranks


def _read_stopped(process: psutil.Process) -> ProcessEnvironment | None:
    """Return the environment of a stopped process; None if it runs, or can't be read."""
    with contextlib.suppress(psutil.Error, MegatfmError):
        if process.status() == psutil.STATUS_STOPPED:
            return read_process_environment(process.environ())
    return None


def start_sentinel() -> None:
    """Fork a sentinel if the environment has several ranks. Call it before any thread starts."""
    if _sentinels or all(os.environ.get(size, "1") in ("", "1") for size in WORLD_SIZE_VARS):
        return
    reading, writing = os.pipe()
    watched = os.getpid()
    if process := os.fork():
        os.close(reading)
        _sentinels.append((process, writing))
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it must outlive the rank
        os.close(writing)
        with contextlib.suppress(MegatfmError):  # the rank itself reports it
            _run_sentinel(watched, reading, read_process_environment(os.environ))
    finally:
        os._exit(0)


def end_sentinel() -> None:
    """End the sentinel, once all ranks have met, by SIGKILL: it may have been stopped itself."""
    while _sentinels:
        process, writing = _sentinels.pop()
        os.close(writing)
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a process (Linux only; elsewhere False)."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _run_sentinel(rank_pid: int, pipe: int, env: ProcessEnvironment) -> None:
    """Watch a rank until its end of the pipe closes, at the latest by its death."""
    n_polls = 0
    while n_polls <= SENTINEL_POLLS:
        if env.world_size == 1 or select.select([pipe], [], [], POLL_SECONDS)[0]:
            return
        n_polls = n_polls + 1 if is_stopped(rank_pid) else 0
    text = (
        f"rank {env.rank} of {env.world_size} on {socket.gethostname()} is stopped (SIGSTOP), and was not "
        "continued while the others waited to meet it"
    )
    os.write(2, f"error: {text}\n".encode())
    _announce(env, text)
    if is_stopped(rank_pid):
        os.kill(rank_pid, signal.SIGKILL)


def _announce(env: ProcessEnvironment, text: str) -> None:
    """Write the message to the store. Under mpirun and torchrun's agents, the launcher notices the rank's end."""
    if env.address is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    import torch.distributed as dist

    with contextlib.suppress(dist.DistError, RuntimeError):
        store = dist.TCPStore(env.address, env.port, None, env.rank == 0, timedelta(seconds=10), wait_for_workers=False)
        store.set(STOPPED_KEY, text)
        if env.rank == 0:
            time.sleep(SERVE_SECONDS)
