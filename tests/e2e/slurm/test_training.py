"""Training on several nodes is training on one, and every way of starting the ranks starts the same run."""

import json
from importlib.util import find_spec

import pytest

from tests.support.slurm_cluster import STEPS, metrics


def test_two_nodes_match_a_single_process(uninterrupted, alone):
    record = uninterrupted.finish()
    assert record["NumNodes"] == "2"
    assert record["ExitCode"] == "0:0"
    on_two, on_one = metrics(uninterrupted.run_dir), metrics(alone)
    assert [line["step"] for line in on_two] == [line["step"] for line in on_one] == list(range(1, STEPS + 1))
    for two, one in zip(on_two, on_one, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-9)
    assert "srun" not in uninterrupted.log


def test_a_job_evaluates_as_one_process_does(uninterrupted, project):
    uninterrupted.finish()
    file = uninterrupted.run_dir / "evaluation.json"
    (job,) = project.submit(
        uninterrupted.run_dir, "--evaluate", "--trust-plugins", "--nodes", 2, "--nproc", 1
    )
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
    for two, one in zip(metrics(job.run_dir), metrics(alone), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
