"""Gradients summed over data ranks in bfloat16: half the bytes, and rounded once, whatever the micro-batches."""

import pytest

from megatfm.config import ParallelConfig
from megatfm.verify.traffic import TrafficCounter
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL
from tests.support.parity import build_engine, local_block, microbatches, one_device, one_device_gradients
from tests.support.workers import Workers

LAYOUTS = [
    ParallelConfig(dp_shard=2, zero=0),
    ParallelConfig(dp_shard=2, zero=1),
    ParallelConfig(dp_replicate=2, dp_shard=1, zero=1),
    ParallelConfig(dp_shard=2, zero=2, grad_accumulation="sharded"),
    ParallelConfig(dp_shard=2, zero=3, grad_accumulation="sharded"),
]
REDUCTIONS = ("all_reduce", "reduce_scatter")


def reduced(parallel: ParallelConfig) -> tuple[float, int]:
    """‖g − r‖ / ‖r‖ over all gradients here, and bytes sent to reduce them."""
    batch = global_batch(seed=4)
    _, expected = one_device_gradients(one_device(TIED_MODEL), batch)
    engine = build_engine(TIED_MODEL, parallel, ADAMW, precision="fp32")
    with TrafficCounter({}) as traffic:
        engine.forward_backward(microbatches(engine, batch), CAUSAL)
    off = norm = 0.0
    for name, gradient in engine.gradients().items():
        assert gradient.dtype == engine.local[name].dtype
        wanted = local_block(engine, name, expected[name])
        off += float((gradient - wanted).square().sum())
        norm += float(wanted.square().sum())
    sent = sum(flow.sent_bytes for flow in traffic.flows() if flow.collective in REDUCTIONS)
    return (off / norm) ** 0.5, sent


def compare() -> list[tuple[float, float]]:
    actual = []
    for parallel in LAYOUTS:
        _, full = reduced(parallel)
        error, half = reduced(parallel.model_copy(update={"reduce_dtype": "bf16"}))
        actual.append((error, half / full))
    return actual


def test_half_the_bytes_and_one_rounding(workers: Workers) -> None:
    for (error, share), parallel in zip(workers.run(compare, 2)[0], LAYOUTS, strict=True):
        assert share == pytest.approx(0.5, abs=0.01), parallel
        # Of two addends that are each rounded to half a step of bfloat16, and their sum.
        micro_batches = 4 if parallel.grad_accumulation == "sharded" else 1
        assert 1e-4 < error < 3 * 2**-9 * micro_batches**0.5, parallel


def test_micro_batches_are_not_added_up_in_it() -> None:
    with pytest.raises(
        ValueError, match=r"zero = 3 would add micro-batches up in it, too: set grad_accumulation"
    ):
        ParallelConfig(reduce_dtype="bf16")
