"""Optimizers with more to remember than moments, through the whole of a run that is stopped and resumed."""

import pytest
import torch

from megatfm.errors import EXIT_OK, EXIT_REQUEUE
from tests.support.training_runs import final_state, run_training, run_until, training_curve


@pytest.mark.parametrize("name", ["schedule_free_adamw", pytest.param("soap", marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_bitwise_the_run_never_stopped(workers, make_config, tmp_path, name):
    """Evaluations and saves lie in between, at which schedule-free weights are exchanged for their average."""
    options = [f'optimizer={{name="{name}", lr=3e-3}}', 'lr_schedule={name="constant", warmup_steps=2}']
    assert workers.run(run_training, 2, make_config(*options, run="whole")) == [EXIT_OK, EXIT_OK]
    config = make_config(*options, run="stopped")
    assert workers.run(run_until, 2, config, 5) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert training_curve(tmp_path / "whole") == training_curve(tmp_path / "stopped")
    full, stopped = final_state(tmp_path / "whole"), final_state(tmp_path / "stopped")
    assert full.keys() == stopped.keys()
    for key, tensor in full.items():
        assert torch.equal(tensor, stopped[key]), key
    expected = {"schedule_free_adamw": {"z", "trained"}, "soap": {"left_basis", "right_basis"}}[name]
    assert expected <= {key.rpartition(".")[2] for key in full}
    losses = [line["loss"] for line in training_curve(tmp_path / "whole")]
    assert losses[-1] < losses[0]
