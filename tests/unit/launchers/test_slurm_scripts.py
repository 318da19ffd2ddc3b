"""Scripts of SLURM jobs: golden ones, quoting, signals in a real bash, sites; and what is read from SLURM's answers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatfm.config import load_section
from megatfm.config.prep import PrepConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.launchers import scheduler, snapshot
from megatfm.launchers.job import Job
from megatfm.launchers.record import find_latest_checkpoint_step, tail_jsonl
from megatfm.launchers.slurm import Site, SlurmLauncher, load_site
from tests.support.documentation import ROOT
from tests.support.launch_jobs import FakeSlurm, make_job

pytestmark = pytest.mark.usefixtures("folder")
GOLDEN = ROOT / "tests" / "golden" / "launchers"
GPUS = {"name": "big-run", "min_nodes": 4, "nproc_per_node": 8, "gpus_per_node": 8, "time_limit": "24:00:00"}
RENDERED = {
    "pretrain.sbatch": lambda: SlurmLauncher(FULL_SITE).render(make_job(**GPUS)),
    "pretrain-chain.sbatch": lambda: SlurmLauncher(SMALL_SITE).render(make_job(**GPUS, chain_length=3)),
    "pretrain-range.sbatch": lambda: SlurmLauncher(Site()).render(make_job(min_nodes=2, max_nodes=4, nproc_per_node=2)),
    "data_prep.sbatch": lambda: SlurmLauncher(FULL_SITE).render(make_prep_job()),
    "data_prep-no-requeue.sbatch": lambda: SlurmLauncher(SMALL_SITE).render(make_prep_job()),
    "evaluate.sbatch": lambda: SlurmLauncher(FULL_SITE).render(make_job(**GPUS, kind="evaluate")),
}
FULL_SITE = Site(
    partition="gpu", account="physics", qos="long", constraint="a100&infiniband", exclude="gpu[07,12]",
    cpus_per_task=8, memory="480G", exclusive=True, sbatch=["--mail-type=FAIL"], srun=["--mpi=none"],
    modules=["cuda/12.8", "openmpi"], setup=[["source", "/my venv/bin/activate"]],
    container=["apptainer", "exec", "--nv", "/images/torch 2.sif"], python="python3", interface="ib0",
    environment={"NCCL_IB_HCA": "mlx5"},
)  # fmt: skip
SMALL_SITE = Site(partition="short", requeue=False, start="torchrun", cpus_per_task=2, gpus="gres", stop_seconds=60)


def make_prep_job(**changes: object) -> Job:
    """A job of eight tasks that prepares the quickstart's data."""
    resolved = load_section(PrepConfig, "quickstart-data")
    return make_job(kind="prep", config_name="quickstart-data", config=resolved, name="prep", array_size=8, **changes)


@pytest.mark.parametrize("name", RENDERED)
def test_the_scripts_are_the_golden_ones(name: str, folder: Path) -> None:
    """MEGATFM_UPDATE_GOLDEN=1 writes them anew."""
    files = RENDERED[name]()
    script = next(iter(files.values()))
    for result, displayed in (
        (snapshot.collect_code([]).dir_name, "code-0123456789ab"),
        (str(folder), "/home/ada/my-project"),
        (sys.executable, "/env/bin/python"),
    ):
        script = script.replace(result, displayed)
    if os.environ.get("MEGATFM_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(script)
    assert script == (GOLDEN / name).read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert [path.name for path in folder.iterdir()] == ["corpora"], "rendering touches nothing"


QUOTED = [
    "$(touch owned)", "`touch owned`", "it's; touch owned", '"; touch owned; "', "&|>#~*", "%s %j", "-n", "a b",
]  # fmt: skip
STUB = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" "HOSTILE=$HOSTILE" >>"$SEEN"
exit 0
"""
PYTHON = """#!/bin/bash
printf '%s\\n' prolog_epilog "$@" >>"$SEEN"
[ "$3" != prolog ] || echo "2 n1 n1,n2"
"""


def write_programs(folder: Path, **contents: str) -> Path:
    """Write scripts to put on PATH, by name; returns their folder."""
    programs = folder / "bin"
    programs.mkdir()
    for name, content in contents.items():
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    return programs


@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("kind", ["train", "torchrun", "prep", "evaluate"])
def test_values_in_job_scripts_are_quoted(folder: Path, text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendered script runs in a real bash, with commands that note their arguments."""
    stubs = dict.fromkeys(("srun", "scontrol", "squeue", "prepare"), STUB)
    programs = write_programs(folder, **stubs, **{"python it's": PYTHON})
    monkeypatch.setattr("sys.executable", str(programs / "python it's"))
    site = Site(
        environment={"HOSTILE": text}, container=["run", text], python=text, setup=[["prepare", text]],
        start="torchrun" if kind == "torchrun" else "srun",
    )  # fmt: skip
    expected = (
        make_prep_job() if kind == "prep" else make_job(min_nodes=2, kind="train" if kind == "torchrun" else kind)
    )
    script = next(iter(SlurmLauncher(site).render(expected).values()))
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(folder / "seen"), "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]",
    }  # fmt: skip
    completed = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert completed.stderr == ""
    arguments = (folder / "seen").read_text().splitlines()
    step = arguments[arguments.index("srun") :]
    assert step[step.index("run") :][:5] == ["run", text, text, "-P", "-m"], "container, then the Python inside it"
    assert f"HOSTILE={text}" in step
    assert arguments[arguments.index("prepare") :][:2] == ["prepare", text]
    if kind in ("train", "torchrun"):
        assert "--nodelist=n1,n2" in step
        begin = -1 - arguments[::-1].index("prolog_epilog")
        assert arguments[begin:][1:4] == ["-m", "megatfm.launchers.prolog_epilog", "epilog"]
    assert not (folder / "owned").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "corpora", "seen"]


def run_script(folder: Path, srun: str, *, plan: str = "echo 1 n1 n1") -> tuple[int, list[str]]:
    """Run pretrain.sbatch in bash with an srun of the test's own; the code, and what the helper was asked."""
    helper = f'#!/bin/bash\nshift 2\necho "$@" >>"$SEEN"\ncase $1 in prolog) {plan} ;; epilog) exit 42 ;; esac\n'
    programs = write_programs(folder, srun=f"#!/bin/bash\n{srun}\n", python=helper)
    script = (
        SlurmLauncher(Site()).render(make_job())["pretrain.sbatch"].replace(sys.executable, str(programs / "python"))
    )
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(folder / "seen"), "SLURM_JOB_ID": "7"}
    completed = subprocess.run(["bash", "-c", script], env=environment, timeout=30)
    return completed.returncode, (folder / "seen").read_text().splitlines()


def test_the_script_ends_as_the_helper_says(folder: Path) -> None:
    code, requested = run_script(folder, "exit 3")
    assert code == 42
    assert requested[-1].split(" --log")[0] == f"epilog --run {folder}/runs/quickstart"
    assert "--code 3 --asked  --requeue --max-restarts 3" in requested[-1]


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_reaches_srun_and_its_code_is_not_lost(folder: Path, number: str) -> None:
    srun = (
        "trap 'sleep 0.3; exit 75' USR1\n"
        f"kill -{number} $PPID; kill -{number} $PPID\n"
        "for _ in $(seq 200); do sleep 0.05; done"
    )
    code, requested = run_script(folder, srun)
    assert code == 42
    assert f"--code 75 --asked {number} --requeue" in requested[-1]


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_during_the_prolog_starts_nothing_and_reaches_the_epilog(folder: Path, number: str) -> None:
    code, requested = run_script(folder, "touch started", plan=f"kill -{number} $PPID; echo 1 n1 n1")
    assert code == 42
    assert f"--code 75 --asked {number} --requeue" in requested[-1]
    assert not (folder / "started").exists()


@pytest.mark.parametrize(("handled", "code"), [("trap 'exit 75' TERM; ", 75), ("", 75), ("trap 'exit 1' TERM; ", 1)])
def test_a_signal_just_after_srun_began_reaches_a_preparation(folder: Path, handled: str, code: int) -> None:
    """Before bash has noted srun's process id; a preparation that has no handler yet dies of it, with 143."""
    srun = f"#!/bin/bash\n{handled}for _ in $(seq 200); do sleep 0.05; done\n"
    programs = write_programs(folder, srun=srun)
    script = SlurmLauncher(Site(requeue=False)).render(make_prep_job())["data_prep.sbatch"]
    script = script.replace("\nstep=$!", "\nkill -TERM $$\nstep=$!")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}
    completed = subprocess.run(["bash", "-c", script], env=environment, timeout=30, capture_output=True)
    assert completed.returncode == code


@pytest.mark.parametrize(("plan", "code"), [("true", 0), ("exit 76", 76), ("exit 2", 2)])
def test_without_a_plan_nothing_is_started(folder: Path, plan: str, code: int) -> None:
    assert run_script(folder, "touch started", plan=plan)[0] == code
    assert not (folder / "started").exists()
    assert len((folder / "seen").read_text().splitlines()) == 1


def test_a_site_file_is_read_and_flags_win(folder: Path) -> None:
    assert load_site(None, {}) == Site(), "what ships is all comments and defaults"
    (folder / "slurm").mkdir()
    (folder / "slurm" / "site.toml").write_text('partition = "cpu"\naccount = "a"\n[environment]\nX = "1"\n')
    site = load_site(None, {"partition": "gpu", "account": None, "max_restarts": 5})
    assert (site.partition, site.account, site.environment, site.max_restarts) == ("gpu", "a", {"X": "1"}, 5)
    (folder / "other.toml").write_text('partitoin = "cpu"\n')
    with pytest.raises(UsageError, match=r"other\.toml: partitoin: unknown key .did you mean 'partition'"):
        load_site(folder / "other.toml", {})


@pytest.mark.parametrize("path", sorted((ROOT / "slurm" / "sites").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_of_sites_render_to_scripts(path: Path) -> None:
    site = load_site(path, {})
    assert path.read_text().startswith("# "), "says what kind of site it is"
    for expected in (make_job(**GPUS), make_prep_job(), make_job(**GPUS, kind="evaluate")):
        for name, text in SlurmLauncher(site).render(expected).items():
            if name.endswith(".sbatch"):
                subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_every_setting_of_a_site_is_shown_in_the_file_that_ships() -> None:
    text = (ROOT / "slurm" / "site.toml").read_text()
    assert [name for name in Site.model_fields if f"{name} = " not in text and f"[{name}]" not in text] == []


# -------------------------------------------------------------------------------------------- SLURM's answers


# As SLURM 22.05 prints it: values with spaces, with `=`, and empty ones.
RECORD = (
    "JobId=7 JobName=a b UserId=root(0) JobState=RUNNING Reason=None Restarts=2 ExitCode=0:0 RunTime=1-02:03:04 "
    "TimeLimit=00:10:00 Partition=main NodeList=n[1-2] NumNodes=2-2 TRES=cpu=2,node=2 Command=/a b/c=d "
    "Power=\n"
)


def test_the_record_of_a_job(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer("scontrol-show", RECORD)
    job = scheduler.show_job("7")
    assert job["JobName"] == "a b"
    assert job["TRES"].startswith("cpu=2")
    assert (job["JobState"], job["Restarts"], job["NumNodes"], job["Power"]) == ("RUNNING", "2", "2-2", "")
    assert fake_slurm.calls == ["scontrol -o show job 7"]


def test_a_job_that_is_forgotten_has_no_record(fake_slurm: FakeSlurm) -> None:
    fake_slurm.fail("scontrol-show", "slurm_load_jobs error: Invalid job id specified\n")
    assert scheduler.show_job("7") == {}
    fake_slurm.fail("scontrol-show", "slurm_load_jobs error:\n Unable to contact slurm controller\n")
    with pytest.raises(MegatfmError, match=r"^scontrol -o show: slurm_load_jobs error: Unable to contact"):
        scheduler.show_job("7")


@pytest.mark.parametrize(("text", "seconds"), [
    ("05:04", 304),
    ("00:10:00", 600),
    ("1-02:03:04", 93784),
    ("90", 5400),
    ("1-02", 93600),
    ("1-02:03", 93780),
    ("UNLIMITED", None),
    ("", None),
    ("INVALID", None),
])  # fmt: skip
def test_slurm_durations_are_parsed(text: str, seconds: int | None) -> None:
    assert scheduler.parse_time(text) == seconds


def test_node_lists_are_expanded(fake_slurm: FakeSlurm) -> None:
    assert scheduler.expand_nodelist("n1") == ["n1"]
    assert scheduler.expand_nodelist("n1,gpu-2.site") == ["n1", "gpu-2.site"]
    assert fake_slurm.calls == [], "what needs no expansion needs no SLURM"
    fake_slurm.answer("scontrol-show", "n1\nn2\n")
    assert scheduler.expand_nodelist("n[1-2]") == ["n1", "n2"]


def test_usable_nodes_are_the_healthy_ones(fake_slurm: FakeSlurm) -> None:
    fake_slurm.answer(
        "sinfo", "n1 idle\nn2 alloc\nn3 down*\nn4 drain\nn5 mix\nn6 idle*\nn7 comp\nn8 drng\nn9 \nn10\n\n"
    )
    assert scheduler.list_usable_nodes("main") == {"n1", "n2", "n5", "n7"}


def test_a_scheduler_that_hangs_is_given_up(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_slurm.folder / "bin" / "sinfo").write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(scheduler, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(MegatfmError, match="sinfo gave no answer in 0 s: is slurmctld up"):
        scheduler.run_slurm_command("sinfo")


def test_a_scheduler_that_is_slow_is_named_while_a_user_waits(
    fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (fake_slurm.folder / "bin/sinfo").write_text(f"#!/bin/sh\nuntil [ -s {tmp_path}/notice ]; do sleep 0.01; done\n")
    monkeypatch.setattr(scheduler, "NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(scheduler, "print_to_stderr", (tmp_path / "notice").write_text)
    scheduler.run_slurm_command("sinfo")
    assert (tmp_path / "notice").read_text() == "waiting for SLURM: no answer to sinfo yet"


def test_the_end_of_a_file_of_records(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert tail_jsonl(file, 3) == []
    file.write_text("".join(f'{{"step": {n}}}\n' for n in range(5)) + '{"step": 5')
    assert [item["step"] for item in tail_jsonl(file, 3)] == [2, 3, 4]


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    assert find_latest_checkpoint_step(tmp_path) == 0
    for name in ("step-00000004", "step-00000012", ".step-00000020.partial-1", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_latest_checkpoint_step(tmp_path) == 12
