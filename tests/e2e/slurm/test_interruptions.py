"""A run that loses its time, its place or a node ends as the run that was never interrupted, bit by bit."""

import pytest
import torch

from megatfm import checkpoint
from tests.e2e.slurm.cluster import Job
from tests.e2e.slurm.conftest import STEPS
from tests.e2e.test_training import curve


def assert_same_run(job: Job, whole: Job) -> None:
    """The joined loss curve and the last checkpoint are those of the run that nothing interrupted."""
    whole.finish()
    assert [line["step"] for line in curve(job.run_dir)] == list(range(1, STEPS + 1))
    assert curve(job.run_dir) == curve(whole.run_dir)
    last = f"checkpoints/step-{STEPS:08}"
    one, other = (checkpoint.read_tensors(run / last) for run in (job.run_dir, whole.run_dir))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def limited(new_project) -> Job:
    """A job whose minute ends before its steps do. Submitted ahead of its test: others run meanwhile."""
    project = new_project("limited")
    project.trouble("slow-first", "2")
    (project.folder / "site.toml").write_text("stop_seconds = 10\n")
    return project.launch("--time", 1, "--site", "site.toml")


@pytest.fixture(scope="module")
def bereft(new_project) -> tuple[Job, str]:
    """A job that has lost its second node, with all that ran there; and that node."""
    project = new_project("bereft")
    if not project.cluster.has_namespaces:
        pytest.skip("needs network namespaces: without them, what runs on a killed node lives on")
    project.trouble("slow-first", "1")
    job = project.launch()
    job.until_step(7)
    lost = job.nodes[-1]
    project.cluster.node("kill", lost)
    return job, lost


def test_requeued_in_the_middle(limited, bereft, whole, project):
    slow = project.trouble("slow", "0.5")
    job = project.launch()
    job.until_step(7)
    project.cluster.slurm("scontrol", "requeue", job.number)
    job.until(lambda: job.state != "RUNNING")
    slow.unlink()
    assert job.finish()["Restarts"] == "1"
    assert_same_run(job, whole)


def test_cancelled_stays_cancelled_and_can_be_taken_up_again(limited, bereft, whole, project):
    slow = project.trouble("slow", "0.5")
    job = project.launch()
    job.until_step(7)
    project.cluster.slurm("scancel", job.number)
    job.finish("CANCELLED", timeout=30)
    slow.unlink()
    again = project.launch()
    again.finish()
    assert_same_run(again, whole)
    record = job.record()
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "0")


def test_of_two_jobs_of_one_run_the_second_is_refused(limited, bereft, whole, project):
    slow = project.trouble("slow", "0.5")
    first = project.launch()
    first.until_step(2)
    second = project.launch()
    assert second.finish("FAILED")["ExitCode"] == "77:0"
    assert "another" in second.log
    assert first.state == "RUNNING"
    slow.unlink()
    first.finish()
    assert_same_run(first, whole)


def test_a_lost_node_is_replaced_by_a_spare(bereft, whole):
    job, lost = bereft
    try:
        record = job.finish(timeout=150)
    finally:
        job.cluster.node("start", lost)
    assert record["Restarts"] == "1"
    assert lost not in job.nodes
    assert_same_run(job, whole)


def test_the_time_limit_ends_a_job_and_its_requeue_finishes_the_run(limited, whole):
    assert limited.finish(timeout=200)["Restarts"] == "1"
    assert "TIMEOUT" not in limited.seen, "it left by itself, ahead of the limit"
    assert_same_run(limited, whole)
