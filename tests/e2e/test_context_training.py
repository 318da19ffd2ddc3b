"""A run whose rows are cut over ranks is the run of one process, and goes on as one whose rows are whole, and back."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megatfm.config import Config
from megatfm.errors import EXIT_OK, EXIT_REQUEUE
from megatfm.inference.evaluate import evaluate_run
from megatfm.parallel import context_attention
from tests.support.training_runs import assert_bitwise_equal, assert_nearly_equal, run_training, run_until
from tests.support.workers import Workers

PATIENCE = 300.0  # on a busy machine; it takes a tenth


def run_told_nothing(config: Config) -> int:
    """As in a process that has logged nothing yet: what is told once, it tells."""
    context_attention._logged.clear()
    return run_training(config)


def evaluate_alone(run: Path) -> float:
    actual = evaluate_run(run, {}, False)
    assert actual is not None
    return float(actual[0]["sets"]["held-out"]["loss"])


def test_context_ranks_train_like_one_process(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Two ranks train like one process, stop and resume bit for bit, and change their number."""
    assert workers.run(run_training, 1, make_config(run="whole"), timeout=PATIENCE) == [EXIT_OK]
    config = make_config("parallel.cp=2", run="cut")
    assert workers.run(run_told_nothing, 2, config, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    plan = (tmp_path / "cut" / "plan.txt").read_text(encoding="utf-8")
    assert "mesh  dp_replicate 1 × dp_shard 1 × cp 2 × tp 1" in plan
    log = (tmp_path / "cut" / "logs" / "rank-1.log").read_text(encoding="utf-8")
    assert (
        log.count("attention Full(causal=True), cp 2: Ulysses, each rank computes some heads of all tokens")
        == 1
    )
    stopped = make_config("parallel.cp=2", run="stopped")
    assert workers.run(run_until, 2, stopped, 5, signal.SIGUSR1, timeout=PATIENCE) == [
        EXIT_REQUEUE,
        EXIT_REQUEUE,
    ]
    assert workers.run(run_training, 2, stopped, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    assert_bitwise_equal(tmp_path / "cut", tmp_path / "stopped")
    assert workers.run(run_until, 1, make_config(run="moved"), 5, timeout=PATIENCE) == [EXIT_REQUEUE]
    moved = make_config("parallel.cp=2", run="moved")
    assert workers.run(run_until, 2, moved, 4, timeout=PATIENCE) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert workers.run(run_training, 1, make_config(run="moved"), timeout=PATIENCE) == [EXIT_OK]
    # Whatever a run was laid over, one process evaluates it.
    losses = [workers.run(evaluate_alone, 1, tmp_path / run, timeout=PATIENCE)[0] for run in ("whole", "cut")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for run in ("cut", "moved"):
        assert_nearly_equal(tmp_path / "whole", tmp_path / run)
