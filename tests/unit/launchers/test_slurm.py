"""SLURM jobs: what is submitted, what is written down of it, and jobs beside others."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatfm.config import load_config, load_section, to_toml
from megatfm.config.prep import PrepConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import RunHandle, scheduler, snapshot, submit
from megatfm.launchers.run_jobs import cancel_run, read_job_ids
from megatfm.launchers.status import get_run_status
from tests.support.documentation import ROOT, list_code_blocks
from tests.support.launch_jobs import CLUSTER_FLAGS, FakeSlurm, run_launch

pytestmark = pytest.mark.usefixtures("folder")
FITS = ["train.global_batch=64", "train.micro_batch=1"]


@pytest.fixture
def fake_slurm(fake_slurm: FakeSlurm) -> FakeSlurm:
    """Its jobs have the number 12."""
    fake_slurm.answer("sbatch", "12\n")
    return fake_slurm


@pytest.fixture
def mine(folder: Path) -> Path:
    """The folder of a run `mine` with a config, to evaluate."""
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    preset = (ROOT / "megatfm" / "presets" / "quickstart.toml").read_text()
    mine = preset.replace('"quickstart"', '"mine"', 1).replace('"corpora/', f'"{folder}/corpora/')
    (run / "config.toml").write_text(mine)
    return run


def test_the_dry_run_prints_the_script_and_the_config(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run_launch(*CLUSTER_FLAGS, "--partition", "gpu", "--dry-run", "train.steps=77", *FITS) == 0
    output = capsys.readouterr()
    for line in (
        "--job-name=big-run", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=24:00:00",
        "--partition=gpu",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in output.out
    assert "\nsteps = 77\n" in output.out
    assert output.err == ""
    assert not (folder / "runs").exists()


def test_commands_for_a_folder_with_blanks_can_be_pasted(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "4711\n")
    assert run_launch(*CLUSTER_FLAGS, "run_dir=my runs/a", *FITS) == 0
    commands = [
        line.split("    (")[0].split()[1:] for line in capsys.readouterr().out.splitlines() if "megatfm" in line
    ]
    assert [shlex.split(" ".join(words))[-1] for words in commands] == [str(folder / "my runs" / "a")] * 3


def test_submit_writes_the_files_and_says_where_to_look(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "4711;cluster\n")
    assert run_launch(*CLUSTER_FLAGS, "train.steps=77", *FITS) == 0
    output = capsys.readouterr().out
    assert output.startswith("job 4711 is queued: 32 processes on 4 nodes\n")
    run = folder / "runs" / "quickstart"
    for part in (f"{run}/logs/slurm-4711.log", f"megatfm status {run}", f"megatfm cancel {run}"):
        assert part in output
    assert fake_slurm.calls[-1] == f"sbatch --parsable {run}/slurm/pretrain.sbatch"
    code = snapshot.collect_code([]).dir_name
    assert sorted(path.name for path in (run / "slurm").iterdir()) == [code, "config.toml", "pretrain.sbatch"]
    assert f"PYTHONPATH={run}/slurm/{code}$" in (run / "slurm" / "pretrain.sbatch").read_text()
    queued = load_config(run / "slurm" / "config.toml")
    assert (queued.train.steps, queued.run_dir) == (77, str(run))
    assert (run / "logs").is_dir()
    note = json.loads((run / "launch.json").read_text())
    assert (note["launcher"], note["jobs"], note["code"]) == ("slurm", ["4711"], code)


def test_chains_are_submitted_by_link(folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bin").mkdir()
    sbatch = fake_slurm.folder / "bin" / "sbatch"
    sbatch.write_text('#!/bin/bash\necho "$*" >>"$SLURM_FAKE/n"\nwc -l <"$SLURM_FAKE/n"\n')
    assert run_launch("--slurm", "--chain", "3", "--dependency", "afterok:4711") == 0
    assert capsys.readouterr().out.startswith("jobs 1, 2, 3 are queued")
    assert json.loads((folder / "runs/quickstart/launch.json").read_text())["jobs"] == ["1", "2", "3"]
    script = folder / "runs/quickstart/slurm/pretrain.sbatch"
    assert "#SBATCH --dependency=afterok:4711\n" in script.read_text()
    after = [f"--dependency=afterok:4711,afterany:{number} " for number in (1, 2)]
    requested = (fake_slurm.folder / "n").read_text()
    assert requested == "".join(f"--parsable {option}{script}\n" for option in ["", *after]), "of no other run's jobs"


def test_variables_of_the_shell_do_not_overrule_the_script(
    folder: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TIMELIMIT": "5", "NO_REQUEUE": "1", "ACCOUNT": "theirs", "PARTITION": "low"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    sbatch = fake_slurm.folder / "bin" / "sbatch"
    sbatch.write_text('#!/bin/bash\nenv >"$SLURM_FAKE/env"\necho 7\n')
    assert run_launch("--slurm", "--account", "mine") == 0
    assert "SBATCH_" not in (fake_slurm.folder / "env").read_text()
    assert "PATH=" in (fake_slurm.folder / "env").read_text()
    assert "note: SBATCH_NO_REQUEUE, SBATCH_TIMELIMIT: not passed on to sbatch" in capsys.readouterr().err
    script = (folder / "runs/quickstart/slurm/pretrain.sbatch").read_text()
    assert "#SBATCH --account=mine\n" in script
    assert "#SBATCH --partition=low\n" in script, "what a site's shell sets for all jobs is still heard"


@pytest.mark.usefixtures("fake_slurm")
def test_a_single_job_is_warned_about_where_none_is_requeued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "site.toml").write_text("requeue = false\n")
    run_launch("--slurm", "--site", "site.toml")
    assert "--chain N queues N jobs" in capsys.readouterr().out
    run_launch("--slurm", "--site", "site.toml", "--chain", "2")
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("state", [
    *("PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD", "STOPPED", "POWER_UP_NODE", "EXPEDITING", "UPDATE_DB"),
    *("LAUNCH_FAILED", "RECONFIG_FAIL", "A_WORD_OF_TOMORROW"),
])  # fmt: skip
def test_a_run_whose_job_waits_or_runs_is_not_submitted_again(folder: Path, fake_slurm: FakeSlurm, state: str) -> None:
    """The record knows one submission: status and cancel would forget the first."""
    assert run_launch("--slurm", "--chain", "2") == 0
    fake_slurm.answer("squeue", f"{state}|Resources|\n")
    for words in (("--slurm",), ("--slurm", "train.steps=700"), ("--nproc", "1")):
        with pytest.raises(UsageError, match=r"job 12 is of this run, and .*: wait for it, or end it with `meg"):
            run_launch(*words)
    assert sum(call.startswith("sbatch") for call in fake_slurm.calls) == 2
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=12 JobState=COMPLETED ExitCode=0:0\n")
    assert run_launch("--slurm", "train.steps=700") == 0


@pytest.mark.parametrize("fails", ["squeue", "scontrol-show", "no SLURM here"])
def test_a_run_whose_job_state_is_unknown_is_not_submitted_again(
    folder: Path, fake_slurm: FakeSlurm, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_launch("--slurm", "--chain", "2") == 0
    run = folder / "runs" / "quickstart"
    note = (run / "launch.json").read_text()
    if fails == "no SLURM here":
        monkeypatch.setenv("PATH", str(folder))
    elif fails == "scontrol-show":
        fake_slurm.fail("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    fake_slurm.fail(fails, "slurm_load_jobs error: Unable to contact slurm controller\n")
    for words in (("--slurm",), ("--nproc", "1")):
        with pytest.raises(UsageError, match=r"it is unknown whether job 12 still waits or runs \(.*delete .*json$"):
            run_launch(*words)
    assert (run / "launch.json").read_text() == note
    assert (get_run_status(run).state.name, get_run_status(run).state.is_over) == ("UNKNOWN", False)
    if fails != "no SLURM here":
        assert cancel_run(run) == "cancelled job 12", "whatever squeue says"


@pytest.mark.usefixtures("fake_slurm")
def test_an_evaluation_leaves_the_config_of_a_waiting_job_alone(mine: Path) -> None:
    run_launch("--slurm", "name=mine", "train.steps=900")
    queued = (mine / "slurm/config.toml").read_text()
    run_launch("--slurm", "--evaluate", "--nproc", "2", config="runs/mine")
    assert (mine / "slurm/config.toml").read_text() == queued
    assert "steps = 900\n" in queued


def test_evaluations_join_the_record(mine: Path, fake_slurm: FakeSlurm) -> None:
    run_launch("--slurm", "name=mine")
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    fake_slurm.answer("sbatch", "13\n")
    evaluate = ("--slurm", "--evaluate", "--nproc", "2")
    run_launch(*evaluate, config="runs/mine")
    note = json.loads((mine / "launch.json").read_text())
    assert (note["kind"], note["jobs"], note["evaluations"]) == ("train", ["12"], ["13"])
    assert get_run_status(mine).work == "evaluation in job 13: RUNNING"
    with pytest.raises(UsageError, match=r"job 13 evaluates this run, and runs: .* `megatfm cancel 13`$"):
        run_launch(*evaluate, config="runs/mine")
    assert cancel_run(mine) == "cancelled jobs 12, 13"
    assert fake_slurm.calls[-1] == "scancel 12 13"


def test_an_evaluation_runs_plugins_only_where_trusted(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "config.toml").write_text(to_toml(load_config("quickstart", ["plugins=this"])))
    for where in (["--nproc", "1"], ["--slurm"]):
        with pytest.raises(UsageError, match=r"names plugins, whose code would run: this: .*--trust-plugins"):
            run_launch("--evaluate", *where, config="runs/mine")
        assert run_launch("--evaluate", "--trust-plugins", "--dry-run", *where, config="runs/mine") == 0
        assert re.search(r"evaluate \S*runs/mine --trust-plugins", capsys.readouterr().out)
    with pytest.raises(UsageError, match="--trust-plugins: not for training"):
        run_launch("--trust-plugins", "--nproc", "1")


@pytest.mark.usefixtures("fake_slurm")
def test_an_evaluation_on_this_machine_does_not_change_the_record(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_launch("--slurm", "name=mine")
    before = (mine / "launch.json").read_text()
    monkeypatch.setattr("megatfm.launchers.job.MEGATFM_COMMAND", ("true", "-m", "megatfm", "train"))
    assert run_launch("--evaluate", "--nproc", "1", config="runs/mine") == 0
    assert (mine / "launch.json").read_text() == before


@pytest.mark.usefixtures("fake_slurm")
def test_a_prep_and_an_evaluation_are_submitted(folder: Path, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "texts").mkdir()
    run_launch("--slurm", "--prep", "--array", "4", "read.folder=texts", "out=made", config="quickstart-data")
    assert capsys.readouterr().out.startswith("job 12 is queued: 4 tasks\n")
    queued = load_section(PrepConfig, folder / "made.jobs" / "slurm" / "config.toml")
    assert (queued.out, queued.read.folder) == (str(folder / "made"), str(folder / "texts"))
    assert not (folder / "made").exists(), "prep refuses a folder with what it didn't make"
    run_launch("--slurm", "name=mine")
    run_launch("--slurm", "--evaluate", "--nproc", "2", config="runs/mine")
    assert "-m megatfm evaluate" in (mine / "slurm/evaluate.sbatch").read_text()


@pytest.mark.usefixtures("fake_slurm")
def test_the_queued_config_extends_nothing(folder: Path) -> None:
    (folder / "mine.toml").write_text('extends = "quickstart"\nname = "mine"\n[data]\nvalidation = {}\n')
    run_launch("--slurm", "data.corpus=corpora/quickstart", config="mine.toml")
    queued = folder / "runs" / "mine" / "slurm" / "config.toml"
    assert "extends =" not in queued.read_text()
    assert load_config(queued).train == load_config("quickstart").train


def test_a_site_s_greeting_may_precede_the_job_s_number(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "Welcome to 3 nodes\n--> checked: ok\n\n12;main\n")
    run_launch("--slurm")
    assert capsys.readouterr().out.startswith("job 12 is queued")
    fake_slurm.answer("sbatch", "Submitted\n")
    with pytest.raises(MegatfmError, match=r"^sbatch took .*, but .* \('Submitted'\): look for the job by squeue$"):
        run_launch("--slurm", "name=other")


def test_a_refusal_of_sbatch_is_one_line(folder: Path, fake_slurm: FakeSlurm) -> None:
    """And nothing is left of a run that was not there before."""
    fake_slurm.fail("sbatch", "sbatch: error: no such\nsbatch: error: partition\n")
    with pytest.raises(MegatfmError, match=r"^sbatch refused .*/pretrain\.sbatch: .*no such sbatch: error: partition$"):
        run_launch("--slurm")
    assert not (folder / "runs").exists()
    (folder / "runs/quickstart").mkdir(parents=True)
    with pytest.raises(MegatfmError):
        run_launch("--slurm")
    assert (folder / "runs/quickstart/slurm/pretrain.sbatch").exists(), "its folder was there before"


def test_a_job_that_sbatch_queued_without_an_answer_is_found_by_the_next_launch(
    folder: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.fail("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")
    with pytest.raises(MegatfmError, match=r"^sbatch.*timed out.* SLURM may have queued the job nevertheless: launch"):
        run_launch("--slurm")
    script = folder / "runs/quickstart/slurm/pretrain.sbatch"
    fake_slurm.answer("squeue", f"7|RUNNING|/elsewhere/pretrain.sbatch\n8|COMPLETING|{script}\n9|PENDING|{script}\n")
    with pytest.raises(UsageError, match=r"/runs/quickstart: job 9 of this run is in the queue.*`megatfm cancel 9`"):
        run_launch("--slurm")
    fake_slurm.answer("squeue", f"8|COMPLETING|{script}\n")
    (fake_slurm.folder / "sbatch.fails").unlink()
    fake_slurm.answer("sbatch", "10\n")
    assert run_launch("--slurm") == 0


def test_a_chain_that_is_refused_halfway_says_which_jobs_wait(folder: Path, fake_slurm: FakeSlurm) -> None:
    sbatch = fake_slurm.folder / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n[ -e {folder}/one ] && {{ echo limit >&2; exit 1; }}\ntouch {folder}/one\necho 12\n")
    with pytest.raises(MegatfmError, match=r"sbatch refused .*limit\. The chain has .* 1 of 3 jobs, 12: `megatfm"):
        run_launch("--slurm", "--chain", "3")
    assert read_job_ids(folder / "runs" / "quickstart") == ["12"]


def test_a_missing_sbatch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="sbatch is not on PATH: run this on a login node"):
        run_launch("--slurm")


@pytest.mark.parametrize(("mode", "reason"), [(0o755, "Exec format error"), (0o644, "Permission denied")])
def test_a_command_of_slurm_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, reason: str
) -> None:
    (tmp_path / "squeue").write_text("")
    (tmp_path / "squeue").chmod(mode)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=rf"squeue on PATH can't be run \({reason}\): ask for access to SLURM"):
        scheduler.run_slurm_command("squeue", "--me")


def test_flags_of_sbatch_are_in_the_script_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--mem=480G", "--exclude=n[1-2],n9", "--nodelist", "n3", "--reservation", "us", "--begin", "now+2hours",
        "--dependency", "afterok:4711?afterany:12", "--sbatch=--mail-type=FAIL,END", "--sbatch=--exclusive",
    ]  # fmt: skip
    assert run_launch("--slurm", "--dry-run", "--chain", "2", *words) == 0
    script = capsys.readouterr().out.replace("'", "")
    for line in (
        *("--mem=480G", "--exclude=n[1-2],n9", "--nodelist=n3", "--reservation=us", "--begin=now+2hours"),
        *("--mail-type=FAIL,END", "--exclusive", "--dependency=afterok:4711?afterany:12"),
    ):
        assert script.count(f"#SBATCH {line}\n") == 1, line
    assert script.count("--dependency") == 1, "of two, sbatch would take the last"


def test_the_script_of_the_page_submits_and_waits(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = (text for page, _, text in list_code_blocks("python") if page.name == "slurm.md")
    size = ["model.n_layers=2", "train.global_batch=16", "train.micro_batch=1"]
    (folder / "mine.toml").write_text(to_toml(load_config("quickstart", ["name=mine", *size])))
    fake_slurm.answer("squeue", "PENDING|Priority|\n")
    submission, waiting = script.split("end = ")
    page: dict[str, object] = {}
    exec(submission, page)
    (shown,) = re.findall(r"# (JobState\(.*\))", script)
    assert shown.replace("4711", "12") in capsys.readouterr().out
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=12 JobState=COMPLETED ExitCode=0:0\n")
    exec(f"end = {waiting}", page)
    assert capsys.readouterr().out == "COMPLETED None\n"


def test_python_submits_the_same_job(folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    run = submit(
        "quickstart", "train.steps=77", nodes=2, chain=2, max_restarts=0, sbatch=["--exclusive", "--mail-type=FAIL"]
    )
    assert run.run_dir == folder / "runs" / "quickstart"
    script = (run.run_dir / "slurm" / "pretrain.sbatch").read_text()
    assert "#SBATCH --exclusive\n#SBATCH --mail-type=FAIL\n" in script
    assert "--max-restarts 0" in script
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    assert (run.state.name, run.progress.steps) == ("RUNNING", 77)
    with pytest.raises(TimeoutError, match=r"runs/quickstart: still RUNNING after 0\.1 s: job 12, n1"):
        run.wait(timeout=0.1, poll_interval=0.05)
    assert RunHandle(run.run_dir).cancel() == "cancelled job 12", "the stand-in gives both links one number"
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=12 JobState=CANCELLED ExitCode=0:15\n")
    assert run.wait(poll_interval=0.05).name == "CANCELLED"
    for flags, reason in (
        ({"node": 2}, "--node=2: not a flag of jobs"),
        ({"nproc": "two"}, "invalid int value"),
        ({"dry_run": True}, "not a flag of jobs"),
        ({"time": "tomorrow"}, "--time 'tomorrow'"),
        ({"chain": 0}, "number of links of the chain is 0"),
    ):
        with pytest.raises(UsageError, match=reason):
            submit("quickstart", **flags)
