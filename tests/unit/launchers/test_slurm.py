"""SLURM jobs: what is rendered, that bash reads it as it was meant, and what is submitted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm.config import load, load_config, to_toml
from megatfm.config.prep import PrepConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import RunHandle, snapshot, submit
from megatfm.launchers.job import Job
from megatfm.launchers.run_jobs import cancel
from megatfm.launchers.slurm import Site, SlurmLauncher, load_site
from megatfm.launchers.status import run_status
from tests.support.fake_slurm import FakeSlurm
from tests.support.launch_jobs import job, launch

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "launchers"
CLUSTER = ["--slurm", "--nodes", "4", "--gpus-per-node", "8", "--time", "24:00:00", "--job-name", "big-run"]
FITS = ["train.global_batch=64", "train.micro_batch=1"]
BIG = Site(
    partition="gpu",
    account="physics",
    qos="long",
    constraint="a100&infiniband",
    exclude="gpu[07,12]",
    cpus_per_task=8,
    memory="480G",
    exclusive=True,
    sbatch=["--mail-type=FAIL"],
    srun=["--mpi=none"],
    modules=["cuda/12.8", "openmpi"],
    setup=[["source", "/my venv/bin/activate"]],
    container=["apptainer", "exec", "--nv", "/images/torch 2.sif"],
    python="python3",
    interface="ib0",
    environment={"NCCL_IB_HCA": "mlx5"},
)
SMALL = Site(
    partition="short", requeue=False, start="torchrun", cpus_per_task=2, gpus="gres", stop_seconds=60
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpora: Path) -> Path:
    """A folder to launch from, with corpora and nothing else."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prep_job(**changes: object) -> Job:
    resolved = load(PrepConfig, "quickstart-data")
    return job(
        kind="prep", config_name="quickstart-data", config=resolved, name="prep", array_size=8, **changes
    )


GPUS = {"name": "big-run", "min_nodes": 4, "nproc_per_node": 8, "gpus_per_node": 8, "time_limit": "24:00:00"}
RENDERED = {
    "pretrain.sbatch": lambda: SlurmLauncher(BIG).render(job(**GPUS)),
    "pretrain-chain.sbatch": lambda: SlurmLauncher(SMALL).render(job(**GPUS, chain_length=3)),
    "pretrain-range.sbatch": lambda: SlurmLauncher(Site()).render(
        job(min_nodes=2, max_nodes=4, nproc_per_node=2)
    ),
    "data_prep.sbatch": lambda: SlurmLauncher(BIG).render(prep_job()),
    "data_prep-no-requeue.sbatch": lambda: SlurmLauncher(SMALL).render(prep_job()),
    "evaluate.sbatch": lambda: SlurmLauncher(BIG).render(job(**GPUS, kind="evaluate")),
}


@pytest.mark.parametrize("name", RENDERED)
def test_the_scripts_are_the_golden_ones(name: str, folder: Path) -> None:
    """MEGATFM_UPDATE_GOLDEN=1 writes them anew."""
    files = RENDERED[name]()
    script = next(iter(files.values()))
    for actual, shown in (
        (snapshot.collect_code([]).dir_name, "code-0123456789ab"),
        (str(folder), "/home/ada/my-project"),
        (sys.executable, "/env/bin/python"),
    ):
        script = script.replace(actual, shown)
    if os.environ.get("MEGATFM_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(script)
    assert script == (GOLDEN / name).read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert [path.name for path in folder.iterdir()] == ["corpora"], "rendering touches nothing"


def test_the_dry_run_prints_the_script_and_the_config(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert launch(*CLUSTER, "--partition", "gpu", "--dry-run", "train.steps=77", *FITS) == 0
    captured = capsys.readouterr()
    for line in (
        "--job-name=big-run",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=24:00:00",
        "--partition=gpu",
    ):
        assert f"#SBATCH {line}\n" in captured.out
    assert "\nsteps = 77\n" in captured.out
    assert captured.err == ""
    assert not (folder / "runs").exists()


def test_a_run_that_does_not_fit_is_refused_before_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    reason = r"train\.global_batch = 16 is not a multiple of train\.micro_batch = 8 on 32 data ranks"
    with pytest.raises(UsageError, match=rf"does not fit 32 processes: {reason}"):
        launch(*CLUSTER)
    launch(*CLUSTER, "--dry-run")
    assert "note: this would be refused: the run does not fit 32" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"does not fit 3 to 3 nodes.*it would fit on 2 nodes"):
        launch("--slurm", "--nodes", "3-3", "--nproc", "1")


# --------------------------------------------------------------------------------------------- hostile fields

HOSTILE = [
    "a\nrm -rf x",
    "$(touch owned)",
    "`touch owned`",
    "it's",
    'say "x"',
    "a;touch owned",
    "a b",
    "100%",
    "-x",
    "--wrap=touch owned",
    "a\\b",
    "",
]


FLAGS = ("job-name", "partition", "account", "qos", "constraint", "time", "start", "nodes")
AS_GOOD_AS_NONE = [("job-name", ""), ("time", ""), ("nodes", "")]


@pytest.mark.parametrize(
    ("flag", "text"), [(f, t) for f in FLAGS for t in HOSTILE if (f, t) not in AS_GOOD_AS_NONE]
)
def test_hostile_flags_are_refused(flag: str, text: str, folder: Path) -> None:
    with pytest.raises(UsageError) as error:
        launch("--slurm", f"--{flag}={text}", "--dry-run")
    assert "\n" not in str(error.value)
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "field",
    [
        "partition = {}",
        "account = {}",
        "qos = {}",
        "constraint = {}",
        "exclude = {}",
        "memory = {}",
        "interface = {}",
        "modules = [{}]",
        "sbatch = [{}]",
        "srun = [{}]",
        "environment = {{ {} = 'x' }}",
    ],
)
def test_hostile_sites_are_refused(field: str, text: str, folder: Path) -> None:
    (folder / "site.toml").write_text(field.format(json.dumps(text)))
    with pytest.raises(UsageError) as error:
        load_site(folder / "site.toml", {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a\nb", "a\x00b", "a\x1bb"])
@pytest.mark.parametrize("field", ["container = [{}]", "python = {}", "setup = [[{}]]", "environment.X = {}"])
def test_control_characters_are_refused_everywhere(field: str, text: str, folder: Path) -> None:
    (folder / "site.toml").write_text(field.format(json.dumps(text)))
    with pytest.raises(UsageError):
        load_site(folder / "site.toml", {})


QUOTED = [
    "$(touch owned)",
    "`touch owned`",
    "it's; touch owned",
    '"; touch owned; "',
    "&|>#~*",
    "%s %j",
    "-n",
    "a b",
]
STUB = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" "HOSTILE=$HOSTILE" >>"$SEEN"
exit 0
"""
PYTHON = """#!/bin/bash
printf '%s\\n' prolog_epilog "$@" >>"$SEEN"
[ "$3" != prolog ] || echo "2 n1 n1,n2"
"""


@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("kind", ["train", "torchrun", "prep", "evaluate"])
def test_what_reaches_the_shell_is_quoted(
    folder: Path, text: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendered script runs in a real bash, with commands that note their arguments."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol", "squeue", "prepare"):
        (programs / name).write_text(STUB)
    (programs / "python it's").write_text(PYTHON)
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(programs / "python it's"))
    site = Site(
        environment={"HOSTILE": text},
        container=["run", text],
        python=text,
        setup=[["prepare", text]],
        start="torchrun" if kind == "torchrun" else "srun",
    )
    wanted = prep_job() if kind == "prep" else job(min_nodes=2, kind="train" if kind == "torchrun" else kind)
    script = next(iter(SlurmLauncher(site).render(wanted).values()))
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SEEN": str(folder / "seen"),
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    seen = (folder / "seen").read_text().splitlines()
    step = seen[seen.index("srun") :]
    assert step[step.index("run") :][:5] == ["run", text, text, "-P", "-m"], (
        "container, then the Python inside it"
    )
    assert f"HOSTILE={text}" in step
    assert seen[seen.index("prepare") :][:2] == ["prepare", text]
    if kind in ("train", "torchrun"):
        assert "--nodelist=n1,n2" in step
        assert seen[-1 - seen[::-1].index("prolog_epilog") :][1:4] == [
            "-m",
            "megatfm.launchers.prolog_epilog",
            "epilog",
        ]
    assert not (folder / "owned").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "corpora", "seen"]


@pytest.mark.parametrize("name", ["it's", 'say "x"', "100%", "a\nb", "back\\slash", "a:b"])
def test_paths_that_sbatch_would_misread_are_refused(name: str) -> None:
    resolved = load_config("quickstart").model_copy(update={"run_dir": f"/data/{name}"})
    with pytest.raises(UsageError, match="can't write to a path with quotes"):
        SlurmLauncher(Site()).render(job(config=resolved))


# ------------------------------------------------------------------------------------------------- the script


def run_script(folder: Path, srun: str, *, plan: str = "echo 1 n1 n1") -> tuple[int, list[str]]:
    """Run pretrain.sbatch in bash with an srun of the test's own; the code, and what the helper was asked."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    (programs / "python").write_text(
        f'#!/bin/bash\nshift 2\necho "$@" >>"$SEEN"\ncase $1 in prolog) {plan} ;; epilog) exit 42 ;; esac\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    script = (
        SlurmLauncher(Site())
        .render(job())["pretrain.sbatch"]
        .replace(sys.executable, str(programs / "python"))
    )
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SEEN": str(folder / "seen"),
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(["bash", "-c", script], env=environment, timeout=30)
    return done.returncode, (folder / "seen").read_text().splitlines()


def test_the_script_ends_as_the_helper_says(folder: Path) -> None:
    code, asked = run_script(folder, "exit 3")
    assert code == 42
    assert asked[-1].split(" --log")[0] == f"epilog --run {folder}/runs/quickstart"
    assert "--code 3 --asked  --requeue --max-restarts 3" in asked[-1]


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_reaches_srun_and_its_code_is_not_lost(folder: Path, number: str) -> None:
    srun = (
        "trap 'sleep 0.3; exit 75' USR1\n"
        f"kill -{number} $PPID; kill -{number} $PPID\n"
        "for _ in $(seq 200); do sleep 0.05; done"
    )
    code, asked = run_script(folder, srun)
    assert code == 42
    assert f"--code 75 --asked {number} --requeue" in asked[-1]


def test_a_signal_ahead_of_the_start_is_not_lost(folder: Path) -> None:
    srun = "trap 'exit 75' USR1\nfor _ in $(seq 100); do sleep 0.05; done"
    code, asked = run_script(folder, srun, plan="kill -USR1 $PPID; echo 1 n1 n1")
    assert code == 42
    assert "--asked USR1" in asked[-1]


@pytest.mark.parametrize(("plan", "code"), [("true", 0), ("exit 76", 76), ("exit 2", 2)])
def test_without_a_plan_nothing_is_started(folder: Path, plan: str, code: int) -> None:
    assert run_script(folder, "touch started", plan=plan)[0] == code
    assert not (folder / "started").exists()
    assert len((folder / "seen").read_text().splitlines()) == 1


# ------------------------------------------------------------------------------------------------------- site


def test_a_site_file_is_read_and_flags_win(folder: Path) -> None:
    assert load_site(None, {}) == Site(), "what ships is all comments and defaults"
    (folder / "slurm").mkdir()
    (folder / "slurm" / "site.toml").write_text('partition = "cpu"\naccount = "a"\n[environment]\nX = "1"\n')
    site = load_site(None, {"partition": "gpu", "account": None, "max_restarts": 5})
    assert (site.partition, site.account, site.environment, site.max_restarts) == ("gpu", "a", {"X": "1"}, 5)
    (folder / "other.toml").write_text('partitoin = "cpu"\n')
    with pytest.raises(UsageError, match=r"other\.toml: partitoin: unknown key .did you mean 'partition'"):
        load_site(folder / "other.toml", {})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "slurm" / "sites").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_examples_of_sites_render_to_scripts(path: Path) -> None:
    site = load_site(path, {})
    assert path.read_text().startswith("# "), "says what kind of site it is"
    for wanted in (job(**GPUS), prep_job(), job(**GPUS, kind="evaluate")):
        for name, text in SlurmLauncher(site).render(wanted).items():
            if name.endswith(".sbatch"):
                subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_every_setting_of_a_site_is_shown_in_the_file_that_ships() -> None:
    text = (ROOT / "slurm" / "site.toml").read_text()
    assert [name for name in Site.model_fields if f"{name} = " not in text and f"[{name}]" not in text] == []


# ----------------------------------------------------------------------------------------------------- submit


def test_submit_writes_the_files_and_says_where_to_look(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "4711;cluster\n")
    assert launch(*CLUSTER, "train.steps=77", *FITS) == 0
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


def test_a_chain_is_submitted_link_by_link(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bin").mkdir()
    sbatch = fake_slurm.folder / "bin" / "sbatch"
    sbatch.write_text('#!/bin/bash\necho "$*" >>"$SLURM_FAKE/n"\nwc -l <"$SLURM_FAKE/n"\n')
    assert launch("--slurm", "--chain", "3", "--dependency", "afterok:4711") == 0
    assert capsys.readouterr().out.startswith("jobs 1, 2, 3 are queued")
    assert json.loads((folder / "runs/quickstart/launch.json").read_text())["jobs"] == ["1", "2", "3"]
    script = folder / "runs/quickstart/slurm/pretrain.sbatch"
    assert "#SBATCH --dependency=afterok:4711\n" in script.read_text()
    after = [f"--dependency=afterok:4711,afterany:{number} " for number in (1, 2)]
    asked = (fake_slurm.folder / "n").read_text()
    assert asked == "".join(f"--parsable {option}{script}\n" for option in ["", *after]), (
        "of no other run's jobs"
    )


def test_variables_of_the_shell_do_not_overrule_the_script(
    folder: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TIMELIMIT": "5", "NO_REQUEUE": "1", "ACCOUNT": "theirs", "PARTITION": "low"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    sbatch = fake_slurm.folder / "bin" / "sbatch"
    sbatch.write_text('#!/bin/bash\nenv >"$SLURM_FAKE/env"\necho 7\n')
    assert launch("--slurm", "--account", "mine") == 0
    assert "SBATCH_" not in (fake_slurm.folder / "env").read_text()
    assert "PATH=" in (fake_slurm.folder / "env").read_text()
    assert "note: SBATCH_NO_REQUEUE, SBATCH_TIMELIMIT: not passed on to sbatch" in capsys.readouterr().err
    script = (folder / "runs/quickstart/slurm/pretrain.sbatch").read_text()
    assert "#SBATCH --account=mine\n" in script
    assert "#SBATCH --partition=low\n" in script, "what a site's shell sets for all jobs is still heard"


def test_where_nothing_is_requeued_a_single_job_is_warned_about(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "site.toml").write_text("requeue = false\n")
    fake_slurm.answer("sbatch", "1\n")
    launch("--slurm", "--site", "site.toml")
    assert "--chain N queues N jobs" in capsys.readouterr().out
    launch("--slurm", "--site", "site.toml", "--chain", "2")
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "state",
    [
        *(
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "REQUEUE_HOLD",
            "STOPPED",
            "POWER_UP_NODE",
            "EXPEDITING",
            "UPDATE_DB",
        ),
        *("LAUNCH_FAILED", "RECONFIG_FAIL", "A_WORD_OF_TOMORROW"),
    ],
)
def test_a_run_whose_job_waits_or_runs_is_not_submitted_again(
    folder: Path, fake_slurm: FakeSlurm, state: str
) -> None:
    """The record knows one submission: status and cancel would forget the first."""
    fake_slurm.answer("sbatch", "12\n")
    assert launch("--slurm", "--chain", "2") == 0
    fake_slurm.answer("squeue", f"{state}|Resources|\n")
    for again in (("--slurm",), ("--slurm", "train.steps=700"), ("--nproc", "1")):
        with pytest.raises(
            UsageError, match=r"job 12 is of this run, and .*: wait for it, or end it with `meg"
        ):
            launch(*again)
    assert sum(call.startswith("sbatch") for call in fake_slurm.calls) == 2
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=12 JobState=COMPLETED ExitCode=0:0\n")
    assert launch("--slurm", "train.steps=700") == 0


@pytest.mark.parametrize("fails", ["squeue", "scontrol-show", "no SLURM here"])
def test_a_run_is_not_submitted_again_while_nobody_can_tell_how_its_job_is(
    folder: Path, fake_slurm: FakeSlurm, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answer("sbatch", "12\n")
    assert launch("--slurm", "--chain", "2") == 0
    run = folder / "runs" / "quickstart"
    note = (run / "launch.json").read_text()
    if fails == "no SLURM here":
        monkeypatch.setenv("PATH", str(folder))
    elif fails == "scontrol-show":
        fake_slurm.fail("squeue", "slurm_load_jobs error: Invalid job id specified\n")
    fake_slurm.fail(fails, "slurm_load_jobs error: Unable to contact slurm controller\n")
    for again in (("--slurm",), ("--nproc", "1")):
        with pytest.raises(
            UsageError, match=r"can't tell whether job 12 still waits or runs \(.*delete .*json$"
        ):
            launch(*again)
    assert (run / "launch.json").read_text() == note
    assert (run_status(run).state.name, run_status(run).state.is_over) == ("UNKNOWN", False)
    if fails != "no SLURM here":
        assert cancel(run) == "cancelled job 12", "whatever squeue says"


def test_an_evaluation_leaves_the_config_of_a_waiting_job_alone(folder: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", "12\n")
    name = name_of(folder)
    launch("--slurm", name, "train.steps=900")
    queued = (folder / "runs/mine/slurm/config.toml").read_text()
    launch("--slurm", "--evaluate", "--nproc", "2", config="runs/mine")
    assert (folder / "runs/mine/slurm/config.toml").read_text() == queued
    assert "steps = 900\n" in queued


def test_an_evaluation_joins_the_record_of_its_run(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "12\n")
    launch("--slurm", name_of(folder))
    run = folder / "runs" / "mine"
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    fake_slurm.answer("sbatch", "13\n")
    evaluate = ("--slurm", "--evaluate", "--nproc", "2")
    launch(*evaluate, config="runs/mine")
    note = json.loads((run / "launch.json").read_text())
    assert (note["kind"], note["jobs"], note["evaluations"]) == ("train", ["12"], ["13"])
    assert run_status(run).state.reason == "job 12, n1; evaluation in job 13: RUNNING"
    with pytest.raises(UsageError, match=r"job 13 evaluates this run, and runs: .* `megatfm cancel 13`$"):
        launch(*evaluate, config="runs/mine")
    assert cancel(run) == "cancelled jobs 12, 13"
    assert fake_slurm.calls[-1] == "scancel 12 13"


def test_an_evaluation_runs_plugins_only_where_they_are_trusted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs" / "mine").mkdir(parents=True)
    config = load_config("quickstart", ["plugins=this"])
    (folder / "runs" / "mine" / "config.toml").write_text(to_toml(config))
    for where in (["--nproc", "1"], ["--slurm"]):
        with pytest.raises(UsageError, match=r"names plugins, whose code would run: this: .*--trust-plugins"):
            launch("--evaluate", *where, config="runs/mine")
        assert launch("--evaluate", "--trust-plugins", "--dry-run", *where, config="runs/mine") == 0
        assert re.search(r"evaluate \S*runs/mine --trust-plugins", capsys.readouterr().out)
    with pytest.raises(UsageError, match="--trust-plugins: not for training"):
        launch("--trust-plugins", "--nproc", "1")


def test_an_evaluation_in_front_of_its_user_is_not_taken_for_the_run(
    folder: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answer("sbatch", "12\n")
    launch("--slurm", name_of(folder))
    before = (folder / "runs/mine/launch.json").read_text()
    monkeypatch.setattr("megatfm.launchers.job.MEGATFM_COMMAND", ("true", "-m", "megatfm", "train"))
    assert launch("--evaluate", "--nproc", "1", config="runs/mine") == 0
    assert (folder / "runs/mine/launch.json").read_text() == before


def test_a_preparation_and_an_evaluation_are_submitted(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "5\n")
    (folder / "texts").mkdir()
    launch("--slurm", "--prep", "--array", "4", "read.folder=texts", "out=made", config="quickstart-data")
    assert capsys.readouterr().out.startswith("job 5 is queued: 4 tasks\n")
    queued = load(PrepConfig, folder / "made.jobs" / "slurm" / "config.toml")
    assert (queued.out, queued.read.folder) == (str(folder / "made"), str(folder / "texts"))
    assert not (folder / "made").exists(), "prep refuses a folder with what it didn't make"
    launch("--slurm", name_of(folder))
    launch("--slurm", "--evaluate", "--nproc", "2", config="runs/mine")
    assert "-m megatfm evaluate" in (folder / "runs/mine/slurm/evaluate.sbatch").read_text()


def test_the_queued_config_extends_nothing(folder: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("sbatch", "5\n")
    (folder / "mine.toml").write_text('extends = "quickstart"\nname = "mine"\n[data]\nvalidation = {}\n')
    launch("--slurm", "data.corpus=corpora/quickstart", config="mine.toml")
    queued = folder / "runs" / "mine" / "slurm" / "config.toml"
    assert "extends =" not in queued.read_text()
    assert load_config(queued).train == load_config("quickstart").train


def name_of(folder: Path) -> str:
    """A run with a config, to evaluate."""
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "config.toml").write_text(
        (ROOT / "megatfm" / "presets" / "quickstart.toml")
        .read_text()
        .replace('"quickstart"', '"mine"', 1)
        .replace('"corpora/', f'"{folder}/corpora/')
    )
    return "name=mine"


def test_a_refusal_of_sbatch_is_one_line(folder: Path, fake_slurm: FakeSlurm) -> None:
    """And nothing is left of a run that was not there before."""
    fake_slurm.fail("sbatch", "sbatch: error: no such\nsbatch: error: partition\n")
    with pytest.raises(
        MegatfmError, match=r"^sbatch refused .*/pretrain\.sbatch: .*no such sbatch: error: partition$"
    ):
        launch("--slurm")
    assert not (folder / "runs").exists()
    (folder / "runs/quickstart").mkdir(parents=True)
    with pytest.raises(MegatfmError):
        launch("--slurm")
    assert (folder / "runs/quickstart/slurm/pretrain.sbatch").exists(), "its folder was there before"


def test_no_sbatch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="sbatch is not on PATH: run this on a login node"):
        launch("--slurm")


# ----------------------------------------------------------------------------------- what would fail only later


def test_a_finished_run_is_not_queued(
    folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer("sbatch", "12\n")
    run = folder / "runs" / "quickstart"
    (run / "checkpoints" / "step-00000720").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "finished", "step": 720}\n')
    with pytest.raises(UsageError, match=r"the run is finished: .* another name, as name=quickstart-2, or"):
        launch("--slurm")
    assert launch("--slurm", "--dry-run") == 0
    assert "note: this would be refused" in capsys.readouterr().err
    assert launch("--slurm", "train.steps=800") == 0


UP = "PartitionName={name} Default=YES State={state} MaxTime={longest} DefaultTime={usual} MaxNodes=UNLIMITED\n"


def partition(
    fake_slurm: FakeSlurm, longest: str = "1-00:00:00", usual: str = "NONE", state: str = "UP"
) -> None:
    fake_slurm.answer("scontrol-show", UP.format(name="gpu", state=state, longest=longest, usual=usual))
    fake_slurm.answer("sbatch", "12\n")


REFUSED = {
    "above the partition's limit": (
        {"longest": "12:00:00"},
        ["--time", "24:00:00"],
        "--time 24:00:00 is above the limit of partition gpu, 720 min",
    ),
    "no time to work": ({}, ["--time", "5"], "--time 5 leaves no time to work: the job is told to save 300 s ahead"),
    "nor by default": (
        {"usual": "00:04:00"},
        [],
        "the time limit of partition gpu for jobs without --time, 4 min, leaves no time to work",
    ),
    "no tokenizer": ({}, ["data.tokenizer=no.model"], "data.tokenizer = '.*/no.model': there is no such file"),
    "no corpus": ({}, ["data.train=nowhere"], "data.train = '.*/nowhere': there is no such file or folder"),
    "something else": ({}, ["data.train=corpora"], "data.train = '.*/corpora': no corpus of `megatfm prep`.*manifest"),
    "no validation": ({}, ["data.validation.more=x"], "data.validation.more = '.*/x': there is no such file"),
    "no weights": ({}, ["train.init_from=x"], "train.init_from = '.*/x': there is no such file or folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_fail_after_the_wait_is_refused_before(
    fake_slurm: FakeSlurm, case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, words, reason = REFUSED[case]
    partition(fake_slurm, **settings)
    with pytest.raises(UsageError, match=reason):
        launch("--slurm", *words)
    assert not any(call.startswith("sbatch") for call in fake_slurm.calls)
    assert not (folder / "runs").exists()
    assert launch("--slurm", "--dry-run", *words) == 0
    assert re.search(f"^note: this would be refused: {reason}", capsys.readouterr().err, re.MULTILINE)


def test_a_preparation_looks_for_its_files(fake_slurm: FakeSlurm, folder: Path) -> None:
    for word in ("read.folder=nowhere", "tokenizer.file=nowhere"):
        key, _, value = word.partition("=")
        with pytest.raises(UsageError, match=f"{key} = '.*/{value}': there is no such file"):
            launch("--slurm", "--prep", f"read.folder={folder}", word, config="quickstart-data")


def test_what_is_merely_worth_knowing_is_a_note(
    fake_slurm: FakeSlurm, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partition(fake_slurm, longest="UNLIMITED", state="DOWN")
    assert launch("--slurm", "--time", "6") == 0
    output = capsys.readouterr().err
    assert "note: partition gpu is closed (DOWN): the job waits until it opens" in output
    assert "note: 60 s are left to start and to train before the job is told to save" in output
    (folder / "site.toml").write_text("container = ['apptainer', 'exec', 'a.sif']\n")
    assert launch("--slurm", "--site", "site.toml", "name=other", "data.train=/in/the/image") == 0
    assert "note: data.train = '/in/the/image': there is no such file or folder; let it be in" in (
        capsys.readouterr().err
    )


def test_where_slurm_does_not_say_nothing_is_refused(fake_slurm: FakeSlurm) -> None:
    fake_slurm.fail("scontrol-show", "slurm_load_partitions error: Unable to contact slurm controller\n")
    fake_slurm.answer("sbatch", "12\n")
    assert launch("--slurm", "--time", "30-00") == 0


# ---------------------------------------------------------------------------------------- flags, and from Python


def test_flags_of_sbatch(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--mem=480G",
        "--exclude=n[1-2],n9",
        "--nodelist",
        "n3",
        "--reservation",
        "us",
        "--begin",
        "now+2hours",
    ]
    more = [
        "--dependency",
        "afterok:4711?afterany:12",
        "--sbatch=--mail-type=FAIL,END",
        "--sbatch=--exclusive",
    ]
    assert launch("--slurm", "--dry-run", "--chain", "2", *words, *more) == 0
    script = capsys.readouterr().out.replace("'", "")
    for line in (
        *("--mem=480G", "--exclude=n[1-2],n9", "--nodelist=n3", "--reservation=us", "--begin=now+2hours"),
        *("--mail-type=FAIL,END", "--exclusive", "--dependency=afterok:4711?afterany:12"),
    ):
        assert script.count(f"#SBATCH {line}\n") == 1, line
    assert script.count("--dependency") == 1, "of two, sbatch would take the last"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--begin", "$(touch owned)"], "no option of sbatch"),
        (["--sbatch=mail-type=FAIL"], "no option of sbatch"),
        (["--sbatch=--comment=a b"], "no option of sbatch"),
        (["--sbatch=--x\n#SBATCH --wrap=y"], "no option of sbatch"),
        (["--sbatch=--signal=B:USR1@5"], "`megatfm launch` sets this itself"),
        (["--sbatch=--time=5"], "`megatfm launch` sets this itself"),
        (["--sbatch=--outp=/x"], "--outp=/x: sbatch would take this for --output: write the name out"),
        (["--sbatch=--job=other"], "for --job-name"),
        (["--sbatch=--nodel=n1"], "for --nodelist"),
        (["--sbatch=--depend=singleton"], "for --dependency"),
        (["--mem", "lots"], "memory = 'lots'"),
    ],
)
def test_options_that_can_not_be(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        launch("--slurm", "--dry-run", *words)
    with pytest.raises(UsageError, match="only with --slurm"):
        launch("--nproc", "1", *words)


def test_from_python(folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    fake_slurm.answer("sbatch", "12\n")
    run = submit("quickstart", "train.steps=77", nodes=2, chain=2, sbatch=["--exclusive", "--mail-type=FAIL"])
    assert run.run_dir == folder / "runs" / "quickstart"
    script = (run.run_dir / "slurm" / "pretrain.sbatch").read_text()
    assert "#SBATCH --exclusive\n#SBATCH --mail-type=FAIL\n" in script
    fake_slurm.answer("squeue", "RUNNING|None|n1\n")
    assert (run.state.name, run.progress.steps) == ("RUNNING", 77)
    with pytest.raises(TimeoutError, match=r"runs/quickstart: still RUNNING after 0\.1 s: job 12, n1"):
        run.wait(timeout=0.1, poll_interval=0.05)
    assert RunHandle(run.run_dir).cancel() == "cancelled job 12", "the stand-in gives both links one number"
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("scontrol-show", "JobId=12 JobState=CANCELLED ExitCode=0:15\n")
    assert run.wait(poll_interval=0.05).name == "CANCELLED"
    for flags, reason in (
        ({"node": 2}, "--node=2: no flag for a job"),
        ({"nproc": "two"}, "invalid int value"),
        ({"dry_run": True}, "no flag for a job"),
        ({"time": "tomorrow"}, "--time 'tomorrow'"),
    ):
        with pytest.raises(UsageError, match=reason):
            submit("quickstart", **flags)
