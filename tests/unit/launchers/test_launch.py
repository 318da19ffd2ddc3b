"""`megatfm launch`: what each launcher renders and runs, with small programs in the place of what it starts."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import Job, Local, Mpi, Slurm, add_arguments, main
from launchers.site import Site, load_site
from megatfm.config import load_config
from megatfm.errors import MegatfmError, UsageError

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "launchers" / "pretrain.sbatch"
CLUSTER = ["--slurm", "--nodes", "4", "--gpus-per-node", "8", "--time", "24:00:00", "--job-name", "big-run"]
FAKE_RANK = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PMIX_RANK")
said = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
os.write(1, (json.dumps(said) + "\\n").encode())  # in one piece, also under mpirun
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to launch from, and a program that tells what it was given in the place of training."""
    program = tmp_path / "fake_rank.py"
    program.write_text(FAKE_RANK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("launchers.job.TRAIN", (sys.executable, str(program), "train"))
    return tmp_path


def launch(*words: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    add_arguments(parser)
    return main(parser.parse_intermixed_args(["quickstart", *words]))


def job(**changes: object) -> Job:
    fields: dict[str, object] = {
        "config": "quickstart",
        "overrides": (),
        "resolved": load_config("quickstart"),
        "name": "quickstart",
    }
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- local


def test_local_ranks_get_the_variables_of_torchrun(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("train.steps=77", "name=my-run", "--nproc", "2") == 0
    said = json.loads(capfd.readouterr().out)
    logged = json.loads((folder / "runs" / "my-run" / "logs" / "rank-1.log").read_text())
    assert (
        said["arguments"] == logged["arguments"] == ["train", "quickstart", "train.steps=77", "name=my-run"]
    )
    assert (said["RANK"], said["LOCAL_RANK"], said["WORLD_SIZE"], said["MASTER_ADDR"]) == (
        "0",
        "0",
        "2",
        "127.0.0.1",
    )
    assert (logged["RANK"], logged["LOCAL_RANK"], logged["MASTER_PORT"]) == ("1", "1", said["MASTER_PORT"])
    assert said["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_own_thread_count_wins(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch("--nproc", "1") == 0
    assert json.loads(capfd.readouterr().out)["OMP_NUM_THREADS"] == "3"


def test_the_dry_run_of_a_local_launch_is_a_shell_script_that_does_the_same(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("--nproc", "2", "--dry-run", "name=run", "data.train=it's $(touch owned)") == 0
    assert not (folder / "runs").exists(), "a dry run touches nothing"
    script = capfd.readouterr().out
    (folder / "runs" / "run" / "logs").mkdir(parents=True)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["arguments"][-1] == "data.train=it's $(touch owned)"
    assert json.loads((folder / "runs" / "run" / "logs" / "rank-1.log").read_text())["RANK"] == "1"
    assert not (folder / "owned").exists()


def test_a_wrong_config_starts_nothing(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.step: unknown key"):
        launch("--nproc", "2", "train.step=1")
    assert not (folder / "runs").exists()


# --------------------------------------------------------------------------------------------------------- mpi


def test_mpi_without_mpirun_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="mpirun is not on PATH: install openmpi-bin"):
        launch("--mpi", "2")


def test_mpi_starts_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(["which", "mpirun"], stdout=subprocess.DEVNULL).returncode:
        pytest.skip("needs Open MPI: run `make system-deps`")
    assert launch("--mpi", "3", "train.steps=77") == 0
    said = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert sorted(line["PMIX_RANK"] for line in said) == ["0", "1", "2"]
    assert {tuple(line["arguments"]) for line in said} == {("train", "quickstart", "train.steps=77")}


def test_the_dry_run_of_mpi_is_its_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--mpi", "3", "--dry-run") == 0
    words = shlex.split(capfd.readouterr().out)
    assert words[words.index("mpirun") :][:3] == ["mpirun", "-n", "3"]
    assert words[-2:] == ["train", "quickstart"]
    assert "OMPI_MCA_rmaps_base_oversubscribe=1" in words


# ------------------------------------------------------------------------------------------------------- slurm


def test_the_script_is_the_golden_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launchers.slurm.TRAIN", ("/env/bin/python", "-m", "megatfm.cli", "train"))
    site = Site(
        partition="gpu",
        account="physics",
        constraint="a100&infiniband",
        cpus_per_task=8,
        modules=["cuda/12.8", "openmpi"],
        container=["apptainer", "exec", "--nv", "/images/torch 2.sif"],
        interface="ib0",
        environment={"NCCL_IB_HCA": "mlx5"},
    )
    big = job(name="big-run", nodes=4, processes_per_node=8, gpus_per_node=8, time_limit="24:00:00")
    script = Slurm(site).render(big)["pretrain.sbatch"].replace(str(folder), "/home/ada/my-project")
    if os.environ.get("MEGATFM_UPDATE_GOLDEN"):
        GOLDEN.write_text(script)
    assert script == GOLDEN.read_text()


def test_the_dry_run_prints_the_script_and_the_config(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert launch(*CLUSTER, "--partition", "gpu", "--dry-run", "train.steps=77") == 0
    said = capsys.readouterr().out
    for line in (
        "--job-name=big-run",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=24:00:00",
    ):
        assert f"#SBATCH {line}\n" in said
    assert "#SBATCH --partition=gpu\n" in said
    assert "\nsteps = 77\n" in said
    assert not (folder / "runs").exists()


HOSTILE = [
    "a\nrm -rf x",
    "$(touch owned)",
    "`touch owned`",
    "it's",
    'say "x"',
    "a;touch owned",
    "a b",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("flag", ["--job-name", "--partition", "--account", "--constraint", "--time"])
def test_hostile_flags_are_refused(flag: str, text: str) -> None:
    with pytest.raises(UsageError) as error:
        launch("--slurm", f"{flag}={text}", "--dry-run")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["$(touch owned)", "`touch owned`", "it's; touch owned", '"; touch owned; "', "&|>#~*"]
)
def test_what_reaches_the_shell_is_quoted(folder: Path, text: str) -> None:
    """The rendered script runs in a real bash, with an srun that shows its arguments."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    srun = bin_folder / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$HOSTILE"\n')
    srun.chmod(0o755)
    site = Site(environment={"HOSTILE": text}, container=["run", text])
    script = Slurm(site).render(job())["pretrain.sbatch"]
    path = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    words = done.stdout.splitlines()
    assert words[words.index("run") :][:2] == ["run", text]
    assert words[-1] == text
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("name", ["it's", 'say "x"', "100%", "a\nb", "back\\slash"])
def test_paths_that_sbatch_would_misread_are_refused(name: str) -> None:
    resolved = load_config("quickstart").model_copy(update={"run_dir": f"/data/{name}"})
    with pytest.raises(UsageError, match="can't write to a path with quotes"):
        Slurm(Site()).render(job(resolved=resolved))


def test_a_site_file_is_read_and_flags_win(folder: Path) -> None:
    assert load_site(None, {}) == Site(), "what ships is all comments and defaults"
    (folder / "slurm").mkdir()
    (folder / "slurm" / "site.toml").write_text('partition = "cpu"\naccount = "a"\n[environment]\nX = "1"\n')
    site = load_site(None, {"partition": "gpu", "account": None})
    assert (site.partition, site.account, site.environment) == ("gpu", "a", {"X": "1"})
    (folder / "other.toml").write_text('partitoin = "cpu"\n')
    with pytest.raises(UsageError, match=r"other\.toml: partitoin: unknown key .did you mean 'partition'"):
        load_site(folder / "other.toml", {})


@pytest.fixture
def sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch that answers with what FAKE_SBATCH holds."""
    path = folder / "bin" / "sbatch"
    path.parent.mkdir(exist_ok=True)
    path.write_text('#!/bin/sh\necho "$@" >sbatch.arguments\neval "$FAKE_SBATCH"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


@pytest.mark.usefixtures("sbatch")
def test_submit_writes_the_files_and_says_where_to_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", "echo '4711;cluster'")
    assert launch(*CLUSTER, "train.steps=77") == 0
    said = capsys.readouterr().out
    assert said.startswith("job 4711 is queued: 32 processes on 4 nodes\n")
    run_dir = folder / "runs" / "quickstart"
    assert f"{run_dir}/logs/slurm-4711.log" in said
    assert (folder / "sbatch.arguments").read_text() == f"--parsable {run_dir}/slurm/pretrain.sbatch\n"
    assert sorted(path.name for path in (run_dir / "slurm").iterdir()) == ["config.toml", "pretrain.sbatch"]
    queued = load_config(run_dir / "slurm" / "config.toml")
    assert (queued.train.steps, queued.run_dir) == (77, str(run_dir))
    assert (run_dir / "logs").is_dir()


@pytest.mark.usefixtures("sbatch")
def test_a_refusal_of_sbatch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "FAKE_SBATCH", "printf 'sbatch: error: no such\\nsbatch: error: partition\\n' >&2; exit 1"
    )
    with pytest.raises(
        MegatfmError, match=r"^sbatch refused .*/pretrain\.sbatch: .*no such sbatch: error: partition$"
    ):
        launch("--slurm")


def test_no_sbatch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="sbatch is not on PATH: run this on a login node"):
        launch("--slurm")


# ------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "say where to run"),
        (["--nproc", "2", "--mpi", "2"], "say where to run"),
        (["--slurm", "--mpi", "2"], "choose one"),
        (
            ["--nproc", "2", "--nodes", "2", "--gpus-per-node", "1"],
            "--nodes, --gpus-per-node: only with --slurm",
        ),
        (["--nproc", "0"], "number of processes is 0"),
        (["--slurm", "--nodes", "-1"], "number of nodes is -1"),
        (["--slurm", "--nproc", "2", "--gpus-per-node", "8"], "2 processes on 8 GPUs"),
        (["--slurm", "--gpus-per-node", "-1"], "--gpus-per-node -1"),
        (["--slurm", "--time", "tomorrow"], "--time 'tomorrow'"),
    ],
)
def test_flags_that_do_not_go_together(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        launch(*words, "--dry-run")


def test_processes_of_a_job() -> None:
    assert job(nodes=2, processes_per_node=4).processes == 8
    assert (
        Local().render(job(processes_per_node=3))["launch.sh"].count("WORLD_SIZE=3") == 6
    )  # and LOCAL_WORLD_SIZE
    assert "mpirun -n 5" in Mpi().render(job(processes_per_node=5))["launch.sh"]


def test_launching_needs_no_torch() -> None:
    code = "import sys, launchers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=GOLDEN.parents[3]).returncode == 0
