"""Traffic of expert parallelism: rows go to their experts and come back, and so do their gradients, the other way
round."""

from collections.abc import Sequence

import torch

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.axes import CONTEXT, EXPERT, EXPERT_SHARD, SHARD, TENSOR, MeshPosition, single_sizes
from megatfm.verify.calls import Call
from megatfm.verify.expected_context import ContextShards
from megatfm.verify.expected_tensor import forwards
from megatfm.verify.ledger import ExpectedTraffic


def add_experts(
    ledger: ExpectedTraffic,
    config: Config,
    place: MeshPosition,
    among: Sequence[Sequence[Call]],
    cut: ContextShards | None,
) -> None:
    """Add what a rank sends for one micro-batch. among: the calls of each rank that divides experts with it.

    Dispatch and combine are an all-to-all each, forward and backward. If tensor parallelism deals the experts of a rank
    out, each part's rows go to a rank of its own.
    """
    size, parts, me = PRECISIONS[config.train.precision].compute_dtype.itemsize, len(among), place.ep
    dealt, peers = config.parallel.tp if config.parallel.expert_tp == "by_expert" else 1, place.peers
    for calls in zip(*among, strict=True):
        call, experts = calls[me], calls[me].n_experts // parts
        here = experts // dealt
        chosen = [_rows_by_expert(config, one, at, cut) for one, at in zip(calls, peers, strict=True)]

        def rows(source: int, target: int, chosen: list[list[int]] = chosen, n: int = experts) -> int:
            first = target * n + (place.tp * (n // dealt) if dealt > 1 else 0)
            return sum(chosen[source][first : first + n // dealt])

        others = [rank for rank in range(parts) if rank != me]
        width = call.input_numel // call.n_tokens * size
        sent = sum(rows(me, other) for other in others) * width
        received = sum(rows(other, me) for other in others) * width
        forward, _ = forwards(call, config.train.recompute)
        ledger.all_to_all(EXPERT, (parts - 1) * here * 8, times=forward)  # how many rows will come
        ledger.all_to_all(EXPERT, sent, times=forward + call.has_gradient)
        ledger.all_to_all(EXPERT, received, times=forward + call.given_has_gradient)


def _rows_by_expert(config: Config, call: Call, at: MeshPosition, cut: ContextShards | None) -> list[int]:
    """Expert → choices of the tokens that a rank has of its rows."""
    chosen_BTK = call.expert_index
    assert chosen_BTK is not None
    if cut:
        chosen_BTK = cut.rank_choices(call.path, chosen_BTK, at.cp)
    if config.parallel.expert_tp == "folded":
        chosen_BTK = chosen_BTK.flatten(0, 1).chunk(config.parallel.tp)[at.tp]
    counts: list[int] = torch.bincount(chosen_BTK.flatten(), minlength=call.n_experts).tolist()
    return counts[: call.n_experts]


def groups_of_the_same_ranks(config: Config) -> dict[str, str]:
    """Axis or joined axes → the name of the group by which their collectives are counted: one that has the same ranks.

    Experts that lie on all ranks of a single axis are that axis's; on those of several, these are the experts'.
    """
    sizes = single_sizes(config.parallel)
    long = [axis for axis in _folded(config) if sizes[axis] > 1]
    if config.parallel.ep == 1 or sizes[EXPERT_SHARD] > 1:
        return {}
    return {EXPERT: long[0]} if len(long) == 1 else {" × ".join(long): EXPERT}


def _folded(config: Config) -> tuple[str, ...]:
    """Axes among whose ranks `ep` divides experts."""
    return (SHARD, CONTEXT, TENSOR) if config.parallel.expert_tp == "folded" else (SHARD, CONTEXT)
