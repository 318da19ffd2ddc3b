"""Real ranks of which one misbehaves, with torch imported already, and a rank's connection to the rank monitor."""

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatfm.launchers.local import find_free_port
from megatfm.train.hang_detector import Heartbeat
from megatfm.train.json_connection import JsonConnection
from tests.support.files import read_lines
from tests.support.forked_commands import keep_last_override, wait_until
from tests.support.workers import start_fork_server

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Fault:
    """Misbehaviour of one rank (−1: each) in a phase: `how` is a function of this module."""

    rank: int
    phase: str
    how: str


@dataclass
class Ranks:
    """The ranks of one run."""

    config: str
    overrides: Sequence[str]
    folder: Path
    processes: list[ForkServerProcess] = field(default_factory=list)
    started: float = 0.0

    def start(self, count: int, fault: Fault | None = None, absent: Sequence[int] = (), **environment: str) -> "Ranks":
        """Start ranks 0 … count−1, except those that are absent."""
        context = start_fork_server()
        self.folder.mkdir(parents=True, exist_ok=True)
        port = find_free_port()
        self.started = time.monotonic()
        for rank in range(count):
            variables = make_rank_variables(rank, count, port) | environment
            words = keep_last_override(["train", self.config, f"run_dir={self.folder}", *self.overrides])
            if rank in absent:
                continue
            local_fault = fault if fault and fault.rank in (rank, -1) else None
            process = context.Process(target=run_rank, args=(words, variables, self.said_at(rank), local_fault))
            process.start()
            self.processes.append(process)
        return self

    def said_at(self, rank: int) -> Path:
        return self.folder.with_name(f"{self.folder.name}-said-{rank}")

    def said(self, rank: int) -> str:
        return self.said_at(rank).read_text() if self.said_at(rank).exists() else ""

    def wait(self, seconds: float, without: Sequence[int] = ()) -> list[int | None]:
        """Exit codes; None for a rank that still lives after so many seconds. `without`: ranks not waited for."""
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank not in without:
                process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def wait_for_step(self, step: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
            assert time.monotonic() < deadline, self.said(0)
            assert any(process.is_alive() for process in self.processes), self.said(0)
            time.sleep(0.01)

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return read_lines(path) if path.exists() else []

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, ValueError):
                process.kill()
                process.join()
                process.close()


Start = Callable[..., Ranks]


def make_rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Environment of one of the ranks on this machine."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ in the process


def set_up_rank(variables: dict[str, str], output: Path) -> None:
    """Set a rank's environment, and write what it says into a file; it ends with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(variables)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def run_rank(words: list[str], variables: dict[str, str], output: Path, fault: Fault | None) -> None:
    """`megatfm train`, as one rank, with what it says in a file."""
    set_up_rank(variables, output)
    import torch

    import megatfm.train.run  # noqa: F401  slow to import, on a busy machine slower than some test's patience
    from megatfm import cli

    torch.set_num_threads(1)
    torch.empty(1, device="meta").to(torch.float64)  # the same
    engine = "deepspeed" if "parallel.engine=deepspeed" in words else "native"
    if engine != "native":
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module(engine)  # the same
    if fault:
        plant_fault(fault, engine)
    cli.main(words)


def engine_class(name: str) -> Any:
    """Class of the engine of that name, to be patched."""
    if name == "deepspeed":
        from megatfm.engines.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine
    from megatfm.engines.native.engine import NativeEngine

    return NativeEngine


def plant_fault(fault: Fault, engine: str) -> None:
    """Make this rank misbehave at the n-th call of what marks the phase; in preflight, what is checked."""
    from megatfm.checkpoint import file_format
    from megatfm.engines.pipeline import PipelineForwardBackward
    from megatfm.train import run

    if fault.phase in ("preflight", "meeting"):
        globals()[fault.how]()
        return
    place, name, call = {
        "startup": (run, "build_engine", 1),
        "step": (engine_class(engine), "forward_backward", 3),
        "tenth step": (engine_class(engine), "forward_backward", 10),
        "evaluation": (engine_class(engine), "evaluate", 2),
        "schedule": (PipelineForwardBackward, "_run_backward", 6),
        "save": (file_format, "write_safetensors", 1),
        "second save": (file_format, "write_safetensors", 2),
    }[fault.phase]
    genuine: Callable[..., Any] = getattr(place, name)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            globals()[fault.how]()
        return genuine(*args, **kwargs)

    setattr(place, name, faulty)


def raises() -> None:
    """Raise an error."""
    raise ZeroDivisionError("a planted fault")


def exits() -> None:
    """End the process without a word."""
    os._exit(3)


def asks_for_too_much() -> None:
    """Allocate an exabyte."""
    import torch

    torch.empty(2**60, dtype=torch.uint8)


def is_killed() -> None:
    """Die of SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def is_asked_to_stop() -> None:
    """Get the signal by which SLURM asks to stop."""
    os.kill(os.getpid(), signal.SIGUSR1)


def is_interrupted_twice() -> None:
    """Get Ctrl-C twice."""
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def is_stopped() -> None:
    """Stand still by SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    """Sleep for ten minutes."""
    time.sleep(600)


def sticks_in_c() -> None:
    """A mutex locked twice: no signal interrupts that."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def sticks_and_holds_the_interpreter() -> None:
    """Stick without letting any other thread run Python."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def has_no_room_for_a_file() -> None:
    """Files may not grow beyond so many bytes: the kernel then refuses writes, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def gives_up_its_privileges() -> None:
    """Root's, to whom no permission is denied."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None, use_errno=True).capset(header, data) == 0


def has_little_patience() -> None:
    """Wait for others five seconds."""
    from megatfm.parallel import distributed

    distributed.RENDEZVOUS_SECONDS = 5.0


def has_no_memory() -> None:
    """See 1,000 bytes of free memory."""
    from megatfm.train import startup_checks

    startup_checks.get_free_memory = lambda device: 1000


def writes_slowly() -> None:
    """Slow the disk by the clock of the check: a real second would be lost on a busy machine."""
    from megatfm.train import startup_checks

    checks: Any = startup_checks
    genuine, clock, late = checks.probe_disk, checks.time, 0.0

    def slowly(folder: Path, rank: int) -> None:
        nonlocal late
        genuine(folder, rank)
        late += 60.0

    checks.probe_disk = slowly
    checks.time = SimpleNamespace(
        perf_counter=lambda: clock.perf_counter() + late, monotonic=clock.monotonic, sleep=clock.sleep
    )


def miscounts() -> None:
    """Take the next rank of every axis for its own, in the check of sums alone."""
    from megatfm.train import startup_checks

    genuine = startup_checks.time_axes

    def next_rank(mesh: Any, device: Any) -> dict[str, float]:
        shifted = SimpleNamespace(size=mesh.size, group=mesh.group, rank=lambda axis: mesh.rank(axis) + 1)
        return genuine(shifted, device)  # type: ignore[arg-type]

    startup_checks.time_axes = next_rank


def connect(listener: socket.socket) -> JsonConnection:
    """Connect to a listener on this machine."""
    return JsonConnection(socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5))


def make_heartbeat(step: int = 3, phase: str = "step", age: float = 0.0) -> dict[str, Any]:
    """The message of a rank that waits in a collective."""
    return {"heartbeat": Heartbeat(step, phase, step, age, True, "").__dict__}


class MonitorClient:
    """A connection that introduces itself as a rank's, if one is given, and keeps all messages."""

    def __init__(self, listener: socket.socket, rank: int | None = None, token: str = "secret") -> None:
        self.line = connect(listener)
        self.heard: list[dict[str, Any]] = []
        if rank is not None:
            self.send(rank=rank, token=token)

    def send(self, **message: Any) -> None:
        """Send a message."""
        self.line.send(message)

    def heartbeat(self, step: int = 3, phase: str = "step", age: float = 0.0) -> None:
        """Send a sign of life."""
        self.line.send(make_heartbeat(step, phase, age))

    def listen(self) -> list[dict[str, Any]]:
        """Take what has arrived; return all messages so far."""
        self.heard += self.line.receive() or []
        return self.heard

    def hears(self, key: str) -> Any:
        """Wait for a message with this key; return its value."""
        wait_until(lambda: any(key in message for message in self.listen()))
        return next(message[key] for message in self.heard if key in message)

    def wait_until_closed(self) -> None:
        """Wait until the other side closes the connection."""
        wait_until(lambda: self.line.receive() is None)
