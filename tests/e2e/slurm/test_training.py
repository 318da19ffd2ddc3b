"""Training and preparing on several nodes are those on one, by every way to start ranks; bad nodes are left out."""

import fcntl
import json
import os
import re
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.prep_files import file_hashes
from tests.support.slurm_cluster import STEPS, Job, Project, read_metrics, run_command
from tests.support.training_runs import training_curve


def test_two_nodes_match_a_single_process(uninterrupted, alone):
    record = uninterrupted.finish()
    assert record["NumNodes"] == "2"
    assert record["ExitCode"] == "0:0"
    on_two, on_one = read_metrics(uninterrupted.run_dir), read_metrics(alone)
    assert [line["step"] for line in on_two] == [line["step"] for line in on_one] == list(range(1, STEPS + 1))
    for two, process in zip(on_two, on_one, strict=True):
        assert two["loss"] == pytest.approx(process["loss"], rel=1e-12)
        assert two["grad_norm"] == pytest.approx(process["grad_norm"], rel=1e-9)
    assert "srun" not in uninterrupted.log
    assert "hostname of the client socket" not in uninterrupted.log, "each node knows the names of the others"


def test_a_job_evaluates_as_one_process_does(uninterrupted, project):
    uninterrupted.finish()
    file = uninterrupted.run_dir / "evaluation.json"
    (job,) = project.submit(uninterrupted.run_dir, "--evaluate", "--trust-plugins", "--nodes", 2, "--nproc", 1)
    job.finish()
    of_job = json.loads(file.read_text())
    file.unlink()
    project.megatfm("evaluate", uninterrupted.run_dir, "--trust-plugins")
    alone = json.loads(file.read_text())
    assert of_job["step"] == alone["step"] == STEPS
    assert of_job["sets"].keys() == alone["sets"].keys() == {"held-out", "again"}
    for name, result in alone["sets"].items():
        assert of_job["sets"][name]["loss"] == pytest.approx(result["loss"], rel=1e-6), name
        assert of_job["sets"][name]["bytes"] == result["bytes"] > 0


@pytest.mark.slow  # to srun it is a run like any; tests/e2e/test_deepspeed.py trains, too
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed")
def test_deepspeed_s_ranks_are_started_by_srun_like_any(project):
    words = ["train.precision=fp32", "train.steps=4"]
    job = project.launch(*words, "parallel.engine=deepspeed", "parallel.zero=2", nodes=2)
    record = job.finish()
    assert record["NumNodes"] == "2"
    assert record["ExitCode"] == "0:0"
    assert "dp_shard 2" in (job.run_dir / "plan.txt").read_text()
    alone = project.folder / "alone"
    project.megatfm("train", *project.small, *words, f"run_dir={alone}")
    for two, process in zip(read_metrics(job.run_dir), read_metrics(alone), strict=True):
        assert two["loss"] == pytest.approx(process["loss"], rel=1e-5)


# -------------------------------------------------------------------------------------------------------- MPI


WAYS = ("Open MPI", "MPICH", "pmi2", "pmix")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def starter(way: str, project: Project) -> tuple[str, dict[str, str]]:
    """The words before the command of two ranks, and the variables that they need; skips what is not here."""
    needed = {
        "Open MPI": "mpirun.openmpi", "MPICH": "mpirun.mpich", "pmi2": "mpirun.mpich", "pmix": "mpirun.openmpi",
    }  # fmt: skip
    if not shutil.which(needed[way]):
        pytest.skip(f"needs {needed[way]}: run `make system-deps`")
    environment = AS_ROOT if needed[way] == "mpirun.openmpi" else debian_mpich(project.folder)
    if way not in ("pmi2", "pmix"):
        return f"{needed[way]} -n 2", environment
    if way not in project.cluster.slurm("srun", "--mpi=list").split():
        pytest.skip(f"needs SLURM's {way} plugin: run `make system-deps`")
    return f"srun --mpi={way}", environment


def debian_mpich(folder: Path) -> dict[str, str]:
    """mpi4py looks for MPICH under the name that its ABI has everywhere but on Debian."""
    (library,) = re.findall(r"libmpich\.so\.12 .*=> (\S+)", run_command("ldconfig", "-p"))
    (folder / "lib").mkdir()
    (folder / "lib" / "libmpi.so.12").symlink_to(library)
    settings = {"LD_LIBRARY_PATH": str(folder / "lib"), "MPI4PY_LIBMPI": str(folder / "lib" / "libmpi.so.12")}
    return {**settings, "UCX_TLS": "tcp,self"}  # the nodes share no memory


@pytest.fixture(scope="module")
def jobs(request, new_project, prep_config, uninterrupted) -> dict[str, Job | str]:
    """A job for each way that is tested, all submitted at once, or why there is none."""
    actual: dict[str, Job | str] = {}
    for way in (way for way in WAYS if any(item.name.endswith(f"[{way}]") for item in request.session.items)):
        project = new_project(way.replace(" ", "-"))
        if way != WAYS[0]:
            project.python = sys.executable  # where the library of MPI is said by a variable when it starts
        try:
            words, environment = starter(way, project)
        except pytest.skip.Exception as reason:
            actual[way] = str(reason)
        else:
            prep = project.command("prep", prep_config(project))
            script = f"{words} {project.command('train', *project.small)} && {words} {prep}"
            actual[way] = project.sbatch(script, "--nodes=2", "--ntasks-per-node=1", **environment)
    return actual


@pytest.fixture(autouse=True)
def ahead(request, start_ahead) -> None:
    """The jobs run while the other tests do."""
    start_ahead(request, "jobs")


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_run_and_corpus_are_the_same(way, jobs, uninterrupted, corpus):
    if isinstance(job := jobs[way], str):
        pytest.skip(job)
    assert job.finish()["NumNodes"] == "2"
    uninterrupted.finish()
    assert training_curve(job.run_dir) == training_curve(uninterrupted.run_dir)
    assert file_hashes(job.run_dir.with_name("corpus")) == file_hashes(corpus)


# -------------------------------------------------------------------------------------------------- preparing


def process_of(part: str) -> int | None:
    """The Python that does this part: nodes share the machine's kernel, so it can be seen from here."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if part.encode() in words and b"srun" not in words[0] and b"prep" in words:
            return int(file.parent.name)
    return None


def test_an_array_with_one_task_killed_makes_what_one_process_makes(project, corpus, prep_config):
    out = project.folder / "corpus"
    claim = out / ".work" / "claims" / "clean.0"
    claim.parent.mkdir(parents=True)
    with open(claim, "w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)  # nobody can finish before this is closed
        array, *_ = project.submit(prep_config(project), "--prep", "--array", 3)
        tasks = [Job(project.cluster, f"{array.number}_{k}", project.run_dir) for k in (1, 2, 3)]
        end = time.monotonic() + 240
        while (victim := process_of("2/3")) is None or not list((out / ".work").rglob("clean.*.json")):
            assert time.monotonic() < end, tasks[1].report("it never got to work")
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        assert tasks[1].finish("FAILED")["ExitCode"] == "137:0"
        assert not (out / "prep.json").exists(), "in the middle"
    for task in (tasks[0], tasks[2]):
        task.finish()
    assert file_hashes(out) == file_hashes(corpus)


# -------------------------------------------------------------------------------------- nodes that fail again


@pytest.mark.slow  # six starts; tests/unit/launchers/test_prolog_epilog.py has what is asked of SLURM
def test_a_node_that_fails_twice_is_excluded(project):
    cluster = project.cluster
    if not cluster.has_namespaces:
        pytest.skip("needs network namespaces: without them all nodes have one host name")
    cluster.wait_until_idle()
    (project.folder / "site.toml").write_text('exclude = "n[4-8]"\n')
    project.plant_fault("crash", "n2")  # SLURM takes idle nodes in their order: n1 and n2, until n2 is excluded
    job = project.launch("--site", "site.toml", nodes=2)
    record = job.finish(timeout=400)
    assert record["Restarts"] == "2"
    assert cluster.hostnames(record["ExcNodeList"]) == ["n2", "n4", "n5", "n6", "n7", "n8"]
    assert job.nodes == ["n1", "n3"]
    attempts = json.loads((job.run_dir / "restarts.json").read_text())
    assert [(attempt["code"], attempt["failed_host"]) for attempt in attempts] == [(1, "n2"), (1, "n2"), (0, None)]


@pytest.mark.slow  # tests/unit/launchers/test_prolog_epilog.py has what srun writes
def test_a_node_that_dies_before_srun_starts_its_task_is_blamed(project):
    """Twice, and comes back in between: then the run goes on beside it, and the healthy node is not left out."""
    cluster = project.cluster
    if not cluster.has_namespaces:
        pytest.skip("needs network namespaces: without them a killed node's tasks live on")
    cluster.wait_until_idle()
    hold_file, waits = project.plant_fault("held"), project.folder / "waits"
    hold = f"touch '{waits}'; while [ -e '{hold_file}' ]; do sleep 0.1; done"
    site = f'exclude = "n[4-8]"\nsetup = [["bash", "-c", {json.dumps(hold)}]]\n'
    (project.folder / "site.toml").write_text(site)
    job = project.launch("train.steps=3", "--site", "site.toml", nodes=2)
    for dies in (True, True, False):
        job.wait_until(waits.exists)
        if dies:
            cluster.node("kill", "n2")
        waits.unlink()
        hold_file.unlink()
        if dies:
            job.wait_until(lambda: job.state != "RUNNING")
            project.plant_fault("held")
            cluster.node("start", "n2")
    job.finish(timeout=400)
    attempts = json.loads((job.run_dir / "restarts.json").read_text())
    assert [attempt["failed_host"] for attempt in attempts] == ["n2", "n2", None]
    assert job.nodes == ["n1", "n3"]
    assert len(read_metrics(job.run_dir)) == 3
