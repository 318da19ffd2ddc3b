"""Worker processes for tests: started once a session, reused by every test.

`workers.run(fn, world_size, *args)` calls a module-level function of a test file on ranks 0 … world_size-1 inside
a fresh gloo process group and returns the results by rank. The processes are forked from a server that has torch
and megatfm imported already, so a worker costs milliseconds, also when the team was thrown away after a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PRELOAD = ["tests.support.preload"]
STACK_SIGNAL = signal.SIGRTMAX - 1  # far from the signals that the tested code handles itself
SETTLE_SECONDS = 1.0  # after the first failure: how long other ranks may still say what they saw
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
MOST_THREADS = 60
"""A pair of connected ranks has about ten; hundreds, which nobody needs any more, once slowed everything down."""
GARBAGE_THRESHOLD = 10_000
"""New objects after which Python searches for garbage: its own 700 cost a tenth of a test's CPU time."""
PR_SET_PDEATHSIG = 1
THREADS = int(os.environ.get("MEGATFM_TEST_THREADS", "1"))
"""Threads of each rank."""


def start_fork_server() -> ForkServerContext:
    """The context whose processes are forked from one that has imported PRELOAD; it starts with the first use.

    Python 3.11 looks for these modules in the current directory alone, and says nothing if they are not there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with contextlib.chdir(TESTS.parent):
        forkserver.ensure_running()
    return context


class WorkerFailure(Exception):
    """A rank raised, died or hung; the message names it and carries its traceback or stack."""


@dataclass(frozen=True)
class Call:
    """A task for a worker. Functions travel by place: a worker can't import test files by name."""

    module: str
    file: str
    name: str
    arguments: bytes
    rank: int
    world_size: int
    store: str
    timeout: float
    memory_of_nan: bool = False


@dataclass(frozen=True)
class Reply:
    """A result, or the traceback of what was raised and when."""

    result: bytes = b""
    error: str = ""
    when: float = 0.0


@dataclass(frozen=True)
class Failure:
    """One rank's end, for the report."""

    rank: int
    text: str
    when: float

    @property
    def order(self) -> tuple[bool, float]:
        """The first failure is the cause; who only lost its peer comes after everybody else."""
        return (any(sign in self.text for sign in LOST_PEER), self.when)


# ---------------------------------------------------------------------------------------------- in the worker


def load_module(name: str, file: str) -> ModuleType:
    """Import a module under the name that it has in the parent, so that its classes can be pickled both ways."""
    if name in sys.modules:
        return sys.modules[name]
    if not Path(file).is_relative_to(TESTS):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    gc.freeze()  # what it imported need not be searched after every call; no group is open
    return module


@contextlib.contextmanager
def clean_state(call: Call) -> Iterator[None]:
    """The environment of a rank, and everything as it was before when the function is done."""
    import torch

    from megatfm import terminal
    from tests.support.process_state import restore_environment
    from tests.support.tensors import fill_memory_with_nan

    memory = fill_memory_with_nan() if call.memory_of_nan else contextlib.nullcontext()
    size, rank, folder = str(call.world_size), str(call.rank), Path.cwd()
    torch.manual_seed(0)
    terminal._LOGGED.clear()
    try:
        with restore_environment(), warnings.catch_warnings(), memory:
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
            warnings.simplefilter("error")
            yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(THREADS)


def count_threads() -> int:
    """Number of threads of this process."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


@contextlib.contextmanager
def process_group(call: Call) -> Iterator[None]:
    """A gloo group of this call's ranks. Leaving it in peace is collective: nobody closes a socket still read."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group(
        "gloo", store=dist.FileStore(call.store, call.world_size), rank=call.rank, world_size=call.world_size,
        timeout=timedelta(seconds=2 * call.timeout),  # so that a hang is reported first
    )  # fmt: skip
    try:
        yield
        if dist.is_initialized():
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group's threads and sockets live as long as something keeps its mesh: DTensor's cache of sharding rules
        # does (its keys compare equal from call to call), and FSDP leaves cycles.
        _clear_sharding_prop_cache()
        gc.collect()
        if count_threads() > MOST_THREADS:  # compiled code goes after the blocks that it guards
            gc.collect()
    left = count_threads()
    assert left <= MOST_THREADS, f"{left} threads are left in this worker: something keeps the groups of past calls"


def execute_call(call: Call) -> Reply:
    """Carry out one call. Whatever is raised becomes a reply, sent before the peers notice the closed group."""
    try:
        with clean_state(call):
            fn = getattr(load_module(call.module, call.file), call.name)
            with process_group(call):
                args, kwargs = pickle.loads(call.arguments)
                return Reply(result=pickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        return Reply(error="".join(traceback.format_exception(type(error), error, trace)), when=time.monotonic())


def serve_calls(connection: Connection, log: str) -> None:
    """The life of a worker: answer calls until the parent closes the pipe or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # so that whatever a test starts in here can be killed together with the worker
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)

    import torch

    torch.set_num_threads(THREADS)
    gc.freeze()  # torch itself need not be searched after every call
    gc.set_threshold(GARBAGE_THRESHOLD)
    with contextlib.suppress(EOFError):
        while True:
            connection.send_bytes(pickle.dumps(execute_call(pickle.loads(connection.recv_bytes()))))


# ---------------------------------------------------------------------------------------------- in the parent


class Worker:
    """One process, its pipe and the file that takes what it prints."""

    def __init__(self, log: Path) -> None:
        context = start_fork_server()
        self.connection, expected = context.Pipe()
        self.log = log
        self.process = context.Process(target=serve_calls, args=(expected, str(log)))
        self.process.start()
        expected.close()
        self._read_from = 0

    def submit(self, call: Call) -> None:
        """Send a call; a dead worker is found out when its reply is awaited."""
        self._read_from = self.log.stat().st_size if self.log.exists() else 0
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(pickle.dumps(call))

    def output(self) -> str:
        """Output of the process since the last call was sent."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[self._read_from :].decode(errors="replace").strip()

    def stack(self) -> str:
        """Return the Python stacks of the process, which need only take a signal."""
        before = self.output()
        os.kill(self.process.pid or 0, STACK_SIGNAL)
        deadline = time.monotonic() + 2
        while self.output() == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # the dump is written in many small pieces
        return self.output()

    def death(self) -> str:
        """How the process ended."""
        self.process.join(5)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        return f"the worker process {how}\n{self.output()}"

    def kill(self) -> None:
        """End the process and all that it started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()


class Workers:
    """A team of worker processes that grows on demand; any failure replaces the whole team."""

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self.memory_of_nan = False
        """Whether what is called finds NaN in memory that nobody wrote (`tests.support.tensors`)."""
        self._folder = tempfile.TemporaryDirectory(prefix="megatfm-workers-")
        self._team: list[Worker] = []
        self._numbers = itertools.count()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dismiss()
        self._folder.cleanup()

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank of a fresh gloo group; returns the results by rank.

        Raises WorkerFailure with the first failed rank's traceback, or with all stacks after `timeout` seconds.
        """
        __tracebackhide__ = True
        if "." in fn.__qualname__ or fn.__name__ == "<lambda>":
            raise TypeError(f"{fn.__qualname__} is not a module-level function: workers can't find it")
        if not 1 <= world_size <= self.limit:
            raise ValueError(f"world_size {world_size}: this team has 1 to {self.limit} workers")
        while len(self._team) < world_size:
            self._team.append(Worker(Path(self._folder.name) / f"worker-{next(self._numbers)}.log"))
        team = self._team[:world_size]
        store = str(Path(self._folder.name) / f"store-{next(self._numbers)}")
        place = (fn.__module__, fn.__code__.co_filename, fn.__name__, pickle.dumps((args, kwargs)))
        for rank, worker in enumerate(team):
            worker.submit(Call(*place, rank, world_size, store, timeout, self.memory_of_nan))
        try:
            return self._collect(team, f"{Path(place[1]).name}::{fn.__name__}", timeout)
        except BaseException:  # KeyboardInterrupt too: a worker in the middle of a call can't be used again
            self._dismiss()
            raise

    def _collect(self, team: list[Worker], function_name: str, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        pending = {worker.connection: rank for rank, worker in enumerate(team)}
        results: list[Any] = [None] * len(team)
        failures: list[Failure] = []
        deadline = time.monotonic() + timeout
        while pending and (ready := wait(list(pending), deadline - time.monotonic())):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    reply = Reply(error=team[rank].death(), when=time.monotonic())
                if reply.error:
                    failures.append(Failure(rank, reply.error, reply.when))
                    deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
                else:
                    results[rank] = pickle.loads(reply.result)
        if failures:
            raise WorkerFailure(describe_failures(failures, team, function_name))
        if pending:
            raise WorkerFailure(describe_hang(sorted(pending.values()), team, function_name, timeout))
        return results

    def _dismiss(self) -> None:
        for worker in self._team:
            worker.kill()
        self._team = []


def describe_failures(failures: list[Failure], team: list[Worker], function_name: str) -> str:
    """The first failed rank in full, the others in a line each."""
    first, *remaining = sorted(failures, key=lambda failure: failure.order)
    lines = [f"rank {first.rank} of {len(team)} failed in {function_name}", "", first.text.rstrip()]
    output = team[first.rank].output()
    if output and output not in first.text:
        lines += ["", f"output of rank {first.rank}:", output]
    lines += [f"after it, rank {other.rank}: {other.text.rstrip().splitlines()[-1]}" for other in remaining]
    return "\n".join(lines)


def describe_hang(ranks: list[int], team: list[Worker], function_name: str, timeout: float) -> str:
    """The stacks of the ranks that did not answer."""
    names = ", ".join(map(str, ranks))
    lines = [f"rank {names} of {len(team)} still ran after {timeout:g} s in {function_name}"]
    for rank in ranks:
        lines += ["", f"stack of rank {rank}:", team[rank].stack()]
    return "\n".join(lines)
