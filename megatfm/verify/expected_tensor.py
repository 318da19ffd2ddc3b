"""Traffic of tensor parallelism for activations, in one micro-batch (Korthikanti et al. 2022).

A gather where replicated input is needed, whose adjoint scatters; a scatter of partial sums, whose adjoint gathers;
without sequence parallelism, an all-reduce in one of the two directions.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.axes import TENSOR
from megatfm.verify.calls import Call
from megatfm.verify.ledger import ExpectedTraffic
from megatfm.verify.module_cuts import ModuleCut

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
        given, made = call.input_numel * size, call.output_numel * size
        gathers, sums = forwards(call, config.train.recompute)
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
    again = call.in_layer and recompute in ("full", "selective")
    return 1 + again, 1 + (again and recompute == "full" and call.saves_tensors_after)


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
    if _has_loss(cuts, call.path) and not call.is_scalar:
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
