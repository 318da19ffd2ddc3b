"""Training on several nodes is training on one, and every way of starting the ranks starts the same run."""

import pytest

from tests.e2e.slurm.cluster import metrics
from tests.e2e.slurm.conftest import STEPS


def test_two_nodes_match_a_single_process(whole, project):
    project.megatfm("train", *project.small)
    record = whole.finish()
    assert record["NumNodes"] == "2"
    assert record["ExitCode"] == "0:0"
    on_two, on_one = metrics(whole.run_dir), metrics(project.run_dir)
    assert [line["step"] for line in on_two] == [line["step"] for line in on_one] == list(range(1, STEPS + 1))
    for two, one in zip(on_two, on_one, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert "srun" not in whole.log
