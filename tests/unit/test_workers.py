"""The team of test workers: results by rank, every way to fail; seeds by names; what tests leave to one another."""

import os
import signal
import subprocess
import sys
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatfm.layers.feed_forward import ACTIVATIONS
from megatfm.registry import import_plugins, list_plugin_names
from tests.support.process_state import assert_unchanged_process, forget_plugins, restore_environment, seed_by_name
from tests.support.workers import THREADS, WorkerFailure, Workers


@dataclass(frozen=True)
class Pair:
    """A class of this file: pickled by reference, so the worker must know the file under the same name."""

    left: int
    right: int


def sum_of_ranks(pair: Pair, scale: float = 1.0) -> tuple[Pair, float]:
    total = torch.tensor([float(dist.get_rank() + pair.left)])
    dist.all_reduce(total)
    return Pair(pair.right, pair.left), scale * total.item()


def facts() -> dict[str, object]:
    return {
        "rank": os.environ["RANK"], "world": dist.get_world_size(), "backend": dist.get_backend(),
        "threads": torch.get_num_threads(), "pid": os.getpid(), "draw": torch.rand(1).item(),
    }  # fmt: skip


def leave_a_mess() -> None:
    os.environ["MESS"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)


def look_around() -> tuple[bool, str, torch.dtype]:
    return "MESS" in os.environ, str(Path.cwd()), torch.get_default_dtype()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted on purpose")
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(3)
    dist.barrier()


def killed_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def warn() -> None:
    warnings.warn("something old", DeprecationWarning, stacklevel=1)


def unpicklable() -> object:
    return lambda: None


def test_results_come_by_rank_and_processes_are_reused(workers: Workers) -> None:
    assert workers.run(sum_of_ranks, 2, Pair(1, 5), scale=2.0) == [(Pair(5, 1), 6.0)] * 2
    first = workers.run(facts, 2)
    assert [fact["rank"] for fact in first] == ["0", "1"]
    assert {(fact["world"], fact["backend"], fact["threads"]) for fact in first} == {(2, "gloo", THREADS)}
    grown = workers.run(facts, 4)
    assert [fact["pid"] for fact in grown[:2]] == [fact["pid"] for fact in first]
    assert {fact["draw"] for fact in grown} == {first[0]["draw"]}, "every call starts from the same seed"
    assert os.getpid() not in {fact["pid"] for fact in grown}


def shard_something() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["b"])
    model(torch.ones(2, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_groups_end_with_their_call(workers: Workers) -> None:
    """DTensor's caches once kept the meshes of all earlier calls, and with them threads and sockets."""
    before = max(workers.run(threads, 2))
    workers.run(shard_something, 2)
    assert max(workers.run(threads, 2)) <= before


def test_a_call_leaves_nothing_behind(workers: Workers) -> None:
    workers.run(leave_a_mess, 1)
    assert workers.run(look_around, 1) == [(False, str(Path.cwd()), torch.float32)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_is_named_with_its_traceback(workers: Workers, rank: int) -> None:
    with pytest.raises(WorkerFailure) as failure:
        workers.run(fail_on, 2, rank)
    text = str(failure.value)
    assert text.startswith(f"rank {rank} of 2 failed in test_workers.py::fail_on")
    assert 'raise ValueError("planted on purpose")' in text, "the traceback shows the source line"
    assert workers.run(sum_of_ranks, 2, Pair(0, 0))[0][1] == 1.0


@pytest.mark.parametrize(
    ("fn", "words"), [(exit_on, "exited with code 3\nlast words"), (killed_on, "was killed by SIGKILL")]
)
def test_a_dying_rank_is_named_and_its_peers_are_not_blamed(workers: Workers, fn, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WorkerFailure) as failure:
        workers.run(fn, 3, 1)
    assert str(failure.value).startswith(f"rank 1 of 3 failed in test_workers.py::{fn.__name__}")
    assert words in str(failure.value)
    assert len(workers.run(facts, 3)) == 3


def test_a_hanging_rank_shows_its_stack(workers: Workers) -> None:
    with pytest.raises(WorkerFailure) as failure:
        workers.run(hang_on, 2, 1, timeout=1.5)
    text = str(failure.value)
    assert text.startswith("rank 0, 1 of 2 still ran after 1.5 s in test_workers.py::hang_on")
    of_0, of_1 = text.split("stack of rank 0:")[1].split("stack of rank 1:")
    assert "barrier" in of_0
    assert "in hang_on" in of_1
    assert len(workers.run(facts, 2)) == 2


def test_warnings_and_unpicklable_results_are_failures(workers: Workers) -> None:
    with pytest.raises(WorkerFailure, match="DeprecationWarning: something old"):
        workers.run(warn, 1)
    with pytest.raises(WorkerFailure, match=r"rank 0 of 1 failed[^§]*unpicklable"):
        workers.run(unpicklable, 1)


def test_misuse_is_refused(workers: Workers) -> None:
    with pytest.raises(TypeError, match="not a module-level function"):
        workers.run(lambda: None, 1)
    with pytest.raises(ValueError, match="1 to 8 workers"):
        workers.run(facts, 9)


SESSION = """
import os, tempfile
import tests.support.workers
tests.support.workers.PRELOAD[:] = ["torch.distributed.tensor.debug"]  # and nothing else that takes seconds
if __name__ == "__main__":
    workers = tests.support.workers.Workers()
    workers.run(tempfile.gettempdir, 2)
    print(*[worker.process.pid for worker in workers._team], flush=True)
    os.kill(os.getpid(), 9)
"""


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    root = Path(__file__).resolve().parents[2]
    completed = subprocess.run(
        [sys.executable, str(script)], env=dict(os.environ, PYTHONPATH=str(root)), stdout=subprocess.PIPE, text=True,
        timeout=240,
    )  # fmt: skip
    assert completed.returncode == -signal.SIGKILL
    pids = [int(word) for word in completed.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived the test session"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie has ended already: nobody in a container may ever reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


NAME = "tests/unit/test_workers.py"


@pytest.fixture(scope="module")
def module_draw() -> float:
    return float(torch.rand(()))


@pytest.fixture
def test_seed() -> int:
    return torch.initial_seed()


def first_draws(name: str) -> tuple[float, float]:
    seed_by_name(name)
    return float(torch.rand(())), float(np.random.random())


def test_a_test_and_its_fixtures_are_seeded_by_their_names(test_seed: int, module_draw: float) -> None:
    draws = float(torch.rand(())), float(np.random.random())
    test = f"{NAME}::test_a_test_and_its_fixtures_are_seeded_by_their_names"
    assert test_seed == zlib.crc32(f"{test} test_seed".encode())
    assert draws == first_draws(test)
    assert module_draw == first_draws(f"{NAME} module_draw")[0]


@pytest.mark.parametrize("case", ["a", "Ä"])
def test_parameters_draw_differently(case: str) -> None:
    assert torch.initial_seed() != zlib.crc32(f"{NAME}::test_parameters_draw_differently".encode())
    assert float(torch.rand(())) != first_draws("another")[0]


def test_changed_settings_of_the_process_are_named() -> None:
    """Environment variables are restored in silence: commands set some."""
    folder = Path.cwd()
    refused = pytest.raises(AssertionError, match=r"torch's dtype.*float64")
    with refused, assert_unchanged_process(), restore_environment():
        leave_a_mess()
    os.chdir(folder)
    torch.set_default_dtype(torch.float32)
    assert "MESS" not in os.environ


def test_plugins_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "ACTIVATIONS.register('passing')(ACTIVATIONS.get('gelu'))"
    (tmp_path / "passing.py").write_text(f"from megatfm.layers.feed_forward import ACTIVATIONS\n{code}\n")
    for _ in range(2):  # the second time it is imported anew
        with restore_environment(), forget_plugins():
            import_plugins(["passing"])
            assert "passing" in ACTIVATIONS.names()
        assert "passing" not in [*ACTIVATIONS.names(), *list_plugin_names("activation"), *sys.modules]
        assert str(tmp_path) not in sys.path
