"""Children that live and die together, against small programs in the place of ranks."""

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatfm.errors import MegatfmError
from megatfm.launchers.supervisor import Child, _ChildGroup, supervise
from tests.support.forked_commands import ForkedCommand, wait_until

# A rank: `python rank.py FOLDER RANK BEHAVIOUR RANKS`. It notes each signal that it gets, and ends by itself only when
# all ranks handle signals: on a busy machine, one may start seconds after another.
RANK = """
import os, signal, sys, time
from pathlib import Path
folder, rank, behaviour = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def note(number, frame):
    with open(folder / f"signals-{rank}", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if behaviour == "save":
        sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, note)
(folder / f"pid-{rank}.partial").write_text(str(os.getpid()))
(folder / f"pid-{rank}.partial").rename(folder / f"pid-{rank}")
while behaviour not in ("save", "hang") and len(list(folder.glob("pid-?"))) < int(sys.argv[4]):
    time.sleep(0.01)
if behaviour.startswith("exit"):
    print("some output", flush=True)
    print(f"rank {rank} says why", file=sys.stderr)
    sys.exit(int(behaviour.removeprefix("exit")))
if behaviour == "abort":
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.01)
    if behaviour == "abort-later" and (folder / "now").exists():
        sys.exit(1)
"""
LAUNCHER = """
import signal
import sys
from pathlib import Path
from megatfm.launchers import supervisor as module
from tests.unit.launchers.test_supervisor import team
signal.signal(signal.SIGHUP, getattr(signal, sys.argv.pop(1)))
module.SETTLE_SECONDS, module.GRACE_SECONDS = 0.3, 1.0 if "hang" in sys.argv else 30.0
sys.exit(module.supervise(team(Path(sys.argv[1]), sys.argv[2:])))
"""
ROOT = Path(__file__).resolve().parents[3]


def team(folder: Path, behaviours: list[str]) -> list[Child]:
    """One child for each behaviour; all but the first have a log, as ranks do."""
    program = folder / "rank.py"
    program.write_text(RANK)
    return [
        Child(
            f"rank {rank}",
            [sys.executable, str(program), str(folder), str(rank), behaviour, str(len(behaviours))],
            log=folder / "logs" / f"rank-{rank}.log" if rank else None,
        )
        for rank, behaviour in enumerate(behaviours)
    ]


Launch = Callable[..., ForkedCommand]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a launcher in a process of its own and wait until all its ranks are up."""
    started = []
    program = tmp_path / "launcher.py"
    program.write_text(LAUNCHER)

    def start(*behaviours: str, hangup: str = "SIG_DFL") -> ForkedCommand:
        words = [hangup, tmp_path, *behaviours]
        started.append(ForkedCommand(words, tmp_path / "output", ROOT, program=str(program)))
        wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(len(behaviours))))
        return started[-1]

    yield start
    for command in started:
        command.end()
    for path in tmp_path.glob("pid-?"):  # whoever a failing test left running
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def process_state(folder: Path, rank: int) -> str:
    """The kernel's letter for a rank's state, of which T is stopped; Z, a zombie's, for one that has ended, too."""
    try:
        stat = Path(f"/proc/{(folder / f'pid-{rank}').read_text()}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
    return stat.rsplit(")", 1)[1].split()[0]


def is_running(folder: Path, rank: int) -> bool:
    """A zombie has ended already: nobody in a container may ever reap it."""
    return process_state(folder, rank) != "Z"


def signals(folder: Path, rank: int) -> list[str]:
    path = folder / f"signals-{rank}"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize(
    ("behaviours", "code"),
    [(["exit0"] * 3, 0), (["exit75"] * 2, 75), (["exit2"] * 2, 2), (["exit3"] * 2, 1), (["exit0", "exit75"], 1)],
)  # fmt: skip
def test_the_exit_code_is_that_of_all_children(tmp_path: Path, behaviours: list[str], code: int) -> None:
    assert supervise(team(tmp_path, behaviours)) == code


def test_the_first_child_has_the_terminal_others_have_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        supervise(team(tmp_path, ["exit0", "exit0"]))
    assert capfd.readouterr().out == "some output\n" * 2
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert log.count("rank 1 says why") == 2, "a second launch appends"


def test_a_failed_rank_is_named_and_ends_others(tmp_path: Path, launch: Launch) -> None:
    launcher = launch("save", "save", "exit3")
    assert launcher.wait(30) == 1
    assert launcher.output == (
        "megatfm: rank 2 failed first (exit code 3), so the others were ended; "
        f"the end of {tmp_path}/logs/rank-2.log:\n  some output\n  rank 2 says why\n"
    )
    assert signals(tmp_path, 0) == signals(tmp_path, 1) == ["SIGTERM"]


def test_a_rank_whose_log_is_gone_is_still_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank-0.log"
    program = "import os, sys; os.remove(sys.argv[1]); sys.exit(3)"
    assert supervise([Child("rank 0", [sys.executable, "-c", program, str(log)], log=log)]) == 1
    assert capfd.readouterr().err == (
        f"megatfm: rank 0 failed first (exit code 3); {log} can't be read: No such file or directory\n"
    )


def test_a_rank_that_died_before_it_wrote_has_no_end_of_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank-0.log"
    assert supervise([Child("rank 0", ["sh", "-c", "kill -KILL $$"], log=log)]) == 1
    assert capfd.readouterr().err == (
        f"megatfm: rank 0 failed first (killed by SIGKILL), before it wrote anything to {log}\n"
    )


def test_an_error_that_says_why_stands_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank-0.log"
    program = "print('Traceback:\\n  File x\\nerror: step 3: why', flush=True); raise SystemExit(1)"
    assert supervise([Child("rank 0", [sys.executable, "-c", program], log=log)]) == 1
    assert (
        capfd.readouterr().err
        == f"megatfm: rank 0 failed first (exit code 1); the end of {log}:\n  error: step 3: why\n"
    )


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, launch: Launch) -> None:
    launcher = launch("hang", "abort")
    assert launcher.wait(30) == 1
    assert launcher.output.startswith("megatfm: rank 1 failed first (killed by SIGKILL), so the others were ended")
    assert signals(tmp_path, 0) == ["SIGTERM"]
    assert not is_running(tmp_path, 0)


def test_others_end_for_the_rank_that_is_stopped(tmp_path: Path, launch: Launch) -> None:
    launcher = launch("save", "hang", "abort-later")
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGSTOP)
    wait_until(lambda: process_state(tmp_path, 1) == "T")
    (tmp_path / "now").touch()
    assert launcher.wait(30) == 1
    reason = "stopped by a signal, and never continued"
    assert launcher.output.startswith(f"megatfm: rank 1 failed first ({reason}), so the others were ended")
    assert not is_running(tmp_path, 1)


def test_a_usage_error_is_said_once_by_rank_0(tmp_path: Path, launch: Launch) -> None:
    launcher = launch("exit2", "exit2")
    assert (launcher.wait(30), launcher.output) == (2, "some output\nrank 0 says why\n")


# The rank dies of Ctrl-C by the signal's default action: Python's own handler only sets a flag, and `input` then
# waits for ever if the signal came after its prompt and before its read (CPython looks at the flag after the read).
ASKS = """
import os, sys
from megatfm.launchers.supervisor import Child, supervise
code = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); print('heard ' + input('asks '))"
sys.exit(supervise([Child(f"rank {rank}", [sys.executable, "-c", code]) for rank in range(int(sys.argv[1]))]))
"""


def at_a_terminal(tmp_path: Path, ranks: int, typed: bytes) -> tuple[int, str]:
    """Exit code and output of a launcher whose ranks ask for a line, when this is typed."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", ASKS, str(ranks)])
    displayed = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while select.select([terminal], [], [], 60)[0] and (data := os.read(terminal, 4096)):
            displayed += data
            if b"asks " in displayed and typed:
                os.write(terminal, typed)
                typed = b""
    # Its end of the terminal closes before it has ended, unless it hangs.
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.close(terminal)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(ended[1]), displayed.decode()


def test_a_single_rank_may_ask_at_the_terminal_as_a_debugger_does(tmp_path: Path) -> None:
    code, displayed = at_a_terminal(tmp_path, 1, b"a line\n")
    assert (code, "heard a line" in displayed) == (0, True)
    code, displayed = at_a_terminal(tmp_path, 1, b"\x03")
    assert code == 75, "Ctrl-C reaches it"


def test_several_ranks_do_not_wait_for_the_terminal(tmp_path: Path) -> None:
    code, displayed = at_a_terminal(tmp_path, 2, b"a line\n")
    assert code == 1
    assert "EOFError" in displayed


@pytest.mark.parametrize("wait_first", [True, False], ids=["forwarded-late", "noted-late"])
def test_a_rank_that_dies_of_a_signal_that_we_got_too_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_first: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes to both at once: the rank is dead before it is passed on, or before we have noted our own."""
    program = tmp_path / "both.py"
    program.write_text(
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nopen(sys.argv[1]).read()\n"
        "os.kill(os.getppid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    os.mkfifo(tmp_path / "go")
    forward_signals, dead = _ChildGroup.forward_signals, []

    def let_it_die(children: _ChildGroup) -> None:
        if not dead:
            dead.append(children.processes["rank 0"].pid)
            (tmp_path / "go").write_text("")
            os.waitid(os.P_PID, dead[0], os.WEXITED | os.WNOWAIT)

    def forward(children: _ChildGroup) -> None:
        if wait_first:
            let_it_die(children)
        forward_signals(children)
        let_it_die(children)

    monkeypatch.setattr(_ChildGroup, "forward_signals", forward)
    forwarded: list[int] = []
    command = [sys.executable, str(program), str(tmp_path / "go")]
    rank = Child("rank 0", command, forward_signal=lambda pid, number: forwarded.append(pid))
    assert supervise([rank]) == 75
    assert capfd.readouterr().err == "megatfm: stopped by a signal; start the same command again to go on\n"
    assert forwarded == [], "its number may be another process's by now"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once(tmp_path: Path, launch: Launch, number: signal.Signals) -> None:
    launcher = launch("save", "save", "save")
    os.kill(launcher.pid, number)
    assert (launcher.wait(30), launcher.output) == (75, "")
    assert [signals(tmp_path, rank) for rank in range(3)] == [[number.name]] * 3


def test_ranks_under_nohup_outlive_their_terminal(tmp_path: Path, launch: Launch) -> None:
    launcher = launch("save", "save", hangup="SIG_IGN")
    for number in (signal.SIGHUP, signal.SIGUSR1):
        os.kill(launcher.pid, number)
    launcher.wait(30)
    assert [signals(tmp_path, rank) for rank in range(2)] == [["SIGUSR1"]] * 2


def test_repeated_signals_are_passed_on_once_and_a_second_interrupt_ends_all(tmp_path: Path, launch: Launch) -> None:
    launcher = launch("hang", "hang")
    for number, expected in ((signal.SIGTERM, 1), (signal.SIGTERM, 1), (signal.SIGINT, 2)):
        os.kill(launcher.pid, number)
        wait_until(lambda count=expected: len(signals(tmp_path, 0)) == len(signals(tmp_path, 1)) == count)  # type: ignore[misc]
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait(30) == 1
    assert signals(tmp_path, 0) == ["SIGTERM", "SIGINT", "SIGTERM"]
    assert not is_running(tmp_path, 0)
    assert not is_running(tmp_path, 1)


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path, launch: Launch) -> None:
    os.kill(launch("hang", "hang").pid, signal.SIGKILL)
    wait_until(lambda: not is_running(tmp_path, 0) and not is_running(tmp_path, 1))


def test_a_missing_program_ends_all_children(tmp_path: Path) -> None:
    children = [*team(tmp_path, ["hang"]), Child("rank 1", [str(tmp_path / "nothing")])]
    with pytest.raises(MegatfmError, match=r"can't start rank 1: .*/nothing: No such file"):
        supervise(children)
    assert not (tmp_path / "pid-0").exists() or not is_running(tmp_path, 0)


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    supervise(team(tmp_path, ["exit0"]))
    assert signal.getsignal(signal.SIGTERM) is before
