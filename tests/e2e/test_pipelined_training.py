"""A run whose layers are cut into pipeline stages is the run of one process, and goes on as a run without stages."""

import signal
from collections.abc import Callable
from pathlib import Path

from megatfm.config import Config
from megatfm.errors import EXIT_OK, EXIT_REQUEUE
from tests.support.training_runs import assert_bitwise_equal, assert_nearly_equal, run_training, run_until
from tests.support.workers import Workers

PATIENCE = 300.0  # on a busy machine; it takes a tenth


def test_two_pipeline_ranks_train_like_one_process_and_resume_without_stages(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    assert workers.run(run_training, 1, make_config(run="whole"), timeout=PATIENCE) == [EXIT_OK]
    config = make_config("parallel.pp=2", "parallel.pp_schedule=interleaved", run="moved")
    assert workers.run(run_until, 2, config, 5, timeout=PATIENCE) == [EXIT_REQUEUE, EXIT_REQUEUE]
    plan = (tmp_path / "moved" / "plan.txt").read_text(encoding="utf-8")
    assert "mesh  pp 2 × dp_replicate 1 × dp_shard 1 × tp 1" in plan
    assert "pipeline  interleaved, 4 stages on 2 ranks" in plan
    assert "decoder.embedding.tokens.weight" in plan, "the tie, which both ranks hold"
    assert workers.run(run_training, 2, make_config(run="moved"), timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    assert_nearly_equal(tmp_path / "whole", tmp_path / "moved")


def test_stopped_and_resumed_is_bitwise_the_run_never_stopped(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    layout = ["parallel.pp=2", "parallel.pp_schedule=zbv", "evaluate.every=0"]
    assert workers.run(run_training, 2, make_config(*layout, run="whole"), timeout=PATIENCE) == [
        EXIT_OK,
        EXIT_OK,
    ]
    config = make_config(*layout, run="stopped")
    assert workers.run(run_until, 2, config, 5, signal.SIGUSR1, timeout=PATIENCE) == [
        EXIT_REQUEUE,
        EXIT_REQUEUE,
    ]
    assert workers.run(run_training, 2, config, timeout=PATIENCE) == [EXIT_OK, EXIT_OK]
    assert_bitwise_equal(tmp_path / "whole", tmp_path / "stopped")
