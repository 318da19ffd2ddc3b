"""ZeRO 0 and 1 reduce buckets while the last backward pass still runs: the same sums, and the same bytes sent."""

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.engines.native import replicated
from megatfm.engines.native.replicated import Replicated
from megatfm.verify.traffic import CollectiveTraffic, TrafficCounter
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

LAYOUTS = [
    ParallelConfig(dp_shard=2, zero=0),
    ParallelConfig(dp_shard=2, zero=1),
    ParallelConfig(dp_shard=1, dp_replicate=2, zero=1),
]


def one_step(parallel: ParallelConfig) -> tuple[dict[str, Tensor], list[CollectiveTraffic], int]:
    """Gradients, traffic, and how many buckets were on their way when the last backward pass was over."""
    engine = build_engine(TIED_MODEL, parallel, ADAMW)
    data = engine.data
    assert isinstance(data, Replicated)
    sent, reduce = [0], data.reduce

    def note() -> None:
        sent[0] = len(data._pending_gradients)
        reduce()

    data.reduce = note  # type: ignore[method-assign]
    with TrafficCounter({}) as traffic:
        engine.forward_backward(microbatches(engine, global_batch(seed=4)), CAUSAL)
    return engine.gradients(), traffic.flows(), sent[0]


def compare() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
        for parallel in LAYOUTS:
            early, flows, sent = one_step(parallel)
            assert sent >= 3, "of the layers, while that of the embedding is not there yet"
            with pytest.MonkeyPatch.context() as late:
                late.setattr(
                    Replicated, "begin", lambda self, is_last: self.start_pipeline_step(keep_unsharded=False)
                )
                afterwards, same_flows, none = one_step(parallel)
            assert (none, flows) == (0, same_flows)
            for name, gradient in early.items():
                assert torch.equal(gradient, afterwards[name]), (parallel, name)


def test_overlapping_leaves_gradients_equal_to_the_bit(workers: Workers) -> None:
    workers.run(compare, 2)


def two_backward_passes() -> None:
    engine = build_engine(TIED_MODEL, LAYOUTS[0], ADAMW)
    parameter = engine.model.get_parameter("decoder.norm.weight")
    engine.data.start_microbatch(is_last=True)
    for other in engine.model.parameters():
        other.square().sum().backward()
    with pytest.raises(RuntimeError, match="arrived after its bucket was reduced"):
        parameter.square().sum().backward()


def test_a_gradient_that_comes_too_late_is_not_dropped(workers: Workers) -> None:
    workers.run(two_backward_passes, 2)
