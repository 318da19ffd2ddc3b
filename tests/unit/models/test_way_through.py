"""From the training loop to the first matrix product: few enough calls to be read one after another."""

import traceback
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import megatfm
from megatfm.config import ParallelConfig
from megatfm.layers import linear
from megatfm.train.resilience import forward_backward_with_replay
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

HOPS = 9
"""Loop, engine, its pass, objective, model, stack, block, sublayer, matrix."""
HERE = Path(megatfm.__file__).parent


def way() -> list[str]:
    """The functions of the package between the loop and the first product, the outermost first."""
    actual, real = list[str](), linear.F.linear

    def noted(*args: Any) -> Tensor:
        if not actual:
            frames = [frame for frame in traceback.extract_stack() if HERE in Path(frame.filename).parents]
            actual.extend(f"{Path(frame.filename).relative_to(HERE)} {frame.name}" for frame in frames)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear.F, "linear", noted)
        engine = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW)
        forward_backward_with_replay(engine, microbatches(engine, global_batch(3)), CAUSAL, 1, replay_every=0)
    return actual


def test_the_way_is_short(workers: Workers) -> None:
    (result,) = workers.run(way, 1)
    assert result[0] == "train/resilience.py forward_backward_with_replay"
    assert result[-1] == "layers/linear.py forward"
    assert len(result) <= HOPS, result
