"""The traffic that a step should have, from the plan's table, the table of stages and the shapes that the plain model's
modules see. It shares nothing with the styles and engines that cause the traffic, nor with what counts it.

This file has what activations cause (Korthikanti et al. 2022); `expected_weights.py` has weights and gradients.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.parallel.mesh import CONTEXT, EXPERT, EXPERT_SHARD, PIPELINE, REPLICATE, SHARD, TENSOR, folded
from megatfm.parallel.pipeline_cut import Pipeline, activation_shape
from megatfm.parallel.plan import NO_ROW, match
from megatfm.parallel.style import Style
from megatfm.train.build import build_model, cut_model
from megatfm.verify.batch import Arrays
from megatfm.verify.calls import Call, observe
from megatfm.verify.expected_context import RowsCut
from megatfm.verify.expected_weights import weights_and_gradients
from megatfm.verify.ledger import Flows, Ledger
from megatfm.verify.rank_parameters import MeshPosition, RankParameters
from megatfm.verify.reference import perturbed

CHUNK = 1024
"""Rows of the cross-entropy that are reduced together."""


def unpredicted(config: Config) -> dict[str, str]:
    """Axis → why there is no closed form for what it sends."""
    parallel, recompute, engine = config.parallel, config.train.recompute, config.parallel.engine
    if engine != "native":
        why = f"the engine {engine!r} is not ours, and only its authors know what it sends"
        return {axis: why for axis, size in _sizes(config).items() if size > 1}
    if parallel.tp == 1:
        return {}
    if recompute.endswith("B"):
        return {
            TENSOR: f"train.recompute = {recompute!r}: what blocks keep is measured while they run, so how many of "
            "them repeat their gathers is not known beforehand"
        }
    with torch.device("meta"):
        planned = match(build_model(config), complete=False)
    silent = [style.name for style in planned.values() if style.sends is None and style is not NO_ROW]
    if silent:
        return {TENSOR: f"the style {silent[0]!r} doesn't say what it sends (`sends`)"}
    return {}


def expected_flows(config: Config, batch: Arrays) -> list[Flows]:
    """Of one step, by rank. For axes of which `unpredicted` speaks, what is here is not to be relied on."""
    with torch.random.fork_rng():
        model = build_model(config).double().train()
    perturbed(model, config.train.seed)
    parallel = config.parallel
    pipeline = cut_model(config, model) if parallel.pp > 1 else None
    planned = match(model, complete=parallel.tp > 1)
    fitted = {
        path: style.fitted(model.get_submodule(path), parallel.tp, parallel.expert_tp)
        for path, style in planned.items()
    }
    cut = RowsCut(config, model, batch) if parallel.cp > 1 else None
    batches = cut.batches if cut else [batch]
    calls_of = [observe(config, model, part, pipeline) for part in batches]
    # Of whole rows, since what a router chooses depends on all that a token has looked at.
    routed = calls_of[0] if parallel.ep == 1 or not cut else observe(config, model, batch, pipeline)
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    each = len(calls_of[0]) // data_ranks
    found = []
    for rank in range(parallel.pp * data_ranks * parallel.cp * parallel.tp):
        rest, tp = divmod(rank, parallel.tp)
        rest, cp = divmod(rest, parallel.cp)
        pp, data_rank = divmod(rest, data_ranks)
        calls = calls_of[cp]
        place = MeshPosition(pp, data_rank % parallel.dp_shard, cp, tp, parallel)
        mine = range(data_rank * each, (data_rank + 1) * each)
        stages = {stage.index for stage in pipeline.mine(pp)} if pipeline else {0}
        microbatches = [[call for call in calls[i] if call.stage in stages] for i in mine]
        ledger = Ledger(_sizes(config), {EXPERT: _name_of_experts(config)}, _exchanged(config))
        for each_calls in microbatches if parallel.tp > 1 else ():
            _activations(ledger, config, model, fitted, each_calls)
        for i in range(each) if parallel.ep > 1 else ():
            first = (data_rank - place.shard) * each + i
            peers = [routed[first + peer.shard * each] for peer in place.peers]
            among = [[call for call in peer if call.stage in stages and call.n_experts] for peer in peers]
            _experts(ledger, config, place, among, cut)
        if cut:
            for i, each_calls in zip(mine, microbatches, strict=True):
                cut.keys_and_values(ledger, i, cp, each_calls)
        if pipeline:
            _sends(ledger, config, pipeline, pp, batches[cp], mine)
        held = RankParameters(model, fitted, pipeline, place, parallel)
        weights_and_gradients(ledger, config, held, microbatches)
        found.append(ledger.flows())
    return found


def _name_of_experts(config: Config) -> str:
    """What the group of the axis of experts is called: that of the data ranks where it is the same."""
    sizes = _single(config)
    long = [axis for axis in folded(config.parallel.expert_tp) if sizes[axis] > 1]
    return long[0] if len(long) == 1 and sizes[EXPERT_SHARD] == 1 else EXPERT


def _exchanged(config: Config) -> dict[str, str]:
    """Exchanges over several axes go by the experts' group where that has the same ranks."""
    sizes = _single(config)
    long = [axis for axis in folded(config.parallel.expert_tp) if sizes[axis] > 1]
    is_theirs = config.parallel.ep > 1 and len(long) > 1 and sizes[EXPERT_SHARD] == 1
    return {" × ".join(long): EXPERT} if is_theirs else {}


def _single(config: Config) -> dict[str, int]:
    parallel = config.parallel
    return {
        PIPELINE: parallel.pp,
        REPLICATE: parallel.dp_replicate,
        SHARD: parallel.dp_shard,
        EXPERT_SHARD: parallel.ep_within // parallel.ep,
        EXPERT: parallel.ep,
        CONTEXT: parallel.cp,
        TENSOR: parallel.tp,
    }


def _sizes(config: Config) -> dict[str, int]:
    single = _single(config)
    several: list[tuple[str, ...]] = [
        *((REPLICATE, CONTEXT), (REPLICATE, SHARD), (SHARD, CONTEXT), (REPLICATE, SHARD, CONTEXT)),
        *((REPLICATE, EXPERT_SHARD), (SHARD, TENSOR), (CONTEXT, TENSOR), (SHARD, CONTEXT, TENSOR)),
    ]
    return single | {" × ".join(axes): prod(single[axis] for axis in axes) for axes in several}


def _activations(
    ledger: Ledger, config: Config, model: nn.Module, fitted: Mapping[str, Style], calls: Sequence[Call]
) -> None:
    """Tensor parallelism, for one micro-batch: a gather where replicated input is needed, whose adjoint scatters; a
    scatter of partial sums, whose adjoint gathers; without sequence parallelism, an all-reduce in one of the two."""
    precision, sequence = PRECISIONS[config.train.precision], config.parallel.sequence_parallel
    size, tp = precision.computed.itemsize, config.parallel.tp
    for call in calls:
        sends = (fitted[call.path].sends or ()) if call.path in fitted else ()
        given, made = call.given * size, call.made * size
        gathers, sums = _times(call, config.train.recompute)
        for word, whole in (("input gathered", given), ("output gathered", made)):
            if word not in sends:
                continue
            if sequence:
                ledger.all_gather(TENSOR, whole // tp, times=gathers)
                ledger.reduce_scatter(TENSOR, whole, times=call.has_gradient)
            else:
                ledger.all_reduce(TENSOR, whole, times=call.has_gradient)
        if "output summed" in sends:
            if sequence:
                ledger.reduce_scatter(TENSOR, made, times=sums)
                ledger.all_gather(TENSOR, made // tp, times=call.has_gradient)
            else:
                ledger.all_reduce(TENSOR, made, times=sums)
        if "input whole" in sends and sequence:
            ledger.all_gather(TENSOR, given // tp)
        if "output whole" in sends and sequence:
            ledger.all_gather(TENSOR, made // tp, times=gathers)
        if "parts summed" in sends:  # in float32 or better; "selective" keeps them
            forwards = gathers if config.train.recompute == "full" else 1
            ledger.all_reduce(TENSOR, call.made * max(size, 4), times=forwards + call.has_gradient)
        if "loss summed" in sends and sequence:
            ledger.all_reduce(TENSOR, call.made * max(size, 4), times=sums)  # in float32 or better
        _vocabulary(ledger, config, model, fitted, call)


def _experts(
    ledger: Ledger, config: Config, place: MeshPosition, among: Sequence[Sequence[Call]], cut: RowsCut | None
) -> None:
    """Expert parallelism, for one micro-batch of each of the ranks that divide experts: rows go to their experts and
    come back, and so do their gradients, the other way round. Where tensor parallelism deals the experts of a rank out,
    each part's rows go to a rank of its own."""
    size, parts, me = PRECISIONS[config.train.precision].computed.itemsize, len(among), place.ep
    dealt, peers = config.parallel.tp if config.parallel.expert_tp == "whole" else 1, place.peers
    for calls in zip(*among, strict=True):
        call, experts = calls[me], calls[me].n_experts // parts
        here = experts // dealt
        chosen = [_rows_by_expert(config, one, at, cut) for one, at in zip(calls, peers, strict=True)]

        def rows(source: int, target: int, chosen: list[list[int]] = chosen, n: int = experts) -> int:
            first = target * n + (place.tp * (n // dealt) if dealt > 1 else 0)
            return sum(chosen[source][first : first + n // dealt])

        others = [rank for rank in range(parts) if rank != me]
        width = call.given // call.tokens * size
        sent = sum(rows(me, other) for other in others) * width
        received = sum(rows(other, me) for other in others) * width
        forward, _ = _times(call, config.train.recompute)
        ledger.all_to_all(EXPERT, (parts - 1) * here * 8, times=forward)  # how many rows will come
        ledger.all_to_all(EXPERT, sent, times=forward + call.has_gradient)
        ledger.all_to_all(EXPERT, received, times=forward + call.given_has_gradient)


def _rows_by_expert(config: Config, call: Call, at: MeshPosition, cut: RowsCut | None) -> list[int]:
    """Of the tokens that a rank has of its rows."""
    chosen_BTK = call.taken
    assert chosen_BTK is not None
    if cut:
        chosen_BTK = cut.of_rank(call.path, chosen_BTK, at.cp)
    if config.parallel.expert_tp == "folded":
        chosen_BTK = chosen_BTK.flatten(0, 1).chunk(config.parallel.tp)[at.tp]
    counts: list[int] = torch.bincount(chosen_BTK.flatten(), minlength=call.n_experts).tolist()
    return counts[: call.n_experts]


def _times(call: Call, recompute: str) -> tuple[int, int]:
    """How often what comes before a call, and what comes after it, is sent in the forward direction: again where its
    block is computed again, which stops at the last thing that the block keeps. "selective" keeps sums."""
    again = call.in_block and recompute in ("full", "selective")
    return 1 + again, 1 + (again and recompute == "full" and call.keeps_more)


def _vocabulary(
    ledger: Ledger, config: Config, model: nn.Module, fitted: Mapping[str, Style], call: Call
) -> None:
    """Of heads that are cut by tokens: logits that are gathered; what ranks tell each other of a loss."""
    precision, tp, vocabulary = (
        PRECISIONS[config.train.precision],
        config.parallel.tp,
        config.model.vocab_size,
    )
    head, _, leaf = call.path.rpartition(".")
    if _has_loss(fitted, call.path) and not call.is_scalar:
        assert vocabulary is not None
        widest = -(-vocabulary // tp)
        ledger.all_gather(TENSOR, call.made // vocabulary * widest * precision.computed.itemsize)
    if leaf == "loss" and _has_loss(fitted, head):
        seam = model.get_submodule(call.path)
        numbers = 6 if seam.variant.smoothing else 4  # type: ignore[union-attr]
        for start in range(0, call.rows, CHUNK):
            ledger.all_gather(TENSOR, numbers * min(CHUNK, call.rows - start) * precision.stored.itemsize)


def _has_loss(fitted: Mapping[str, Style], path: str) -> bool:
    return path in fitted and "loss over the vocabulary" in (fitted[path].sends or ())


def _sends(
    ledger: Ledger, config: Config, pipeline: Pipeline, pp: int, batch: Arrays, microbatches: Sequence[int]
) -> None:
    """What a pipeline rank sends: b·s·h elements for each boundary between stages of two ranks, each way, and as much
    again where an encoder's memory travels along (its own length); what is int64, as ELECTRA's corrupted tokens, goes
    one way."""
    computed, rows = PRECISIONS[config.train.precision].computed.itemsize, config.train.micro_batch
    for i in microbatches:
        inputs = {name: torch.from_numpy(values[i * rows :][:rows]) for name, values in batch.items()}
        for stage in pipeline.stages[1:]:
            before = pipeline.stages[stage.index - 1].rank
            for name, field in stage.takes.items() if before != stage.rank else ():
                elements = torch.Size(activation_shape(field, inputs, pipeline.sequence_parts)).numel()
                if before == pp:
                    ledger.send(PIPELINE, elements * (8 if field.d_model is None else computed))
                if stage.rank == pp and name in stage.returns:
                    ledger.send(PIPELINE, elements * computed)
