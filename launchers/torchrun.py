"""torchrun on one node of a SLURM step: `agent` starts it, and `worker` is one of its ranks.

`python -m megatfm.launchers.torchrun agent --processes N train CONFIG …` runs on each node. torchrun itself dies of
USR1, gives its workers half a minute after TERM, too short for a large checkpoint, and returns 1 whatever they return.
So it is started with both signals blocked, and its workers too, until their handlers are installed. The agent passes
the signals on to the workers, and returns the exit code that they agree on: each leaves its own in a folder. No torch.
"""

import argparse
import contextlib
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS
from megatfm.launchers.supervisor import Child, supervise

EXIT_CODE_DIR = "MEGATFM_EXIT_CODES"
"""Variable that names the folder in which workers leave their exit codes."""


# Below the kernel's range for outgoing connections; another range than the one of tasks that srun starts.
FIRST_PORT, N_PORTS = 22_000, 10_000


def main() -> int:
    """Run what `sys.argv` says, `agent` or `worker`; returns the agent's exit code."""
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        run_worker()
        return EXIT_OK
    parser = argparse.ArgumentParser(prog="megatfm.launchers.torchrun", description=__doc__)
    agent = parser.add_subparsers(required=True).add_parser("agent")
    agent.add_argument("--processes", type=int, required=True, help="workers on this node")
    agent.add_argument("command", nargs=argparse.REMAINDER, help="words for megatfm")
    args = parser.parse_args()
    return run_agent(args.processes, args.command)


def run_agent(processes: int, argv: Sequence[str]) -> int:
    """Run torchrun with so many workers of `megatfm ARGV`; returns the exit code."""
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
            torchrun_command(os.environ, processes, argv),
            {EXIT_CODE_DIR: codes, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"},
            forward_signal=deliver,
            translate_exit_code=lambda code: (
                EXIT_REQUEUE if stopped_before_start else common_exit_code(code, Path(codes))
            ),
            blocks_stop_signals=True,
        )
        return supervise([agent])


def torchrun_command(environment: Mapping[str, str], processes: int, argv: Sequence[str]) -> list[str]:
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
        *("-m", "megatfm.launchers.torchrun", "worker", *argv),
    ]


def signal_workers(pid: int, number: int) -> bool:
    """Send a signal to the workers below torchrun; whether it has any yet."""
    workers = list(_workers(pid))
    for worker in workers:
        with contextlib.suppress(psutil.Error):  # it ends just now
            worker.send_signal(number)
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
    exit_codes = {
        int(text) if text.isdecimal() else EXIT_FAILED for text in texts
    }  # empty: killed while it wrote
    (agreed,) = exit_codes if len(exit_codes) == 1 else (EXIT_FAILED,)
    # A worker that torchrun ended because another left with such a code could not leave its own.
    return agreed if agreed in (EXIT_USAGE, EXIT_REQUEUE, NO_PROGRESS, LOCKED) else EXIT_FAILED


def run_worker() -> None:
    """Run the command of `sys.argv` and exit with its code."""
    try:
        runpy.run_module("megatfm", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        (Path(os.environ[EXIT_CODE_DIR]) / os.environ["RANK"]).write_text(str(code))
        raise


if __name__ == "__main__":
    sys.exit(main())
