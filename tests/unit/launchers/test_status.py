"""`megatfm status`, `logs` and `cancel`, on run directories as runs leave them."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatfm import cli
from megatfm.launchers.logs import ERROR_PATTERN, Troubles, follow_logs, print_tails, select_logs
from megatfm.launchers.record import Attempt, dump
from megatfm.launchers.status import run_status
from tests.support.fake_slurm import FakeSlurm

ROOT = Path(__file__).parents[3]
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`make("name", launcher="slurm", jobs=["7"])`: a run of 100 steps that came to step 40."""
    monkeypatch.chdir(tmp_path)

    def run(name: str = "mine", steps: int = 40, **note: Any) -> Path:
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "config.toml").write_text('name = "mine"\n[train]\nsteps = 100\n')
        lines = [
            {"step": n, "loss": 5 - n / 50, "tokens_per_second": 1000.0 + (n == 2) * 9e9, "step_seconds": 2.0}
            for n in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if note:
            (folder / "launch.json").write_text(json.dumps(note))
        return folder

    return run


def megatfm(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out + captured.err


def attempts(run: Path, *codes: int | None) -> None:
    result = [
        Attempt(100.0, "7", job="7", code=code, ended=None if code is None else 101.0, reason="of a test")
        for code in codes
    ]
    (run / "restarts.json").write_text(dump(result))


# ------------------------------------------------------------------------------------------------------ status


def test_a_run_in_full(make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="slurm", jobs=["7", "8"])
    attempts(run, 1, 75, None)
    (run / "checkpoints" / "step-00000030").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "resumed", "detail": "from step-00000030", "time": 1}\n')
    fake_slurm.answer("squeue", "RUNNING|None|n[1-2]\n")
    code, output = megatfm("status", "runs/mine", capsys=capsys)
    assert code == 0
    assert output.splitlines() == [
        f"run         {run}",
        "state       RUNNING: job 7, n[1-2], 1 more in the chain",
        "step        40 of 100",
        "loss        4.2000",
        "tokens/s    1,000",
        "time left   2 min 00 s",
        "checkpoint  step 30",
        "restarts    2",
        "last event  resumed: from step-00000030",
    ]


def test_several_runs_in_a_table(
    make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    make("a", launcher="slurm", jobs=["7"])
    make("b", steps=0, launcher="slurm", jobs=["9"])
    (Path("runs") / "no-run").mkdir()
    fake_slurm.answer("squeue", "PENDING|Resources|\n")
    _, output = megatfm("status", capsys=capsys)
    heading, first, second = (line.split() for line in output.splitlines())
    assert heading == ["run", "state", "step", "loss", "tokens/s", "left", "restarts"]
    assert " ".join(first) == "a PENDING 40 of 100 4.2000 1,000 2 min 00 s job 7, Resources"
    assert second == ["b", "PENDING", "0", "of", "100", "job", "9,", "Resources"]


def test_for_programs(make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    _, output = megatfm("status", "runs/mine", "--json", capsys=capsys)
    parsed = json.loads(output)
    assert (parsed["run"], parsed["state"], parsed["step"], parsed["steps"]) == (str(run), "RUNNING", 40, 100)
    assert parsed["seconds_left"] == 120.0


@pytest.mark.parametrize(
    ("codes", "record", "state"),
    [
        ((1, 0), "", "DONE: job 7: of a test"),
        ((1, 76), "", "NO PROGRESS: job 7: of a test"),
        ((75,), "", "STOPPED: job 7: of a test"),
        ((2,), "", "FAILED: job 7: of a test"),
        ((75,), "JobId=7 JobState=CANCELLED ExitCode=0:15", "CANCELLED: job 7: exit code 0:15"),
        ((), "JobId=7 JobState=NODE_FAIL ExitCode=1:0", "NODE_FAIL: job 7: exit code 1:0"),
        ((None,), "", "GONE: job 7: SLURM has forgotten it"),
    ],
)
def test_after_the_job_has_left_the_queue(
    make: Make, fake_slurm: FakeSlurm, codes: tuple[int | None, ...], record: str, state: str
) -> None:
    """squeue knows it no more; scontrol may, for some minutes; then the run's own record tells."""
    run = make(launcher="slurm", jobs=["7"])
    attempts(run, *codes)
    fake_slurm.fail("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    if record:
        fake_slurm.answer("scontrol-show", f"{record}\n")
    else:
        fake_slurm.fail("scontrol-show", "slurm_load_jobs error: Invalid job id specified\n")
    status = run_status(run)
    assert f"{status.state.name}: {status.state.reason}" == state
    assert status.state.is_over
    assert status.seconds_left is None


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("JobHeldUser", "it is held: `scontrol release 7` lets it go on"),
        ("launch failed requeued held", "a node could not start it, so SLURM holds it: `scontrol release 7`"),
        (
            "PartitionTimeLimit",
            "its time limit is above the partition's: cancel it, and",
        ),
        ("PartitionDown", "the partition is closed"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher", "`sinfo -R` says why"),
    ],
)
def test_what_no_waiting_mends_is_told_with_the_way_out(
    make: Make, fake_slurm: FakeSlurm, reason: str, advice: str
) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.answer("squeue", f"PENDING|{reason}|\n")
    assert run_status(run).state.reason.startswith(f"job 7, {reason}: {advice}")
    fake_slurm.answer("squeue", "PENDING|Priority|\n")
    assert run_status(run).state.reason == "job 7, Priority"


def test_who_died_of_the_signal_that_asked_it_to_stop_has_stopped(make: Make, fake_slurm: FakeSlurm) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=FAILED ExitCode=138:0\n")
    attempt = Attempt(100.0, "7", job="7", code=138, asked=True, ended=101.0, reason="stopped by USR1")
    (run / "restarts.json").write_text(dump([attempt]))
    assert (run_status(run).state.name, run_status(run).state.reason) == ("STOPPED", "job 7: stopped by USR1")


def test_how_far_an_array_is(make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("made.jobs", steps=0, launcher="slurm", kind="prep", jobs=["7"], array=8)
    (run / "config.toml").unlink()
    work = run.with_name("made") / ".work"
    work.mkdir(parents=True)
    for part in ("clean.00000", "clean.00001", "clean", "encode-train.00000", "encode-train.00003"):
        (work / f"{part}.json").touch()
        os.utime(work / f"{part}.json", (1, 2 if part.startswith("encode") else 1))
    fake_slurm.answer("squeue", "RUNNING|None|n1\nRUNNING|None|n2\nPENDING|Resources|\nPENDING|Resources|\n")
    _, output = megatfm("status", "runs/made.jobs", capsys=capsys)
    assert "RUNNING: job 7, 2 of 8 tasks run on n1, n2; 2 wait (Resources); 4 are over\n" in output
    assert "work        encode-train: 2 parts done\n" in output
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=COMPLETED ExitCode=0:0\n")
    status = run_status(run)
    assert (status.state.name, "the corpus is not finished" in status.state.reason) == ("FAILED", True)
    (run.with_name("made") / "prep.json").touch()
    assert (run_status(run).state.name, run_status(run).work) == ("DONE", "the corpus is finished")


def test_sacct_is_asked_where_there_is_one(make: Make, fake_slurm: FakeSlurm) -> None:
    run = make(launcher="slurm", jobs=["7"])
    for command in ("squeue", "scontrol-show"):
        fake_slurm.fail(command, "Invalid job id specified\n")
    fake_slurm.answer("sacct", "OUT_OF_MEMORY|0:125\n")
    assert (run_status(run).state.name, run_status(run).state.reason) == (
        "OUT_OF_MEMORY",
        "job 7: exit code 0:125",
    )


def test_a_dead_scheduler_is_no_reason_to_say_nothing(make: Make, fake_slurm: FakeSlurm) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.fail("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    status = run_status(run)
    assert (status.state.name, status.step) == ("UNKNOWN", 40)
    assert "Unable to contact" in status.state.reason


def test_a_local_run_is_known_by_its_process(make: Make) -> None:
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    assert run_status(make("now", launcher="local", **me)).state.name == "RUNNING"
    assert run_status(make("reused", launcher="local", **{**me, "started": 5.0})).state.name == "FAILED"
    assert run_status(make("elsewhere", launcher="mpi", **{**me, "host": "n9"})).state.name == "UNKNOWN"
    ended = make("ended", launcher="local", host=socket.gethostname())
    attempts(ended, 75)
    assert run_status(ended).state.name == "STOPPED"


def test_a_run_that_was_started_by_hand_is_known_by_its_lock(make: Make) -> None:
    run = make()
    assert run_status(run).state.name == "ENDED"
    (run / "events.jsonl").write_text('{"event": "finished", "detail": "step 100"}\n')
    assert run_status(run).state.name == "DONE"
    holder = {"host": socket.gethostname(), "pid": os.getpid()}
    (run / "lock").write_text(json.dumps(holder))
    assert run_status(run).state.name == "RUNNING"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (run / "lock").write_text(json.dumps({**holder, "pid": process.pid}))
    assert run_status(run).state.name == "DONE", "its holder is dead"
    (run / "lock").write_text(json.dumps({**holder, "host": "n9"}))
    assert run_status(run).state.name == "RUNNING", "somebody elsewhere moves it"
    os.utime(run / "lock", (1, 1))
    assert run_status(run).state.name == "DONE", "nobody does"
    assert not list(run.glob(".now*"))


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "metrics.jsonl", "launch.json"])
def test_a_fifo_in_a_file_s_place_is_not_waited_for(make: Make, name: str) -> None:
    run = make()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert run_status(run).state.name == "ENDED"


def test_a_dead_run_in_a_directory_that_can_not_be_written_to(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    (run / "lock").write_text(json.dumps({"host": "n9", "pid": 1}))
    assert run_status(run).state.name == "RUNNING"
    os.utime(run / "lock", (time.time() - 100,) * 2)
    assert run_status(run).state.name == "ENDED"


@pytest.mark.parametrize("pid", ["a word", None, [1], 1e400, -5])
def test_what_others_write_badly_stops_no_look(
    make: Make, pid: object, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(launcher="local", host=socket.gethostname(), pid=pid, started="long ago", jobs=7, array="x")
    (run / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "time": "now"}))
    record = {"step": pid, "loss": None, "step_seconds": "x", "tokens_per_second": [1]}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "events.jsonl").write_text('{"event": "finished", "detail": 3, "time": "then"}\n')
    for text in ('{"a": 1}', "[1]", "{", '[{"time": "x", "submission": 7}]'):
        (run / "restarts.json").write_text(text)
        code, output = megatfm("status", "runs/mine", capsys=capsys)
        assert (code, "state       DONE" in output, "restarts.json: left out" in output) == (0, True, True)
    launched = json.loads((run / "launch.json").read_text())
    for launcher in ("slurm", "by hand"):
        (run / "launch.json").write_text(json.dumps({**launched, "launcher": launcher}))
        assert megatfm("status", "runs/mine", capsys=capsys)[0] == 0


def test_a_number_of_a_process_that_is_used_again_is_no_run(make: Make) -> None:
    run = make()
    began = psutil.Process().create_time()
    for taken, word in ((began + 5, "RUNNING"), (began - 5, "ENDED")):
        (run / "lock").write_text(
            json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": taken})
        )
        assert run_status(run).state.name == word


def test_a_loss_that_is_no_number_is_shown(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n{"step": 2')
    _, output = megatfm("status", "runs/mine", capsys=capsys)
    assert "loss        nan" in output
    assert "step        1 of 100" in output


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_what_is_no_run_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = megatfm(command, "nothing", capsys=capsys)
    assert code == 2
    assert output == "error: nothing: not a run directory: give one such as runs/quickstart\n"


# -------------------------------------------------------------------------------------------------------- logs


def test_the_logs_that_matter(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="slurm", jobs=["7", "8"])
    for rank in range(12):
        (run / "logs" / f"rank-{rank}.log").write_text(f"all is well on {rank}\n" * 30)
    (run / "logs" / "slurm-7.log").write_text("of the first link\n")
    (run / "logs" / "slurm-8.log").write_text("of the second link\n")
    with (run / "logs" / "rank-10.log").open("a") as file:
        file.write("2026-11-21 15:00:00,000 ERROR the disk is full\n")
    assert list(select_logs(run).values()) == ["job", "rank 10"]
    _, output = megatfm("logs", "runs/mine", "-n", "2", capsys=capsys)
    assert output.splitlines() == [
        f"==> {run}/logs/slurm-8.log <==",
        "of the second link",
        f"==> {run}/logs/rank-10.log <==",
        "all is well on 10",
        "2026-11-21 15:00:00,000 ERROR the disk is full",
    ]
    assert len(select_logs(run, all_ranks=True)) == 13


def test_following_shows_what_comes_and_who_gets_into_trouble(make: Make) -> None:
    run = make()
    for rank in range(2):
        (run / "logs" / f"rank-{rank}.log").write_text("old\n")
    out, over = io.StringIO(), threading.Event()
    tails = print_tails(run, 1, out=out)
    thread = threading.Thread(target=follow_logs, args=(run, tails, False, over.is_set, out))
    thread.start()

    def until(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in out.getvalue():
            assert time.monotonic() < deadline, out.getvalue()
            time.sleep(0.02)

    with (run / "logs" / "rank-0.log").open("a") as file:
        file.write("a new li")
        file.flush()
        time.sleep(0.1)
        assert "a new li" not in out.getvalue(), "whole lines only"
        file.write("ne\n")
    until("rank 0 | a new line\n")
    with (run / "logs" / "rank-1.log").open("a") as file:
        file.write("Traceback (most recent call last):\n")
    until("rank 1 | old\nrank 1 | Traceback (most recent call last):\n")
    with (run / "logs" / "rank-0.log").open("a") as file:
        file.write("the last word\n")
    over.set()
    thread.join(10)
    assert out.getvalue().endswith("rank 0 | the last word\n")


@pytest.mark.parametrize(
    "text", ["", "\n", "a", "a\n", "a\n\nbc\n", "\n\na\r\nwith no end", "x" * 9 + "\ny\n\n\n"]
)
def test_the_last_lines_are_those_of_the_whole_file(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Read in pieces from the end, and to the last word of who was killed in mid-line."""
    log = make() / "logs" / "rank-0.log"
    log.write_bytes(text.encode())
    monkeypatch.setattr("megatfm.launchers.record.BLOCK_BYTES", 3)
    for count in range(5):
        _, output = megatfm("logs", "runs/mine", "-n", str(count), capsys=capsys)
        lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
        assert output.split("\n") == [f"==> {log} <==", *lines[max(0, len(lines) - count) :], ""]


def test_following_ends_with_a_line_that_was_never_finished(make: Make) -> None:
    run = make()
    log = run / "logs" / "rank-0.log"
    log.write_text("old\nkilled in mid-li")
    out, asked = io.StringIO(), iter([False, True])
    follow_logs(run, print_tails(run, 1, out=out), is_over=lambda: next(asked), out=out)
    assert out.getvalue() == f"==> {log} <==\nrank 0 | killed in mid-li\n"


def test_what_was_searched_for_trouble_is_not_read_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    log, troubles, read = make() / "logs" / "rank-1.log", Troubles(), []
    search = ERROR_PATTERN.search
    seen = type("Seen", (), {"search": staticmethod(lambda text: read.append(len(text)) or search(text))})
    monkeypatch.setattr("megatfm.launchers.logs.ERROR_PATTERN", seen)
    log.write_text("all is well\n" * 1000)
    assert [troubles.has(log) for _ in range(3)] == [False] * 3
    assert read == [12_000]
    for part, expected in (("Trace", False), ("back (most recent call last)\n", True), ("and on\n", True)):
        with log.open("a") as file:
            file.write(part)
        assert troubles.has(log) is expected, "also one that comes in two parts, and it stays so"
    assert max(read[1:]) < 5000
    log.write_text("begun anew\n")
    assert not troubles.has(log)


# ------------------------------------------------------------------------------------------------------ cancel


def test_all_links_of_a_chain_are_cancelled(
    make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    make(launcher="slurm", jobs=["7", "8"])
    fake_slurm.answer("squeue", "PENDING|Dependency|\n")
    assert megatfm("cancel", "runs/mine", capsys=capsys) == (0, "cancelled jobs 7, 8\n")
    assert fake_slurm.calls[-1] == "scancel 7 8"
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=COMPLETED\n")
    code, output = megatfm("cancel", "runs/mine", capsys=capsys)
    assert code == 2
    assert "none of its jobs is in the queue" in output


def test_a_job_is_cancelled_by_its_number_with_all_of_its_run(
    make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(launcher="slurm", jobs=["7", "8"], evaluations=["9"])
    fake_slurm.answer("squeue", "PENDING|Dependency|\n")

    def answer(name: str) -> None:
        record = (
            f"JobId=8 JobState=PENDING Command={run}/slurm/{name} WorkDir=/x StdOut={run}/logs/slurm-8.log\n"
        )
        fake_slurm.answer("scontrol-show", record)

    answer("pretrain.sbatch")
    assert megatfm("cancel", "8", capsys=capsys) == (0, "cancelled jobs 7, 8, 9\n")
    answer("evaluate.sbatch")
    assert megatfm("cancel", "9", capsys=capsys) == (0, "cancelled job 9\n")
    assert megatfm("cancel", "12", capsys=capsys) == (0, "cancelled job 12\n"), "of ours, and in no record"
    answer("../mine.sh")
    code, output = megatfm("cancel", "5", capsys=capsys)
    assert (code, output.startswith("error: 5: no job of `megatfm launch`: ")) == (2, True)
    fake_slurm.fail("scontrol-show", "slurm_load_jobs error: Invalid job id specified\n")
    code, output = megatfm("cancel", "5", capsys=capsys)
    assert (code, output.startswith("error: 5: SLURM knows no such job: ")) == (2, True)


def test_everything_of_all_runs_is_cancelled(
    make: Make, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    make("a", launcher="slurm", jobs=["7"])
    make("b")
    make("c", evaluations=["9"])
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    code, output = megatfm("cancel", "--all", capsys=capsys)
    assert code == 0
    assert "a: cancelled job 7\nc: cancelled job 9\n" in output
    assert "b: was not started by `megatfm launch`" in output
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=COMPLETED\n")
    code, output = megatfm("cancel", "--all", capsys=capsys)
    assert (code, output.splitlines()[-1]) == (2, "error: nothing of the runs under runs/ here waits or runs")
    for words in ([], ["runs/a", "--all"]):
        code, output = megatfm("cancel", *words, capsys=capsys)
        assert (code, "name what to end" in output) == (2, True)


def test_a_local_run_is_told_to_save_and_stop(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    make(launcher="local", host=socket.gethostname(), pid=process.pid, started=started)
    assert megatfm("cancel", "runs/mine", capsys=capsys) == (
        0,
        f"told process {process.pid} to save and stop\n",
    )
    assert process.wait(10) == -signal.SIGTERM
    code, output = megatfm("cancel", "runs/mine", capsys=capsys)
    assert (code, output.partition(": ")[2].partition("/mine")[2]) == (2, ": nothing runs\n")


def test_the_process_of_another_user_is_named_with_its_owner(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    me = psutil.Process()
    make(launcher="local", host=socket.gethostname(), pid=me.pid, started=me.create_time())

    def refuse(process: psutil.Process, number: int) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", refuse)
    code, output = megatfm("cancel", "runs/mine", capsys=capsys)
    assert (code, output.count("\n")) == (2, 1)
    assert f"process {me.pid} is of {me.username()}, who alone can end it" in output


def test_watching_needs_no_torch(make: Make) -> None:
    make()
    program = (
        "import sys; from megatfm import cli\n"
        "for words in (['status', 'runs/mine'], ['logs', 'runs/mine'], ['cancel', 'runs/mine']):\n"
        "    try: cli.main(words)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}
        ).returncode
        == 0
    )
