"""Failures for good end with a code and a reason; those that a restart mends are restarted."""

import json
import sys

import pytest

from tests.support.slurm_cluster import Job, Project
from tests.support.training_runs import training_curve


@pytest.fixture(scope="module")
def crashing(new_project) -> Job:
    """A job that fails before its first checkpoint whenever it is started."""
    project = new_project("crashing")
    project.plant_fault("crash")
    return project.launch("--max-restarts", 1)


@pytest.fixture(scope="module")
def impossible(new_project) -> Job:
    """A job whose config can't be: what the tokenizer has is seen by the run alone."""
    return new_project("impossible").launch("model.vocab_size=3")


@pytest.fixture(scope="module")
def by_torchrun(new_project) -> Job:
    """A job of two nodes, on each of which torchrun starts the rank."""
    return new_project("torchrun").launch("--start", "torchrun", nodes=2)


HOSTILE = "$(touch owned) `touch owned`; touch owned #"


@pytest.fixture(scope="module")
def hostile(new_project) -> tuple[Job, Project]:
    """A job of paths, values and variables that a shell would run, or sbatch would heed."""
    project = new_project("$(touch owned) & `touch owned`; #")
    project.run_name = "run $(touch owned) > owned"
    project.python = sys.executable  # what a fork has imported would hide what the job's copy of the code lacks
    trouble = json.dumps(str(project.folder / "trouble"))
    site = f"container = ['env', 'A={HOSTILE}']\nenvironment = {{ B = '{HOSTILE}', TROUBLE = {trouble} }}\n"
    (project.folder / "site.toml").write_text(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(project.cluster.environment, "SBATCH_TIMELIMIT", "1")
        patch.setitem(project.cluster.environment, "SBATCH_JOB_NAME", "other")
        return project.launch("train.steps=2", "--site", "site.toml", "--sbatch=--export=NONE"), project


@pytest.fixture(autouse=True)
def ahead(request, start_ahead) -> None:
    """All start at once, since three quarters of a job's time are SLURM's."""
    start_ahead(request, "limited", "crashing", "hostile", "impossible", "by_torchrun")


def test_a_config_that_can_not_be_is_not_tried_again(impossible):
    record = impossible.finish("FAILED")
    assert (record["ExitCode"], record["Restarts"]) == ("2:0", "0")
    assert "model.vocab_size = 3 is smaller than the tokenizer's" in impossible.log


def test_hostile_paths_and_values_reach_no_shell(hostile):
    """Nor do variables of the submitting shell reach the job: those for sbatch, and with --export=NONE all others."""
    job, project = hostile
    record = job.finish()
    assert record["JobName"] == "small"
    assert record["TimeLimit"] != "00:01:00"
    assert [line["step"] for line in training_curve(job.run_dir)] == [1, 2]
    assert not list(project.folder.parent.rglob("owned"))


def test_torchrun_starts_the_ranks_of_each_node(uninterrupted, by_torchrun):
    assert by_torchrun.finish()["NumNodes"] == "2"
    uninterrupted.finish()
    assert training_curve(by_torchrun.run_dir) == training_curve(uninterrupted.run_dir)


@pytest.mark.slow  # two nodes are above, and signals to torchrun's workers in unit/launchers/test_torchrun.py
def test_a_stop_reaches_torchrun_s_ranks(uninterrupted, project):
    project.python = sys.executable  # a fork handles signals before its ranks run
    slow = project.plant_fault("slow", "1.5")
    job = project.launch("--start", "torchrun", nodes=2)
    job.wait_for_step(7)
    project.cluster.slurm("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_until(lambda: job.state != "RUNNING")
    slow.unlink()
    assert job.finish()["Restarts"] == "1"
    assert "stopped by USR1" in job.log
    uninterrupted.finish()
    assert training_curve(job.run_dir) == training_curve(uninterrupted.run_dir)


def test_a_crash_loop_stops_by_itself(crashing):
    record = crashing.finish("FAILED")
    assert (record["ExitCode"], record["Restarts"]) == ("76:0", "1")
    assert "trouble was asked for" in crashing.log
    assert "no progress: 2 attempts in a row failed without a new checkpoint after step 0" in crashing.log


@pytest.mark.slow  # a hang is named in tests/e2e/test_resilience.py, and what fails is restarted above
def test_a_rank_that_hangs_is_named_and_the_run_restarted(project, uninterrupted):
    project.plant_fault("hang-first", "1")
    hanging = project.launch("train.hang_seconds=20", nodes=2)
    assert hanging.finish()["Restarts"] == "1"
    first, _ = json.loads((hanging.run_dir / "restarts.json").read_text())
    assert (first["code"], first["failed_rank"], first["failed_host"]) == (1, 1, first["nodes"][1])
    assert f"rank 1 on {first['failed_host']}" in hanging.log
    assert "next_with_trouble" in (hanging.run_dir / "logs" / "rank-1.log").read_text(), "where it hung"
    uninterrupted.finish()
    assert training_curve(hanging.run_dir) == training_curve(uninterrupted.run_dir)
