"""A small process beside each rank, from before torch is imported until all ranks have met.

A rank that a signal has stopped (SIGSTOP) can't say so, and where it is alone on its machine no other rank sees it. Its
sentinel does: it tells the others in the store where they meet, then ends the rank, which its launcher sees. Imports no
torch until there is something to tell.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from megatfm.errors import MegatfmError
from megatfm.parallel.process_environment import ProcessEnvironment, read_process_environment

LOOK_SECONDS = 0.2
STOPPED_POLLS = 125
"""Looks in a row that find the rank stopped: five seconds more than ranks beside it wait, who can say it themselves."""
SERVE_SECONDS = 20.0
"""For rank 0, at whose address the others try to meet: they try again every few seconds."""
STOPPED = "megatfm/stopped"
"""Where in the store it stands which rank is stopped."""
SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_started: list[tuple[int, int]] = []
"""Process ids, and what to close for them to end."""


def start(environment: Mapping[str, str] = os.environ) -> None:
    """Have this process watched, where the environment speaks of others. Before there are threads."""
    if _started or all(environment.get(size, "1") in ("", "1") for size in SIZES):
        return
    reading, writing = os.pipe()
    watched = os.getpid()
    if process := os.fork():
        os.close(reading)
        _started.append((process, writing))
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it ends with the rank, not before
        os.close(writing)
        with contextlib.suppress(MegatfmError):  # the rank says it
            _watch(watched, reading, read_process_environment(environment))
    finally:
        os._exit(0)


def end() -> None:
    """All have met: it isn't needed any more."""
    while _started:
        process, writing = _started.pop()
        os.close(writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by a signal (Linux; elsewhere nobody knows)."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _watch(rank: int, line: int, env: ProcessEnvironment) -> None:
    """Until the rank closes its end of the line, which its death does as well."""
    looks = 0
    while looks <= STOPPED_POLLS:
        if env.world_size == 1 or select.select([line], [], [], LOOK_SECONDS)[0]:
            return
        looks = looks + 1 if is_stopped(rank) else 0
    text = (
        f"rank {env.rank} of {env.world_size} on {socket.gethostname()} is stopped (SIGSTOP), and was not "
        "continued while the others waited to meet it"
    )
    os.write(2, f"error: {text}\n".encode())
    _tell(env, text)
    if is_stopped(rank):
        os.kill(rank, signal.SIGKILL)


def _tell(env: ProcessEnvironment, text: str) -> None:
    """Leave it in the store. mpirun and torchrun's agents, who have other ways to meet, see that the rank ends."""
    if env.address is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    import torch.distributed as dist

    with contextlib.suppress(dist.DistError, RuntimeError):
        store = dist.TCPStore(
            env.address, env.port, None, env.rank == 0, timedelta(seconds=10), wait_for_workers=False
        )
        store.set(STOPPED, text)
        if env.rank == 0:
            time.sleep(SERVE_SECONDS)
