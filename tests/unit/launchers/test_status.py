"""`megatfm status`, `logs` and `cancel`, on run directories as runs leave them."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatfm.launchers.attempts import Attempt, dump_attempts
from megatfm.launchers.run_jobs import BOOT_ID, describe_process
from megatfm.launchers.status import get_run_status
from tests.support.launch_jobs import FakeSlurm, MakeRun, run_megatfm

ROOT = Path(__file__).parents[3]


def write_attempts(run: Path, *codes: int | None) -> None:
    """Write `restarts.json`: an attempt of job 7 for each exit code, None for one that runs."""
    result = [
        Attempt(100.0, "7", job="7", code=code, ended=None if code is None else 101.0, reason="of a test")
        for code in codes
    ]
    (run / "restarts.json").write_text(dump_attempts(result))


def test_a_run_in_full(make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="slurm", jobs=["7", "8"])
    write_attempts(run, 1, 75, None)
    (run / "checkpoints" / "step-00000030").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "resumed", "detail": "from step-00000030", "time": 1}\n')
    fake_slurm.answer("squeue", "RUNNING|None|n[1-2]\n")
    code, output = run_megatfm("status", "runs/mine", capsys=capsys)
    assert code == 0
    assert output.splitlines() == [
        f"run         {run}", "state       RUNNING: job 7, n[1-2], 1 more in the chain", "step        40 of 100",
        "loss        4.2000", "tokens/s    1,000", "time left   2 min 00 s", "checkpoint  step 30", "restarts    2",
        "last event  resumed: from step-00000030",
    ]  # fmt: skip


def test_several_runs_in_a_table(
    make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    make("a", launcher="slurm", jobs=["7"])
    make("b", steps=0, launcher="slurm", jobs=["9"])
    (Path("runs") / "no-run").mkdir()
    fake_slurm.answer("squeue", "PENDING|Resources|\n")
    _, output = run_megatfm("status", capsys=capsys)
    heading, first, second = (line.split() for line in output.splitlines())
    assert heading == ["run", "state", "step", "loss", "tokens/s", "left", "restarts"]
    assert " ".join(first) == "a PENDING 40 of 100 4.2000 1,000 2 min 00 s job 7, Resources"
    assert second == ["b", "PENDING", "0", "of", "100", "job", "9,", "Resources"]


def test_status_as_json(make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    _, output = run_megatfm("status", "runs/mine", "--json", capsys=capsys)
    result = json.loads(output)
    assert (result["run"], result["state"], result["step"], result["steps"]) == (str(run), "RUNNING", 40, 100)
    assert result["seconds_left"] == 120.0


@pytest.mark.parametrize(("codes", "answers", "state"), [
    ((1, 0), {}, "DONE: job 7: of a test"),
    ((1, 76), {}, "NO PROGRESS: job 7: of a test"),
    ((75,), {}, "STOPPED: job 7: of a test"),
    ((2,), {}, "FAILED: job 7: of a test"),
    ((75,), {"scontrol-show": "JobId=7 JobState=CANCELLED ExitCode=0:15\n"}, "CANCELLED: job 7: ended by SIGTERM"),
    ((), {"scontrol-show": "JobId=7 JobState=NODE_FAIL ExitCode=1:0\n"}, "NODE_FAIL: job 7: exit code 1"),
    ((), {"sacct": "OUT_OF_MEMORY|0:125\n"}, "OUT_OF_MEMORY: job 7: exit code 0:125"),
    ((None,), {}, "GONE: job 7: SLURM has forgotten it"),
])  # fmt: skip
def test_after_the_job_has_left_the_queue(
    make: MakeRun, fake_slurm: FakeSlurm, codes: tuple[int | None, ...], answers: dict[str, str], state: str
) -> None:
    """squeue knows it no more; scontrol may, for some minutes, and sacct; then the run's own record tells."""
    run = make(launcher="slurm", jobs=["7"])
    write_attempts(run, *codes)
    for command in {"squeue", "scontrol-show"} - answers.keys():
        fake_slurm.fail(command, "slurm_load_jobs error: Invalid job id specified\n")
    for command, answer in answers.items():
        fake_slurm.answer(command, answer)
    result = get_run_status(run)
    assert f"{result.state.name}: {result.state.reason}" == state
    assert result.state.is_over
    assert result.seconds_left is None


@pytest.mark.parametrize(("reason", "advice"), [
    ("JobHeldUser", "it is held: `scontrol release 7` releases it"),
    ("launch failed requeued held", "a node could not start it, so SLURM holds it: `scontrol release 7`"),
    ("PartitionTimeLimit", "its time limit is above the partition's: cancel it, and"),
    ("PartitionDown", "the partition is closed"),
    ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher", "`sinfo -R` says why"),
])  # fmt: skip
def test_pending_reasons_come_with_advice(make: MakeRun, fake_slurm: FakeSlurm, reason: str, advice: str) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.answer("squeue", f"PENDING|{reason}|\n")
    assert get_run_status(run).state.reason.startswith(f"job 7, {reason}: {advice}")
    fake_slurm.answer("squeue", "PENDING|Priority|\n")
    assert get_run_status(run).state.reason == "job 7, Priority"


def test_a_death_by_the_stop_signal_counts_as_stopped(make: MakeRun, fake_slurm: FakeSlurm) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=FAILED ExitCode=138:0\n")
    result = Attempt(100.0, "7", job="7", code=138, asked=True, ended=101.0, reason="stopped by USR1")
    (run / "restarts.json").write_text(dump_attempts([result]))
    assert (get_run_status(run).state.name, get_run_status(run).state.reason) == ("STOPPED", "job 7: stopped by USR1")


def test_status_shows_array_progress(make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("made.jobs", steps=0, launcher="slurm", kind="prep", jobs=["7"], array=8)
    (run / "config.toml").unlink()
    work = run.with_name("made") / ".work"
    work.mkdir(parents=True)
    for part in ("clean.00000", "clean.00001", "clean", "encode-train.00000", "encode-train.00003"):
        (work / f"{part}.json").touch()
        os.utime(work / f"{part}.json", (1, 2 if part.startswith("encode") else 1))
    fake_slurm.answer("squeue", "RUNNING|None|n1\nRUNNING|None|n2\nPENDING|Resources|\nPENDING|Resources|\n")
    _, output = run_megatfm("status", "runs/made.jobs", capsys=capsys)
    assert "RUNNING: job 7, 2 of 8 tasks running on n1, n2; 2 waiting (Resources); 4 ended\n" in output
    assert "work        encode-train: 2 parts done\n" in output
    for part in ("dedup-0-exact_substrings.00000", "dedup-0-exact_substrings-join.00003"):
        (work / f"{part}.json").touch()
        assert get_run_status(run).work == f"{part.partition('.')[0]}: 1 parts done"
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=COMPLETED ExitCode=0:0\n")
    result = get_run_status(run)
    assert (result.state.name, "the corpus is not finished" in result.state.reason) == ("FAILED", True)
    launch_record = json.loads((run / "launch.json").read_text())
    (run / "launch.json").write_text(json.dumps({**launch_record, "corpus_url": "s3://bucket/made"}))
    assert get_run_status(run).state.name == "DONE", "a corpus at a URL leaves no prep.json here"
    (run / "launch.json").write_text(json.dumps(launch_record))
    (run.with_name("made") / "prep.json").touch()
    assert (get_run_status(run).state.name, get_run_status(run).work) == ("DONE", "the corpus is finished")


def test_a_dead_scheduler_is_no_reason_to_say_nothing(make: MakeRun, fake_slurm: FakeSlurm) -> None:
    run = make(launcher="slurm", jobs=["7"])
    fake_slurm.fail("squeue", "slurm_load_jobs error: Unable to contact slurm controller\n")
    result = get_run_status(run)
    assert (result.state.name, result.step) == ("UNKNOWN", 40)
    assert "Unable to contact" in result.state.reason


def test_a_local_run_is_known_by_its_process(make: MakeRun) -> None:
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    assert get_run_status(make("now", launcher="local", **me)).state.name == "RUNNING"
    assert get_run_status(make("reused", launcher="local", **{**me, "started": 5.0})).state.name == "FAILED"
    assert get_run_status(make("elsewhere", launcher="mpi", **{**me, "host": "n9"})).state.name == "UNKNOWN"
    ended = make("ended", launcher="local", host=socket.gethostname())
    write_attempts(ended, 75)
    assert get_run_status(ended).state.name == "STOPPED"


def test_a_run_that_was_started_by_hand_is_known_by_its_lock(make: MakeRun) -> None:
    run = make()
    assert get_run_status(run).state.name == "ENDED"
    (run / "events.jsonl").write_text('{"event": "finished", "detail": "step 100"}\n')
    assert get_run_status(run).state.name == "DONE"
    holder = {"host": socket.gethostname(), "pid": os.getpid()}
    (run / "lock").write_text(json.dumps(holder))
    assert get_run_status(run).state.name == "RUNNING"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    (run / "lock").write_text(json.dumps({**holder, "pid": process.pid}))
    assert get_run_status(run).state.name == "DONE", "its holder is dead"
    (run / "lock").write_text(json.dumps({**holder, "host": "n9"}))
    assert get_run_status(run).state.name == "RUNNING", "somebody elsewhere moves it"
    os.utime(run / "lock", (1, 1))
    assert get_run_status(run).state.name == "DONE", "nobody does"
    assert not list(run.glob(".now*"))


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_launched_run_that_is_continued_by_hand_is_known_by_its_lock(
    make: MakeRun, fake_slurm: FakeSlurm, launcher: str
) -> None:
    run = make(launcher=launcher, jobs=["7"], host=socket.gethostname())
    fake_slurm.answer("scontrol-show", "JobId=7 JobState=FAILED ExitCode=1:0\n")
    write_attempts(run, 75)
    holder = {"host": socket.gethostname(), "pid": os.getpid()}
    for job, state in ((None, "RUNNING"), ("7", "STOPPED"), ("8", "RUNNING")):
        (run / "lock").write_text(json.dumps({**holder, "job": job}))
        assert get_run_status(run).state.name == state, job
    (run / "lock").write_text("")
    for event, seconds, state in (
        ("stopped", 100.5, "STOPPED"),
        ("finished", 500.0, "DONE"),
        ("failed", 600.0, "ENDED"),
    ):
        (run / "events.jsonl").write_text(json.dumps({"event": event, "detail": "", "time": seconds}) + "\n")
        assert get_run_status(run).state.name == state, event


def test_a_clock_that_is_set_leaves_a_run_its_process(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts a process's start from the machine's, and that from the clock."""
    run = make(launcher="local", host=socket.gethostname(), **describe_process(psutil.Process()))
    booted = psutil.boot_time()
    for step in (-3600.0, 0.0, 3600.0):
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda step=step: booted + step)
        assert psutil.boot_time() == booted + step
        assert get_run_status(run).state.name == "RUNNING", step
    (run / "launch.json").write_text((run / "launch.json").read_text().replace(BOOT_ID.read_text().strip(), "earlier"))
    assert get_run_status(run).state.name != "RUNNING", "a process of that pid, as long after an earlier start"


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_copy_of_a_run_that_trains_is_not_the_one_that_trains(
    make: MakeRun, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    """Cancelling the copy, or launching it, leaves the other run alone; a run that was moved is itself."""
    run = make(launcher=launcher, jobs=["7"], evaluations=["8"])
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        facts = {"host": socket.gethostname(), "pid": process.pid, "run": str(run)}
        facts["started"] = psutil.Process(process.pid).create_time()
        record = json.loads((run / "launch.json").read_text())
        (run / "launch.json").write_text(json.dumps({**record, **facts}))
        (run / "lock").write_text(json.dumps(facts))
        (run / "events.jsonl").write_text('{"event": "resumed", "detail": "from step-00000030", "time": 1}\n')
        fake_slurm.answer("squeue", "RUNNING|None|n1\n")
        copy = Path(shutil.copytree(run, run.with_name("copy")))
        assert get_run_status(run).state.name == "RUNNING"
        assert get_run_status(copy).state.name == "ENDED"
        assert run_megatfm("cancel", str(copy), capsys=capsys) == (2, f"error: {copy}: nothing runs\n")
        assert "scancel" not in " ".join(fake_slurm.calls)
        assert process.poll() is None
        shutil.rmtree(run)
        assert get_run_status(copy).state.name == "RUNNING", "moved"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("events", "state"), [
    (["started", "finished"], "DONE"),
    (["started", "finished early"], "DONE"),
    (["resumed", "finished", "slow", "refused", "refused"], "DONE"),
    (["resumed", "stopped", "refused"], "STOPPED"),
    (["started", "failed", "refused"], "ENDED"),
    (["finished", "resumed"], "ENDED"),
])  # fmt: skip
def test_the_state_of_a_run_is_that_of_its_last_start_that_was_not_refused(
    make: MakeRun, events: list[str], state: str
) -> None:
    run, launched = make(), make("launched", launcher="local", host=socket.gethostname())
    for folder in (run, launched):
        lines = [json.dumps({"event": event, "detail": f"{n}"}) for n, event in enumerate(events)]
        (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert get_run_status(run).state.name == state
    assert get_run_status(run).event == f"{events[-1]}: {len(events) - 1}", "the last event is shown"
    assert get_run_status(launched).state.name == state.replace("ENDED", "FAILED")


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "metrics.jsonl", "launch.json"])
def test_a_fifo_in_a_file_s_place_is_not_waited_for(make: MakeRun, name: str) -> None:
    run = make()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert get_run_status(run).state.name == "ENDED"


def test_a_dead_run_in_a_directory_that_can_not_be_written_to(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    (run / "lock").write_text(json.dumps({"host": "n9", "pid": 1}))
    assert get_run_status(run).state.name == "RUNNING"
    os.utime(run / "lock", (time.time() - 100,) * 2)
    assert get_run_status(run).state.name == "ENDED"


@pytest.mark.parametrize("pid", ["a word", None, [1], 1e400, -5])
def test_status_survives_badly_written_files(make: MakeRun, pid: object, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(launcher="local", host=socket.gethostname(), pid=pid, started="long ago", jobs=7, array="x")
    (run / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "time": "now"}))
    record = {"step": pid, "loss": None, "step_seconds": "x", "tokens_per_second": [1]}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "events.jsonl").write_text('{"event": "finished", "detail": 3, "time": "then"}\n')
    for text in ('{"a": 1}', "[1]", "{", '[{"time": "x", "submission": 7}]'):
        (run / "restarts.json").write_text(text)
        code, output = run_megatfm("status", "runs/mine", capsys=capsys)
        assert (code, "state       DONE" in output, "restarts.json: ignored" in output) == (0, True, True)
    launched = json.loads((run / "launch.json").read_text())
    for launcher in ("slurm", "by hand"):
        (run / "launch.json").write_text(json.dumps({**launched, "launcher": launcher}))
        assert run_megatfm("status", "runs/mine", capsys=capsys)[0] == 0


@pytest.mark.parametrize("number", ["NaN", "inf", 1e400, 1e30], ids=str)
def test_status_survives_numbers_without_a_bound(
    make: MakeRun, number: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts and times of damaged files; a loss alone may be NaN."""
    run = make()
    (run / "config.toml").write_text("[train]\nsteps = inf\n")
    (run / "metrics.jsonl").write_text(json.dumps({"step": number, "step_seconds": number}) + "\n")
    (run / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": number}))
    assert run_megatfm("status", "runs/mine", capsys=capsys)[0] == 0
    (run / "lock").unlink()
    for launcher in ("slurm", "local"):
        record = {"launcher": launcher, "host": socket.gethostname(), "kind": "prep", "jobs": ["7"]}
        numbers = dict.fromkeys(("pid", "array", "time", "exit_code"), number)
        (run / "launch.json").write_text(json.dumps(record | numbers))
        for attempts in ([], [{"time": 1.0, "submission": "7", "job": "7", "code": 0, "ended": number}]):
            (run / "restarts.json").write_text(json.dumps(attempts))
            assert run_megatfm("status", "runs/mine", capsys=capsys)[0] == 0


def test_a_number_of_a_process_that_is_used_again_is_no_run(make: MakeRun) -> None:
    run = make()
    began = psutil.Process().create_time()
    for started, word in ((began + 5, "RUNNING"), (began - 5, "ENDED")):
        (run / "lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": started}))
        assert get_run_status(run).state.name == word


def test_a_loss_that_is_no_number_is_shown(make: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": "NaN"}\n{"step": 2')
    _, output = run_megatfm("status", "runs/mine", capsys=capsys)
    assert "loss        nan" in output
    assert "step        1 of 100" in output


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_a_folder_that_is_no_run_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run_megatfm(command, "nothing", capsys=capsys)
    assert code == 2
    assert output == "error: nothing: not a run directory: give one such as runs/quickstart\n"


def test_watching_and_the_report_of_a_run_on_a_cpu_need_no_torch(make: MakeRun) -> None:
    run = make()
    program = (
        "import sys; from megatfm import cli\n"
        "for command in ('status', 'logs', 'cancel', 'report'):\n"
        "    try: cli.main([command, 'runs/mine'])\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
    assert (run / "report.html").exists()
