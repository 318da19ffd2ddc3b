"""Real process groups through torchrun, mpirun and plain variables."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers.local import find_free_port
from megatfm.parallel import distributed, rendezvous
from megatfm.parallel.distributed import TIMEOUTS, distributed_session, init_distributed, shutdown
from megatfm.parallel.process_environment import Launcher, ProcessEnvironment
from megatfm.parallel.rendezvous import _find_reachable_address, check_resolves, wait_for_all_ranks
from tests.support.forked_commands import ForkedCommand
from tests.support.workers import Workers


def join_on_machines_of_two_gpus(bound: int | None) -> tuple[tuple[int, int, bool], str, timedelta, timedelta]:
    os.environ.pop("LOCAL_RANK", None)
    current: list[torch.device] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "set_device", current.append)
        if bound is not None:
            patch.setattr(c10d._get_default_group(), "bound_device_id", torch.device("cuda", bound))
        with distributed_session(collective_timeout=77) as rank:
            inside = c10d.default_pg_timeout
        assert current == [rank.device], "Triton, graphs and streams run on the current device"
        return (rank.rank, rank.world_size, rank.is_main), str(rank.device), inside, c10d.default_pg_timeout


def test_a_group_that_is_there_is_used_with_local_ranks_and_timeouts(workers: Workers) -> None:
    """Its maker may not have set LOCAL_RANK."""
    places, devices, inside, after = zip(*workers.run(join_on_machines_of_two_gpus, 3, None), strict=True)
    assert places == ((0, 3, True), (1, 3, False), (2, 3, False))
    assert devices == ("cuda:0", "cuda:1", "cuda:0")
    assert set(inside) == {timedelta(seconds=77)}
    assert set(after) == {TIMEOUTS[0]}


def test_a_group_that_is_bound_to_a_gpu_is_used_there(workers: Workers) -> None:
    _, devices, _, _ = zip(*workers.run(join_on_machines_of_two_gpus, 2, 1), strict=True)
    assert devices == ("cuda:1", "cuda:1")


@pytest.mark.parametrize(("launcher", "visible", "count", "device"), [
    ("torchrun", None, 4, "cuda:3"),
    ("srun", None, 1, "cuda:0"),
    ("mpirun", "3", 1, "cuda:0"),
    ("mpirun", None, 1, "start at most 1 processes a node"),
    ("torchrun", "3", 1, "start at most 1 processes a node"),
    ("srun", None, 2, "local rank 3 has no GPU: torch sees 2"),
])  # fmt: skip
def test_the_gpu_of_a_local_rank(
    launcher: Launcher, visible: str | None, count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sees one GPU has it to itself where its launcher shows each process another one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    env = ProcessEnvironment(launcher, rank=3, world_size=4, local_rank=3)
    if device.startswith("cuda"):
        assert distributed._choose_device(env, "auto") == torch.device(device)
        return
    with pytest.raises(UsageError, match=device):
        distributed._choose_device(env, "auto")


# Ranks share one output, where a long line of print may be cut in two by another's: one write each.
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from megatfm.config import ParallelConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.parallel.distributed import init_distributed, shutdown
try:
    me = init_distributed(timeout=float(sys.argv[1]), device="cpu")
except MegatfmError as error:
    os.write(1, f"{type(error).__name__}: {error}\\n".encode())
    sys.exit(error.exit_code)
total = torch.tensor([float(me.rank + 1)])
dist.all_reduce(total)
shutdown()
shutdown()
line = f"{me.launcher} {me.rank}/{me.world_size} local {me.local_rank} {me.device} sum {total.item():g}\\n"
os.write(1, line.encode())
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def run(command: list[str], **environment: str) -> tuple[int, list[str]]:
    completed = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=60,
    )  # fmt: skip
    return completed.returncode, sorted(completed.stdout.splitlines())


def run_forked(program: str, seconds: int, **environment: str) -> tuple[int, list[str]]:
    """Run a program as `run` does, without a fresh Python."""
    output = Path(program).with_suffix(".out")
    rank = ForkedCommand([seconds], output, output.parent, {**os.environ, **environment}, program=program)
    return rank.wait(60), sorted(rank.output.splitlines())


def test_a_single_process_has_a_group_without_ports(program: str) -> None:
    assert run_forked(program, 20) == (0, ["none 0/1 local 0 cpu sum 1"])


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI: run `make system-deps`")
def test_mpirun_starts_a_group(program: str) -> None:
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'megatfm[mpi]'")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    spread = {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    code, lines = run(["mpirun", "-n", "2", sys.executable, program, "30"], **root, **spread)
    assert code == 0, lines
    assert lines == ["mpirun 0/2 local 0 cpu sum 3", "mpirun 1/2 local 1 cpu sum 3"]


MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def test_mpirun_without_mpi4py(program: str, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError(\"No module named 'mpi4py'\")\n")
    code, lines = run_forked(program, 5, **MPIRUN)
    assert code == 2
    assert lines == [
        "UsageError: started by mpirun, but mpi4py can't be used (No module named 'mpi4py'): "
        "pip install 'megatfm[mpi]', with an MPI library on the system"
    ]


def second_rank(address: str) -> dict[str, str]:
    """Variables of the second of two ranks, which meet at an address."""
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    return {**ranks, "MASTER_ADDR": address, "MASTER_PORT": "9"}


def test_ranks_that_never_come(program: str) -> None:
    code, lines = run_forked(program, 1, **second_rank("127.0.0.1"))
    assert code == 1
    output = [line for line in lines if line.startswith("MegatfmError")]
    assert len(output) == 1
    assert output[0].startswith("MegatfmError: rank 1 of 2 could not meet the others at 127.0.0.1:9 within 1 s")


@pytest.mark.parametrize(("launcher", "way_out"), [
    ("torchrun", "; to train in one process, unset RANK and WORLD_SIZE"), ("srun", ""),
])  # fmt: skip
def test_rank_0_says_once_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, launcher: Any, way_out: str
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_POLL_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.0)
    store = dist.HashStore()
    store.set("megatfm/here/2", "n2")
    with pytest.raises(MegatfmError, match="rank 1, 3 of 4 did not start"):
        wait_for_all_ranks(store, ProcessEnvironment(launcher, 0, 4), timedelta(seconds=0.1), time.monotonic())
    waits = "rank 0 of 4 waits for rank 1, 3, up to 0.1 s: check its log or its node"
    assert caplog.messages == [f"{waits}{way_out}"]


def test_the_time_that_rank_0_has_waited_already_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_POLL_SECONDS", 0.1)
    store, place = dist.HashStore(), ProcessEnvironment("torchrun", 0, 2)
    with pytest.raises(MegatfmError, match="rank 1 of 2 did not start within 1000 s"):
        wait_for_all_ranks(store, place, timedelta(seconds=1000), time.monotonic() - 1001)


def test_a_missing_last_count_is_reported_with_the_store_s_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_POLL_SECONDS", 0.01)
    store, place = dist.HashStore(), ProcessEnvironment("torchrun", 0, 2)
    store.set("megatfm/here/1", "n2")
    with pytest.raises(dist.DistError):
        wait_for_all_ranks(store, place, timedelta(seconds=0), time.monotonic())


class CountingStore:
    """A store that is asked over a connection of its own, and counts what is looked for."""

    def __init__(self, port: int, counts: Counter[str]) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
        self._counts = counts

    def check(self, keys: list[str]) -> bool:
        self._counts[keys[0].rpartition("/")[0]] += 1
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_one_rank_finds_missing_ranks_and_reports_them_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_POLL_SECONDS", 0.1)
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    counts, errors = Counter[str](), []

    def arrive(rank: int) -> None:
        store: Any = CountingStore(server.port, counts)
        try:
            wait_for_all_ranks(store, ProcessEnvironment("srun", rank, 9), timedelta(seconds=0.5), time.monotonic())
        except MegatfmError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in (0, 1, 2, 4, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(errors) == {"rank 3, 6, 8 of 9 did not start within 0.5 s: check its log or its node"}
    assert len(errors) == len(threads)
    assert counts["megatfm/here"] == 9


LATE_RANK = """
import os, time
from megatfm.parallel import distributed
if os.environ["RANK"] == "1": time.sleep(1.6)
with distributed.distributed_session(60, "cpu"): pass
"""


def test_ranks_that_wait_for_a_late_one_print_nothing(tmp_path: Path) -> None:
    """`TCPStore.wait` would print two warnings of torch's in each second."""
    program = tmp_path / "late.py"
    program.write_text(LATE_RANK)
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = [
        ForkedCommand([], tmp_path / rank, tmp_path, {**common, "RANK": rank, "LOCAL_RANK": rank}, program=str(program))
        for rank in ("0", "1")
    ]
    assert [(rank.wait(120), rank.output) for rank in ranks] == [(0, "")] * 2


TALKING_RANK = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from megatfm.parallel import distributed
distributed.LAZY_GLOO_RANKS = int(sys.argv[1])
def count(): return sum(1 for f in Path("/proc/self/fd").iterdir() if f.is_socket())
before = count()
with distributed.distributed_session(60, "cpu") as rank:
    groups = [dist.new_group(backend="gloo") for _ in range(8)]
    opened = count() - before
    ones = torch.ones(3)
    for group in groups: dist.all_reduce(ones, group=group)
    answers = [None] * 4
    dist.all_gather_object(answers, opened)
    if rank.rank == 0: print(min(answers), max(answers), ones.tolist())
"""


def test_many_ranks_are_connected_when_they_first_talk(tmp_path: Path) -> None:
    """Each pair of each group of 4 ranks has a socket before anything was sent, or only those that have talked."""
    program = tmp_path / "talk.py"
    program.write_text(TALKING_RANK)
    sockets = {}
    for ranks_of_lazy in (5, 4):
        common = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
        ranks = [
            ForkedCommand(
                [ranks_of_lazy], tmp_path / f"{ranks_of_lazy}-{rank}", tmp_path,
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, program=str(program),
            )
            for rank in range(4)
        ]  # fmt: skip
        assert [rank.wait(120) for rank in ranks] == [0] * 4, [rank.output for rank in ranks]
        least, most, values = ranks[0].output.split(maxsplit=2)
        assert values.strip() == str([4.0**8] * 3)
        sockets[ranks_of_lazy] = int(least), int(most)
    assert sockets[5][0] >= 9 * 3
    assert sockets[4][1] < sockets[5][0] / 2


SPLITTING_PROGRAM = """
import os, torch
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
from megatfm.parallel.distributed import distributed_session
for session in ("first", "second"):
    with distributed_session(60, "cpu"):
        world = c10d._get_default_group()
        part = world.split_group([0], timeout=timedelta(seconds=60), group_name=session, group_desc=session)
        os.write(1, f"{session}: {part.size()} ".encode())
"""


def test_a_process_splits_the_group_of_its_second_session(tmp_path: Path) -> None:
    """A DeviceMesh on GPUs splits groups in C++, where the process would die."""
    program = tmp_path / "splits.py"
    program.write_text(SPLITTING_PROGRAM)
    process = ForkedCommand([], tmp_path / "out", tmp_path, dict(os.environ), program=str(program))
    assert (process.wait(120), process.output) == (0, "first: 1 second: 1 ")


@pytest.mark.parametrize(("hosts", "known", "address"), [
    ([("a", "n1"), ("a", "n1")], {}, "127.0.0.1"),
    ([("a", "n1"), ("b", "n2")], {"n2": "127.0.0.1"}, "127.0.0.1"),
    ([("a", "n1"), ("b", "n2"), ("c", "n3")], {"n3": "::1"}, "::1"),
    ([("a", "n1"), ("b", "n2")], {}, "n2: Name or service not known"),
    ([("a", "localhost"), ("b", "localhost")], {"localhost": "127.0.0.1"}, "all are called localhost"),
])  # fmt: skip
def test_rank_0_s_address_is_one_that_others_reach(
    hosts: list[tuple[str, str]], known: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, *remaining: Any, **more: Any) -> Any:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(known[host], *remaining, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if address[0].isdigit() or address[0] == ":":
        assert _find_reachable_address(hosts) == address
        return
    with pytest.raises(MegatfmError, match=rf"{address}.*set MASTER_ADDR"):
        _find_reachable_address(hosts)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert _find_reachable_address(hosts) == "10.0.0.1"


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl backend")  # torch built for a CPU
def test_groups_that_are_made_later_have_the_run_s_timeout() -> None:
    """Groups that are split from another, too: torch asks the same function for them."""
    usual = [c10d._get_default_timeout(c10d.Backend(name)) for name in ("gloo", "nccl")]
    assert init_distributed(timeout=5, device="cpu", collective_timeout=77).launcher == "none"
    try:
        group = dist.new_group([0])
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
        assert c10d._get_default_timeout(c10d.Backend("nccl")) == timedelta(seconds=77)
    finally:
        shutdown()
    assert not dist.is_initialized()
    assert [c10d._get_default_timeout(c10d.Backend(name)) for name in ("gloo", "nccl")] == usual


def test_an_unknown_host_is_named_at_once(program: str) -> None:
    begun = time.monotonic()
    code, lines = run_forked(program, 300, **second_rank("no.such.host.invalid"))
    assert code == 1
    (output,) = [line for line in lines if line.startswith("MegatfmError")]
    assert "rank 1 on " in output
    assert "knows no host 'no.such.host.invalid'" in output
    assert time.monotonic() - begun < 100


def test_a_name_server_that_does_not_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    check_resolves("head", 0)
    monkeypatch.undo()
    with pytest.raises(MegatfmError, match="not a valid host name"):
        check_resolves("x" * 300 + ".", 0)
