"""The environment that each launcher makes, and ranks that meet."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers.local import find_free_port
from megatfm.parallel import rendezvous, startup_watch
from megatfm.parallel.process_environment import ProcessEnvironment, count_local_ranks, read_process_environment
from megatfm.parallel.rendezvous import restart_store
from megatfm.parallel.startup_watch import StartupWatch
from tests.support.forked_commands import ForkedCommand, wait_until

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
# What SLURM 22.05 really sets: `srun -N2 -n3` for task 1, and the script of `sbatch -N2 -n4`.
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "n[1-2]",
}  # fmt: skip
STEP = {
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n1",
}  # fmt: skip


@pytest.mark.parametrize(("environment", "place"), [
    ({}, ProcessEnvironment("none")),
    (TORCHRUN, ProcessEnvironment("torchrun", 3, 4, 1, "head", 29500)),
    ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment("torchrun")),
    (STEP | TORCHRUN, ProcessEnvironment("torchrun", 3, 4, 1, "head", 29500)),
    (BATCH, ProcessEnvironment("none")),
    (STEP, ProcessEnvironment("srun", 1, 3, 1, "n1", 12_000 + 31 * 7)),
    (STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "9"}, ProcessEnvironment("srun", 1, 3, 1, "head", 9)),
    (STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ProcessEnvironment("none")),
    (OPEN_MPI, ProcessEnvironment("mpirun", 1, 2, 1)),
    (MPICH, ProcessEnvironment("mpirun", 1, 2, 0)),
    (STEP | OPEN_MPI, ProcessEnvironment("mpirun", 1, 2, 1)),  # mpirun in a job: its daemons are the step's tasks
    (STEP | MPICH, ProcessEnvironment("mpirun", 1, 2, 0)),
    # srun --mpi=pmi2
    (STEP | MPICH | {"PMI_SIZE": "3"}, ProcessEnvironment("srun", 1, 3, 1, "n1", 12_000 + 31 * 7)),
])  # fmt: skip
def test_launchers_are_recognised(environment: dict[str, str], place: ProcessEnvironment) -> None:
    assert read_process_environment(environment) == place


@pytest.mark.parametrize(("launcher", "change", "words"), [
    (TORCHRUN, {"MASTER_ADDR": ""}, "MASTER_ADDR is not set, although"),
    (TORCHRUN, {"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
    (TORCHRUN, {"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    (TORCHRUN, {"WORLD_SIZE": "four"}, "WORLD_SIZE='four' in the environment is not a number"),
    (TORCHRUN, {"RANK": "4"}, "RANK=4 with WORLD_SIZE=4: ranks are 0 to 3"),
    (TORCHRUN, {"MASTER_PORT": "-1"}, "MASTER_PORT='-1'"),
    (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment: ports are 1 to 65535"),
    (TORCHRUN, {"MASTER_PORT": "0"}, "ports are 1 to 65535"),
    (TORCHRUN, {"RANK": "9" * 5000}, "RANK='9999"),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two'"),
    (TORCHRUN, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment is not a"),
    (STEP, {"SLURM_PROCID": "first"}, "SLURM_PROCID='first' in the environment is not a number"),
    (STEP, {"SLURM_PROCID": "first", "SLURM_STEP_NUM_TASKS": "1"}, "SLURM_PROCID='first'"),
    (STEP, {"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a number"),
    (STEP, {"MASTER_PORT": "65536"}, "ports are 1 to 65535"),
])  # fmt: skip
def test_contradictions_are_one_line(launcher: dict[str, str], change: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_process_environment(launcher | change)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scontrol", ["", "#!/bin/sh\n"], ids=["there is none", "it names no host"])
def test_a_node_list_needs_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scontrol: str) -> None:
    if scontrol:
        (tmp_path / "scontrol").write_text(scontrol)
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if scontrol else "/nowhere")
    with pytest.raises(MegatfmError, match=r"can't expand SLURM_STEP_NODELIST=n\[1-2\].*set MASTER_ADDR"):
        read_process_environment(STEP | {"SLURM_STEP_NODELIST": "n[1-2]"})


@pytest.mark.parametrize(("environment", "count"), [
    ({}, None),
    (TORCHRUN, None),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 4),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}, 1),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3),6,2(x2)", "SLURM_NODEID": "2"}, 8),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8(x3),6,2(x2)", "SLURM_NODEID": "5"}, 2),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "1"}, None),
    (STEP | {"SLURM_STEP_TASKS_PER_NODE": "?", "SLURM_NODEID": "0"}, None),
    (BATCH | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, None),
    (STEP | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
    (MPICH | {"MPI_LOCALNRANKS": "3"}, 3),
])  # fmt: skip
def test_local_ranks_are_counted(environment: dict[str, str], count: int | None) -> None:
    assert count_local_ranks(environment) == count


@pytest.mark.skipif(not shutil.which("scontrol"), reason="needs SLURM's scontrol: run `make system-deps`")
def test_the_head_node_is_the_first_of_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert read_process_environment(STEP | {"SLURM_STEP_NODELIST": "gpu[07-09,12],login1"}).address == "gpu07"


# -------------------------------------------------------------------------------------------- ranks that meet


# The rank that is to be stopped stops itself before it has come; the others are not kept waiting for long.
PROGRAM = """
import os, signal, sys, time
from types import SimpleNamespace
from megatfm.parallel import rendezvous, startup_watch
def serve(seconds):  # or until the file is there
    end = time.monotonic() + seconds
    while time.monotonic() < end and not os.path.exists(sys.argv[3]):
        time.sleep(0.05)
startup_watch.time, startup_watch.SENTINEL_POLLS = SimpleNamespace(sleep=serve), 3
if len(sys.argv) > 3:
    startup_watch.start_sentinel()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if os.environ["RANK"] == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGSTOP)
os.kill(os.getpid(), int(sys.argv[2]))
from megatfm.parallel import distributed
startup_watch.STOPPED_POLLS = startup_watch.SIGNALLED_POLLS = 3
distributed.init_distributed(timeout=240, device="cpu")
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    """File that ends the time for which a stopped rank 0 is announced, once it is there."""
    return tmp_path / "reported"


@pytest.fixture
def shared_variables() -> dict[str, str]:
    """Environment of each rank of two, with a port of their own."""
    return {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}


@pytest.fixture
def start(reported: Path, shared_variables: dict[str, str]) -> Iterator[Start]:
    """`start(rank, stops=0)`: a rank of two. alone: as on a node of its own, where no other rank is to be seen."""
    started = []

    def start(rank: int, stops: int = -1, *, alone: bool = False) -> "subprocess.Popen[str]":
        environment = {**shared_variables, "RANK": str(rank), "LOCAL_RANK": "0" if alone else str(rank)}
        command = [sys.executable, "-c", PROGRAM, str(stops), "0"]
        if alone:  # below a process of its own, as below a node's launcher
            command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *command, str(reported)]
        started.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def fork(shared_variables: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., ForkedCommand]]:
    """`fork(rank, number)`: a rank of two on a node of its own that sends itself a signal; it has no sentinel."""
    program, started = tmp_path / "rank.py", []
    program.write_text(PROGRAM)

    def fork(rank: int, number: int = 0) -> ForkedCommand:
        environment = {**shared_variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(ForkedCommand((-1, number), tmp_path / "output", environment=environment, program=str(program)))
        return started[-1]

    yield fork
    for command in started:
        command.end()


@pytest.mark.parametrize(
    ("stopped", "alone"), [(0, False), pytest.param(0, True, marks=pytest.mark.extended), (1, True)]
)
def test_a_rank_that_is_stopped_before_it_comes_is_named(
    start: Start, fork: Callable[..., ForkedCommand], reported: Path, stopped: int, alone: bool
) -> None:
    """The other rank waits inside torch to reach it if it is rank 0; not alone, it is a child of the same process."""
    if alone:
        forked = fork(1 - stopped)
        lost = start(stopped, stops=stopped, alone=True)
        code, output = forked.wait(200), forked.output
    else:
        start(stopped, stops=stopped)
        waits = start(1 - stopped)
        _, output = waits.communicate(timeout=200)
        code = waits.returncode
    assert code == 1, output
    (line,) = [line for line in output.splitlines() if "is stopped (SIGSTOP)" in line]
    assert f"rank {stopped} of 2 on " in line
    assert line.endswith("is stopped (SIGSTOP), and was not continued while the others waited to meet it")
    reported.touch()
    if alone:  # for its launcher to see
        assert lost.wait(timeout=60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_while_ranks_are_missing_ends_the_rank(fork: Callable[..., ForkedCommand], rank: int) -> None:
    waits = fork(rank, int(signal.SIGUSR1))
    assert waits.wait(120) == 75, waits.output
    assert waits.output.endswith("a signal stopped the run before all ranks had met: there is nothing to save\n")


def test_a_rank_that_waits_says_where(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Once, on the first rank of a machine; rank 0 says for whom it waits."""
    monkeypatch.setattr(startup_watch, "NOTICE_POLLS", 2)
    monkeypatch.setattr(startup_watch, "POLL_SECONDS", 0.001)
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        polled = Counter[int]()
        monkeypatch.setattr(startup_watch, "find_stopped_ranks", lambda _, polled=polled: polled.update([0]) or [])
        with StartupWatch(ProcessEnvironment("torchrun", rank, 4, local_rank, "node-0", 29500)):
            wait_until(lambda polled=polled: polled[0] >= 3)
    place = f"rank 2 of 4 on {socket.gethostname()} waits to meet rank 0 and the others at node-0:29500"
    assert caplog.messages == [f"{place}: check rank 0's log and node"]


def test_a_sentinel_that_is_stopped_does_not_hold_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as sentinel:
        os.kill(sentinel.pid, signal.SIGSTOP)
        wait_until(lambda: startup_watch.is_stopped(sentinel.pid))
        reading, writing = os.pipe()
        os.close(reading)
        monkeypatch.setattr(startup_watch, "_sentinels", [(sentinel.pid, writing)])
        ends = threading.Thread(target=startup_watch.end_sentinel)
        ends.start()
        ends.join(10)
        is_held = ends.is_alive()
        sentinel.kill()
    assert not is_held


def test_ranks_that_meet_during_a_stop_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StartupWatch(ProcessEnvironment("torchrun", 0, 2))
    meets = threading.Thread(target=watch.__exit__, args=(None, None, None))

    def write(_: int, data: bytes) -> int:
        meets.start()
        meets.join(0.1)
        assert meets.is_alive(), "it waits for the end"
        return len(data)

    ended: list[int] = []
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "_exit", ended.append)
    watch._end(1, "error")
    meets.join(10)
    watch._end(1, "they have met")
    assert ended == [1]


SOON = timedelta(seconds=20)


def start_ranks(store: dist.Store, world_size: int, ranks: range | None = None) -> list[dist.Store]:
    """The parts that the ranks find, each in a thread, the later ones first."""
    came = threading.Barrier(len(ranks or range(world_size)))

    def rank(number: int) -> dist.Store:
        came.wait()
        return restart_store(store, number, world_size, SOON)

    numbers = list(ranks or range(world_size))
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(rank, reversed(numbers)))[::-1]


def test_rank_0_says_for_whom_it_waits_in_a_restart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.0)
    store = dist.HashStore()
    store.set("megatfm/hello/2", "an earlier start's")
    restart_store(store, 0, 3, timedelta(seconds=0.1))
    assert caplog.messages == ["rank 0 of 3 waits for rank 1, 2, up to 0.1 s: check its log or its node"]


@pytest.mark.parametrize("later", [2, 3, 4])
def test_a_restart_has_its_own_store_prefix(later: int) -> None:
    store = dist.HashStore()
    first = start_ranks(store, 3)
    first[1].set("where", "an old port")
    assert [part.get("where") for part in first] == [b"an old port"] * 3
    second = start_ranks(store, later)
    assert not any(part.check(["where"]) for part in second)
    second[-1].set("where", "a new port")
    assert [part.get("where") for part in second] == [b"a new port"] * later
    assert first[0].get("where") == b"an old port"


def test_leftovers_of_a_start_that_died_are_no_answer() -> None:
    store = dist.HashStore()
    store.set("megatfm/hello/1", "nobody")
    part, other = start_ranks(store, 2)
    part.set("where", "here")
    assert other.get("where") == b"here"


def test_ranks_that_do_not_come() -> None:
    store, at_once = dist.HashStore(), timedelta(seconds=0.2)
    restart_store(store, 0, 2, at_once)
    with pytest.raises(MegatfmError, match=r"rank 0 of 2 did not start within 0\.2 s"):
        restart_store(store, 1, 2, at_once)
