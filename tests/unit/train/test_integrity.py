"""One flipped bit in what ranks hold as copies of each other is found, and its rank and name said, at every stage."""

import random
import re
import socket

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import ParallelConfig
from megatfm.engines.interface import Batch
from megatfm.errors import MegatfmError
from megatfm.train.resilience import compare_replicas, forward_backward_with_replay
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.workers import Workers

HOST = re.escape(socket.gethostname())
COPIES = {
    "zero 0": ParallelConfig(dp_shard=3, zero=0),
    **{f"replicas, zero {zero}": ParallelConfig(dp_replicate=3, dp_shard=1, zero=zero) for zero in range(4)},
}
NAME = "decoder.layers.1.attn.wo.weight"


def flipped(parallel: ParallelConfig, kind: str, precision: str) -> str:
    """What is said after a bit has flipped on rank 1; nothing must be said before."""
    engine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision=precision)
    rows = {key: value[2 * dist.get_rank() :][:2] for key, value in global_batch(seed=1).items()}
    engine.forward_backward([rows], CAUSAL)
    engine.step(1e-2, clip=1.0)
    compare_replicas(engine, step=4, every=2)
    if dist.get_rank() == 1:
        held = engine.local[NAME] if kind == "model" else engine.optimizers[0].state()[NAME]["exp_avg"]
        held.view(-1)[:1].view(torch.uint8)[0] ^= 1
    compare_replicas(engine, step=5, every=2)  # not due
    try:
        compare_replicas(engine, step=6, every=2)
    except MegatfmError as error:
        return str(error)
    return "nothing was found"


def everywhere() -> dict[tuple[str, str], str]:
    return {
        (layout, kind): flipped(parallel, kind, "bf16" if parallel.zero % 2 else "fp32")
        for layout, parallel in COPIES.items()
        for kind in ("model", "optimizer")
    }


def test_a_flipped_bit_is_named_under_every_stage(workers: Workers) -> None:
    by_rank = workers.run(everywhere, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(by_rank[0]) == 2 * len(COPIES)
    for (layout, kind), message in by_rank[0].items():
        name = re.escape(f"model.{NAME}" if kind == "model" else f"optimizer.{NAME}.exp_avg")
        actual = rf"after step 6, replicas of one parameter differ: rank 1 on {HOST}: {name}\. A processor"
        assert re.match(actual, message), (layout, kind, message)


class Drawing:
    """An objective that a plugin might bring: it draws from the global generators."""

    loss_weights, target_counts = CAUSAL.loss_weights, CAUSAL.target_counts

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        factor = 1.0 + torch.rand(()) + random.random() + float(np.random.rand())
        return {name: factor * term for name, term in CAUSAL(model, batch).items()}


def replayed_with_draws() -> list[float]:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), ADAMW)
    rows = {key: value[2 * dist.get_rank() :][:2] for key, value in global_batch(seed=1).items()}
    losses = []
    for step in (1, 2, 3):
        losses.append(
            forward_backward_with_replay(engine, [rows], Drawing(), step, replay_every=step % 2).loss
        )
        engine.zero_grad()
    return losses


def test_a_plugin_that_draws_from_global_generators_can_be_replayed(workers: Workers) -> None:
    losses = workers.run(replayed_with_draws, 2)[0]
    assert len(set(losses)) == 3, "the draws of a step are those of one pass, and go on"


def shards_differ() -> None:
    for zero in (1, 2, 3):
        engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=3, zero=zero), ADAMW)
        compare_replicas(engine, step=2, every=2)


def test_shards_are_no_copies(workers: Workers) -> None:
    """Other blocks on every rank: not compared, and not taken for broken."""
    workers.run(shards_differ, 3)
