"""Ranks of a run that only move on, watched by the rank monitor, each on a machine of a name that the test gives."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatfm.errors import MegatfmError
from megatfm.launchers.local import find_free_port
from megatfm.parallel.distributed import distributed_session
from megatfm.train import rank_monitor_client
from megatfm.train.rank_monitor_client import RankMonitor
from tests.support.workers import start_fork_server

STEPS = 30


class WatchedRanks:
    """Processes forked from one that has imported all there is to import.

    machines: a letter for each rank. failing: the rank that raises at step 5.
    """

    def __init__(self, folder: Path, machines: str, hang_timeout: float, failing: int | None = None) -> None:
        context = start_fork_server()
        port = find_free_port()
        self._outputs = [folder / f"{rank}.txt" for rank in range(len(machines))]
        self._processes = [
            context.Process(target=_run_rank, args=(output, port, rank, machines, hang_timeout, failing))
            for rank, output in enumerate(self._outputs)
        ]
        for process in self._processes:
            process.start()

    def wait_until_watched(self) -> None:
        """Wait until all ranks move on."""
        deadline = time.monotonic() + 60
        while not all(output.exists() and "step 3\n" in output.read_text() for output in self._outputs):
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.02)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a rank a signal."""
        os.kill(self._processes[rank].pid or 0, number)

    def wait_for_exits(self, seconds: float, without: int | None = None) -> dict[int, tuple[int | None, str]]:
        """Wait so long at most, and return exit codes (None: still runs) and outputs by rank."""
        deadline = time.monotonic() + seconds
        ranks = [rank for rank in range(len(self._processes)) if rank != without]
        for rank in ranks:
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        return {rank: (self._processes[rank].exitcode, self._outputs[rank].read_text()) for rank in ranks}

    def outputs(self) -> list[str]:
        """Return what each rank has said."""
        return [output.read_text() if output.exists() else "" for output in self._outputs]

    def kill(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.join()


def _run_rank(output: Path, port: int, rank: int, machines: str, hang_timeout: float, failing: int | None) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(machines)), "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }  # fmt: skip
    vars(rank_monitor_client)["machine"] = lambda: machines[rank]
    try:
        with distributed_session(60.0, "cpu", 60.0) as info, RankMonitor(info, hang_timeout) as monitor:
            for step in range(STEPS):
                monitor.tick(step, "step")
                os.write(1, f"step {step}\n".encode())
                if step == 5 and rank == failing:
                    raise ValueError("as the test wants it")
                dist.monitored_barrier(timeout=timedelta(seconds=60))
                time.sleep(0.05)
    except (MegatfmError, ValueError) as error:
        os.write(2, f"error: {error}\n".encode())
        sys.exit(1)
