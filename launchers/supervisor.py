"""Supervises a group of child processes: forwards signals to all of them, and ends all when one fails."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from megatfm.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, EXIT_USAGE, LOCKED, NO_PROGRESS, MegatfmError
from megatfm.files import open_nofollow
from megatfm.terminal import list_hangup_signals, mute_closed_streams, print_to_stderr

POLL_SECONDS = 0.02
SETTLE_SECONDS = 2.0  # from the first failure to SIGTERM: the others may end by themselves and log why
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
TAIL_LINES, TAIL_BYTES = 8, 2**16
"""Lines of the log of the first child that failed which are shown, and bytes of its end that are searched for them."""
COMMON_CODES = (EXIT_OK, EXIT_USAGE, EXIT_REQUEUE, NO_PROGRESS, LOCKED)  # passed on if all children agree
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Child:
    """A process to start. Without a log it writes to this terminal.

    `environment`: variables added to this process's. `stop_signal`: signal that replaces every forwarded one.
    `parent_death_signal`: signal that the kernel sends the child if this process is killed. `forward_signal(pid,
    signal)`: function that delivers a signal instead of the default, which sends it to the child itself.
    `translate_exit_code`: function from the child's exit code to the one that counts. `blocks_stop_signals`: start
    with USR1 and TERM blocked; the child unblocks them after it has installed its handlers (`megatfm train` does).
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
        """Whether the child writes to this terminal and receives signals unchanged."""
        return not (self.log or self.stop_signal or self.forward_signal)


def supervise(children: Sequence[Child], on_signal: Callable[[], None] = lambda: None) -> int:
    """Run all children to their end; return the exit code that they agree on (0, 2, 75, 76 or 77), else 1.

    Forwards TERM, INT, USR1 and HUP once each; a second SIGINT ends the children. If a child fails, ends the
    others within seconds, and prints to stderr which child failed first, with the end of its log. on_signal: called for
    each signal.
    """
    group = _ChildGroup(children, on_signal)
    with group.capture_signals():
        try:
            group.start()
            while group.running:
                time.sleep(POLL_SECONDS)
                group.forward_signals()
                group.poll()
        finally:
            group.kill()
    return group.exit_code()


class _ChildGroup:
    """The running children of a supervisor: their processes, exit codes, and the signals to forward."""

    def __init__(self, children: Sequence[Child], on_signal: Callable[[], None]) -> None:
        self.children, self._on_signal = children, on_signal
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: set[str] = set()
        self.codes: dict[str, int] = {}  # exit codes of children that ended by themselves
        self.first_failed: str | None = None
        self.log_starts: dict[str, int] = {}
        self._received: list[int] = []
        self._forwarded: set[int] = set()
        self._ended_by_signal = False  # a child died of a forwarded signal, and so has said nothing itself
        self._terminate_at = self._kill_at = float("inf")
        self._is_terminating = False
        # Several children are background processes, which the system stops when they read the terminal.
        has_terminal = _is_terminal()
        self._is_foreground = has_terminal and len(children) == 1 and children[0].is_plain
        self._inherits_stdin = self._is_foreground or not has_terminal

    @property
    def running(self) -> list[Child]:
        """Children whose end `poll` has not recorded yet. A returncode is no sign: sending a signal sets it, too."""
        return [child for child in self.children if child.name in self.processes and child.name not in self.ended]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Collect signals, for `forward_signals`, instead of dying of them."""

        def receive(signum: int, _: FrameType | None) -> None:
            self._received.append(signum)
            self._on_signal()
            if signum == signal.SIGHUP:
                mute_closed_streams()

        forwarded = (*FORWARDED, *list_hangup_signals())
        original_handlers = {signum: signal.signal(signum, receive) for signum in forwarded}
        try:
            yield
        finally:
            for signum, handler in original_handlers.items():
                signal.signal(signum, handler)

    def start(self) -> None:
        """Start every child in its own process group, so that Ctrl-C reaches it only through `forward_signals`.

        A single plain child stays in this process group, so that it can read from the terminal, as a debugger does.
        Ctrl-C then reaches it directly.
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
                    stdin=None if self._inherits_stdin and not output else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=None if self._is_foreground else 0,
                    preexec_fn=_make_exec_hook(child),
                )
            except OSError as error:
                raise MegatfmError(f"can't start {child.name}: {error.filename}: {error.strerror}") from error
            finally:
                if output:
                    output.close()

    def forward_signals(self) -> None:
        """Send each received signal to the children, once per signal. A second SIGINT ends them."""
        while self._received:
            signum = self._received.pop(0)
            if signum in self._forwarded:
                if signum == signal.SIGINT:
                    self._terminate_at = time.monotonic()
                continue
            self._forwarded.add(signum)
            if signum == signal.SIGINT and self._is_foreground and os.tcgetpgrp(0) == os.getpgrp():
                continue  # Ctrl-C: the terminal has signalled the child directly
            for child in self.running:
                process, stop_signal = self.processes[child.name], child.stop_signal or signum
                if process.poll() is not None:  # another process may have its pid by now
                    continue
                if child.forward_signal:
                    child.forward_signal(process.pid, stop_signal)
                else:
                    process.send_signal(stop_signal)

    def poll(self) -> None:
        """Record ended children. After a failure, end the others: by SIGTERM, then by SIGKILL."""
        now = time.monotonic()
        ended = {child.name: child for child in self.running if self.processes[child.name].poll() is not None}
        if ended:  # a signal to the whole process group may have arrived here only after the last poll
            self.forward_signals()
        self.ended.update(ended)
        if not self._is_terminating:
            for name, child in ended.items():
                code = self.processes[name].returncode
                translate = child.translate_exit_code or partial(self._translate_code, child)
                self.codes[name] = translate(code)
        failed = [name for name in ended if self.codes.get(name, 0) not in (EXIT_OK, EXIT_REQUEUE)]
        if failed and self.first_failed is None:
            # A stopped child (SIGSTOP) is the reason why the others ended. Among children that ended between two
            # polls, one that a signal killed comes first: it can't have failed because of the others.
            stopped = [child.name for child in self.running if _is_stopped(self.processes[child.name].pid)]
            self.first_failed = next(iter(stopped), min(failed, key=lambda name: self.codes[name] >= 0))
            self._terminate_at = min(self._terminate_at, now + SETTLE_SECONDS)
        if now >= self._terminate_at and not self._is_terminating:
            self._is_terminating = True
            self._kill_at = now + GRACE_SECONDS
            for child in self.running:
                self.processes[child.name].send_signal(signal.SIGTERM)
        if now >= self._kill_at:
            self.kill()

    def _translate_code(self, child: Child, code: int) -> int:
        """Return a child's exit code; EXIT_REQUEUE if a forwarded signal killed it before it had a handler."""
        sent_signals = {int(child.stop_signal or signum) for signum in self._forwarded}
        if not {-code, code - 128} & sent_signals:
            return code
        self._ended_by_signal = True
        return EXIT_REQUEUE

    def kill(self) -> None:
        """Send SIGKILL to the process groups of all children that still live."""
        for child in self.running:
            process = self.processes[child.name]
            self.ended.add(child.name)
            if process.returncode is not None:
                continue
            with contextlib.suppress(ProcessLookupError):
                if self._is_foreground:
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def exit_code(self) -> int:
        """Return the common exit code, else 1; print which child failed first."""
        distinct_codes = set(self.codes.values())
        code = distinct_codes.pop() if len(distinct_codes) == 1 else EXIT_FAILED
        if code not in COMMON_CODES:
            code = EXIT_FAILED
        if code == EXIT_REQUEUE and self._ended_by_signal:
            print_to_stderr("megatfm: stopped by a signal; start the same command again to go on")
        # The first child has already printed an error that all ranks share.
        is_printed = code in (EXIT_USAGE, NO_PROGRESS, LOCKED) and self.children[0].name in self.codes
        if self.first_failed and not is_printed:
            print_to_stderr(self._describe_failure(self.first_failed))
        return code

    def _describe_failure(self, name: str) -> str:
        code = self.codes.get(name)
        if code is None:
            ending = "stopped by a signal, and never continued"
        else:
            ending = f"exit code {code}" if code >= 0 else _describe_signal(-code)
        n_others = len(self.children) - 1
        message = f"megatfm: {name} failed first ({ending}){', so the others were ended' if n_others else ''}"
        log = next(child.log for child in self.children if child.name == name)
        if log is None:
            return message
        try:
            with log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_starts[name], end - TAIL_BYTES))
                text = file.read().decode(errors="replace").rstrip()
        except OSError as error:
            return f"{message}; {log} can't be read: {error.strerror}"
        lines = text.splitlines()[-TAIL_LINES:]
        if not lines:
            return f"{message}, before it wrote anything to {log}"
        if lines[-1].startswith("error: "):  # it says why: the traceback above it is for the log
            lines = lines[-1:]
        return "\n".join([f"{message}; the end of {log}:", *(f"  {line}" for line in lines)])


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped (paused) a process; always False where there is no /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


def _describe_signal(signum: int) -> str:
    try:
        return f"killed by {signal.Signals(signum).name}"
    except ValueError:
        return f"killed by signal {signum}"


def _make_exec_hook(child: Child) -> Callable[[], None]:
    """Return the child's hook before exec: it blocks stop signals, and ties its life to this process's (Linux)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()
    blocked_signals = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP) if child.blocks_stop_signals else ()

    def prepare() -> None:
        if blocked_signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, int(child.parent_death_signal))
        if os.getppid() != parent:  # the parent was killed before prctl
            os._exit(1)

    return prepare
