"""Between pipeline stages, what goes forward and what comes back have communicators of their own."""

from typing import Any

import pytest
import torch.distributed as dist

from megatfm.config import ParallelConfig
from megatfm.parallel.mesh import PIPELINE
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import UNTIED_MODEL
from tests.support.parity import build_engine, uneven_microbatches
from tests.support.workers import Workers


def groups_by_direction(parallel: ParallelConfig) -> None:
    engine = build_engine(UNTIED_MODEL, parallel)
    stage = dist.get_rank()
    actual: dict[str, set[str]] = {"forward": set(), "back": set()}
    calls = {name: getattr(dist, name) for name in ("isend", "irecv")}
    with pytest.MonkeyPatch.context() as patch:
        for name, ahead in (("isend", 1), ("irecv", -1)):

            def seen(
                tensor: Any,
                group: Any,
                *,
                group_dst: int = 0,
                group_src: int = 0,
                ahead: int = ahead,
                name: str = name,
            ) -> Any:
                other = group_dst if name == "isend" else group_src
                actual["forward" if other - stage == ahead else "back"].add(str(group.group_name))
                peer = {"group_dst": other} if name == "isend" else {"group_src": other}
                return calls[name](tensor, group=group, **peer)

            patch.setattr(dist, name, seen)
        engine.forward_backward(uneven_microbatches(engine, global_batch(seed=2)), CAUSAL)
    (forward,), (back,) = actual.values()
    assert forward != back
    named = engine.process_groups()
    assert named[forward] == named[back] == PIPELINE


def test_no_direction_queues_behind_the_other(workers: Workers) -> None:
    workers.run(groups_by_direction, 2, ParallelConfig(pp=2, dp_shard=1))
