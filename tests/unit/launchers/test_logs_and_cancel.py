"""`megatfm logs` and `megatfm cancel`: which lines are shown, and who is told to stop."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from megatfm.launchers.logs import ERROR_PATTERN, ErrorScanner, follow_logs, print_tails, select_logs
from tests.support.forked_commands import wait_until
from tests.support.launch_jobs import FakeSlurm, MakeRun, run_megatfm


def test_the_logs_that_matter(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="slurm", jobs=["7", "8"])
    for rank in range(12):
        (run / "logs" / f"rank-{rank}.log").write_text(f"all is well on {rank}\n" * 30)
    (run / "logs" / "slurm-7.log").write_text("of the first link\n")
    (run / "logs" / "slurm-8.log").write_text("of the second link\n")
    with (run / "logs" / "rank-10.log").open("a") as file:
        file.write("2026-11-21 15:00:00,000 ERROR the disk is full\n")
    assert list(select_logs(run).values()) == ["job", "rank 10"]
    _, output = run_megatfm("logs", "runs/mine", "-n", "2", capsys=capsys)
    assert output.splitlines() == [
        f"==> {run}/logs/slurm-8.log <==", "of the second link", f"==> {run}/logs/rank-10.log <==",
        "all is well on 10", "2026-11-21 15:00:00,000 ERROR the disk is full",
    ]  # fmt: skip
    assert len(select_logs(run, all_ranks=True)) == 13


def test_an_evaluation_is_followed_to_its_end_beside_a_run_that_is_done(
    make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(evaluations=["9"])
    (run / "logs" / "rank-0.log").write_text("the last step\n")
    (run / "logs" / "slurm-9.log").write_text("loss 2.0\n")
    (run / "events.jsonl").write_text('{"event": "finished"}\n')
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")

    def end_evaluation(_: float) -> None:
        fake_slurm.answer("squeue", "")
        with (run / "logs" / "slurm-9.log").open("a") as file:
            file.write("evaluated\n")

    monkeypatch.setattr("megatfm.commands.runs.QUEUE_SECONDS", -1.0)
    monkeypatch.setattr("megatfm.launchers.logs.time", SimpleNamespace(sleep=end_evaluation))
    _, output = run_megatfm("logs", "-f", "runs/mine", capsys=capsys)
    assert output.splitlines() == [
        f"==> {run}/logs/slurm-9.log <==", "loss 2.0", f"==> {run}/logs/rank-0.log <==", "the last step",
        "job 9  | evaluated",
    ]  # fmt: skip


def test_following_shows_what_comes_and_who_gets_into_trouble(make: MakeRun) -> None:
    run = make()
    for rank in range(2):
        (run / "logs" / f"rank-{rank}.log").write_text("old\n")
    out, over = io.StringIO(), threading.Event()
    tails = print_tails(run, 1, out=out)
    thread = threading.Thread(target=follow_logs, args=(run, tails, False, over.is_set, out))
    thread.start()

    with (run / "logs" / "rank-0.log").open("a") as file:
        file.write("a new li")
        file.flush()
        time.sleep(0.1)
        assert "a new li" not in out.getvalue(), "whole lines only"
        file.write("ne\n")
    wait_until(lambda: "rank 0 | a new line\n" in out.getvalue())
    with (run / "logs" / "rank-1.log").open("a") as file:
        file.write("Traceback (most recent call last):\n")
    wait_until(lambda: "rank 1 | old\nrank 1 | Traceback (most recent call last):\n" in out.getvalue())
    with (run / "logs" / "rank-0.log").open("a") as file:
        file.write("the last word\n")
    over.set()
    thread.join(10)
    assert out.getvalue().endswith("rank 0 | the last word\n")


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\nbc\n", "\n\na\r\nwith no end", "x" * 9 + "\ny\n\n\n"])
def test_the_last_lines_are_those_of_the_whole_file(
    make: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    log = make() / "logs" / "rank-0.log"
    log.write_bytes(text.encode())
    monkeypatch.setattr("megatfm.launchers.logs.BLOCK_BYTES", 3)
    for count in range(5):
        _, output = run_megatfm("logs", "runs/mine", "-n", str(count), capsys=capsys)
        lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
        assert output.split("\n") == [f"==> {log} <==", *lines[max(0, len(lines) - count) :], ""]


def test_following_ends_with_a_line_that_was_never_finished(make: MakeRun) -> None:
    run = make()
    log = run / "logs" / "rank-0.log"
    log.write_text("old\nkilled in mid-li")
    out, requested = io.StringIO(), iter([False, True])
    follow_logs(run, print_tails(run, 1, out=out), is_over=lambda: next(requested), out=out)
    assert out.getvalue() == f"==> {log} <==\nrank 0 | killed in mid-li\n"


@pytest.mark.parametrize(("event", "lines"), [
    (None, ["runs/mine: no logs yet"]),
    ("finished", ["==> runs/mine/logs/rank-0.log <==", "the last word"]),
])  # fmt: skip
def test_following_a_run_that_nobody_launched_ends(
    make: MakeRun, capsys: pytest.CaptureFixture[str], event: str | None, lines: list[str]
) -> None:
    """Never started, or by `megatfm train` itself."""
    run = make()
    if event:
        (run / "logs" / "rank-0.log").write_text("the last word\n")
        (run / "events.jsonl").write_text(json.dumps({"event": event, "step": 100}) + "\n")
    code, output = run_megatfm("logs", "-f", "runs/mine", capsys=capsys)
    assert (code, output.replace(str(run), "runs/mine").splitlines()) == (0, lines)


def test_log_lines_are_searched_for_errors_once(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    log, scanner, read = make() / "logs" / "rank-1.log", ErrorScanner(), []
    search = ERROR_PATTERN.search
    seen = type("Seen", (), {"search": staticmethod(lambda text: read.append(len(text)) or search(text))})
    monkeypatch.setattr("megatfm.launchers.logs.ERROR_PATTERN", seen)
    log.write_text("all is well\n" * 1000)
    assert [scanner.has_error(log) for _ in range(3)] == [False] * 3
    assert read == [12_000]
    for part, expected in (("Trace", False), ("back (most recent call last)\n", True), ("and on\n", True)):
        with log.open("a") as file:
            file.write(part)
        assert scanner.has_error(log) is expected, "also one that comes in two parts, and it stays so"
    assert max(read[1:]) < 5000
    log.write_text("begun anew\n")
    assert not scanner.has_error(log)


def test_chains_are_cancelled_whole(make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    make(launcher="slurm", jobs=["7", "8"])
    fake_slurm.answer("squeue", "PENDING|Dependency|\n")
    assert run_megatfm("cancel", "runs/mine", capsys=capsys) == (0, "cancelled jobs 7, 8\n")
    assert fake_slurm.calls[-1] == "scancel 7 8"
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=COMPLETED\n")
    code, output = run_megatfm("cancel", "runs/mine", capsys=capsys)
    assert code == 2
    assert "none of its jobs is in the queue" in output


def test_a_job_is_cancelled_by_its_number_with_all_of_its_run(
    make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(launcher="slurm", jobs=["7", "8"], evaluations=["9"])
    fake_slurm.answer("squeue", "PENDING|Dependency|\n")

    def answer(name: str) -> None:
        record = f"JobId=8 JobState=PENDING Command={run}/slurm/{name} WorkDir=/x StdOut={run}/logs/slurm-8.log\n"
        fake_slurm.answer("scontrol-show", record)

    answer("pretrain.sbatch")
    assert run_megatfm("cancel", "8", capsys=capsys) == (0, "cancelled jobs 7, 8, 9\n")
    answer("evaluate.sbatch")
    assert run_megatfm("cancel", "9", capsys=capsys) == (0, "cancelled job 9\n")
    assert run_megatfm("cancel", "12", capsys=capsys) == (0, "cancelled job 12\n"), "of ours, and in no record"
    fake_slurm.answer("squeue", "COMPLETED|None|\n")
    assert run_megatfm("cancel", "12", capsys=capsys) == (2, f"error: job 12 of {run} is over\n")
    answer("../mine.sh")
    code, output = run_megatfm("cancel", "5", capsys=capsys)
    assert (code, output.startswith("error: 5: not a job of `megatfm launch`: ")) == (2, True)
    fake_slurm.fail("scontrol-show", "slurm_load_jobs error: Invalid job id specified\n")
    code, output = run_megatfm("cancel", "5", capsys=capsys)
    assert (code, output.startswith("error: 5: SLURM knows no such job: ")) == (2, True)


def test_all_cancels_jobs_of_all_runs(make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    make("a", launcher="slurm", jobs=["7"])
    me = {"host": socket.gethostname(), "pid": os.getpid()}
    (make("b") / "lock").write_text(json.dumps(me))
    (make("by-hand", launcher="local", **me, started=5.0) / "lock").write_text(json.dumps(me))
    make("c", evaluations=["9"])
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    code, output = run_megatfm("cancel", "--all", capsys=capsys)
    assert code == 0
    assert "a: cancelled job 7\nc: cancelled job 9\n" in output
    for name in ("b", "by-hand"):
        reason = f"was not started by `megatfm launch`: send its process (pid {os.getpid()} on {socket.gethostname()})"
        assert f"{name}: {reason} SIGTERM, and it saves and stops\n" in output
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=COMPLETED\n")
    code, output = run_megatfm("cancel", "--all", capsys=capsys)
    assert (code, output.splitlines()[-1]) == (2, "error: no run under runs/ has a job or process to end")
    for words in ([], ["runs/a", "--all"]):
        code, output = run_megatfm("cancel", *words, capsys=capsys)
        assert (code, "name what to end" in output) == (2, True)


def test_a_local_run_is_signalled_to_save_and_stop(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = psutil.Process(process.pid).create_time()
    make(launcher="local", host=socket.gethostname(), pid=process.pid, started=started)
    assert run_megatfm("cancel", "runs/mine", capsys=capsys) == (0, f"told process {process.pid} to save and stop\n")
    assert process.wait(10) == -signal.SIGTERM
    code, output = run_megatfm("cancel", "runs/mine", capsys=capsys)
    assert (code, output.partition(": ")[2].partition("/mine")[2]) == (2, ": nothing runs\n")
    make("far", launcher="local", host="elsewhere", pid=process.pid, started=started)
    code, output = run_megatfm("cancel", "runs/far", capsys=capsys)
    assert (code, output.partition("/far")[2]) == (2, ": was started on elsewhere: cancel it there\n")


def test_the_process_of_another_user_is_named_with_its_owner(
    make: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    me = psutil.Process()
    make(launcher="local", host=socket.gethostname(), pid=me.pid, started=me.create_time())

    def refuse(process: psutil.Process, number: int) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "send_signal", refuse)
    code, output = run_megatfm("cancel", "runs/mine", capsys=capsys)
    assert (code, output.count("\n")) == (2, 1)
    assert f"process {me.pid} belongs to {me.username()}: only they and root can end it" in output
