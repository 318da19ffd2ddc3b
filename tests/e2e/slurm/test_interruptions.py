"""A run that loses its time, its place or a node ends as the run that was never interrupted, bit by bit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatfm import checkpoint
from tests.support.slurm_cluster import STEPS, Job, Project, run_command
from tests.support.training_runs import training_curve


def assert_same_run(run: Path, uninterrupted: Path) -> None:
    """The joined loss curve and the last checkpoint are those of the run that nothing interrupted."""
    assert [line["step"] for line in training_curve(run)] == list(range(1, STEPS + 1))
    assert training_curve(run) == training_curve(uninterrupted)
    last = f"checkpoints/step-{STEPS:08}"
    first, second = (checkpoint.read_tensors(folder / last) for folder in (run, uninterrupted))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


SLOW = "1.5"
"""Seconds of a step, of which some thirty leave SLURM's commands enough time on a busy machine."""
NAMESPACES = "needs network namespaces: without them, what runs on a killed node lives on"

# Three jobs that have to wait for SLURM's clock go ahead; the other tests run meanwhile, and theirs come last.


@pytest.fixture(scope="module")
def bereft(new_project) -> Iterator[tuple[Job, str]]:
    """A job that has lost its second node, with all that ran there; there are others to spare."""
    project = new_project("spare")
    if not project.cluster.has_namespaces:
        pytest.skip(NAMESPACES)
    project.plant_fault("slow-first", SLOW)
    yield from without_a_node(project.launch(nodes=2))


def without_a_node(job: Job) -> Iterator[tuple[Job, str]]:
    """The job and the name of the node that is killed under it; started again at the end."""
    job.wait_for_step(7)
    node = job.nodes[-1]
    job.cluster.node("kill", node)
    yield job, node
    job.cluster.node("start", node)


@pytest.fixture(scope="module")
def preempted(new_project) -> Job:
    """A job that has made room for another one."""
    project = new_project("preempted")
    slow = project.plant_fault("slow", SLOW)
    job = project.launch("--partition", "low")
    job.wait_for_step(7)
    place = f"--nodelist={job.record()['NodeList']}"
    project.sbatch("sleep 1", "--partition=main", place).finish()
    slow.unlink()
    return job


@pytest.fixture(autouse=True)
def ahead(request, start_ahead) -> None:
    start_ahead(request, "limited", "bereft", "preempted")


@pytest.mark.extended  # a requeue is below, and what `status` says of a held job in tests/unit/launchers/test_status.py
def test_requeued_in_the_middle(alone, project):
    """And held, as SLURM holds a job that it could not start again: `status` says so, and the way out of it works."""
    slow = project.plant_fault("slow", SLOW)
    job = project.launch()
    job.wait_for_step(7)
    project.cluster.slurm("scontrol", "requeuehold", job.number)
    job.wait_until(lambda: job.state == "PENDING")
    slow.unlink()
    output = project.megatfm("status", job.run_dir)
    (way_out,) = re.findall(rf"^state +PENDING.*`(scontrol release {job.number})`", output, re.MULTILINE)
    project.cluster.slurm(*way_out.split())
    assert job.finish()["Restarts"] == "1"
    assert_same_run(job.run_dir, alone)


def resubmit_words(project: Project) -> list[object]:
    """For `launch`: the small run as a job, once more."""
    return [*project.small, "--slurm", "--nodes", 1, "--nproc", 1]


def test_a_cancelled_run_stays_cancelled_and_can_be_resumed(alone, project):
    slow = project.plant_fault("slow", SLOW)
    job = project.launch()
    job.wait_for_step(7)
    assert re.search(rf"^state +RUNNING: job {job.number}", project.megatfm("status", job.run_dir), re.MULTILINE)
    assert f"job {job.number} is of this run, and runs" in project.megatfm("launch", *resubmit_words(project), code=2)
    project.cluster.slurm("scancel", job.number)
    job.finish("CANCELLED", timeout=60)
    assert re.search(rf"^state +CANCELLED: job {job.number}", project.megatfm("status", job.run_dir), re.MULTILINE)
    slow.unlink()
    second_job = project.launch()
    second_job.finish()
    output = project.megatfm("logs", job.run_dir)
    assert f"==> {job.run_dir}/logs/slurm-{second_job.number}.log <==\n" in output
    assert "rank-0.log" not in output, "the same lines are in the job's"
    assert "megatfm job: the run ended with 0: done" in output
    assert_same_run(second_job.run_dir, alone)
    record = job.record()
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "0")


def test_a_job_that_waits_is_seen_and_cancelled(project):
    (project.folder / "site.toml").write_text('sbatch = ["--begin=now+1hour"]\n')
    job = project.launch("--site", "site.toml")
    assert re.search(rf"^state +PENDING.*: job {job.number}", project.megatfm("status", job.run_dir), re.MULTILINE)
    assert project.megatfm("cancel", job.number) == f"cancelled job {job.number}\n"
    job.finish("CANCELLED")
    assert "none of its jobs is in the queue" in project.megatfm("cancel", job.run_dir, code=2)


@pytest.mark.slow  # what `launch` says is above, and the lock in tests/e2e/test_resilience.py
def test_a_second_job_of_a_run_is_refused(alone, project):
    slow = project.plant_fault("slow", "300")  # the second may have to wait for nodes
    project.plant_fault("handover", "2")
    first = project.launch()
    first.wait_for_step(2)
    assert f"job {first.number} is of this run, and runs" in project.megatfm("launch", *resubmit_words(project), code=2)
    script = project.run_dir / "slurm" / "pretrain.sbatch"
    output = run_command("sbatch", "--parsable", script, cwd=project.folder, env=project.environment)
    second = project.cluster.job(output.strip(), project.run_dir)  # past us
    assert second.finish("FAILED")["ExitCode"] == "77:0"
    assert "another process is training in this run directory (process " in second.log
    assert f"job {first.number}" in second.log
    assert first.state == "RUNNING"
    slow.unlink()
    first.finish()
    assert_same_run(first.run_dir, alone)


def test_a_chain_resumes_after_a_stop_and_after_a_lost_node(alone, project):
    """Jobs may not be requeued here. The first is stopped as ahead of its time limit; the second loses its node, and
    srun leaves with 0 then: only the run itself knows that it is not done. The fourth is not needed."""
    (project.folder / "site.toml").write_text("requeue = false\n")
    slow = project.plant_fault("slow", SLOW)
    links = project.submit(*project.small, "--nodes", 1, "--nproc", 1, "--chain", 4, "--site", "site.toml")
    assert all(link.record()["Dependency"].startswith("afterany:") for link in links[1:])
    first, second, third, last = links
    first.wait_for_step(7)
    project.cluster.slurm("scancel", "--signal=USR1", "--batch", first.number)
    assert first.finish("FAILED")["ExitCode"] == "75:0"
    second.wait_for_step(12)
    (node,) = second.nodes
    project.cluster.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    second.wait_until(lambda: second.state in ("NODE_FAIL", "FAILED"), timeout=60)
    # What the second has on its node saves and ends before the third goes on.
    third.wait_until(lambda: f'"job": "{third.number}"' in (third.run_dir / "lock").read_text())
    attempts = json.loads((third.run_dir / "restarts.json").read_text())
    assert [attempt["job"] for attempt in attempts] == [first.number, second.number, third.number]
    assert (attempts[0]["code"], attempts[2]["ended"]) == (75, None)
    assert attempts[1]["code"] != 0, second.log
    assert "was cancelled" not in second.log
    slow.unlink()
    assert third.finish()["Requeue"] == "0"
    assert last.finish("CANCELLED")
    assert_same_run(third.run_dir, alone)


def test_a_lost_node_is_replaced_by_a_spare(bereft, uninterrupted):
    job, node = bereft
    assert job.finish(timeout=400)["Restarts"] == "1"
    assert node not in job.nodes
    assert len(job.nodes) == 2
    uninterrupted.finish()
    assert_same_run(job.run_dir, uninterrupted.run_dir)


@pytest.mark.slow  # that a node is lost is above, and the layout that fits the others in tests/e2e/test_elastic.py
def test_a_run_without_a_spare_resumes_on_fewer_nodes(project, uninterrupted):
    if not project.cluster.has_namespaces:
        pytest.skip(NAMESPACES)
    project.cluster.wait_until_idle("n[7-8]")  # the node that `bereft` has lost stays down until the last test
    project.plant_fault("slow-first", SLOW)
    (project.folder / "site.toml").write_text('exclude = "n[1-6]"\n')
    for job, node in without_a_node(project.launch("--site", "site.toml", nodes="1-2")):
        assert job.finish(timeout=400)["Restarts"] == "1"
        assert {*job.nodes, node} == {"n7", "n8"}
        uninterrupted.finish()
        assert [line["step"] for line in training_curve(job.run_dir)] == list(range(1, STEPS + 1))
        for first, second in zip(training_curve(job.run_dir), training_curve(uninterrupted.run_dir), strict=True):
            assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)


def test_a_preempted_job_resumes_to_the_same_curve(preempted, alone):
    assert preempted.finish()["Restarts"] == "1"
    assert_same_run(preempted.run_dir, alone)


def test_the_time_limit_ends_a_job_and_its_requeue_finishes_the_run(limited, alone):
    assert int(limited.finish(timeout=400)["Restarts"]) >= 1
    assert "TIMEOUT" not in limited.seen, "it left by itself, ahead of the limit"
    assert_same_run(limited.run_dir, alone)
