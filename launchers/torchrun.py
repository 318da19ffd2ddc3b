"""torchrun on one node of a SLURM step: `agent` starts torchrun, and `worker` is one of its ranks.

`python -m megatfm.launchers.torchrun agent --processes N train CONFIG …` runs on each node. By itself, torchrun dies of
USR1, kills its workers half a minute after TERM, which is too short for a large checkpoint, and returns 1 for every
failure. So the agent starts it with both signals blocked (the workers inherit this until they install their handlers)
and forwards signals to the workers. Each worker leaves an empty file named by its exit code, which even a full disk
takes; the agent returns the code on which they agree. The agent imports no torch.
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
"""Environment variable with the folder in which workers leave their exit codes, as files RANK-CODE."""

# Below Linux's default range of ephemeral ports, and apart from the range for tasks that srun starts.
FIRST_PORT, N_PORTS = 22_000, 10_000


def main() -> int:
    """Run the agent or a worker, as `sys.argv` says; return the exit code."""
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        run_worker()
        return EXIT_OK
    parser = argparse.ArgumentParser(prog="megatfm.launchers.torchrun", description=__doc__)
    agent = parser.add_subparsers(required=True).add_parser("agent")
    agent.add_argument("--processes", type=int, required=True, help="workers on this node")
    agent.add_argument("command", nargs=argparse.REMAINDER, help="arguments of megatfm")
    args = parser.parse_args()
    return run_agent(args.processes, args.command)


def run_agent(processes: int, argv: Sequence[str]) -> int:
    """Run torchrun with `processes` workers that run `megatfm ARGV`; return their common exit code."""
    with tempfile.TemporaryDirectory(prefix="megatfm-agent-") as codes:
        stopped_before_start: list[int] = []

        def deliver(pid: int, signum: int) -> None:
            has_started = signal_workers(pid, signum) or any(Path(codes).iterdir())
            if not has_started:  # so there is nothing to save
                stopped_before_start.append(signum)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        agent = Child(
            "torchrun",
            make_torchrun_command(os.environ, processes, argv),
            {EXIT_CODE_DIR: codes, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGINT"},
            forward_signal=deliver,
            translate_exit_code=lambda code: (
                EXIT_REQUEUE if stopped_before_start else find_common_exit_code(code, Path(codes))
            ),
            blocks_stop_signals=True,
        )
        return supervise([agent])


def make_torchrun_command(environment: Mapping[str, str], processes: int, argv: Sequence[str]) -> list[str]:
    """Return this node's torchrun command. Node ranks are SLURM's, so they are the same after every restart."""
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run"),
        f"--nnodes={environment['SLURM_STEP_NUM_NODES']}",
        f"--node-rank={environment['SLURM_NODEID']}",
        f"--nproc-per-node={processes}",
        f"--master-addr={environment['MASTER_ADDR']}",
        f"--master-port={FIRST_PORT + (31 * job + step) % N_PORTS}",
        "--max-restarts=0",  # the job script restarts the run, on nodes that are known to work
        *("-m", "megatfm.launchers.torchrun", "worker", *argv),
    ]


def signal_workers(pid: int, signum: int) -> bool:
    """Send a signal to torchrun's workers; return whether it has any yet."""
    workers = list(_iter_workers(pid))
    for worker in workers:
        with contextlib.suppress(psutil.Error):  # it has just ended
            worker.send_signal(signum)
    return bool(workers)


def _iter_workers(pid: int) -> Iterator[psutil.Process]:
    try:
        children = psutil.Process(pid).children()
    except psutil.Error:
        return
    for process in children:
        try:
            if "LOCAL_RANK" in process.environ():
                yield process
        except psutil.Error:  # it has just ended
            continue


def find_common_exit_code(code: int, folder: Path) -> int:
    """Return the exit code that all workers left, if they agree; else 1. `code` is torchrun's own."""
    if code == EXIT_OK:
        return EXIT_OK
    # Workers that torchrun killed after another's exit left none.
    exit_codes = {int(path.name.partition("-")[2]) for path in folder.iterdir()}
    common_code = exit_codes.pop() if len(exit_codes) == 1 else EXIT_FAILED
    return common_code if common_code in (EXIT_USAGE, EXIT_REQUEUE, NO_PROGRESS, LOCKED) else EXIT_FAILED


def run_worker() -> None:
    """Run megatfm with the arguments of `sys.argv`; leave its exit code for the agent, and exit with it."""
    try:
        runpy.run_module("megatfm", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        (Path(os.environ[EXIT_CODE_DIR]) / f"{os.environ['RANK']}-{code}").touch()
        raise


if __name__ == "__main__":
    sys.exit(main())
