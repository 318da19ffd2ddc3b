"""torchrun on one node: its command, the signals that pass it by, and the code that comes through."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatfm.launchers.torchrun import find_common_exit_code, make_torchrun_command, signal_workers

ROOT = Path(__file__).parents[3]
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NODEID": "2",
    "MASTER_ADDR": "n1",
}

# In the place of torchrun: starts two workers, and returns 1 whatever they return, as torchrun does.
TORCHRUN = """
import os, subprocess, sys
workers = [
    subprocess.Popen([sys.executable, {worker!r}], env={{**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}})
    for rank in range(2)
]
sys.exit(1 if any([worker.wait() for worker in workers]) else 0)
"""
# A rank: saves for longer than any patience and returns what it was told to.
WORKER = """
import os, signal, sys, time
from pathlib import Path
held = {signal.SIGUSR1, signal.SIGTERM}
assert held <= signal.pthread_sigmask(signal.SIG_BLOCK, []), "as inherited from the agent"
code = int(os.environ["TOLD"])
def stop(number, frame):
    time.sleep(0.5)
    (Path(os.environ["MEGATFM_EXIT_CODES"]) / os.environ["RANK"]).write_text("75")
    os._exit(75)
signal.signal(signal.SIGUSR1, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
Path(os.environ["READY"] + os.environ["RANK"]).touch()
if code >= 0:
    (Path(os.environ["MEGATFM_EXIT_CODES"]) / os.environ["RANK"]).write_text(str(code))
    sys.exit(code)
time.sleep(60)
"""


def test_the_command_follows_slurms_order() -> None:
    words = make_torchrun_command(STEP, 4, ["train", "config.toml"])
    assert words[-5:] == ["-m", "megatfm.launchers.torchrun", "worker", "train", "config.toml"]
    for word in ("--nnodes=3", "--node-rank=2", "--nproc-per-node=4", "--master-addr=n1", "--max-restarts=0"):
        assert word in words
    commands = [make_torchrun_command({**STEP, "SLURM_JOB_ID": str(job)}, 4, []) for job in range(40)]
    ports = {word for words in commands for word in words if word.startswith("--master-port=")}
    assert len(ports) == 40, "jobs that share a node don't meet"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """`agent(code)`: an agent whose two workers return that code, or wait for a signal if it is negative."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN.format(worker=str(worker)))
    started = []

    def start(code: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **STEP,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "PYTHONSAFEPATH": "1",
            "TOLD": str(code),
            "READY": str(tmp_path / "ready-"),
            "TMPDIR": str(tmp_path),
        }
        command = [
            sys.executable,
            "-m",
            "megatfm.launchers.torchrun",
            "agent",
            "--processes",
            "2",
            "train",
            "config.toml",
        ]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        started.append(process)
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("code", [0, 2, 75, 76, 77, 1, 3])
def test_the_code_of_the_workers_comes_through(
    code: int, agent: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = agent(code)
    process.communicate(timeout=100)
    assert process.returncode == (1 if code == 3 else code)
    assert not list(tmp_path.glob("megatfm-agent-*")), "no litter"


def test_a_signal_to_all_of_the_step_lets_the_workers_save(
    agent: Callable[[int], subprocess.Popen[str]],
) -> None:
    """SLURM signals every process of a step: what stands for torchrun must not die of it."""
    process = agent(-1)
    (displayed,) = psutil.Process(process.pid).children()
    assert "torch.distributed.run" in displayed.cmdline()
    displayed.send_signal(signal.SIGUSR1)
    displayed.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    _, output = process.communicate(timeout=100)
    assert process.returncode == 75
    assert output == ""


def test_a_worker_that_ends_while_it_is_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `supervise` would kill the others while they save."""
    ended = subprocess.Popen(["true"], env={**os.environ, "LOCAL_RANK": "0"})
    saves = subprocess.Popen(["sleep", "60"], env={**os.environ, "LOCAL_RANK": "1"})
    workers = [psutil.Process(process.pid) for process in (ended, saves)]
    ended.wait()
    monkeypatch.setattr("megatfm.launchers.torchrun._iter_workers", lambda pid: iter(workers))
    assert signal_workers(os.getpid(), signal.SIGTERM)
    assert saves.wait(10) == -signal.SIGTERM
    monkeypatch.undo()
    assert not signal_workers(ended.pid, signal.SIGTERM), "torchrun itself is gone"


def test_workers_that_could_not_leave_a_code_go_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "9").write_text("")
    assert find_common_exit_code(1, tmp_path) == 1, "killed while it wrote"
    (tmp_path / "9").unlink()
    assert find_common_exit_code(1, tmp_path) == 1
    (tmp_path / "0").write_text("75")
    assert find_common_exit_code(1, tmp_path) == 75
    (tmp_path / "1").write_text("2")
    assert find_common_exit_code(1, tmp_path) == 1
    assert find_common_exit_code(0, tmp_path) == 0
