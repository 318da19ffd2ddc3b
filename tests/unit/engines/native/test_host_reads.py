"""How often the host waits for the device in a step. On a CPU nobody waits, but what would is the same calls."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.layers.moe import experts
from megatfm.ops.deferred_reads import DeferredReads
from tests.support.batches import CAUSAL, global_batch
from tests.support.host_reads import BLOCKING_METHODS, HostWaits
from tests.support.models import ADAMW, TIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

MOE = TIED_MODEL.with_changes({"ffn": {"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 48}})


def waits_of_a_step(
    model: ModelConfig, parallel: ParallelConfig, precision: str, early: bool
) -> tuple[list[str], int]:
    """What waits, and reads of what was put together, in a step that is clipped. early: which the device may skip by
    itself, as a GPU does, whose rows of experts nobody looks at."""
    engine = build_engine(model, parallel, ADAMW, precision=precision)
    if early:
        engine.skipping_optimizers = list(engine.optimizers)
    batches = [microbatches(engine, global_batch(seed=step)) for step in range(2)]
    reads, real, requested = [], DeferredReads.read, []

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)
        return lambda self, *inputs: (requested.append(name), method(self, *inputs))[1]

    def read(self: DeferredReads) -> None:
        reads.append(1)
        before = len(requested)
        real(self)
        del requested[before:]

    for batch in batches:
        reads.clear()
        requested.clear()
        with pytest.MonkeyPatch.context() as patch, HostWaits() as waits:
            patch.setattr(DeferredReads, "read", read)
            for name in BLOCKING_METHODS:
                patch.setattr(Tensor, name, noted(name))
            if early:
                patch.setattr(experts, "is_host_readable", lambda _: False)
            stats = engine.forward_backward(batch, CAUSAL)
            engine.step(1e-2, clip=1e-3)
            assert stats.loss > 0
    return [*waits.found, *requested], len(reads)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (1, ParallelConfig()),
        (2, ParallelConfig(zero=0, dp_shard=2)),
        (2, ParallelConfig(zero=1, dp_shard=2)),
        (2, ParallelConfig(zero=3, dp_shard=2)),
        (2, ParallelConfig(tp=2)),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("early", [False, True])
def test_the_host_waits_once_a_step(
    workers: Workers, ranks: int, parallel: ParallelConfig, precision: str, early: bool
) -> None:
    for waits, reads in workers.run(waits_of_a_step, ranks, TIED_MODEL, parallel, precision, early):
        assert waits == []
        assert reads == 1


@pytest.mark.parametrize(
    ("ranks", "parallel", "looks"),
    [(1, ParallelConfig(), []), (2, ParallelConfig(dp_shard=2, ep=2), ["tolist"])],
)
def test_rows_of_experts_are_counted_on_the_device(
    workers: Workers, ranks: int, parallel: ParallelConfig, looks: list[str]
) -> None:
    """Where they travel to other ranks, the host makes room for them: it looks once in each layer, forward."""
    passes = MOE.n_layers * len(range(0, 8 // ranks, 2))
    for waits, reads in workers.run(waits_of_a_step, ranks, MOE, parallel, "fp32", True):
        assert waits == looks * passes
        assert reads == 1
