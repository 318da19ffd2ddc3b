"""The traffic that a step should have, from the plan's table, the table of stages and the shapes that the plain model's
modules see. It shares nothing with the styles and engines that cause the traffic, nor with what counts it.

This file has what activations cause (Korthikanti et al. 2022); `expected_weights.py` has weights and gradients.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.layers.initialisation import initialise
from megatfm.parallel.mesh import PIPELINE, REPLICATE, SHARD, TENSOR
from megatfm.parallel.pipeline_cut import Pipeline, activation_shape
from megatfm.parallel.plan import NO_ROW, match
from megatfm.parallel.styles import Style
from megatfm.train.build import build_model, cut_model
from megatfm.verify.batch import Arrays
from megatfm.verify.calls import Call, observe
from megatfm.verify.expected_weights import (
    REPLICAS,
    WHOLE_TENSORS,
    MeshPosition,
    RankParameters,
    weights_and_gradients,
)
from megatfm.verify.ledger import Flows, Ledger

CHUNK = 1024
"""Rows of the cross-entropy that are reduced together."""


def unpredicted(config: Config) -> dict[str, str]:
    """Axis → why there is no closed form for what it sends."""
    tp, recompute, engine = config.parallel.tp, config.train.recompute, config.parallel.engine
    if engine != "native":
        why = f"the engine {engine!r} is not ours, and only its authors know what it sends"
        return {axis: why for axis, size in _sizes(config).items() if size > 1}
    if tp == 1:
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
    initialise(model, config.train.seed)
    parallel = config.parallel
    pipeline = cut_model(config, model) if parallel.pp > 1 else None
    planned = match(model, complete=parallel.tp > 1)
    fitted = {path: style.fitted(model.get_submodule(path), parallel.tp) for path, style in planned.items()}
    calls = observe(config, model, batch, pipeline)
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    each = len(calls) // data_ranks
    found = []
    for rank in range(parallel.pp * data_ranks * parallel.tp):
        rest, tp = divmod(rank, parallel.tp)
        pp, data_rank = divmod(rest, data_ranks)
        place = MeshPosition(pp, data_rank % parallel.dp_shard, tp)
        mine = range(data_rank * each, (data_rank + 1) * each)
        stages = {stage.index for stage in pipeline.mine(pp)} if pipeline else {0}
        microbatches = [[call for call in calls[i] if call.stage in stages] for i in mine]
        ledger = Ledger(_sizes(config))
        for each_calls in microbatches if parallel.tp > 1 else ():
            _activations(ledger, config, model, fitted, each_calls)
        if pipeline:
            _sends(ledger, config, pipeline, pp, batch, mine)
        held = RankParameters(model, fitted, pipeline, place, parallel)
        weights_and_gradients(ledger, config, held, microbatches)
        found.append(ledger.flows())
    return found


def _sizes(config: Config) -> dict[str, int]:
    parallel = config.parallel
    shard, replicas, tp = parallel.dp_shard, parallel.dp_replicate, parallel.tp
    return {
        PIPELINE: parallel.pp,
        REPLICATE: replicas,
        SHARD: shard,
        TENSOR: tp,
        REPLICAS: replicas * shard,
        WHOLE_TENSORS: shard * tp,
    }


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
            ledger.all_gather(TENSOR, made // tp)
        if "loss summed" in sends and sequence:
            ledger.all_reduce(TENSOR, call.made * max(size, 4), times=sums)  # in float32 or better
        _vocabulary(ledger, config, model, fitted, call)


def _times(call: Call, recompute: str) -> tuple[int, int]:
    """How often what comes before a call, and what comes after it, is sent in the forward direction: again where its
    block is computed again, which stops at the last thing that the block keeps. "selective" keeps sums."""
    again = call.in_block and recompute in ("full", "selective")
    return 1 + again, 1 + (again and recompute == "full" and call.keeps_more)


def _vocabulary(
    ledger: Ledger, config: Config, model: nn.Module, fitted: Mapping[str, Style], call: Call
) -> None:
    """Of heads that are cut by tokens: logits that are gathered; a loss's maxima, and sums over the vocabulary."""
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
        numbers = 5 if seam.variant.smoothing else 3  # type: ignore[union-attr]
        for start in range(0, call.rows, CHUNK):
            rows = min(CHUNK, call.rows - start) * precision.stored.itemsize
            ledger.all_reduce(TENSOR, rows)
            ledger.all_reduce(TENSOR, numbers * rows)


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
                    ledger.send(PIPELINE, elements * (8 if field.width is None else computed))
                if stage.rank == pp and name in stage.returns:
                    ledger.send(PIPELINE, elements * computed)
