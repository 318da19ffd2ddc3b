"""`python -m megatfm …` as a process that is forked from one which has imported everything, and its children likewise.

A fresh Python that trains takes six seconds of a CPU to import what it needs, a fork none. All else is real: process
ids and groups, signals, exit codes, what goes to the terminal. That a fresh Python does the same is shown by
`tests/e2e/test_leftovers.py` (a rank that gets a signal while it starts), `tests/e2e/slurm` (a job) and
`.ci/wheel-test` (ranks that `launch` starts).
"""

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatfm import cli
from tests.support.workers import start_fork_server

PR_SET_PDEATHSIG = 1
MODULES = (
    "megatfm", "megatfm.data_prep", "megatfm.launchers.prolog_epilog", "megatfm.launchers.torchrun",
    "torch.distributed.run",
)  # fmt: skip
"""Modules that are forked when a forked process starts them with `python -m`; all else is executed."""


def keep_last_override(words: Iterable[object]) -> list[str]:
    """Words of a command, in which a later override replaces an earlier one: a key is given once."""
    by_key: dict[str | int, str] = {}
    for place, word in enumerate(map(str, words)):
        key, equals, _ = word.partition("=")
        by_key[key if equals and not key.startswith("-") else place] = word
    return list(by_key.values())


class ForkedCommand:
    """A running `python -m megatfm …`, or another module or file; what it and its children say is in a file."""

    def __init__(
        self,
        words: Sequence[object],
        output: Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        program: str = "megatfm",
        python: str = sys.executable,
    ) -> None:
        """python: what the command itself takes for Python's path (`sys.executable`)."""
        self.output_path = output
        output.write_bytes(b"")
        context = start_fork_server()
        place = (str(cwd or Path.cwd()), dict(os.environ if environment is None else environment), str(output), python)
        self.process: ForkServerProcess = context.Process(
            target=_run_process, args=(program, list(map(str, words)), *place)
        )
        self.process.start()

    @property
    def output(self) -> str:
        """All that it wrote, to either output."""
        return self.output_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid

    def wait_for_lines(self, path: Path, count: int) -> None:
        """Wait until a file has so many lines; it is a failure to end before."""
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert self.process.is_alive(), self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def wait(self, seconds: float = 240) -> int:
        """Its exit code, as a shell's `$?` without 128 for signals."""
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, f"still running after {seconds:g} s:\n{self.output}"
        return code

    def end(self) -> None:
        """Kill it, and all in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def run_megatfm(*words: object, output: Path, cwd: Path | None = None, code: int = 0, **variables: str) -> str:
    """Run a command of megatfm to its end, which has to come with this code; returns what it wrote."""
    command = ForkedCommand(words, output, cwd, {**os.environ, **variables})
    try:
        assert command.wait() == code, f"megatfm {' '.join(map(str, words))}\n{command.output}"
    finally:
        command.end()
    return command.output


# ------------------------------------------------------------------------------------------------ in the process


def _run_process(
    program: str, words: list[str], folder: str, environment: dict[str, str], path: str, python: str
) -> NoReturn:
    """The process of a Command."""
    from megatfm.launchers import job

    sys.executable = python
    job.MEGATFM_COMMAND = (python, *job.MEGATFM_COMMAND[1:])
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    run_program(program, words, folder, environment)


def parse_command(words: Sequence[str]) -> tuple[str, list[str], bool] | None:
    """Module, its arguments and whether with -P, of a Python's arguments; None if they are executed, not forked."""
    flags = list(words)[words[:1] == ["-u"] :]  # as torchrun starts its workers
    safe, flags = flags[:1] == ["-P"], flags[flags[:1] == ["-P"] :]
    if flags[:1] != ["-m"] or flags[1] not in MODULES:
        return None
    return flags[1], flags[2:], safe


class _ForkingPopen(subprocess.Popen[Any]):
    """subprocess.Popen, which forks where it would execute one of MODULES with this Python."""

    def _execute_child(self, args: Any, *remaining: Any) -> None:
        python, *words = args if isinstance(args, list | tuple) else [args]
        command = parse_command(words) if python == sys.executable else None
        if command is None:
            super()._execute_child(args, *remaining)  # type: ignore[misc]
            return
        module, module_words, safe = command
        _, preexec, _, _, cwd, env, _, _, _, *pipes = remaining[:15]
        new_session, group = remaining[-2:]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                set_up_child((pipes[0], pipes[3], pipes[5]), new_session, group)
                if preexec:
                    preexec()
                variables = dict(os.environ if env is None else env)
                run_program(module, module_words, str(cwd or Path.cwd()), variables, safe)
            finally:
                os._exit(71)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@cache
def list_modules_with_popen() -> list[Any]:
    """Modules that hold Popen, some by name. Listed once, in the server: a fork would copy all that it visits."""
    modules = list(sys.modules.values())
    return [module for module in modules if getattr(module, "__dict__", {}).get("Popen") is subprocess.Popen]


def set_up_child(pipes: tuple[int, int, int], new_session: bool, group: int) -> None:
    """Do as the kernel and subprocess on the way to another program: outputs, groups, signals, open files."""
    for number, pipe_ends in enumerate(pipes):
        if pipe_ends != -1:
            os.dup2(pipe_ends, number)
    if new_session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if int(name) > 2:
                os.close(int(name))


def run_program(
    program: str, words: list[str], folder: str, environment: dict[str, str], safe: bool = False
) -> NoReturn:
    """`python -m program words`, with these variables in that folder; a file is run without -m. safe: with -P."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    local = [] if safe or environment.get("PYTHONSAFEPATH") else [folder]
    sys.path[:0] = [*local, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [program, *words]
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for module in list_modules_with_popen():
        module.Popen = _ForkingPopen
    torch.set_num_threads(1)
    gc.freeze()
    code: Any = 0
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(io.UnsupportedOperation, BrokenPipeError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def run_command(*words: str) -> int:
    """Run `megatfm`; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds; it is a failure if it doesn't in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s"
        time.sleep(0.01)


def send_signal(pid: int, number: int) -> None:
    """Send a process a signal and wait until it has taken it: of two equal ones that wait, the kernel keeps one."""
    os.kill(pid, number)

    def is_pending() -> bool:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return False
        masks = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", status, re.MULTILINE)
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    wait_until(lambda: not is_pending())
