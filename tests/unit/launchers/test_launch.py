"""`megatfm launch`: what each launcher renders and runs, with small programs in the place of what it starts."""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatfm.errors import EXIT_FAILED, EXIT_USAGE, LOCKED, LockedError, UsageError
from megatfm.files import NewPaths
from megatfm.launchers.attempts import Attempt, dump_attempts
from megatfm.launchers.cli import add_arguments, main
from megatfm.launchers.local import LocalLauncher, MpiLauncher
from megatfm.launchers.record import read_json_if_valid, tail_jsonl
from megatfm.launchers.status import get_run_status
from tests.support.launch_jobs import make_job, run_launch

ROOT = Path(__file__).resolve().parents[3]
FAKE_RANK = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PMIX_RANK")
said = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
os.write(1, (json.dumps(said) + "\\n").encode())  # in one piece, also under mpirun
name = next((word[5:] for word in sys.argv if word.startswith("name=")), "quickstart")
"""
FINISH = """
if sys.argv[1] == "train":
    file = open(f"runs/{name}/events.jsonl", "a")
    file.write(json.dumps({"event": "finished", "step": 10**6}) + "\\n")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpora: Path) -> Path:
    """A folder with corpora to launch from, and a program that tells what it was given in the place of training."""
    program = tmp_path / "fake_rank.py"
    program.write_text(FAKE_RANK + FINISH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("megatfm.launchers.job.MEGATFM_COMMAND", (sys.executable, str(program), "train"))
    return tmp_path


# ------------------------------------------------------------------------------------------------------- local


@pytest.mark.parametrize(("code", "expected"), [(EXIT_USAGE, "old"), (EXIT_FAILED, "new")])
def test_a_refused_run_has_the_config_that_was_replaced(folder: Path, code: int, expected: str) -> None:
    run, new_paths = folder / "runs" / "quickstart", NewPaths()
    run.mkdir(parents=True)
    (run / "from.toml").write_text("old")
    new_paths.will_replace(run / "from.toml")
    (run / "from.toml").write_text("new")
    assert LocalLauncher().run(make_job(), lambda is_new: code, new_paths) == code
    assert (run / "from.toml").read_text() == expected


REFUSED_AFTER_A_STEP = """
import json, sys
with open("runs/quickstart/events.jsonl", "a") as file:
    file.write(json.dumps({"event": "resumed"}) + "\\n" + json.dumps({"event": "failed"}) + "\\n")
sys.exit(2)
"""


@pytest.mark.parametrize(("program", "state"), [("import sys; sys.exit(2)", "DONE"), (REFUSED_AFTER_A_STEP, "FAILED")])
def test_a_refused_start_leaves_the_state_of_a_finished_run(folder: Path, program: str, state: str) -> None:
    assert run_launch("--nproc", "1") == 0
    run = folder / "runs" / "quickstart"
    records = {name: (run / name).read_bytes() for name in ("launch.json", "restarts.json")}
    (folder / "fake_rank.py").write_text(program)
    assert run_launch("--nproc", "1", "--max-restarts", "2") == 2
    assert get_run_status(run).state.name == state
    assert (records == {name: (run / name).read_bytes() for name in records}) == (state == "DONE")


def test_local_ranks_get_the_variables_of_torchrun(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_launch("train.steps=77", "name=my-run", "--nproc", "2") == 0
    status = json.loads(capfd.readouterr().out)
    logged = json.loads((folder / "runs" / "my-run" / "logs" / "rank-1.log").read_text())
    assert status["arguments"] == logged["arguments"] == ["train", "quickstart", "train.steps=77", "name=my-run"]
    facts = status["RANK"], status["LOCAL_RANK"], status["WORLD_SIZE"], status["MASTER_ADDR"]
    assert facts == ("0", "0", "2", "127.0.0.1")
    assert (logged["RANK"], logged["LOCAL_RANK"], logged["MASTER_PORT"]) == ("1", "1", status["MASTER_PORT"])
    assert status["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


@pytest.mark.parametrize(("own_count", "expected"), [("", "3"), ("5", "5")], ids=["seven cores", "the user's count"])
def test_threads_without_affinity_are_of_all_cores_and_the_user_s_count_wins(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_count: str, expected: str
) -> None:
    """macOS has no os.sched_getaffinity."""
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    if own_count:
        monkeypatch.setenv("OMP_NUM_THREADS", own_count)
    assert run_launch("--nproc", "2") == 0
    assert json.loads(capfd.readouterr().out)["OMP_NUM_THREADS"] == expected


def test_the_dry_run_of_a_local_launch_is_a_shell_script_that_does_the_same(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_launch("--nproc", "2", "--dry-run", "name=run", "data.train=it's $(touch owned)") == 0
    assert not (folder / "runs").exists(), "a dry run touches nothing"
    script = capfd.readouterr().out
    (folder / "runs" / "run" / "logs").mkdir(parents=True)
    completed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(completed.stdout)["arguments"][-1] == "data.train=it's $(touch owned)"
    assert json.loads((folder / "runs" / "run" / "logs" / "rank-1.log").read_text())["RANK"] == "1"
    assert not (folder / "owned").exists()


def test_a_failure_is_tried_again_as_often_as_was_asked(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "fake_rank.py").write_text("import sys; open('starts', 'a').write('x'); sys.exit(3)")
    assert run_launch("--nproc", "1") == 1
    assert (folder / "starts").read_text() == "x"
    assert run_launch("--nproc", "1", "--max-restarts", "2") == 76
    assert (folder / "starts").read_text() == "xxxx", "three of the second launch"
    assert "no progress: 3 attempts in a row failed without a new checkpoint" in capfd.readouterr().err


def test_exit_codes_that_a_restart_can_not_help_end_the_job(folder: Path) -> None:
    assert run_launch("--nproc", "1", "--max-restarts", "2") == 0
    for code in (0, 2, 75, 76, 77):
        (folder / "starts").write_text("")
        if code == 2:
            (folder / "runs" / "quickstart" / "events.jsonl").unlink()
        (folder / "fake_rank.py").write_text(f"import sys; open('starts', 'a').write('x'); sys.exit({code})")
        assert run_launch("--nproc", "1", "--max-restarts", "2") == code
        assert (folder / "starts").read_text() == "x"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_told_to_stop_and_fails_is_not_started_again(folder: Path, signum: signal.Signals) -> None:
    """By Ctrl-C or `megatfm cancel`, because it hangs; the hang then ends it with an error."""
    (folder / "fake_rank.py").write_text(
        f"import os, signal, sys, time; open('starts', 'a').write('x'); signal.signal({int(signum)}, signal.SIG_IGN)\n"
        f"os.kill(os.getppid(), {int(signum)}); time.sleep(0.2); sys.exit(3)"
    )
    assert run_launch("--nproc", "1", "--max-restarts", "2") == EXIT_FAILED
    assert (folder / "starts").read_text() == "x"
    assert get_run_status(folder / "runs" / "quickstart").state.name == "STOPPED"


RUNS_ELSEWHERE = """
import json, sys
event = open("runs/quickstart/events.jsonl", "a").write('{"event": "resumed", "detail": "of the other run"}\\n')
BEGUN = False
if BEGUN:
    open("runs/quickstart/launch.json", "w").write('{"launcher": "local", "pid": 1, "host": "elsewhere"}')
sys.exit(77)
"""


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "since"])
def test_a_launch_beside_another_one_leaves_its_records(folder: Path, has_begun: bool) -> None:
    """On another machine, or by hand; it may begin while this one does."""
    run = folder / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "launch.json").write_text('{"launcher": "local", "pid": 7, "host": "elsewhere"}')
    earlier = dump_attempts([Attempt(1.0, "of another")])
    (run / "restarts.json").write_text(earlier)
    (folder / "fake_rank.py").write_text(RUNS_ELSEWHERE.replace("BEGUN = False", f"BEGUN = {has_begun}"))
    assert run_launch("--nproc", "1", "--max-restarts", "2") == LOCKED
    assert json.loads((run / "launch.json").read_text())["pid"] == (1 if has_begun else 7)
    assert (run / "restarts.json").read_text() == earlier


def test_a_run_that_is_stopped_after_its_last_step_is_done(folder: Path) -> None:
    (folder / "fake_rank.py").write_text(f"{FAKE_RANK}{FINISH}sys.exit(75)")
    assert run_launch("--nproc", "1") == 0
    assert get_run_status(folder / "runs" / "quickstart").state.name == "DONE"


def test_a_run_that_left_with_zero_unfinished_is_tried_again(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "fake_rank.py").write_text("import sys; open('starts', 'a').write('x')")
    assert run_launch("--nproc", "1") == 1
    assert "exit code 0, but events.jsonl has no `finished` event" in capfd.readouterr().err
    assert run_launch("--nproc", "1", "--max-restarts", "1") == 76
    assert (folder / "starts").read_text() == "xxx"


def test_a_run_that_is_under_way_is_not_started_beside(folder: Path) -> None:
    note = {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}
    (folder / "runs" / "quickstart").mkdir(parents=True)
    (folder / "runs" / "quickstart" / "launch.json").write_text(json.dumps(note))
    with pytest.raises(LockedError, match=f"process {os.getpid()} runs this already"):
        run_launch("--nproc", "1")


def test_workers_of_a_preparation_get_their_parts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    add_arguments(parser)
    (folder / "texts").mkdir()
    words = ["quickstart-data", "read.folder=texts", "out=made", "--prep", "--nproc", "2"]
    assert main(parser.parse_intermixed_args(words)) == 0
    status = json.loads(capfd.readouterr().out)
    logged = json.loads((folder / "made.jobs" / "logs" / "worker-2.log").read_text())
    assert status["arguments"] == [
        "prep", "quickstart-data", "read.folder=texts", "out=made", "--part", "1/2",
    ]  # fmt: skip
    assert logged["arguments"][-1] == "2/2"


@pytest.mark.parametrize(("code", "state"), [(0, "DONE"), (75, "STOPPED"), (1, "FAILED")])
def test_a_preparation_for_a_url_has_its_run_directory_beside_the_scratch_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], code: int, state: str
) -> None:
    """A URL is no path; the corpus is made below `scratch`, and leaves nothing there once it is uploaded."""
    (folder / "texts").mkdir()
    with open(folder / "fake_rank.py", "a") as program:
        program.write(f"sys.exit({code})\n")
    words = ["read.folder=texts", "out=s3://bucket/my/corpus", "scratch=work", "--prep"]
    assert run_launch(*words, "--slurm", "--dry-run", config="quickstart-data") == 0
    assert run_launch(*words, "--nproc", "1", config="quickstart-data") == code
    (run,) = (folder / "work").iterdir()
    assert run.name.startswith("s3_bucket_my_corpus-")
    assert run.suffix == ".jobs"
    assert f"#SBATCH --output={run}/logs/slurm-%A_%a.log" in capsys.readouterr().out
    assert not (folder / "s3:").exists()
    assert get_run_status(run).state.name == state
    stage = run.with_suffix("") / ".work" / "0123" / "clean.00000.json"
    stage.parent.mkdir(parents=True)
    stage.touch()
    assert get_run_status(run).work == "clean: 1 parts done"


@pytest.mark.parametrize(("words", "reason"), [
    (["--nproc", "2", "train.step=1"], r"train\.step: unknown key"),
    (["--nproc", "3"], r"the run does not fit 3 processes: train\.global_batch = 16 .* would fit on 2 processes"),
    (["--nproc", "2", "train.micro_batch=16"], r"the run does not fit 2 processes: .* would fit on 1 process$"),
    (["--mpi", "2", "parallel.tp=3"], "parallel.tp = 3 does not divide"),
    (["--nproc", "2", "data.train=nowhere"], "data.train = '.*/nowhere': there is no such file or folder"),
    (["--nproc", "2", "parallel.engine=deepspeed", "optimizer.name=adamw", "deepspeed.json_file=gone.json"],
     "deepspeed.json_file = '.*/gone.json': can't read it: No such file"),
    (["--nproc", "2", "data.tokenizer=x"], "data.tokenizer = '.*/x': there is no such file or folder"),
])  # fmt: skip
def test_impossible_launches_start_nothing(folder: Path, words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_launch(*words)
    assert not (folder / "runs").exists()


def test_a_link_in_the_place_of_a_checkpoint_is_refused_before_anything_starts(folder: Path) -> None:
    checkpoints = folder / "runs" / "quickstart" / "checkpoints"
    (checkpoints / "step-00000002").mkdir(parents=True)
    (checkpoints / "step-00000004").symlink_to(folder / "elsewhere")
    with pytest.raises(UsageError, match="step-00000004 is a symbolic link: put the checkpoint itself there"):
        run_launch("--nproc", "1")
    assert sorted(path.name for path in checkpoints.parent.iterdir()) == ["checkpoints"]


REFUSED = """
import os, sys
if os.environ.get("MEGATFM_NEW_RUN") != os.path.abspath("runs/quickstart"):
    open("not-new", "a").write("x")
print("error: no such thing", file=sys.stderr)
sys.exit(2)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_launch_that_its_ranks_refuse_leaves_nothing(folder: Path, count: int) -> None:
    before = sorted(folder.rglob("*"))
    (folder / "fake_rank.py").write_text(REFUSED)
    assert run_launch("--nproc", str(count)) == 2
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("file", ["config.toml", "logs/rank-0.log"])
def test_a_run_that_began_keeps_its_files_when_it_is_refused(folder: Path, file: str) -> None:
    """Ranks remove their own files where a run is refused before its first step: one that is left is of later."""
    (folder / "fake_rank.py").write_text(f"open('runs/quickstart/{file}', 'w'); import sys; sys.exit(2)")
    (folder / "runs/quickstart/logs").mkdir(parents=True) if "/" in file else None
    assert run_launch("--nproc", "2") == 2
    names = {path.name for path in (folder / "runs/quickstart").rglob("*") if path.is_file()}
    assert names == {Path(file).name, "launch.json", "restarts.json", "rank-1.log"}


@pytest.mark.parametrize("first_attempt", [False, True], ids=["it was there", "a first attempt made it"])
def test_ranks_of_a_folder_that_is_not_new_are_not_told_that_it_is(folder: Path, first_attempt: bool) -> None:
    attempt = (
        "import os\nopen('runs/quickstart/plan.txt', 'w')\nif 'MEGATFM_NEW_RUN' in os.environ: raise SystemExit(3)\n"
    )
    if not first_attempt:
        (folder / "runs/quickstart").mkdir(parents=True)
    (folder / "fake_rank.py").write_text(attempt * first_attempt + REFUSED)
    assert run_launch("--nproc", "1", "--max-restarts", "2") == 2
    assert (folder / "not-new").read_text() == "x"
    assert (folder / "runs/quickstart/restarts.json").exists()


# --------------------------------------------------------------------------------------------------------- mpi


def test_mpi_without_mpirun_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="mpirun is not on PATH: install openmpi-bin"):
        run_launch("--mpi", "2")


def test_mpi_starts_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(["which", "mpirun"], stdout=subprocess.DEVNULL).returncode:
        pytest.skip("needs Open MPI: run `make system-deps`")
    assert run_launch("--mpi", "2", "train.steps=77") == 0
    output = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert sorted(line["PMIX_RANK"] for line in output) == ["0", "1"]
    assert {tuple(line["arguments"]) for line in output} == {("train", "quickstart", "train.steps=77")}


def test_the_dry_run_of_mpi_is_its_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_launch("--mpi", "2", "--dry-run") == 0
    words = shlex.split(capfd.readouterr().out)
    assert words[words.index("mpirun") :][:3] == ["mpirun", "-n", "2"]
    assert words[-2:] == ["train", "quickstart"]
    assert "OMPI_MCA_rmaps_base_oversubscribe=1" in words


# ------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(("words", "reason"), [
    ([], "say where to run"),
    (["--nproc", "2", "--mpi", "3"], "choose one: --nproc 2 without mpirun, --mpi 3 with it"),
    (["--slurm", "--mpi", "2"], "by srun: --slurm --nproc 2 for 2 on each node"),
    (["--nproc", "2", "--nodes", "2", "--gpus-per-node", "1"], "--nodes, --gpus-per-node: only with --slurm"),
    (["--nproc", "0"], "number of processes is 0"),
    (["--slurm", "--nodes", "-1"], "number of nodes is -1"),
    (["--slurm", "--nproc", "2", "--gpus-per-node", "8"], "2 processes on 8 GPUs"),
    (["--slurm", "--gpus-per-node", "-1"], "--gpus-per-node -1"),
    (["--slurm", "--time", "tomorrow"], "--time 'tomorrow'"),
    (["--slurm", "--nodes", "4-2"], "--nodes 4-2: the smaller number comes first"),
    (["--slurm", "--nodes", "a few"], "--nodes 'a few': give a number"),
    (["--slurm", "--chain", "0"], "number of links of the chain is 0"),
    (["--slurm", "--array", "4"], "--array: not for training"),
    (["--slurm", "--start", "ssh"], "start = 'ssh'"),
    (["--slurm", "--max-restarts", "-1"], "--max-restarts -1"),
    (["--nproc", "2", "--chain", "2"], "--chain: only with --slurm"),
    (["--nproc", "2", "--evaluate"], "quickstart: not a run directory"),
])  # fmt: skip
def test_flags_that_do_not_go_together(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_launch(*words, "--dry-run")


def test_a_run_directory_that_is_no_text_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = folder / os.fsdecode(b"\xff")
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(UsageError, match="a run directory's path must be UTF-8"):
        run_launch("--nproc", "1")


def test_json_that_is_nested_too_deep_counts_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text("[" * 100_000)
    assert read_json_if_valid(tmp_path / "launch.json", "nothing") == "nothing"
    assert tail_jsonl(tmp_path / "launch.json", 1) == []


def test_processes_of_a_job() -> None:
    assert make_job(min_nodes=2, nproc_per_node=4).world_size == 8
    script = LocalLauncher().render(make_job(nproc_per_node=3))["launch.sh"]
    assert script.count("WORLD_SIZE=3") == 6  # and LOCAL_WORLD_SIZE
    assert "mpirun -n 5" in MpiLauncher().render(make_job(nproc_per_node=5))["launch.sh"]


def test_launching_needs_no_torch_and_only_slurm_needs_templates() -> None:
    code = "import sys, launchers; sys.exit('torch' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
