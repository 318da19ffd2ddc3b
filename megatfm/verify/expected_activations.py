"""Expected traffic of activations in one micro-batch: tensor parallelism (Korthikanti et al. 2022) and experts.

Column-parallel inputs: all-gather forward, reduce-scatter backward. Row-parallel outputs: reduce-scatter forward,
all-gather backward; without sequence parallelism, an all-reduce in one of the two directions. Experts: all-to-all
dispatch and combine, forward and backward.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.axes import CONTEXT, EXPERT, EXPERT_SHARD, SHARD, TENSOR, MeshPosition, single_sizes
from megatfm.verify.expected_context import ContextShards
from megatfm.verify.module_calls import Call
from megatfm.verify.module_cuts import ModuleCut
from megatfm.verify.traffic import ExpectedTraffic

CHUNK = 1024
"""Rows of the cross-entropy that are reduced together."""


def add_activations(
    ledger: ExpectedTraffic,
    config: Config,
    model: nn.Module,
    cuts: Mapping[str, ModuleCut],
    calls: Sequence[Call],
) -> None:
    """Add what a tensor-parallel rank sends for the calls of a micro-batch."""
    precision, sequence = PRECISIONS[config.train.precision], config.parallel.sequence_parallel
    size, tp = precision.compute_dtype.itemsize, config.parallel.tp
    for call in calls:
        sends = (cuts[call.path].sends or ()) if call.path in cuts else ()
        input_bytes, output_bytes = call.input_numel * size, call.output_numel * size
        gathers, sums = forwards(call, config.train.recompute)
        for word, gathered_bytes, has_gradient in (
            ("input gathered", input_bytes, call.has_gradient and call.given_has_gradient),
            ("output gathered", output_bytes, call.has_gradient),
        ):
            if word not in sends:
                continue
            if sequence:
                ledger.all_gather(TENSOR, gathered_bytes // tp, times=gathers)
                ledger.reduce_scatter(TENSOR, gathered_bytes, times=has_gradient)
            else:
                ledger.all_reduce(TENSOR, gathered_bytes, times=has_gradient)
        if "output gathered for tokens" in sends and sequence:
            ledger.all_gather(TENSOR, output_bytes // tp, times=gathers)
            ledger.reduce_scatter(TENSOR, output_bytes, times=call.has_gradient)
        if "output summed" in sends:
            if sequence:
                ledger.reduce_scatter(TENSOR, output_bytes, times=sums)
                ledger.all_gather(TENSOR, output_bytes // tp, times=call.has_gradient)
            else:
                ledger.all_reduce(TENSOR, output_bytes, times=sums)
        if "input whole" in sends and sequence:
            ledger.all_gather(TENSOR, input_bytes // tp)
        if "output whole" in sends and sequence:
            ledger.all_gather(TENSOR, output_bytes // tp, times=gathers)
        if "parts summed" in sends:  # in float32 or better; "selective" keeps them
            sums_forward = gathers if config.train.recompute == "full" else 1
            ledger.all_reduce(
                TENSOR, call.output_numel * max(size, 4), times=sums_forward + call.has_gradient
            )
        if "loss summed" in sends and sequence:
            ledger.all_reduce(TENSOR, call.output_numel * max(size, 4), times=sums)  # in float32 or better
        _vocabulary(ledger, config, model, cuts, call)


def forwards(call: Call, recompute: str) -> tuple[int, int]:
    """Number of forward collectives before and after a call: 2 if recomputation repeats it. Recomputation stops after
    the last tensor that the block saves; "selective" keeps sums."""
    is_recomputed = call.in_layer and recompute in ("full", "selective")
    return 1 + is_recomputed, 1 + (is_recomputed and recompute == "full" and call.saves_tensors_after)


def _vocabulary(
    ledger: ExpectedTraffic, config: Config, model: nn.Module, cuts: Mapping[str, ModuleCut], call: Call
) -> None:
    """Add what heads cut by tokens send: gathered logits, and the parts of a loss."""
    precision, tp, vocabulary = (
        PRECISIONS[config.train.precision],
        config.parallel.tp,
        config.model.vocab_size,
    )
    head, _, leaf = call.path.rpartition(".")
    if _has_loss(cuts, call.path) and not call.is_loss:
        assert vocabulary is not None
        widest = -(-vocabulary // tp)
        ledger.all_gather(TENSOR, call.output_numel // vocabulary * widest * precision.compute_dtype.itemsize)
    if leaf == "loss" and _has_loss(cuts, head):
        seam = model.get_submodule(call.path)
        numbers = 6 if seam.variant.smoothing else 4  # type: ignore[union-attr]
        for start in range(0, call.rows, CHUNK):
            ledger.all_gather(
                TENSOR, numbers * min(CHUNK, call.rows - start) * precision.param_dtype.itemsize
            )


def _has_loss(cuts: Mapping[str, ModuleCut], path: str) -> bool:
    return path in cuts and "loss over the vocabulary" in (cuts[path].sends or ())


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
    size, parts, own_part = PRECISIONS[config.train.precision].compute_dtype.itemsize, len(among), place.ep
    n_dealt, peers = config.parallel.tp if config.parallel.expert_tp == "by_expert" else 1, place.peers
    for calls in zip(*among, strict=True):
        call, experts = calls[own_part], calls[own_part].n_experts // parts
        local_experts = experts // n_dealt
        rows_by_expert = [
            _rows_by_expert(config, peer_call, peer, cut)
            for peer_call, peer in zip(calls, peers, strict=True)
        ]

        def rows(source: int, target: int, chosen: list[list[int]] = rows_by_expert, n: int = experts) -> int:
            first = target * n + (place.tp * (n // n_dealt) if n_dealt > 1 else 0)
            return sum(chosen[source][first : first + n // n_dealt])

        other_ranks = [rank for rank in range(parts) if rank != own_part]
        width = call.input_numel // call.n_tokens * size
        n_sent = sum(rows(own_part, peer) for peer in other_ranks) * width
        received = sum(rows(peer, own_part) for peer in other_ranks) * width
        forward, _ = forwards(call, config.train.recompute)
        ledger.all_to_all(EXPERT, (parts - 1) * local_experts * 8, times=forward)  # how many rows will come
        ledger.all_to_all(EXPERT, n_sent, times=forward + call.has_gradient)
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
