"""Supervises child processes as a group: forwards signals to all of them, and ends all when one fails."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS, MegatfmError
from megatfm.files import open_nofollow

POLL_SECONDS = 0.02
SETTLE_SECONDS = 2.0  # after the first failure: others may end by themselves and say why
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
TAIL_LINES = 8
COMMON_CODES = (
    EXIT_OK,
    EXIT_USAGE,
    EXIT_REQUEUE,
    NO_PROGRESS,
    LOCKED,
)  # mean something when all ranks agree on them
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Child:
    """One process to start. Without a log it inherits this terminal.

    `environment` is added to this process's. `stop_signal` replaces every signal that is forwarded;
    `parent_death_signal` is what the process gets when we are killed ourselves. `forward_signal(pid, signal)` forwards
    to others than the process itself; `translate_exit_code` says what its exit code means. `blocks_stop_signals`: it
    starts with USR1 and TERM blocked, and unblocks them once its handlers are installed (`megatfm train` does).
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    log: Path | None = None
    stop_signal: signal.Signals | None = None
    parent_death_signal: signal.Signals = signal.SIGKILL
    forward_signal: Callable[[int, int], None] | None = None
    translate_exit_code: Callable[[int], int] | None = None
    blocks_stop_signals: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is one process that writes here and takes every signal as it comes."""
        return not (self.log or self.stop_signal or self.forward_signal)


def supervise(children: Sequence[Child]) -> int:
    """Run all children to their end; returns the code that they agree on (0, 2, 75, 76 or 77), else 1.

    SIGTERM, SIGINT and SIGUSR1 are passed on once each; a second SIGINT ends the children. When one fails, the
    others are ended within seconds and one line on stderr names the first that failed, with the end of its log.
    """
    team = _Children(children)
    with team.capture_signals():
        try:
            team.start()
            while team.running:
                time.sleep(POLL_SECONDS)
                team.forward_signals()
                team.poll()
        finally:
            team.kill()
    return team.exit_code()


class _Children:
    def __init__(self, children: Sequence[Child]) -> None:
        self.children = children
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: set[str] = set()
        self.codes: dict[str, int] = {}  # of those that ended by themselves
        self.first_failed: str | None = None
        self.log_starts: dict[str, int] = {}
        self._received: list[int] = []
        self._forwarded: set[int] = set()
        self._end_at = self._kill_at = float("inf")
        self._ending = False
        # With several children, none may read the keyboard: the system stops a background process that reads it.
        terminal = _is_terminal()
        (first, *later_children) = children
        self._in_front = terminal and not later_children and first.is_plain
        self._has_keyboard = self._in_front or not terminal

    @property
    def running(self) -> list[Child]:
        """Children whose end `poll` has not recorded yet (signalling a dead process sets its returncode, too)."""
        return [
            child for child in self.children if child.name in self.processes and child.name not in self.ended
        ]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Collect signals instead of dying of them; the loop passes them on."""

        def receive(number: int, _: FrameType | None) -> None:
            self._received.append(number)

        original_handlers = {number: signal.signal(number, receive) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in original_handlers.items():
                signal.signal(number, handler)

    def start(self) -> None:
        """Start every child in a process group of its own, so that the terminal's Ctrl-C comes only through us.

        A single child stays in this process group, where it may read from the terminal, as a debugger does: Ctrl-C
        reaches it, too.
        """
        for child in self.children:
            output = None
            try:
                if child.log:
                    child.log.parent.mkdir(parents=True, exist_ok=True)
                    output = open(child.log, "ab", opener=open_nofollow)  # noqa: SIM115
                    self.log_starts[child.name] = output.tell()
                self.processes[child.name] = subprocess.Popen(
                    child.command,
                    env={**os.environ, **child.environment},
                    stdin=None if self._has_keyboard and not output else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=None if self._in_front else 0,
                    preexec_fn=_before_exec(child),
                )
            except OSError as error:
                raise MegatfmError(f"can't start {child.name}: {error.filename}: {error.strerror}") from error
            finally:
                if output:
                    output.close()

    def forward_signals(self) -> None:
        while self._received:
            number = self._received.pop(0)
            if number in self._forwarded:
                if number == signal.SIGINT:
                    self._end_at = time.monotonic()
                continue
            self._forwarded.add(number)
            if number == signal.SIGINT and self._in_front and os.tcgetpgrp(0) == os.getpgrp():
                continue  # typed at the terminal, which signalled the child itself
            for child in self.running:
                process, stop_signal = self.processes[child.name], child.stop_signal or number
                if process.poll() is not None:  # its number may be another process's by now
                    continue
                if child.forward_signal:
                    child.forward_signal(process.pid, stop_signal)
                else:
                    process.send_signal(stop_signal)

    def poll(self) -> None:
        """Record ended children, and end the others when one failed: gently, then for good."""
        now = time.monotonic()
        ended = {child.name: child for child in self.running if self.processes[child.name].poll() is not None}
        if ended:  # perhaps of a signal to our whole group, which we have only received since the last look
            self.forward_signals()
        self.ended.update(ended)
        if not self._ending:
            for name, child in ended.items():
                code = self.processes[name].returncode
                self.codes[name] = (
                    child.translate_exit_code(code)
                    if child.translate_exit_code
                    else self._translate_code(child, code)
                )
        failed = [name for name in ended if self.codes.get(name, 0) not in (EXIT_OK, EXIT_REQUEUE)]
        if failed and self.first_failed is None:
            # Of the children that ended between two polls, one killed by a signal can't be a victim of the others; a
            # stopped child is the reason why the others ended.
            stopped = [child.name for child in self.running if _is_stopped(self.processes[child.name].pid)]
            self.first_failed = next(iter(stopped), min(failed, key=lambda name: self.codes[name] >= 0))
            self._end_at = min(self._end_at, now + SETTLE_SECONDS)
        if now >= self._end_at and not self._ending:
            self._ending = True
            self._kill_at = now + GRACE_SECONDS
            for child in self.running:
                self.processes[child.name].send_signal(signal.SIGTERM)
        if now >= self._kill_at:
            self.kill()

    def _translate_code(self, child: Child, code: int) -> int:
        """Its exit code; a child that died of the forwarded signal before it could handle it counts as stopped."""
        passed_on = {int(child.stop_signal or number) for number in self._forwarded}
        return EXIT_REQUEUE if {-code, code - 128} & passed_on else code

    def kill(self) -> None:
        """SIGKILL to the groups of all children that still live."""
        for child in self.running:
            process = self.processes[child.name]
            self.ended.add(child.name)
            if process.returncode is not None:
                continue
            with contextlib.suppress(ProcessLookupError):
                if self._in_front:
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def exit_code(self) -> int:
        """The exit code; names the first failure."""
        common = set(self.codes.values())
        code = common.pop() if len(common) == 1 else EXIT_FAILED
        if code not in COMMON_CODES:
            code = EXIT_FAILED
        # A mistake that all ranks see is on the terminal already, said by the first child.
        said_already = code in (EXIT_USAGE, NO_PROGRESS, LOCKED) and self.children[0].name in self.codes
        if self.first_failed and not said_already:
            print(self._failure_message(self.first_failed), file=sys.stderr, flush=True)
        return code

    def _failure_message(self, name: str) -> str:
        code = self.codes.get(name)
        if code is None:
            ending = "stopped, and never continued"
        else:
            ending = f"exit code {code}" if code >= 0 else _signal_name(-code)
        n_others = len(self.children) - 1
        line = f"megatfm: {name} failed first ({ending})" + (", so the others were ended" if n_others else "")
        log = next(child.log for child in self.children if child.name == name)
        if log is None:
            return line
        text = log.read_bytes()[self.log_starts[name] :].decode(errors="replace").rstrip()
        tail = text.splitlines()[-TAIL_LINES:]
        return "\n".join([f"{line}; the end of {log}:", *(f"  {row}" for row in tail)])


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (Linux; elsewhere unknown)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


def _signal_name(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def _before_exec(child: Child) -> Callable[[], None]:
    """Make the hook that runs before exec: it blocks stop signals, and has the kernel end the child with us (Linux)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent, blocked_signals = (
        os.getpid(),
        (signal.SIGUSR1, signal.SIGTERM) if child.blocks_stop_signals else (),
    )

    def prepare() -> None:
        if blocked_signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, int(child.parent_death_signal))
        if os.getppid() != parent:  # killed before the line above
            os._exit(1)

    return prepare
