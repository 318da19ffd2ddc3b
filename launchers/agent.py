"""torchrun on one node of a job: where the others are comes from SLURM, and a stop reaches the workers.

torchrun dies of USR1 and gives its workers half a minute after TERM, too short for a large checkpoint; and whatever
its workers return, it returns 1. So torchrun is started with both signals blocked, and its workers too, until they can
take them. This process stands before it: it passes them on to the workers themselves, and returns the code that they
agree on. No torch.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS
from megatfm.launchers.supervise import Child, supervise
from megatfm.launchers.worker import EXIT_CODE_DIR

# Below the kernel's range for outgoing connections; another range than the one of tasks that srun starts.
FIRST_PORT, N_PORTS = 22_000, 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m megatfm.launchers.agent --processes N train CONFIG …`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megatfm.launchers.agent", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="workers on this node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="words for megatfm")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatfm-agent-") as codes:
        stopped_before_start: list[int] = []

        def deliver(pid: int, number: int) -> None:
            if not signal_workers(pid, number) and not any(
                Path(codes).iterdir()
            ):  # there is nothing to save yet
                stopped_before_start.append(number)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        agent = Child(
            "torchrun",
            torchrun(os.environ, args.processes, args.command),
            {EXIT_CODE_DIR: codes, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"},
            forward_signal=deliver,
            translate_exit_code=lambda code: (
                EXIT_REQUEUE if stopped_before_start else common_exit_code(code, Path(codes))
            ),
            blocks_stop_signals=True,
        )
        return supervise([agent])


def torchrun(environment: Mapping[str, str], processes: int, argv: Sequence[str]) -> list[str]:
    """The torchrun command of this node. Ranks follow SLURM's order of nodes, so every restart has the same."""
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run"),
        f"--nnodes={environment['SLURM_STEP_NUM_NODES']}",
        f"--node-rank={environment['SLURM_NODEID']}",
        f"--nproc-per-node={processes}",
        f"--master-addr={environment['MASTER_ADDR']}",
        f"--master-port={FIRST_PORT + (31 * job + step) % N_PORTS}",
        "--max-restarts=0",  # the job restarts the run, on nodes that are known to be there
        *("-m", "megatfm.launchers.worker", *argv),
    ]


def signal_workers(pid: int, number: int) -> bool:
    """Send a signal to the workers below torchrun; whether it has any yet."""
    workers = list(_workers(pid))
    for run_worker in workers:
        with contextlib.suppress(psutil.Error):  # it ends just now
            run_worker.send_signal(number)
    return bool(workers)


def _workers(pid: int) -> Iterator[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
    except psutil.Error:
        return
    for process in children:
        try:
            if "LOCAL_RANK" in process.environ():
                yield process
        except psutil.Error:  # ended meanwhile
            continue


def common_exit_code(code: int, folder: Path) -> int:
    """The code that the workers left, where all that left one agree; else 1."""
    if code == EXIT_OK:
        return EXIT_OK
    texts = {path.read_text() for path in folder.iterdir()}
    left = {int(text) if text.isdecimal() else EXIT_FAILED for text in texts}  # empty: killed while it wrote
    (agreed,) = left if len(left) == 1 else (EXIT_FAILED,)
    # A worker that torchrun ended because another left with such a code could not leave its own.
    return agreed if agreed in (EXIT_USAGE, EXIT_REQUEUE, NO_PROGRESS, LOCKED) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
