"""Ranks forked from a process that has imported all there is to import, which end themselves when they are told to."""

import fcntl
import importlib.util
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import megatfm.train.run  # noqa: F401  imported before the fork, as all that is slow to import
from megatfm import cli
from megatfm.checkpoint import chunked_io, file_format, saver, staging, writer
from tests.support.rank_processes import engine_class, set_up_rank

ENGINES = ("native", "deepspeed") if importlib.util.find_spec("deepspeed") else ("native",)
SLOW_SECONDS = 0.001
"""Extra seconds of each operation of a save: steps go on meanwhile, as with a large model's disk."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL one rank at the n-th event of a phase, counted from 1. settle: the other ranks end by themselves."""

    rank: int
    phase: str
    event: int
    settle: bool = False


def fork_process(work: Callable[[], None]) -> int:
    """Run a function in a forked process; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(70)
    return pid


def wait_for_any(pids: Sequence[int], deadline: float) -> tuple[int, int]:
    """The next of these that ends, and its status; (0, 0) after the deadline, when all are killed."""
    while time.monotonic() < deadline:
        for pid in pids:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return ended, status
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0, 0


def run_rank(
    words: list[str],
    variables: dict[str, str],
    output: Path,
    kill: Kill | None = None,
    hit: Path | None = None,
    counts: Path | None = None,
) -> None:
    """`megatfm train` as one rank; of four or more, past the page cache, as large files are written and read."""
    set_up_rank(variables, output)
    if int(variables["WORLD_SIZE"]) >= 4:
        file_format.DIRECT_BYTES = 0
        chunked_io._is_in_page_cache = lambda fd, size: False
    events = EventCounter(kill, hit)
    if hit:
        events.install_hooks()
    code = 1
    try:
        cli.main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    if counts:
        counts.write_text(json.dumps(events.seen))
    os._exit(code)


@dataclass
class EventCounter:
    """Counts what happens in each phase of this process, and ends it at the chosen moment."""

    kill: Kill | None
    hit: Path | None
    seen: Counter[str] = field(default_factory=Counter)
    phase: str = "write"
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_event(self, phase: str, first: Callable[[], object] = lambda: None) -> None:
        """One event. first: what is still done before the kill."""
        with self._lock:
            self.seen[phase] += 1
            if self.kill and self.hit and (self.kill.phase, self.kill.event) == (phase, self.seen[phase]):
                first()
                self.hit.write_text(phase)
                os.kill(os.getpid(), signal.SIGKILL)

    def install_hooks(self) -> None:
        """A step is made of the calls of its modules; staging of pieces; all else of operations on the disk."""
        torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self.count_event("step"))
        for name in ("forward_backward", "step"):
            for engine in map(engine_class, ENGINES):
                setattr(engine, name, self._count_around(getattr(engine, name), "step"))
        copy = staging._copy

        def counted(*part: Any) -> None:
            self.count_event("staging")
            copy(*part)

        vars(staging)["_copy"] = counted
        writer.commit = self._set_phase_during(writer.commit, "metadata")
        vars(saver)["purge_old_checkpoints"] = self._set_phase_during(vars(saver)["purge_old_checkpoints"], "retention")
        for name in ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, self._wrap_operation(name, getattr(os, name)))

    def _count_around(self, genuine: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count_event(phase)
            result = genuine(*args, **kwargs)
            self.count_event(phase)
            return result

        return counted

    def _set_phase_during(self, genuine: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def in_phase(*args: Any, **kwargs: Any) -> Any:
            self.phase = phase
            try:
                return genuine(*args, **kwargs)
            finally:
                self.phase = "write"

        return in_phase

    def _wrap_operation(self, name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != "megatfm-save":
                return genuine(*args, **kwargs)
            time.sleep(SLOW_SECONDS)
            if name == "rename" and self.phase == "metadata":
                self.phase = "commit"
            half = (lambda: genuine(args[0], _first_half(*args))) if name == "write" else lambda: None
            if name != "open" or args[1] & os.O_CREAT:
                self.count_event(self.phase, half)
            return genuine(*args, **kwargs)

        return operation


def _first_half(file: int, data: memoryview) -> memoryview:
    """The first half of the data; past the page cache, of its complete blocks."""
    direct = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
    return data[: len(data) // 2 // chunked_io.BLOCK_BYTES * chunked_io.BLOCK_BYTES if direct else len(data) // 2]
