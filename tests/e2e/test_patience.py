"""Runs that end early, at the same step whether they were interrupted or not; and runs of adapters, which resume."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.errors import EXIT_OK, EXIT_REQUEUE, UsageError
from megatfm.launchers.record import is_finished
from megatfm.train.best_checkpoint import best_checkpoint
from tests.support.training_runs import assert_bitwise_equal, run_training, run_until, training_curve
from tests.support.workers import WorkerFailure, Workers

OPTIONS = '{rank = 3, dropout = 0.1, trained = ["decoder.norm.*"]}'
MakeConfig = Callable[..., Config]
STANDSTILL = ["train.patience=2", "evaluate.every=2", "optimizer.lr=1e-30", "optimizer.matrix_lr=1e-30"]
"""Nothing is learnt, so the first evaluation, of step 2, stays the best: the run ends at step 6 of 12."""


def test_a_run_without_progress_ends_early(workers: Workers, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(*STANDSTILL, "parallel.dp_shard=2", run="whole")
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert [line["step"] for line in training_curve(tmp_path / "whole")] == list(range(1, 7))
    assert best_checkpoint(tmp_path / "whole").name == "step-00000002"
    event = json.loads((tmp_path / "whole/events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"]) == ("finished early", 6)
    assert "loss was best at step 2, 2 evaluations before" in event["detail"]
    assert is_finished(tmp_path / "whole", 12)
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK], "once more: nothing is left to do"
    assert len(training_curve(tmp_path / "whole")) == 6

    stopped = make_config(*STANDSTILL, "parallel.dp_shard=2", run="stopped")
    assert workers.run(run_until, 2, stopped, 5, signal.SIGTERM) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 2, stopped) == [EXIT_OK, EXIT_OK]
    assert training_curve(tmp_path / "whole") == training_curve(tmp_path / "stopped")


def test_a_run_with_progress_goes_to_its_end(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config("train.patience=1", "evaluate.every=4", run="learns")
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert len(training_curve(tmp_path / "learns")) == 12


def test_patience_needs_evaluations(make_config: MakeConfig) -> None:
    with pytest.raises(UsageError, match=r"counts evaluations, and evaluate\.every = 0"):
        make_config("train.patience=3", "evaluate.every=0")
    with pytest.raises(UsageError, match=r"there is none: give data\.validation"):
        make_config("train.patience=3", "evaluate.every=2", "data.validation={}")


def test_adapters_resume_to_the_bit_and_leave_the_base_alone(
    workers: Workers, make_config: MakeConfig, tmp_path: Path
) -> None:
    assert workers.run(run_training, 2, make_config("train.steps=2", run="base")) == [EXIT_OK, EXIT_OK]
    lora = [f"train.init_from={tmp_path / 'base'}", f"model.lora={OPTIONS}", "parallel.tp=2"]
    assert workers.run(run_training, 2, make_config(*lora, run="whole")) == [EXIT_OK, EXIT_OK]
    config = make_config(*lora, run="stopped")
    assert workers.run(run_until, 2, config, 5, signal.SIGTERM) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 2, config) == [EXIT_OK, EXIT_OK]
    assert_bitwise_equal(tmp_path / "whole", tmp_path / "stopped")

    newest = checkpoint.find_checkpoint(tmp_path / "whole")
    base = checkpoint.find_checkpoint(tmp_path / "base")
    before, after = (checkpoint.read_tensors(path, "model.") for path in (base, newest))
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {"model.decoder.norm.weight"}, "the base is frozen"
    assert all(".lora." in name for name in after.keys() - before.keys())
    states = [name for name in checkpoint.read_names(newest) if name.startswith("optimizer.")]
    assert all(".lora." in name or ".decoder.norm." in name for name in states)
    identity = checkpoint.read_state(newest)["base"]
    assert isinstance(identity, dict)
    assert identity["checkpoint"] == str(base)
    assert len(str(identity["blake3"])) == 64

    plain = make_config(f"train.init_from={newest}", run="lost")
    with pytest.raises(
        WorkerFailure, match=r"has an adapter, .*lora\.a\.weight, without which it would be another model"
    ):
        workers.run(run_training, 2, plain)
